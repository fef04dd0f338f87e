"""Text that UTF-8 can carry. Pure.

Handlers, drivers and file names may contain lone surrogates; gRPC, JSON and BSON refuse to encode them.
"""

from __future__ import annotations


def clean(text: str) -> str:
    r"""Return `text` with each lone surrogate replaced by its escape, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
