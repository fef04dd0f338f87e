"""The HTML report, rendered from data without I/O of its own."""
