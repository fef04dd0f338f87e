"""What an operation does to a task's variables, and what stands in its way. Pure: the model that MongoDB must match."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from bson.decimal128 import Decimal128

from flowkit.adapters.vars import LARGEST_INT, SMALLEST_INT, ancestors, kind, shown, size
from flowkit.errors import AdapterError
from flowkit.limits import VARS_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.adapters.vars import Change, Tree


def conflict(variables: Tree, change: Change) -> str | None:
    """Why `change` cannot be made to these variables; None when it can."""
    for path in (*change.sets, *change.adds, *change.removes):
        for above in ancestors(path):
            if (held := _at(variables, above)) is not _NOTHING and not _passable(held, change):
                return f"{shown(above)} holds {kind(held)}: nothing can be below it ({shown(path)})"
    for path, amount in change.adds.items():
        held = _at(variables, path)
        if held is not _NOTHING and not _is_number(held):
            return f"{shown(path)} holds {kind(held)}, not a number"
        if _is_int(held) and _is_int(amount) and not SMALLEST_INT <= held + amount <= LARGEST_INT:
            return f"{shown(path)} would exceed 64 bits"
    return None


def _passable(held: Any, change: Change) -> bool:
    """A removal finds nothing below a scalar, and that is fine; below a list it would reach an element."""
    return isinstance(held, dict) or (bool(change.removes) and not isinstance(held, list))


def changed(variables: Tree, change: Change) -> Tree:
    """The variables after `change`, which must have no conflict with them. `variables` stays as it is."""
    after = copy.deepcopy(variables)
    for path, value in change.sets.items():
        _place(after, path, copy.deepcopy(value))
    for path, amount in change.adds.items():
        held = _at(after, path)
        _place(after, path, amount if held is _NOTHING else held + amount)
    for path in change.removes:
        above, _, leaf = path.rpartition(".")
        holder = _at(after, above) if above else after
        if isinstance(holder, dict):
            holder.pop(leaf, None)
    return after


def check_total(variables: Tree, change: Change) -> None:
    """AdapterError when the variables would grow beyond their limit, or cannot be changed at all."""
    if problem := conflict(variables, change):
        raise AdapterError(f"vars.{change.operation}: {problem}")
    total = size(changed(variables, change))
    if total > VARS_BYTES and total > size(variables):
        raise AdapterError(
            f"vars.{change.operation}: the task's variables would have {total:,} bytes, more than {VARS_BYTES:,}: "
            "unset what is not needed, or store references"
        )


def empty_objects(variables: Tree) -> Tree:
    """What pruning removes: the topmost objects below `coordinator.vars` that hold no leaf, by path."""
    return dict(_empty_objects(variables, ()))


def _empty_objects(tree: Tree, above: tuple[str, ...]) -> Iterator[tuple[str, Tree]]:
    for key, value in tree.items():
        if not isinstance(value, dict) or not _can_be_named(key):
            continue
        if _has_leaf(value):
            yield from _empty_objects(value, (*above, key))
        else:
            yield ".".join((*above, key)), value


def _has_leaf(tree: Tree) -> bool:
    return any(
        _has_leaf(value) if isinstance(value, dict) and _can_be_named(key) else True
        for key, value in tree.items()
    )


def _can_be_named(key: str) -> bool:
    """Whether a path can lead there; what cannot be reached, because somebody else has put it there, stays."""
    return bool(key) and not key.startswith("$") and "." not in key and "\0" not in key


class _Nothing:
    """Stands for a variable that is not there; None is a value."""


_NOTHING = _Nothing()


def _at(tree: Tree, path: str) -> Any:
    held: Any = tree
    for segment in path.split("."):
        if not isinstance(held, dict) or segment not in held:
            return _NOTHING
        held = held[segment]
    return held


def _place(tree: Tree, path: str, value: Any) -> None:
    *above, leaf = path.split(".")
    for segment in above:
        tree = tree.setdefault(segment, {})
    tree[leaf] = value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
