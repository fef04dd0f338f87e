"""What can go wrong with the demo itself."""


class DemoError(Exception):
    """The demo cannot go on; the text is one line for the person at the terminal."""
