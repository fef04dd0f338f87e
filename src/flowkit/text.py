"""Functions that make text safe to encode as UTF-8.

Handlers, drivers and file names may contain lone surrogates; gRPC, JSON and BSON refuse to encode them.
"""

from __future__ import annotations

from contextlib import suppress


def clean(text: str) -> str:
    r"""Return `text` with each lone surrogate replaced by its escape, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, even if its `__str__` raises."""
    message = "its message cannot be read"
    with suppress(Exception):
        message = str(error)
    return clean(f"{type(error).__name__}: {message}")
