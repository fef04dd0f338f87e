"""Text that UTF-8 can carry. Pure.

Handlers, drivers and file names may contain lone surrogates; gRPC, JSON and BSON refuse to encode them.
"""

from __future__ import annotations

from contextlib import suppress


def clean(text: str) -> str:
    r"""Return `text` with each lone surrogate replaced by its escape, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, also when its `__str__` fails."""
    message = "its message cannot be read"
    with suppress(Exception):
        message = str(error)
    return clean(f"{type(error).__name__}: {message}")
