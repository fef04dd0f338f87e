"""Keys of one object that become equal in JSON, which keeps only one of their values. Pure.

JSON has text keys only, so 1 and "1" become the same key, as True and "true" do. A JSON text may have a key twice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json, to_jsonable_python

from flowkit.text import printed, shown_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEVELS = 200
"""Levels in which the place of equal keys is searched."""


class EqualKeys(ValueError):
    """Two keys of one object are equal in JSON. The text names the place and both keys."""


def to_json_types(value: Any, *, inf_nan_mode: Any = "constants") -> Any:
    """Return a copy of `value` in JSON types, as `to_jsonable_python` does. Raise EqualKeys if it would drop a value."""
    converted = to_jsonable_python(value, inf_nan_mode=inf_nan_mode)
    if _is_longer(value, converted):
        raise EqualKeys(next(_equal_keys(value, "", 0), None) or _find_in_text(value))
    return converted


def _is_longer(value: Any, converted: Any) -> bool:
    """Return whether the JSON of `value` has more than that of its copy, because an object of it has equal keys."""
    try:
        return len(to_json(value, inf_nan_mode="null")) > len(to_json(converted, inf_nan_mode="null"))
    except ValueError:  # half of a surrogate pair, which the caller finds
        return next(_equal_keys(value, "", 0), None) is not None


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
        keys = [key for key, _ in pairs]
        repeated = _Repeated(made)
        repeated.key = next(key for key in keys if keys.count(key) > 1)
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
