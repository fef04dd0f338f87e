"""Parsing and validation of operations on a task's variables: paths, limits, flattening (spec: CoordinatorAdapters).

Variables are stored under `coordinator.vars` of the task document. The functions are pure. For each violation they
raise AdapterError, whose message contains the path and never a value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import bson
from bson.errors import BSONError

from flowkit.errors import AdapterError
from flowkit.limits import (
    DOCUMENT_LEVELS,
    VARS_DEPTH,
    VARS_KEYS,
    VARS_PATH_CHARS,
    VARS_SEGMENT_CHARS,
    VARS_VALUE_BYTES,
)
from flowkit.text import kind_of, truncate
from flowkit.validation.storable import REFERENCE, holds_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "coordinator.vars"
"""Path of a task's variables in its document."""

_LEVELS_ABOVE = 3
"""Nesting levels above the variables: the document, `coordinator` and `vars`."""

_SHOWN_CHARS = 120
SMALLEST_INT, LARGEST_INT = -(2**63), 2**63 - 1
"""Limits of MongoDB's integers."""

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class VarsChange:
    """One validated operation, ready to be written. Paths are relative to `coordinator.vars`."""

    operation: str
    """`set`, `merge`, `incr`, `unset`; `noop` changes nothing."""
    sets: Mapping[str, Any] = field(default_factory=dict)
    adds: Mapping[str, int | float] = field(default_factory=dict)
    removes: tuple[str, ...] = ()
    repeated: int = 0
    """Number of repeated paths in the arguments of a removal."""
    block_sensitive: bool = False

    @property
    def paths(self) -> list[str]:
        """Return the full paths of all variables that the operation names, sorted."""
        return sorted(full(path) for path in (*self.sets, *self.adds, *self.removes))

    @property
    def touched(self) -> int:
        """Return the number of paths in the arguments, including repeated ones."""
        return len(self.sets) + len(self.adds) + len(self.removes) + self.repeated

    @property
    def ancestors(self) -> list[str]:
        """Return all paths above the leaves of the operation, sorted. Each must contain an object or be missing."""
        named = (*self.sets, *self.adds, *self.removes)
        return sorted({above for path in named for above in ancestors(path)})

    @property
    def values(self) -> list[tuple[str, Any]]:
        """Return the full path and value of each new leaf, including the leaves of objects that are stored whole."""
        return [leaf for path, value in self.sets.items() for leaf in _inner(full(path), value)]


NOTHING = VarsChange(operation="noop")


def full(path: str) -> str:
    """Return a variable's full path in the task document."""
    return f"{ROOT}.{path}"


def _inner(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, held in value.items():
        yield from _inner(f"{path}.{key}", held)


def setting(given: Mapping[str, Any]) -> VarsChange:
    """Return the change of `vars.set`.

    An object under a key without a dot is flattened to its leaves. A key with a dot is a path, and its value is stored
    whole.
    """
    data, block = _unwrapped(given, "set", "kv")
    leaves: Tree = {}
    for key, value in data.items():
        path = checked_path("set", key)
        flattened = isinstance(value, Mapping) and "." not in key
        _gather("set", leaves, _leaves("set", value, (path,)) if flattened else [(path, value)])
    return _checked(VarsChange(operation="set", sets=leaves, block_sensitive=block))


def merging(given: Mapping[str, Any]) -> VarsChange:
    """Return the change of `vars.merge`: the leaves of a tree overwrite variables. Keys must not contain dots."""
    data, block = _unwrapped(given, "merge", "data", "kv")
    leaves: Tree = {}
    _gather("merge", leaves, _leaves("merge", data, ()))
    return _checked(VarsChange(operation="merge", sets=leaves, block_sensitive=block))


def incrementing(key: Any, by: Any) -> VarsChange:
    """Return the change of `vars.incr`, which adds a finite number. A boolean counts as 0 or 1."""
    path = checked_path("incr", key)
    if not isinstance(by, (int, float)):
        raise AdapterError(f"vars.incr: 'by' must be int or float, not {type(by).__name__}: {shown(path)}")
    amount = int(by) if isinstance(by, int) else by
    if isinstance(amount, int) and not SMALLEST_INT <= amount <= LARGEST_INT:
        raise AdapterError(f"vars.incr: 'by' must fit 64 bits: {shown(path)}")
    if not math.isfinite(amount):
        raise AdapterError(f"vars.incr: 'by' must be finite: {shown(path)}")
    return VarsChange(operation="incr", adds={path: amount})


def final_increments(given: Any) -> VarsChange | None:
    """Return the change for the variables that `finalize` returns, `{"incr": {path: amount}}`; None for no
    increments.
    """
    if not isinstance(given, Mapping) or set(given) != {"incr"} or not isinstance(given["incr"], Mapping):
        raise AdapterError(
            'vars must be {"incr": {path: number}}; set other variables with ctx.vars.set before finalize returns'
        )
    adds = {path: by for key, by in given["incr"].items() for path, by in incrementing(key, by).adds.items()}
    return _checked(VarsChange(operation="incr", adds=adds)) if adds else None


def unsetting(paths: Iterable[Any], keys: Any) -> VarsChange:
    """Return the change of `vars.unset`, which removes paths whether they exist or not."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, (Iterable, type(None))):
        raise AdapterError(f"vars.unset: 'keys' must be an iterable of strings, not {type(keys).__name__}")
    requested = [checked_path("unset", path) for path in paths]
    requested += [checked_path("unset", str(key)) for key in keys or ()]
    named = tuple(dict.fromkeys(requested))
    return _checked(VarsChange(operation="unset", removes=named, repeated=len(requested) - len(named)))


def _unwrapped(given: Mapping[str, Any], operation: str, *wrappers: str) -> tuple[Tree, bool]:
    """Return the data of a call, with or without a wrapper key, and whether sensitive values block the call."""
    data, block = dict(given), given.get("block_sensitive", False)
    data.pop("block_sensitive", None)
    for wrapper in wrappers:
        if wrapper not in data:
            continue
        inner = data[wrapper]
        if isinstance(inner, Mapping):
            block = block or inner.get("block_sensitive", False)
            data = {key: value for key, value in inner.items() if key != "block_sensitive"}
            break
        if operation == "merge":
            raise AdapterError(f"vars.merge: {wrapper!r} must be a mapping, not {type(inner).__name__}")
    if not isinstance(block, bool):
        raise AdapterError(f"vars.{operation}: block_sensitive must be true or false")
    return data, block


def _leaves(operation: str, tree: Any, above: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths. An object without leaves yields nothing."""
    path = ".".join(above)
    if above:
        _check_length(operation, path, len(above))
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, value in tree.items():
        _check_segment(operation, key, shown=f"{path}.{key}" if above else str(key))
        yield from _leaves(operation, value, (*above, key))


def _gather(operation: str, leaves: Tree, found: Iterable[tuple[str, Any]]) -> None:
    for path, value in found:
        if path in leaves:
            raise AdapterError(f"vars.{operation}: {shown(path)} is given twice")
        _check_value(operation, path, value)
        leaves[path] = value


def checked_path(operation: str, path: Any) -> str:
    """Return `path`. Raise AdapterError, which names `operation`, if no variable can have this path."""
    if not isinstance(path, str) or not path:
        given = "an empty one" if path == "" else kind(path)
        raise AdapterError(f"vars.{operation}: a key must be a non-empty string, not {given}")
    segments = path.split(".")
    for segment in segments:
        _check_segment(operation, segment, shown=path)
    _check_length(operation, path, len(segments))
    return path


def _check_segment(operation: str, segment: Any, shown: str) -> None:
    where = f"vars.{operation}: {truncate(_printable(full(shown)), _SHOWN_CHARS)!r}"
    if not isinstance(segment, str) or not segment:
        raise AdapterError(f"{where} has a segment that is not a non-empty string")
    if segment.startswith("$") or "." in segment or "\0" in segment:
        raise AdapterError(f"{where} has a segment that begins with '$' or holds '.' or NUL")
    if not _encodable(segment):
        raise AdapterError(f"{where} has a segment that is not valid Unicode")
    if len(segment) > VARS_SEGMENT_CHARS:
        raise AdapterError(f"{where} has a segment of more than {VARS_SEGMENT_CHARS} characters")


def _encodable(text: str) -> bool:
    """Return True if UTF-8 can encode the text. It cannot encode half of a surrogate pair."""
    return _printable(text) == text


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _check_length(operation: str, path: str, segments: int) -> None:
    if segments > VARS_DEPTH:
        raise AdapterError(f"vars.{operation}: {shown(path)} is deeper than {VARS_DEPTH} segments")
    if len(full(path)) > VARS_PATH_CHARS:
        raise AdapterError(
            f"vars.{operation}: {shown(path)} is longer than {VARS_PATH_CHARS} characters (with its prefix)"
        )


def _check_value(operation: str, path: str, value: Any) -> None:
    where = f"vars.{operation}: the value of {shown(path)}"
    try:
        bson.encode({"v": value})
    except (BSONError, OverflowError, TypeError, ValueError, RecursionError):
        raise AdapterError(f"{where}, {kind(value)}, cannot be stored in MongoDB") from None
    if holds_reference(value):
        raise AdapterError(f"{where} {REFERENCE}")
    if _levels(value) + path.count(".") + _LEVELS_ABOVE > DOCUMENT_LEVELS:
        raise AdapterError(
            f"{where} is nested deeper than the {DOCUMENT_LEVELS} levels that MongoDB stores: "
            "make it flatter, or store it as a string"
        )
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes) and len(value) > VARS_VALUE_BYTES:
        raise AdapterError(
            f"{where} has {len(value):,} bytes, more than {VARS_VALUE_BYTES:,}: store a reference instead"
        )


def _levels(value: Any) -> int:
    """Return the nesting depth of objects and lists in a value; 0 if the value is neither."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        held, level = waiting.pop()
        if isinstance(held, (Mapping, list, tuple)):
            deepest = max(deepest, level)
            inner = held.values() if isinstance(held, Mapping) else held
            waiting += [(each, level + 1) for each in inner]
    return deepest


def _checked(change: VarsChange) -> VarsChange:
    """Return `change`. Raise AdapterError if it has too many paths or if one path is below another."""
    paths = sorted([*change.sets, *change.adds, *change.removes], key=lambda path: path.split("."))
    if len(paths) > VARS_KEYS:
        raise AdapterError(
            f"vars.{change.operation}: {len(paths)} keys in one operation, more than {VARS_KEYS}"
        )
    for outer, inner in pairwise(paths):
        if inner.startswith(f"{outer}."):
            raise AdapterError(f"vars.{change.operation}: {shown(inner)} is below {shown(outer)}; give one")
    return change


def size(variables: Tree) -> int:
    """Return the BSON size of variables in bytes."""
    return len(bson.encode(variables))


def shown(path: str) -> str:
    """Return a variable's full path for an error message, cut to 120 characters."""
    return truncate(full(path), _SHOWN_CHARS)


def ancestors(path: str) -> Iterator[str]:
    """Return all paths above `path`, starting with the topmost."""
    segments = path.split(".")
    return (".".join(segments[:count]) for count in range(1, len(segments)))


def kind(value: Any) -> str:
    """Return the type of a value for an error message, for example `a dict`."""
    return "null" if value is None else kind_of(value)
