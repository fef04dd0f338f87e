"""Whether MongoDB can store a document of JSON types. Pure: needs neither a driver nor a server.

A task is checked with it before its workflow starts: once it runs, it is too late to refuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.arguments import shown_path
from flowkit.limits import DOCUMENT_BYTES, DOCUMENT_LEVELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1
"""Of MongoDB's integers."""

_SMALLEST_INT32, _LARGEST_INT32 = -(2**31), 2**31 - 1
_ENOUGH = 11
"""Problems after which no more are kept: an error shows ten."""

Steps = Any
"""Where a value is: `(steps of what holds it, its key or index)`, or None for the document itself."""


def storage_problems(document: Mapping[str, Any]) -> list[str]:
    """What keeps MongoDB from storing `document`: sentences that name place, problem and remedy, eleven at most."""
    search = _Search()
    size = search.members(document, None, 1)
    problems = [f"{_place(document, steps)} {problem}" for steps, problem in search.found]
    if not problems and size > DOCUMENT_BYTES:
        problems.append(
            f"{', '.join(document)} make a document of {size:,} bytes, more than MongoDB's {DOCUMENT_BYTES:,}: "
            "put data into a store and pass a reference"
        )
    return problems


class _Search:
    """Adds up the size of a document as BSON, and collects what cannot be stored on the way."""

    def __init__(self) -> None:
        self.found: list[tuple[Steps, str]] = []

    def members(self, held: Mapping[Any, Any], steps: Steps, level: int) -> int:
        """Size of an object, which is on this level of nesting."""
        if level > DOCUMENT_LEVELS:
            return self._add(steps, _TOO_DEEP)
        size = 5
        for key, value in held.items():
            here = (steps, key)
            size += 2 + self._key(key, here) + self._value(value, here, level + 1)
        return size

    def _elements(self, held: Sequence[Any], steps: Steps, level: int) -> int:
        """Size of a list, which is stored as an object with the indexes as keys."""
        if level > DOCUMENT_LEVELS:
            return self._add(steps, _TOO_DEEP)
        values = (self._value(value, (steps, index), level + 1) for index, value in enumerate(held))
        return 5 + sum(values) + sum(2 + len(str(index)) for index in range(len(held)))

    def _value(self, value: Any, steps: Steps, level: int) -> int:
        match value:
            case None:
                return 0
            case bool():
                return 1
            case int():
                return self._int(value, steps)
            case float():
                return 8
            case str():
                return 5 + self._text(value, steps)
            case dict():
                return self.members(value, steps, level)
            case list() | tuple():
                return self._elements(value, steps, level)
        return self._add(
            steps, f"is {_kind(value)}; use texts, numbers, true, false, null, lists and objects"
        )

    def _int(self, value: int, steps: Steps) -> int:
        if _SMALLEST_INT32 <= value <= _LARGEST_INT32:
            return 4
        if not SMALLEST_INT <= value <= LARGEST_INT:
            self._add(steps, f"is {_digits(value)}, beyond MongoDB's 64-bit integers: pass it as a text")
        return 8

    def _text(self, text: str, steps: Steps) -> int:
        if text.isascii():
            return len(text)
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            half = text[error.start]
            return self._add(steps, f"holds {half!r}, half of a surrogate pair: correct or replace it")

    def _key(self, key: Any, steps: Steps) -> int:
        if not isinstance(key, str):
            return self._add(steps, f"has the key {key!r:.80}, {_kind(key)}: keys must be texts")
        if "\0" in key:
            self._add(steps, "has a key with NUL (\\x00) in it, which MongoDB refuses: rename the key")
        return self._text(key, steps)

    def _add(self, steps: Steps, problem: str) -> int:
        if len(self.found) < _ENOUGH:
            self.found.append((steps, problem))
        return 0


_TOO_DEEP = (
    f"is nested deeper than the {DOCUMENT_LEVELS} levels that MongoDB stores: "
    "make it flatter, or pass it as a text"
)


def _place(document: Any, steps: Steps) -> str:
    """Path to a value, with the id of the node that it belongs to."""
    keys: list[Any] = []
    while steps is not None:
        steps, key = steps
        keys.append(key)
    path, owner, held = "", "", document
    for key in reversed(keys):
        path += f"[{key}]" if isinstance(held, (list, tuple)) else f".{key}"
        held = held[key]
        if isinstance(held, dict) and isinstance(held.get("node_id"), str):
            owner = f"node {held['node_id']!r:.80}: "
    return owner + shown_path(path.removeprefix("."))


def _digits(value: int) -> str:
    """An integer as errors show it; one of thousands of digits Python does not even print."""
    return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length():,} bits"


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
