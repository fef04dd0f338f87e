"""The error of the check."""


class InteropError(Exception):
    """A check failed."""
