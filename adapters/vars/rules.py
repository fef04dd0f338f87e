"""The effect of an operation on a task's variables, its conflicts with them, and the size to which they may grow.

The functions are pure. They model in Python what the update in MongoDB does.

The document contains an upper bound of their size. A write that may enlarge the variables adds its maximum growth to
the bound. It does so in the same update, whose filter matches only if the result stays within the limit. The bound may
be too high, because values that were replaced or removed still count. If the update does not match, the write reads
the variables and checks their exact size. Its next update then corrects the bound.

FlowKit counts corrections, and a correction matches only if no other correction came first. Other writes may come in
between. Each adds at least as much to the bound as to the variables, so the corrected bound remains valid.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any

from bson.decimal128 import Decimal128, create_decimal128_context
from bson.int64 import Int64

from flowkit.adapters.vars.changes import LARGEST_INT, ROOT, SMALLEST_INT, ancestors, kind, shown, size
from flowkit.errors import AdapterError
from flowkit.limits import VARS_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.adapters.vars.changes import Tree, VarsChange


BOUND = "coordinator.vars_bytes"
"""Path of the upper bound of the variables' BSON size, in bytes and without those of an empty object."""

CORRECTED = "coordinator.vars_measured"
"""Path of the number of corrections of the bound."""

_EMPTY = size({})


def conflict(variables: Tree, change: VarsChange) -> str | None:
    """Return why `change` cannot be applied to these variables; None if it can."""
    for path in (*change.sets, *change.adds, *change.removes):
        for above in ancestors(path):
            if (held := _at(variables, above)) is not _NOTHING and not _passable(held, change):
                return f"{shown(above)} holds {kind(held)}, so it cannot contain {shown(path)}"
    for path, amount in change.adds.items():
        held = _at(variables, path)
        if held is not _NOTHING and not _is_number(held):
            return f"{shown(path)} holds {kind(held)}, not a number"
        if _is_int(held) and _is_int(amount) and not SMALLEST_INT <= held + amount <= LARGEST_INT:
            return f"{shown(path)} would exceed 64 bits"
    return None


def _passable(held: Any, change: VarsChange) -> bool:
    """Return True if `change` can reach a path below `held`.

    A removal below a scalar has no effect and is allowed. Below a list it could remove an element, so it is not.
    """
    return isinstance(held, dict) or (bool(change.removes) and not isinstance(held, list))


def changed(variables: Tree, change: VarsChange) -> Tree:
    """Return the variables after `change`, which must not conflict with them. Do not modify `variables`."""
    after = copy.deepcopy(variables)
    for path, value in change.sets.items():
        _place(after, path, copy.deepcopy(value))
    for path, amount in change.adds.items():
        held = _at(after, path)
        _place(after, path, amount if held is _NOTHING else _sum(held, amount))
    for path in change.removes:
        above, _, leaf = path.rpartition(".")
        holder = _at(after, above) if above else after
        if isinstance(holder, dict):
            holder.pop(leaf, None)
    return after


def brought(change: VarsChange) -> Tree:
    """Return the variables that `change` creates in an empty tree, with each increment as a 64-bit integer.

    64 bits are the largest size that an increment can give to a number that it creates or enlarges.
    """
    tree: Tree = {}
    for path, value in change.sets.items():
        _place(tree, path, value)
    for path in change.adds:
        _place(tree, path, Int64(0))
    return tree


def empty_objects(variables: Tree) -> Tree:
    """Return the topmost objects below `coordinator.vars` that contain no leaf, by path. Pruning removes these."""
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
    """Return True if a path can contain this key. Pruning keeps other keys, which a direct write has created."""
    return bool(key) and not key.startswith("$") and "." not in key and "\0" not in key


def value_at(variables: Tree, path: str, default: Any = None) -> Any:
    """Return the variable at `path`, or `default` if there is none."""
    held = _at(variables, path)
    return default if held is _NOTHING else held


class _Nothing:
    """Represents a missing variable, because None is a valid value."""


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


def _sum(held: Any, amount: float) -> Any:
    """Return the sum with the type that MongoDB gives it: a 64-bit integer stays one."""
    if isinstance(held, Decimal128):
        with localcontext(create_decimal128_context()):
            return Decimal128(held.to_decimal() + Decimal(amount))
    long = isinstance(held, int) and (isinstance(held, Int64) or not _is_int32(held) or not _is_int32(amount))
    return Int64(held + amount) if long and _is_int(amount) else held + amount


def _is_int32(value: float) -> bool:
    return -(2**31) <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal128)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeReservation:
    """The filter (`condition`) and the increments (`adds`) by which an update keeps the bound valid."""

    condition: Tree = field(default_factory=dict)
    adds: dict[str, int] = field(default_factory=dict)


def growth_of(change: VarsChange) -> int:
    """Return the largest number of bytes by which a change can enlarge any variables."""
    return size(brought(change)) - _EMPTY


def reserve_within_bound(change: VarsChange) -> SizeReservation | None:
    """Return the reservation for a change according to the bound; None if the change alone exceeds the limit."""
    grows = growth_of(change)
    if not grows:
        return SizeReservation()
    if grows > _highest_bound():
        return None
    first = {BOUND: {"$exists": False}, ROOT: {"$exists": False}}
    return SizeReservation(
        condition={"$or": [{BOUND: {"$lte": _highest_bound() - grows}}, first]}, adds={BOUND: grows}
    )


def reserve(held: Tree, change: VarsChange) -> SizeReservation:
    """Return the reservation for a change to the document whose `coordinator` is `held`.

    Calculate the exact size if the bound is too high. Raise AdapterError if the variables would exceed their limit.
    """
    bound = held.get(_name(BOUND), None if "vars" in held else 0)
    within = reserve_within_bound(change)
    if within and (not within.adds or (bound is not None and bound + growth_of(change) <= _highest_bound())):
        return within
    after = size_after(held.get("vars", {}), change) - _EMPTY
    correction = after - (bound or 0)
    unchanged: Tree = {CORRECTED: held.get(_name(CORRECTED))}
    if bound is not None:
        # Writes since the read may have raised the bound. Variables that are beyond the limit may only shrink.
        unchanged[BOUND] = {"$lte": max(_highest_bound() - correction, bound)}
    return SizeReservation(condition=unchanged, adds={BOUND: correction, CORRECTED: 1})


def _highest_bound() -> int:
    """Return the highest value of the bound that is within the limit."""
    return VARS_BYTES - _EMPTY


def size_after(variables: Tree, change: VarsChange) -> int:
    """Return the size of the variables after a change, in bytes.

    Raise AdapterError if the change conflicts with the variables or makes them grow beyond their limit.
    """
    if problem := conflict(variables, change):
        raise AdapterError(f"vars.{change.operation}: {problem}")
    total = size(changed(variables, change))
    if total > VARS_BYTES and total > size(variables):
        raise AdapterError(
            f"vars.{change.operation}: the task's variables would have {total:,} bytes, more than {VARS_BYTES:,}: "
            "unset what is not needed, or store references"
        )
    return total


def _name(path: str) -> str:
    return path.removeprefix("coordinator.")
