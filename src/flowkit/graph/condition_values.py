"""The values that a condition reads, and the message that shows them if its evaluation fails. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flowkit.graph.cel import VARS
from flowkit.text import printable, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from flowkit.graph.cel_tree import Access

    Secret = Callable[[str, Any], bool]

_Paths = dict[str, Any]
"""A tree of keys. None in place of a subtree selects the whole value."""

_SHOWN_CHARS = 80
_SHOWN_TEXT_CHARS = 400
_SHOWN_VALUES = 10
_HIDDEN = "(hidden)"
_MISSING = object()


def selected(values: Mapping[str, Any], accesses: Iterable[Access]) -> dict[str, Any]:
    """Return the part of `values` that an expression reads, in types that JSON and CEL have."""
    paths = _paths((access.root, *access.path) for access in accesses)
    found: dict[str, Any] = _pruned(values, paths)
    return {root: found.get(root, {}) for root in values}


def _paths(chosen: Iterable[tuple[str, ...]]) -> _Paths:
    root: _Paths = {}
    for path in sorted(set(chosen), key=len):
        here: _Paths | None = root
        for key in path[:-1]:
            here = None if here is None else here.setdefault(key, {})
        if here is not None:
            here.setdefault(path[-1], None)
    return root


def _pruned(value: Any, paths: _Paths | None) -> Any:
    if paths is None or not isinstance(value, Mapping):
        return plain(value)
    return {key: _pruned(value[key], below) for key, below in paths.items() if key in value}


def plain(value: Any) -> Any:
    """Return `value` with times as ISO text, bytes as base64 text, and values of other types as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def explained(
    error: str, text: str, accesses: Iterable[Access], values: Mapping[str, Any], is_secret: Secret
) -> str:
    """Return the message of a condition that cannot be evaluated: the error, the expression and its values.

    `is_secret` decides by path and value which values the message hides.
    """
    paths = dict.fromkeys((access.root, *access.path) for access in accesses)
    shown = [_shown(values, path, is_secret) for path in paths]
    more = [f"and {len(shown) - _SHOWN_VALUES} more"] if len(shown) > _SHOWN_VALUES else []
    read = f"; it reads {', '.join([*shown[:_SHOWN_VALUES], *more])}" if shown else ""
    hidden = {form for secret in _secrets(values, (), is_secret) for form in _forms(secret)}
    for form in sorted(hidden, key=len, reverse=True):
        error = error.replace(form, _HIDDEN)
    return f"{truncate(printable(error), _SHOWN_TEXT_CHARS)}, in the condition {printable(truncate(text, _SHOWN_TEXT_CHARS))}{read}"


def _shown(values: Mapping[str, Any], path: tuple[str, ...], is_secret: Secret) -> str:
    """Return a part of the values with its name, or which part of its path is missing."""
    value: Any = values
    for place, key in enumerate(path, 1):
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            return f"{_name(path[:place])} (not set)"
    if any(True for _ in _secrets(value, path, is_secret)):
        return f"{_name(path)} = {_HIDDEN}"
    text = printable(json.dumps(value, ensure_ascii=False))
    return f"{_name(path)} = {truncate(text, _SHOWN_CHARS)}"


def _name(path: tuple[str, ...]) -> str:
    """Return a path as an expression contains it."""
    keys = [
        f".{key}" if key.isidentifier() else f"[{json.dumps(key, ensure_ascii=False)}]" for key in path[1:]
    ]
    return printable(path[0] + "".join(keys))


def _secrets(value: Any, path: tuple[str, ...], is_secret: Secret) -> Iterator[Any]:
    """Yield the values below `path` that look like secrets. A list can be one as a whole, and so can its items."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _secrets(each, (*path, key), is_secret)
    elif _is_secret(value, path, is_secret):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _secrets(each, path, is_secret)


def _is_secret(value: Any, path: tuple[str, ...], is_secret: Secret) -> bool:
    name = ".".join(path)
    return value not in (None, "") and is_secret(
        f"coordinator.{name}" if path[:1] == (VARS,) else name, value
    )


def _forms(secret: Any) -> Iterator[str]:
    """Yield the forms in which an error of CEL can contain a secret."""
    if isinstance(secret, Mapping):
        secret = list(secret.values())
    if isinstance(secret, list):
        for each in secret:
            yield from _forms(each)
    elif isinstance(secret, str):
        yield from {secret, json.dumps(secret, ensure_ascii=False)[1:-1]} - {""}
    elif not isinstance(secret, bool) and secret is not None:
        yield str(secret)
