"""The gate of a node: which ends and batches of its parents let it start, and why it is skipped otherwise. Pure.

A parent satisfies its edge by finishing, or by its first stored batch if the edge streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.models import NodeStatus, SkipReason, StartWhen

if TYPE_CHECKING:
    from flowkit.models import Node, NodeState

_INHERITED = (SkipReason.UPSTREAM_FAILED, SkipReason.CONDITION, SkipReason.ROUTING, SkipReason.USER)
"""Skip reasons that a child inherits from its parents, in order of precedence."""

TOLERATED_BY_ALL = frozenset({SkipReason.CONDITION, SkipReason.ROUTING, SkipReason.USER})
"""Skip reasons of parents that do not close an `all` gate. At least one other parent must finish."""


@dataclass(slots=True)
class Gate:
    """The state of a node's fan-in: counts of its parents by how they ended."""

    open_parents: int
    """Parents that have not ended and have not satisfied their edges."""
    satisfied: int = 0
    """Parents that have satisfied their edges."""
    blocked: int = 0
    """Parents that ended in a way that closes a gate with the mode `all`."""
    opened_by_batch: bool = False
    """Whether a batch of one parent is enough (`start_when: first_batch`), and there is one."""
    route_reason: SkipReason | None = None
    """The skip reason of the node if no route leads to it."""


def is_open(node: Node, gate: Gate) -> bool:
    """Return whether enough parents of a node have satisfied their edges for it to start."""
    if not node.depends_on or gate.opened_by_batch:
        return True
    match node.fan_in.mode:
        case "any":
            return gate.satisfied >= 1
        case "count":
            return gate.satisfied >= node.fan_in.count
        case _:
            return gate.open_parents == 0 and gate.blocked == 0 and gate.satisfied > 0


def is_closed(node: Node, gate: Gate) -> bool:
    """Return whether too few parents of a node can still satisfy their edges for it to start."""
    if not node.depends_on or gate.opened_by_batch:
        return False
    match node.fan_in.mode:
        case "any":
            return gate.satisfied + gate.open_parents < 1
        case "count":
            return gate.satisfied + gate.open_parents < node.fan_in.count
        case _:
            return gate.blocked > 0 or (gate.open_parents == 0 and gate.satisfied == 0)


def add_batch(node: Node, gate: Gate) -> None:
    """Note the first stored batch of a parent from which `node` streams, and whose end was not noted before."""
    if node.io.start_when is StartWhen.FIRST_BATCH:
        gate.opened_by_batch = True
    else:
        gate.open_parents -= 1
        gate.satisfied += 1


def add_end(gate: Gate, state: NodeState) -> None:
    """Note how a parent has ended whose edge no batch has satisfied."""
    gate.open_parents -= 1
    gate.satisfied += state.status is NodeStatus.FINISHED
    gate.blocked += closes_all_gate(state)


def remove_end(gate: Gate, state: NodeState) -> None:
    """Undo `add_end`, because a batch of the parent decides about the edge."""
    gate.open_parents += 1
    gate.satisfied -= state.status is NodeStatus.FINISHED
    gate.blocked -= closes_all_gate(state)


def closes_all_gate(state: NodeState) -> bool:
    """Return whether a parent that ended in `state` closes a gate with the mode `all`."""
    if state.status is NodeStatus.FINISHED:
        return False
    return not (state.status is NodeStatus.SKIPPED and state.skip_reason in TOLERATED_BY_ALL)


def inherited_reason(node: Node, state: NodeState) -> SkipReason | None:
    """Return the skip reason that an ended node passes on; None if it finished.

    A failure that starts other nodes passes on `routing`, because the branches below the node were not taken.
    """
    if state.status is NodeStatus.FINISHED:
        return None
    if state.status is NodeStatus.FAILED and node.on_failure:
        return SkipReason.ROUTING
    if state.status is NodeStatus.SKIPPED and state.skip_reason in _INHERITED:
        return state.skip_reason
    return SkipReason.UPSTREAM_FAILED


def higher_precedence(left: SkipReason | None, right: SkipReason | None) -> SkipReason | None:
    """Return the reason that takes precedence, or None if there is none."""
    present = [reason for reason in (left, right) if reason is not None]
    return min(present, key=_INHERITED.index, default=None)
