"""What JSON loses of a value: compares what a handler gives with what the next one reads. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_json

if TYPE_CHECKING:
    from collections.abc import Callable

Place = tuple[str | int, ...]

_LISTS = (list, tuple, deque)
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a value that its reader would get differently."""

    place: Place
    given: Any
    read: Any

    @property
    def is_missing(self) -> bool:
        """Whether the reader would not get it at all."""
        return self.read is _MISSING


class LostValue(ValueError):
    """JSON would lose a part of a value: the reader gets another one, or, without a `change`, none at all."""

    def __init__(self, change: Difference | None = None) -> None:
        super().__init__("JSON would lose a part of the value")
        self.change = change


def find_change(
    given: Any,
    read: Any,
    *,
    is_open: bool,
    has_same_json: Callable[[], bool],
    takes_tuples: bool = False,
    place: Place = (),
) -> Difference | None:
    """Return the first part that a reader gets differently; None if it gets the same value.

    Two values are the same if they are equal, or if their types are the same and their JSON is, as for not-a-number.
    With `is_open`, the type allows any value somewhere, which is read in JSON types. `has_same_json` returns whether
    the whole values have the same JSON by their type, for parts that have none without it. With `takes_tuples`, a
    tuple may be read as a list of the same items.
    """
    if given is read or _is_equal(given, read):
        return None
    is_same_type = isinstance(
        given, (type(read), tuple) if takes_tuples and isinstance(read, list) else type(read)
    )
    pairs = _parts(given, read) if is_same_type else None
    if pairs is None:
        texts = _json_of(given), _json_of(read)
        is_same = texts[0] == texts[1] if any(texts) else has_same_json()
        return None if is_same and (is_same_type or is_open) else Difference(place, given, read)
    for name, one, other in pairs:
        if other is _MISSING or one is _MISSING:
            has_text_keys = is_open and isinstance(given, Mapping) and _json_of(given) == _json_of(read)
            return None if has_text_keys else Difference((*place, name), one, other)
        found = find_change(
            one,
            other,
            is_open=is_open,
            has_same_json=has_same_json,
            takes_tuples=takes_tuples,
            place=(*place, name),
        )
        if found is not None:
            return found
    return None


def _is_equal(given: Any, read: Any) -> bool:
    try:
        return bool(given == read)
    except (TypeError, ValueError):  # arrays, for example, which are equal item by item
        return False


def _parts(given: Any, read: Any) -> list[tuple[str | int, Any, Any]] | None:
    """Return the parts of two values, each with its name or index; None for values without parts."""
    if isinstance(given, _LISTS):
        count = max(len(given), len(read))
        return [(place, *(_item(each, place) for each in (given, read))) for place in range(count)]
    if (fields := _fields(given)) is None:
        return None
    others = _fields(read) or {}
    return [
        (str(name), fields.get(name, _MISSING), others.get(name, _MISSING)) for name in {**fields, **others}
    ]


def _item(items: Any, place: int) -> Any:
    return items[place] if place < len(items) else _MISSING


def _fields(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, BaseModel):
        own = {name: getattr(value, name, _MISSING) for name in type(value).model_fields}
        return own | (value.__pydantic_extra__ or {})
    if (names := getattr(type(value), "__dataclass_fields__", None)) is not None:
        return {name: getattr(value, name, _MISSING) for name in names}
    return value if isinstance(value, Mapping) else None


def _json_of(value: Any) -> bytes:
    """Return the JSON of a value; empty for one that has none without its type."""
    try:
        return to_json(value, inf_nan_mode="constants")
    except (ValueError, RecursionError):
        return b""


def find_non_finite(value: Any, place: Place = ()) -> Difference | None:
    """Return the first number in a value of JSON types that JSON cannot hold: not-a-number or an infinity."""
    if isinstance(value, float):
        return None if math.isfinite(value) else Difference(place, value, None)
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        if (
            isinstance(each, (float, dict, list))
            and (found := find_non_finite(each, (*place, name))) is not None
        ):
            return found
    return None
