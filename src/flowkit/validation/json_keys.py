"""Read JSON, and find keys of one object that become equal in it, because it keeps only one of their values. Pure.

JSON has text keys only, so 1 and "1" become the same key, as True and "true" do. A JSON text may have a key twice.
"""

from __future__ import annotations

import copy
import json
import operator
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from math import isinf
from typing import Any, NoReturn

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json, to_json, to_jsonable_python

from flowkit.text import printed, shown_path

_YEAR_DAYS = 365
_YEARS = re.compile(rb'"-?P[0-9]+Y')
"""A duration that pydantic writes with years of 365 days."""
TOO_DEEP = "it is nested too deeply, or contains itself; make it flatter"
"""What is wrong with a value for which `is_too_deep` is true of the error."""
_DEPTH_ERRORS = ("depth exceeded", "Circular reference detected")
_LEVELS = 200
"""Levels in which equal keys and iterators are searched."""
_LEAVES = frozenset([str, int, float, bool, bytes, type(None)])


class EqualKeys(ValueError):
    """Two keys of one object are equal in JSON. The text names the place and both keys."""

    path: tuple[str | int, ...] | None = None
    """The keys and indexes that lead to the value of such a key in a JSON text; None if they are unknown."""


def to_json_types(value: Any, *, inf_nan_mode: Any = "constants") -> Any:
    """Return a copy of `value` in JSON types, as `to_jsonable_python` does.

    Raise EqualKeys if it would drop a value.
    """
    value = with_lists(value)
    converted = to_jsonable_python(value, inf_nan_mode=inf_nan_mode)
    try:
        text = to_json(value, inf_nan_mode="null")
        drops = len(text) > len(to_json(converted, inf_nan_mode="null"))
    except ValueError:  # half of a surrogate pair, which the caller finds
        text, drops = b"", next(_equal_keys(value, None, 0), None) is not None
    if drops:
        raise EqualKeys(next(_equal_keys(value, None, 0), None) or _find_in_text(value))
    if _YEARS.search(text):
        return to_jsonable_python(_in_days(value), inf_nan_mode=inf_nan_mode)
    return converted


def with_lists(value: Any) -> Any:
    """Return `value`, or a copy of it with lists in place of iterators such as generators, which can be read only once.

    Call this for what user code returns before anything that reads the value twice, such as a write that
    may be retried.
    """
    if type(value) is dict and _LEAVES.issuperset(map(type, value.values())):
        return value  # as nearly all results of batches
    return _with_lists(value, set())


def _with_lists(value: Any, above: set[int]) -> Any:
    """Return `with_lists`. `above` has the identities of the values that contain this one, since one may
    contain itself.
    """
    if type(value) in _LEAVES or len(above) > _LEVELS or id(value) in above:
        return value
    above.add(id(value))
    try:
        if isinstance(value, dict):
            read = {key: _with_lists(held, above) for key, held in value.items()}
            return value if all(read[key] is held for key, held in value.items()) else read
        if isinstance(value, Iterator):
            return [_with_lists(each, above) for each in value]
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            items = [_with_lists(each, above) for each in value]
            return value if all(map(operator.is_, items, value)) else items
        return _with_lists_in_fields(value, above)
    finally:
        above.discard(id(value))


def _with_lists_in_fields(value: Any, above: set[int]) -> Any:
    """Return a dataclass or a pydantic model, or a copy of it, as `with_lists` does; any other value as it is."""
    held = {name: getattr(value, name, None) for name in _field_names(value)}
    read = _with_lists(held, above)
    if read is held:
        return value
    copied = copy.copy(value)
    for name, each in read.items():
        object.__setattr__(copied, name, each)
    return copied


def _field_names(value: Any) -> list[str]:
    if isinstance(value, BaseModel):
        return [*type(value).model_fields]
    return (
        [each.name for each in fields(value)] if is_dataclass(value) and not isinstance(value, type) else []
    )


def _in_days(value: Any) -> Any:
    """Return a copy of a value in which durations are ISO 8601 text in days: a year has no fixed length."""
    match value:
        case dict():
            return {key: _in_days(held) for key, held in value.items()}
        case list() | tuple() | set() | frozenset() | deque():
            return [_in_days(held) for held in value]
        case timedelta(days=days) if abs(days) >= _YEAR_DAYS:
            rest = TypeAdapter(timedelta).dump_python(abs(value) % timedelta(days=1), mode="json")
            time = rest.removeprefix("PT") if rest != "PT0S" else ""
            sign = "-" if days < 0 else ""
            return f"{sign}P{abs(value) // timedelta(days=1)}D" + (time and f"T{time}")
    return value


_Path = tuple["_Path", str] | None
"""Where a value is: the place of what contains it, and its key or index. Only an error spells it out.

A text for each value would take time and memory in proportion to the length of all keys above it.
"""


def _equal_keys(value: Any, path: _Path, level: int) -> Iterator[str]:
    """Yield each pair of equal keys in dicts, lists, tuples and deques."""
    if level > _LEVELS:
        return
    if isinstance(value, dict):
        seen: dict[str, Any] = {}
        for key, held in value.items():
            text = key if isinstance(key, str) else _key_text(key)
            if text in seen:
                first, second = printed(seen[text]), printed(key)
                yield f"{_place(path)} has the keys {first} and {second}, which are the same key in JSON; rename one"
            seen[text] = key
            yield from _equal_keys(held, (path, f".{text}"), level + 1)
    elif isinstance(value, (list, tuple, deque)):
        for index, held in enumerate(value):
            yield from _equal_keys(held, (path, f"[{index}]"), level + 1)


def _key_text(key: Any) -> str:
    [text] = to_jsonable_python({key: None})
    return str(text)


def _find_in_text(value: Any) -> str:
    """Return which keys are equal in an object other than a dict, such as a dataclass, from its JSON."""
    try:
        load_json(to_json(value, inf_nan_mode="null"))
    except EqualKeys as error:
        return str(error)
    return "two keys of one object are the same key in JSON; rename one"


class JsonRefused(ValueError):
    """A JSON text has a number or a nesting that FlowKit does not read. The text names the value or its place."""

    path: tuple[str | int, ...] | None = None
    """The keys and indexes that lead to the number; None if they are unknown."""


class _Repeated(dict[str, Any]):
    """An object of a JSON text that has a key twice."""

    problem = ""
    key = ""


class _Infinite(float):
    """A number of a JSON text that is too large for a float."""

    problem = ""


def load_json(text: str | bytes, *, constants: bool = True, strict: bool = False) -> Any:
    """Return the value of a JSON text.

    Raise EqualKeys if an object has a key twice, and JsonRefused for a number that is too large or a value
    that is nested too deeply; otherwise ValueError, as `json.loads` does.

    Without `constants`, reject also NaN and Infinity, which Python accepts but JSON does not. With `strict`, for texts
    from outside, reject these, halves of surrogate pairs, text that is not UTF-8, and more than 200 levels.
    """
    if strict:
        from_json(text, allow_inf_nan=False)
    reader = _Reader()
    options: dict[str, Any] = {} if constants else {"parse_constant": _refuse_constant}
    try:
        value = json.loads(
            text, object_pairs_hook=reader.make_object, parse_float=reader.read_float, **options
        )
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (ValueError, RecursionError):
        raise JsonRefused(_why_refused(text)) from None
    if reader.marked:
        raise reader.describe(value)
    return value


class _Reader:
    """Reads the objects and numbers of a JSON text, and marks those that are not valid."""

    def __init__(self) -> None:
        self.marked: list[_Repeated | _Infinite] = []

    def make_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object, which is marked if it has a key twice."""
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated = _Repeated(made)
        key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        repeated.key = key
        repeated.problem = f"has the key {printed(key)} twice, and JSON keeps one of them; remove one"
        self.marked.append(repeated)
        return repeated

    def read_float(self, digits: str) -> float:
        """Return a number, which is marked if it is infinite."""
        number = float(digits)
        if not isinf(number):
            return number
        infinite = _Infinite(number)
        infinite.problem = f"is {printed(digits)}, beyond the range of numbers; pass it as a string"
        self.marked.append(infinite)
        return infinite

    def describe(self, value: Any) -> ValueError:
        """Return the error about the first mark in `value`."""
        place, marked, steps = "an object", self.marked[0], None
        with suppress(RecursionError, StopIteration):
            owner, path, marked = next(_find_marked(value, None, ""))
            place, steps = f"{owner}{_place(path)}", _steps(path)
        error = (EqualKeys if isinstance(marked, _Repeated) else JsonRefused)(f"{place} {marked.problem}")
        if steps is not None:
            error.path = (*steps, marked.key) if isinstance(marked, _Repeated) else steps
        return error


def _refuse_constant(name: str) -> NoReturn:
    raise json.JSONDecodeError(f"{name} is not a value of JSON", name, 0)


def _why_refused(text: str | bytes) -> str:
    """Return why Python does not read a JSON text, with the line and the column."""
    remedy = "numbers have at most 4,300 digits, and values at most 200 levels"
    try:
        from_json(text)
    except ValueError as error:
        return f"{error}; {remedy}"
    return remedy


def _find_marked(value: Any, path: _Path, owner: str) -> Iterator[tuple[str, _Path, _Repeated | _Infinite]]:
    """Yield each marked value with the node that has it, as an error begins, and with its place.

    Only the outer of two nested objects with repeated keys may be in the value.
    """
    is_object = isinstance(value, dict)
    if is_object and isinstance(value.get("node_id"), str):
        owner = f"node {printed(value['node_id'])}: "
    if isinstance(value, (_Repeated, _Infinite)):
        yield owner, path, value
    if is_object:
        for key, held in value.items():
            yield from _find_marked(held, (path, f".{key}"), owner)
    elif isinstance(value, list):
        for index, held in enumerate(value):
            yield from _find_marked(held, (path, f"[{index}]"), owner)


def _parts(path: _Path) -> list[str]:
    parts = []
    while path is not None:
        path, part = path
        parts.append(part)
    return parts[::-1]


def _place(path: _Path) -> str:
    parts = _parts(path)
    return shown_path("".join(parts).removeprefix(".")) if parts else "the top level"


def _steps(path: _Path) -> tuple[str | int, ...]:
    """Return the keys and indexes of a path."""
    return tuple(part[1:] if part.startswith(".") else int(part[1:-1]) for part in _parts(path))


def is_too_deep(error: Exception) -> bool:
    """Return whether a value could not be written as JSON because of its depth. pydantic says so only in its text."""
    return isinstance(error, RecursionError) or any(text in str(error) for text in _DEPTH_ERRORS)
