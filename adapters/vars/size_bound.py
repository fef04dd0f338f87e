"""Keeps a task's variables within VARS_BYTES without reading them before each write. Pure functions.

The document contains an upper bound of their size. A write that may enlarge the variables adds its maximum growth to
the bound. It does so in the same update, whose filter matches only if the result stays within the limit. The bound may
be too high, because values that were replaced or removed still count. If the update does not match, the write reads
the variables and checks their exact size. Its next update then corrects the bound.

FlowKit counts corrections, and a correction matches only if no other correction came first. Other writes may come in
between. Each adds at least as much to the bound as to the variables, so the corrected bound remains valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.adapters.vars.operations import ROOT, size
from flowkit.adapters.vars.rules import brought, changed, conflict
from flowkit.errors import AdapterError
from flowkit.limits import VARS_BYTES

if TYPE_CHECKING:
    from flowkit.adapters.vars.operations import Change, Tree

BOUND = "coordinator.vars_bytes"
"""Path of the upper bound of the variables' BSON size, in bytes and without those of an empty object."""

CORRECTED = "coordinator.vars_measured"
"""Path of the number of corrections of the bound."""

_EMPTY = size({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The filter (`condition`) and the increments (`adds`) by which an update keeps the bound valid."""

    condition: Tree = field(default_factory=dict)
    adds: dict[str, int] = field(default_factory=dict)


def growth(change: Change) -> int:
    """Return the largest number of bytes by which a change can enlarge any variables."""
    return size(brought(change)) - _EMPTY


def room_within_bound(change: Change) -> Room | None:
    """Return the Room for a change according to the bound; None if the change alone exceeds the limit."""
    grows = growth(change)
    if not grows:
        return Room()
    if grows > _most():
        return None
    first = {BOUND: {"$exists": False}, ROOT: {"$exists": False}}
    return Room(condition={"$or": [{BOUND: {"$lte": _most() - grows}}, first]}, adds={BOUND: grows})


def room(held: Tree, change: Change) -> Room:
    """Return the Room for a change to the document whose `coordinator` is `held`.

    Calculate the exact size if the bound is too high. Raise AdapterError if the variables would exceed their limit.
    """
    bound = held.get(_name(BOUND), None if "vars" in held else 0)
    within = room_within_bound(change)
    if within and (not within.adds or (bound is not None and bound + growth(change) <= _most())):
        return within
    after = size_after(held.get("vars", {}), change) - _EMPTY
    corrects = {BOUND: after - (bound or 0), CORRECTED: 1}
    return Room(condition={CORRECTED: held.get(_name(CORRECTED))}, adds=corrects)


def _most() -> int:
    """Return the highest value of the bound that is within the limit."""
    return VARS_BYTES - _EMPTY


def size_after(variables: Tree, change: Change) -> int:
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
