"""Commands that start, show, watch and cancel tasks."""
