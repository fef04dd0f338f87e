"""Errors of the demo itself."""


class DemoError(Exception):
    """The demo cannot continue; the message is one line for the terminal."""
