"""Keys of one object that become equal in JSON, which keeps only one of their values. Pure.

JSON has text keys only, so 1 and "1" become the same key, as True and "true" do. A JSON text may have a key twice.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from flowkit.text import printed, shown_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_YEAR_DAYS = 365
_YEARS = re.compile(rb'"-?P[0-9]+Y')
"""A duration that pydantic writes with years of 365 days."""
_LEVELS = 200
"""Levels in which the place of equal keys is searched."""


class EqualKeys(ValueError):
    """Two keys of one object are equal in JSON. The text names the place and both keys."""


def to_json_types(value: Any, *, inf_nan_mode: Any = "constants") -> Any:
    """Return a copy of `value` in JSON types, as `to_jsonable_python` does. Raise EqualKeys if it would drop a value."""
    converted = to_jsonable_python(value, inf_nan_mode=inf_nan_mode)
    try:
        text = to_json(value, inf_nan_mode="null")
        drops = len(text) > len(to_json(converted, inf_nan_mode="null"))
    except ValueError:  # half of a surrogate pair, which the caller finds
        text, drops = b"", next(_equal_keys(value, "", 0), None) is not None
    if drops:
        raise EqualKeys(next(_equal_keys(value, "", 0), None) or _find_in_text(value))
    if _YEARS.search(text):
        return to_jsonable_python(_in_days(value), inf_nan_mode=inf_nan_mode)
    return converted


def _in_days(value: Any) -> Any:
    """Return a copy of a value in which durations are ISO 8601 text in days: a year has no fixed length."""
    match value:
        case dict():
            return {key: _in_days(held) for key, held in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_in_days(held) for held in value]
        case timedelta(days=days) if abs(days) >= _YEAR_DAYS:
            rest = TypeAdapter(timedelta).dump_python(abs(value) % timedelta(days=1), mode="json")
            time = rest.removeprefix("PT") if rest != "PT0S" else ""
            sign = "-" if days < 0 else ""
            return f"{sign}P{abs(value) // timedelta(days=1)}D" + (time and f"T{time}")
    return value


def _equal_keys(value: Any, path: str, level: int) -> Iterator[str]:
    """Yield each pair of equal keys in dicts, lists and tuples."""
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
            yield from _equal_keys(held, f"{path}.{text}", level + 1)
    elif isinstance(value, (list, tuple)):
        for index, held in enumerate(value):
            yield from _equal_keys(held, f"{path}[{index}]", level + 1)


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


class _Repeated(dict[str, Any]):
    """An object of a JSON text that has a key twice."""

    key = ""


def load_json(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a JSON text. Raise EqualKeys if an object has a key twice, otherwise as `json.loads` does."""
    found: list[_Repeated] = []

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        repeated = _Repeated(made)
        repeated.key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        found.append(repeated)
        return repeated

    value = json.loads(text, object_pairs_hook=make, parse_constant=parse_constant)
    if found:
        place, repeated = next(_find_repeated(value, "", ""), ("an object", found[0]))
        raise EqualKeys(
            f"{place} has the key {printed(repeated.key)} twice, and JSON keeps one of them; remove one"
        )
    return value


def _find_repeated(value: Any, path: str, owner: str) -> Iterator[tuple[str, _Repeated]]:
    """Yield the place of each object with a repeated key. Only the outer of two nested ones may be in the value."""
    if isinstance(value, dict):
        if isinstance(value.get("node_id"), str):
            owner = f"node {printed(value['node_id'])}: "
        if isinstance(value, _Repeated):
            yield f"{owner}{_place(path)}", value
        for key, held in value.items():
            yield from _find_repeated(held, f"{path}.{key}", owner)
    elif isinstance(value, list):
        for index, held in enumerate(value):
            yield from _find_repeated(held, f"{path}[{index}]", owner)


def _place(path: str) -> str:
    return shown_path(path.removeprefix(".")) if path else "the top level"
