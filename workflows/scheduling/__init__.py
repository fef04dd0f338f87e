"""Pure rules that decide which nodes of a graph start, and when."""
