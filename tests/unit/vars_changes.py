"""Helpers for the unit tests of task variables."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.vars import changes
from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowkit.adapters.vars.changes import VarsChange

SECRET = "s3cret-mark-of-a-value"
"""A value that must not appear in any error."""


def refusal(rule: Callable[..., object], *args: Any) -> str:
    """Return the text of an AdapterError, and check that it shows no value."""
    with pytest.raises(AdapterError) as caught:
        rule(*args)
    text = str(caught.value)
    assert SECRET not in text
    return text


def nested(path: str, value: Any = SECRET) -> dict[str, Any]:
    """Return an object with `value` at a dotted path."""
    tree: dict[str, Any] = reduce(lambda inner, segment: {segment: inner}, reversed(path.split(".")), value)
    return tree


def nested_all(paths: Iterable[str]) -> dict[str, Any]:
    """Return an object with a value at each of these paths of two segments."""
    tree: dict[str, Any] = {}
    for path in paths:
        outer, _, inner = path.partition(".")
        tree.setdefault(outer, {})[inner] = SECRET
    return tree


ON_A_PATH: dict[str, Callable[[str], VarsChange]] = {
    "set, dotted": lambda path: changes.setting({"kv": {path: SECRET}}),
    "set, keywords": lambda path: changes.setting({path: SECRET}),
    "set, nested": lambda path: changes.setting({"kv": nested(path)}),
    "merge, data": lambda path: changes.merging({"data": nested(path)}),
    "merge, kv": lambda path: changes.merging({"kv": nested(path)}),
    "merge, keywords": lambda path: changes.merging(nested(path)),
    "incr": lambda path: changes.incrementing(path, 1),
    "unset": lambda path: changes.unsetting([path], None),
    "unset, keys": lambda path: changes.unsetting([], [path]),
}
"""Every operation that changes one path, in every form."""

ON_MANY_PATHS: dict[str, Callable[[list[str]], VarsChange]] = {
    "set, dotted": lambda paths: changes.setting({"kv": dict.fromkeys(paths, SECRET)}),
    "set, nested": lambda paths: changes.setting({"kv": nested_all(paths)}),
    "merge": lambda paths: changes.merging({"data": nested_all(paths)}),
    "unset": lambda paths: changes.unsetting(paths, None),
    "unset, keys": lambda paths: changes.unsetting([], paths),
    "unset, both": lambda paths: changes.unsetting(paths[::2], paths[1::2]),
}
"""Every operation that changes several paths, in every form."""
