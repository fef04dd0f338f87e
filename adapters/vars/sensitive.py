"""Detection of secrets in a task's variables (spec: sensitive values). No function logs or returns a value."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowkit.core.user_code import contained, original
from flowkit.errors import AdapterError
from flowkit.text import truncate

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_LENGTH = 20
"""Minimum length of a secret: characters of a text without surrounding whitespace, or bytes."""

MIN_ENTROPY = 3.2
"""Minimum entropy of a secret in bits per character. Ordinary prose often exceeds it."""

_WHOLE = re.compile(
    r"[\w-]+\.[\w-]+\.[\w-]+"  # a JSON web token
    r"|AKIA[A-Z0-9]{16}"  # an AWS access key
    r"|AIza[\w-]{35}"  # a Google API key
    r"|(?i:bearer) [\w.~+/=-]{20,}"
    r"|[A-Za-z0-9+/=]{24,}",  # base64
    re.ASCII,
)
_START = re.compile(r"-----BEGIN [A-Z ]+-----|xox[baprs]-")


@runtime_checkable
class SensitiveDetectorProto(Protocol):
    """An object that decides whether a value is a secret. `key_path` is the full path (`coordinator.vars...`)."""

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Return True if the value looks like a secret."""


class DefaultDetector:
    """Detects tokens of well-known formats, texts with high entropy, and long byte strings."""

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Return True if the value looks like a secret. Only texts and bytes can."""
        if isinstance(value, bytes):
            return len(value) >= MIN_LENGTH
        if not isinstance(value, str):
            return False
        text = value.strip()
        if len(text) < MIN_LENGTH:
            return False
        return bool(_WHOLE.fullmatch(text) or _START.match(text)) or entropy(text) >= MIN_ENTROPY


def entropy(text: str) -> float:
    """Return the Shannon entropy of a text in bits per character."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


class Detector:
    """Wraps a detector in any documented form and resolves it at its first use.

    `given` is an object with `is_sensitive`, a callable of (path, value), a factory of either without arguments, or the
    name of one of these (`pkg.mod:attr` or `pkg.mod.attr`). Raise AdapterError for a malformed name. Exceptions of the
    import pass through.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = imported(given) if isinstance(given, str) else given
        self._ready: SensitiveDetectorProto | None = DefaultDetector() if given is None else None

    def hits(self, values: Iterable[tuple[str, Any]]) -> int:
        """Return how many of these (path, value) pairs look like secrets. Raise AdapterError if the detector fails."""
        try:
            with contained:
                if self._ready is None:
                    self._ready = _resolved(self._given)
                return sum(_verdict(self._ready.is_sensitive(path, value)) for path, value in values)
        except AdapterError:
            raise
        except Exception as error:  # noqa: BLE001 - user code; its message may contain the value
            kind = type(original(error)).__name__
            raise AdapterError(f"the detector of sensitive values raised {kind}") from None


def _verdict(given: Any) -> bool:
    if inspect.iscoroutine(given):
        given.close()
        raise AdapterError(
            "a detector of sensitive values must be a plain function, not a coroutine function"
        )
    return bool(given)


class _Function:
    """Adapts a callable of (path, value) to the detector interface."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        return _verdict(self._function(key_path, value))


def _resolved(given: Any, *, made: bool = False) -> SensitiveDetectorProto:
    if not inspect.isclass(given):
        if isinstance(given, SensitiveDetectorProto):
            return given
        if _takes(given, "path", "value"):
            return _Function(given)
    if not made and _takes(given):
        return _resolved(given(), made=True)
    raise AdapterError(
        "a detector of sensitive values is an object with is_sensitive(key_path, value), a function of the two, "
        f"or a factory of one; not {type(given).__name__}"
    )


def _takes(given: Any, *args: Any) -> bool:
    if not callable(given):
        return False
    try:
        inspect.signature(given).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def imported(name: str) -> Any:
    """Import the object with the name `pkg.mod:attr` or `pkg.mod.attr`. Raise AdapterError for a malformed name."""
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise AdapterError(
            f"{truncate(name, 100)!r} does not name a detector: use the form 'package.module:attribute'"
        )
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
