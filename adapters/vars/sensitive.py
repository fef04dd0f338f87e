"""Looks for secrets among a task's variables (spec: sensitive values). Pure; no value ever leaves it."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_LENGTH = 20
"""Characters (of a text, stripped) or bytes below which nothing is taken for a secret."""

MIN_ENTROPY = 3.2
"""Bits a character from which a text of that length is taken for one; ordinary prose often has more."""

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
    """Judges one value; `key_path` is its full path (`coordinator.vars...`)."""

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Whether the value looks like a secret."""


class DefaultDetector:
    """Tokens of well-known forms, and texts of high entropy."""

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Whether the value looks like a secret; only texts and bytes can."""
        if isinstance(value, bytes):
            return len(value) >= MIN_LENGTH
        if not isinstance(value, str):
            return False
        text = value.strip()
        if len(text) < MIN_LENGTH:
            return False
        return bool(_WHOLE.fullmatch(text) or _START.match(text)) or entropy(text) >= MIN_ENTROPY


def entropy(text: str) -> float:
    """Shannon entropy of a text's characters, in bits each."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


class Detector:
    """A detector in any documented form, made ready at its first use.

    An object with `is_sensitive`, a callable of (path, value), a factory without arguments for either, or the name of
    one (`pkg.mod:attr`, `pkg.mod.attr`). AdapterError for a malformed name; what an import raises passes through.
    """

    def __init__(self, given: Any = None) -> None:
        self._given = imported(given) if isinstance(given, str) else given
        self._ready: SensitiveDetectorProto | None = DefaultDetector() if given is None else None

    def hits(self, values: Iterable[tuple[str, Any]]) -> int:
        """How many of these values look like secrets. AdapterError when the detector itself fails."""
        try:
            if self._ready is None:
                self._ready = _resolved(self._given)
            return sum(_verdict(self._ready.is_sensitive(path, value)) for path, value in values)
        except AdapterError:
            raise
        except Exception as error:  # noqa: BLE001 - a detector of somebody else's; its text may hold the value
            raise AdapterError(f"the detector of sensitive values raised {type(error).__name__}") from None


def _verdict(given: Any) -> bool:
    if inspect.iscoroutine(given):
        given.close()
        raise AdapterError(
            "a detector of sensitive values must be a plain function, not a coroutine function"
        )
    return bool(given)


class _Function:
    """A callable of (path, value) as a detector."""

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
    """The object that `pkg.mod:attr` or `pkg.mod.attr` names."""
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise AdapterError(f"{name[:100]!r} names no detector: write 'package.module:attribute'")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
