"""Functions for the texts of errors. They make text safe to encode as UTF-8, and suggest names.

Handlers, drivers and file names may contain lone surrogates; gRPC, JSON and BSON refuse to encode them.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def clean(text: str) -> str:
    r"""Return `text` with each lone surrogate replaced by its escape, such as `\ud800`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception, even if its `__str__` raises."""
    message = "its message cannot be read"
    with suppress(Exception):
        message = str(error)
    return clean(f"{type(error).__name__}: {message}")


def did_you_mean(name: object, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return a sentence that suggests the known name most similar to `name`, or `otherwise` if none is similar."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def suggestion(name: object, known: Iterable[str]) -> str:
    """Return what `did_you_mean` returns, for the end of an error: after a semicolon, or an empty string."""
    hint = did_you_mean(name, known)
    return hint and f"; {hint}"


def kind_of(value: object) -> str:
    """Return the type of a value with its article, for example `a dict`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
