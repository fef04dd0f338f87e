"""What the type of params says about a list in them."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from flowkit.graph.cel import PARAMS

_PLAIN_PATH = re.compile(rf"{PARAMS}((?:\.[A-Za-z_][A-Za-z0-9_]*)+)")
_UNKNOWN: Any = object()


def differing_items(params: Any, over: str, items: Any) -> str | None:
    """Return how the items of a list in params differ from the type with which a node maps them.

    None if they fit, or if their type is not known. `params` and `items` are None if they are not known.
    """
    match = _PLAIN_PATH.fullmatch(over.strip())
    if match is None or params is None or items is None:
        return None
    kind = _strip(_find_type(params, match[1].split(".")[1:]))
    if kind is _UNKNOWN or kind is Any:
        return None
    found = _find_items(kind)
    if found is None:
        return f"map.over {over!r} is {_name(kind)}, not a list"
    if found is _UNKNOWN or _fits(_strip(found), items):
        return None
    return f"map.over {over!r} has items of the type {_name(found)}, but the node reads {_name(items)}"


def _find_type(kind: Any, path: list[str]) -> Any:
    for key in path:
        kind = _find_field(_strip(kind), key)
    return kind


def _find_field(kind: Any, key: str) -> Any:
    if not isinstance(kind, type):
        return _UNKNOWN
    if issubclass(kind, BaseModel):
        fields = {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
        return fields.get(key, _UNKNOWN)
    try:
        return get_type_hints(kind).get(key, _UNKNOWN)
    except (NameError, TypeError):
        return _UNKNOWN


def _strip(kind: Any) -> Any:
    """Return a type without its annotations, and without None."""
    if get_origin(kind) is Annotated:
        return _strip(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [each for each in get_args(kind) if each is not type(None)]
        return _strip(others[0]) if len(others) == 1 else _UNKNOWN
    return kind


def _find_items(kind: Any) -> Any:
    """Return the type of the items of a list; None if the type is no list."""
    origin, arguments = get_origin(kind), get_args(kind)
    if not isinstance(origin or kind, type):
        return _UNKNOWN
    if not issubclass(origin or kind, Collection) or issubclass(origin or kind, (str, bytes, Mapping)):
        return None
    if not arguments or (origin is tuple and arguments[1:] != (...,)):
        return _UNKNOWN
    return arguments[0]


def _fits(found: Any, wanted: Any) -> bool:
    """Return whether items of one type may be read as another one; True if that is not known."""
    if not isinstance(found, type) or not isinstance(wanted, type) or found is wanted:
        return True
    if get_origin(found) is not None or get_origin(wanted) is not None:
        return True
    return issubclass(found, wanted) or wanted in (dict, object) or (found, wanted) == (int, float)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind)
