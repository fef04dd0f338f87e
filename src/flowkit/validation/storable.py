"""Checks whether MongoDB can store a document of JSON types, without a driver or a server.

FlowKit checks a task before its workflow starts, because it cannot reject a task that is already running.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowkit.limits import DOCUMENT_BYTES, DOCUMENT_LEVELS
from flowkit.text import kind_of, shown_path

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1
"""The range of MongoDB's 64-bit integers."""

_SMALLEST_INT32, _LARGEST_INT32 = -(2**31), 2**31 - 1
_MAX_PROBLEMS = 11
"""Maximum number of problems to collect; an error shows ten of them."""

REFERENCE = (
    'has the keys "$ref" and "$id", which MongoDB\'s drivers read as a reference to a document (DBRef): '
    "rename one of them"
)
"""The problem of an object for which `is_reference` holds."""

_SCHEMA = ["graph", "params_schema"]
"""The place of the schema of a task's params, which has references of its own. Its document does not contain it."""

Steps = Any
"""The position of a value: `(steps of its container, its key or index)`, or None for the document itself."""


def storage_problems(document: Mapping[str, Any]) -> list[str]:
    """Return the reasons why MongoDB cannot store `document`, at most eleven. Each names place, problem and remedy."""
    search = _DocumentSearch()
    size = search.measure(document, None, 1)
    problems = [f"{_find_place(document, steps)} {problem}" for steps, problem in search.found]
    if not problems and size > DOCUMENT_BYTES:
        problems.append(
            f"{', '.join(document)} make a document of {size:,} bytes, more than MongoDB's {DOCUMENT_BYTES:,}: "
            "put data into a store and pass a reference"
        )
    return problems


def stored_bytes(document: Mapping[str, Any]) -> int:
    """Return the BSON size, in bytes, of a document in which `storage_problems` finds no problem."""
    return _DocumentSearch().measure(document, None, 1)


def is_reference(held: Mapping[Any, Any]) -> bool:
    """Return whether MongoDB's drivers do not read an object as it was stored, but as a DBRef."""
    return "$ref" in held and "$id" in held and isinstance(held["$ref"], str)


def holds_reference(value: Any) -> bool:
    """Return whether `is_reference` holds for an object, or for one in it."""
    waiting = [value]
    while waiting:
        held = waiting.pop()
        if isinstance(held, Mapping):
            if is_reference(held):
                return True
            waiting += held.values()
        elif isinstance(held, (list, tuple)):
            waiting += held
    return False


class _DocumentSearch:
    """Computes the BSON size of a document and collects the values that MongoDB cannot store."""

    def __init__(self) -> None:
        self.found: list[tuple[Steps, str]] = []

    def measure(self, held: Mapping[Any, Any], steps: Steps, level: int) -> int:
        """Return the BSON size, in bytes, of an object at this nesting level."""
        if level > DOCUMENT_LEVELS:
            return self._add(steps, _TOO_DEEP)
        if is_reference(held) and _keys(steps)[:2] != _SCHEMA:
            return self._add(steps, REFERENCE)
        size = 5
        for key, value in held.items():
            here = (steps, key)
            size += 2 + self._measure_key(key, here) + self._measure_value(value, here, level + 1)
        return size

    def _measure_list(self, held: Sequence[Any], steps: Steps, level: int) -> int:
        """Return the BSON size, in bytes, of a list. BSON stores it as an object whose keys are the indexes."""
        if level > DOCUMENT_LEVELS:
            return self._add(steps, _TOO_DEEP)
        values = (self._measure_value(value, (steps, index), level + 1) for index, value in enumerate(held))
        return 5 + sum(values) + sum(2 + len(str(index)) for index in range(len(held)))

    def _measure_value(self, value: Any, steps: Steps, level: int) -> int:
        match value:
            case None:
                return 0
            case bool():
                return 1
            case int():
                return self._measure_int(value, steps)
            case float():
                return 8
            case str():
                return 5 + self._measure_text(value, steps)
            case dict():
                return self.measure(value, steps, level)
            case list() | tuple():
                return self._measure_list(value, steps, level)
        return self._add(
            steps, f"is {kind_of(value)}; use strings, numbers, true, false, null, lists and objects"
        )

    def _measure_int(self, value: int, steps: Steps) -> int:
        if _SMALLEST_INT32 <= value <= _LARGEST_INT32:
            return 4
        if not SMALLEST_INT <= value <= LARGEST_INT:
            self._add(
                steps, f"is {_format_integer(value)}, beyond MongoDB's 64-bit integers: pass it as a string"
            )
        return 8

    def _measure_text(self, text: str, steps: Steps) -> int:
        if text.isascii():
            return len(text)
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            half = text[error.start]
            return self._add(steps, f"contains {half!r}, half of a surrogate pair: correct or replace it")

    def _measure_key(self, key: Any, steps: Steps) -> int:
        if not isinstance(key, str):
            return self._add(steps, f"has the key {key!r:.80}, {kind_of(key)}: keys must be strings")
        if "\0" in key:
            self._add(steps, "has a key with NUL (\\x00) in it, which MongoDB rejects: rename the key")
        return self._measure_text(key, steps)

    def _add(self, steps: Steps, problem: str) -> int:
        if len(self.found) < _MAX_PROBLEMS:
            self.found.append((steps, problem))
        return 0


_TOO_DEEP = (
    f"is nested deeper than the {DOCUMENT_LEVELS} levels that MongoDB stores: "
    "make it flatter, or pass it as a string"
)


def _find_place(document: Any, steps: Steps) -> str:
    """Return the path to a value, preceded by the id of the node that contains it, if any."""
    path, owner, held = "", "", document
    for key in _keys(steps):
        path += f"[{key}]" if isinstance(held, (list, tuple)) else f".{key}"
        held = held[key]
        if isinstance(held, dict) and isinstance(held.get("node_id"), str):
            owner = f"node {held['node_id']!r:.80}: "
    return owner + shown_path(path.removeprefix("."))


def _keys(steps: Steps) -> list[Any]:
    keys: list[Any] = []
    while steps is not None:
        steps, key = steps
        keys.append(key)
    return keys[::-1]


def _format_integer(value: int) -> str:
    """Return an integer as errors show it. Python refuses to print integers of several thousand digits."""
    return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length():,} bits"
