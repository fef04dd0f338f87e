"""Find the place of a value in a JSON text. Pure.

Python's decoder does not keep places. Only an error needs one, so this module reads the text again then.
"""

from __future__ import annotations

import json
import re
from math import isinf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

PLACE_LEVELS: Final = 5
"""Levels of nesting of which the places are known: enough for the keys of `graph.nodes[0].io`."""

_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)


class JsonStep(NamedTuple):
    """A key of an object, or a value."""

    path: Path
    """For a key, that of its value."""
    offset: int
    token: str
    is_key: bool
    parent: int
    """Where the object or the list begins that contains it."""


def walk(text: str) -> Iterator[JsonStep]:
    """Yield the keys and the values of a JSON text, in order. What follows an error in the text has no meaning."""
    path: list[str | int] = []
    parents = [-1]
    is_key = False
    for found in _TOKEN.finditer(text):
        token, offset = found[0], found.start()
        match token:
            case "{" | "[":
                yield JsonStep(tuple(path), offset, token, False, parents[-1])
                parents.append(offset)
                path.append("" if token == "{" else 0)
                is_key = token == "{"
            case "}" | "]":
                if path:
                    path.pop()
                    parents.pop()
                is_key = False
            case ",":
                is_key = _go_on(path)
            case ":":
                is_key = False
            case _ if is_key and path:
                path[-1] = _decode(token)
                yield JsonStep(tuple(path), offset, token, True, parents[-1])
            case _:
                yield JsonStep(tuple(path), offset, token, False, parents[-1])


def _go_on(path: list[str | int]) -> bool:
    """Count an item of a list. Return whether the key of an object comes next."""
    if not path:
        return False
    last = path[-1]
    if isinstance(last, int):
        path[-1] = last + 1
    return isinstance(last, str)


def _decode(token: str) -> str:
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        return token


def offset_of(text: str, path: Path, *, again: bool = False) -> int | None:
    """Return where the value at `path` begins whose number is too large for a float, or None.

    With `again`, return where its key occurs for the second time in one object.
    """
    seen = -1
    for step in walk(text):
        if step.path != path:
            continue
        if again and step.is_key:
            if step.parent == seen:
                return step.offset
            seen = step.parent
        elif not again and not step.is_key and _is_infinite(step.token):
            return step.offset
    return None


def _is_infinite(token: str) -> bool:
    try:
        return isinf(float(token))
    except ValueError:
        return False


def offsets(text: str) -> dict[Path, int]:
    """Return where the outer values begin: the key of a value, or the value itself in a list."""
    found: dict[Path, int] = {}
    for step in walk(text):
        if len(step.path) <= PLACE_LEVELS:
            found.setdefault(step.path, step.offset)
    return found
