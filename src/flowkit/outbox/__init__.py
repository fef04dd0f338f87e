"""Home of a name of the earlier system."""
