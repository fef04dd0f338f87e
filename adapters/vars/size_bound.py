"""Keeps a task's variables within VARS_BYTES without a look at them before each write. Pure.

The document holds an upper bound of their size. A write that may make them larger adds what it brings to the bound, in
the same update, which matches only while that fits. When it does not fit, because values that were replaced or removed
still count, the write reads the variables and is judged by their exact size; its update then corrects the bound.

Each correction is counted, and its update matches only if no other one came first. Other writes may come in between:
each adds at least as much to the bound as to the variables, so the corrected bound holds for them too.
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
"""BSON bytes that a task's variables have at most, without those of an empty object."""

CORRECTED = "coordinator.vars_measured"
"""How often the bound was corrected."""

_EMPTY = size({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What an update must find, and what it adds to which path, so that the bound stays true."""

    condition: Tree = field(default_factory=dict)
    adds: dict[str, int] = field(default_factory=dict)


def growth(change: Change) -> int:
    """Bytes that a change brings; it makes variables larger by no more, whatever they hold."""
    return size(brought(change)) - _EMPTY


def room_within_bound(change: Change) -> Room | None:
    """Room as far as the bound tells; None for a change that is too large for any task."""
    grows = growth(change)
    if not grows:
        return Room()
    if grows > _most():
        return None
    first = {BOUND: {"$exists": False}, ROOT: {"$exists": False}}
    return Room(condition={"$or": [{BOUND: {"$lte": _most() - grows}}, first]}, adds={BOUND: grows})


def room(held: Tree, change: Change) -> Room:
    """Room for a change to a document of which `held` is the `coordinator`, by exact size if the bound is too high.

    AdapterError when the variables would grow beyond their limit.
    """
    bound = held.get(_name(BOUND), None if "vars" in held else 0)
    within = room_within_bound(change)
    if within and (not within.adds or (bound is not None and bound + growth(change) <= _most())):
        return within
    after = size_after(held.get("vars", {}), change) - _EMPTY
    corrects = {BOUND: after - (bound or 0), CORRECTED: 1}
    return Room(condition={CORRECTED: held.get(_name(CORRECTED))}, adds=corrects)


def _most() -> int:
    """The highest bound with which all variables fit."""
    return VARS_BYTES - _EMPTY


def size_after(variables: Tree, change: Change) -> int:
    """Size of the variables after a change. AdapterError when it cannot be made, or they grow beyond their limit."""
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
