"""The gates of nodes: which ends and batches of their parents let them start, and why they are skipped otherwise. Pure.

A parent satisfies its edge by finishing, or by its first stored batch if the edge streams. The conditions of edges can
change what a gate sees of a parent. A gate with the mode `all_done` counts every end, and never closes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.models import ALL_DONE, NodeStatus, SkipReason, StartWhen
from flowkit.models.graphs import INHERITED, inherited_reason
from flowkit.workflows.scheduling.conditions import BY_CONDITION
from flowkit.workflows.scheduling.streams import TOLERATED_BY_ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState
    from flowkit.workflows.scheduling.conditions import Conditions
    from flowkit.workflows.scheduling.streams import Streams


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
        case "all_done":
            return gate.open_parents == 0
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
        case "all_done":
            return False
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


def higher_precedence(left: SkipReason | None, right: SkipReason | None) -> SkipReason | None:
    """Return the reason that takes precedence, or None if there is none."""
    present = [reason for reason in (left, right) if reason is not None]
    return min(present, key=INHERITED.index, default=None)


class Gates:
    """The gates of one graph. `states` are the complete states of the nodes."""

    def __init__(
        self, nodes: Sequence[Node], states: Sequence[NodeState], conditions: Conditions, streams: Streams
    ) -> None:
        self._nodes = nodes
        self._streams = streams
        self._states = states
        self._conditions = conditions
        index_of = {node.node_id: node.index for node in nodes}
        self._parents = [[index_of[parent] for parent in node.depends_on] for node in nodes]
        self._gates = [Gate(open_parents=len(node.depends_on)) for node in nodes]

    def __getitem__(self, index: int) -> Gate:
        """Return the gate of a node. A node without parents has one that is open."""
        return self._gates[index]

    def count_batch(self, child: int, parent: int) -> None:
        """Count the first batch of a parent from which `child` streams, unless the condition of the edge is
        undecided.
        """
        result = self._conditions.passes(child, parent)
        if result is True:
            add_batch(self._nodes[child], self._gates[child])
        elif result is False:
            add_end(self._gates[child], BY_CONDITION)

    def count_late_batch(self, child: int, parent: int) -> None:
        """Count the first batch of a parent whose end was counted before, because a signal came late.

        The condition of an edge from a finished parent is the same for its batch, so its end has counted already.
        """
        end, conditional = self._states[parent], self._has_condition(child, parent)
        if conditional and not self.needs_condition(child, parent):
            return
        opens = self._nodes[child].io.start_when is StartWhen.FIRST_BATCH
        if conditional and end.status is NodeStatus.FINISHED:
            passes = self._conditions.passes(child, parent)
            self._gates[child].opened_by_batch |= opens and passes is True
        else:
            if conditional or not opens:
                remove_end(self._gates[child], end)
            self.count_batch(child, parent)

    def count_end(self, child: int, parent: int) -> None:
        """Count an ended parent, unless the condition of the edge is undecided or a batch decides about the edge."""
        if not self._is_decided_by_batch(child, parent):
            seen = self._parent_seen_by(child, parent)
            if seen is not None:
                add_end(self._gates[child], seen)

    def count_decided(self, child: int, parent: int) -> None:
        """Count a parent when the condition of its edge, which was undecided, has its result."""
        if self._is_decided_by_batch(child, parent):
            self.count_batch(child, parent)
        else:
            self.count_end(child, parent)

    def skip_reason(self, child: int) -> SkipReason | None:
        """Return the skip reason that the parents pass on whose edges are not satisfied; None if no parent does."""
        reason = None
        for parent in self._parents[child]:
            seen = self._unsatisfied(child, parent)
            if seen is not None:
                reason = higher_precedence(
                    reason, inherited_reason(self._nodes[parent], seen.status, seen.skip_reason)
                )
        return reason

    def _unsatisfied(self, child: int, parent: int) -> NodeState | None:
        """Return how a parent counts that has ended, or whose edge is false; None if a batch satisfies the edge."""
        if self._is_decided_by_batch(child, parent):
            return BY_CONDITION if self._conditions.passes(child, parent) is False else None
        if not self._states[parent].status.ended:
            return None
        return self._parent_seen_by(child, parent)

    def _parent_seen_by(self, child: int, parent: int) -> NodeState | None:
        """Return how an ended parent counts for the gate of `child`; None while the condition of the edge
        is undecided.
        """
        state = self._states[parent]
        if state.status is not NodeStatus.FINISHED or not self._has_condition(child, parent):
            return state
        passes = self._conditions.passes(child, parent)
        if passes is None:
            return None
        return state if passes else BY_CONDITION

    def needs_condition(self, child: int, parent: int) -> bool:
        """Return whether the condition of an edge can still have an effect.

        It has none for a gate with the mode `all_done` once the parent has ended without finishing.
        """
        status = self._states[parent].status
        return self._nodes[child].fan_in.mode != ALL_DONE or not status.ended or status is NodeStatus.FINISHED

    def _is_decided_by_batch(self, child: int, parent: int) -> bool:
        """Return whether the first batch of a parent decides about the edge, so that the end of the parent does not.

        With `start_when: first_batch`, a batch opens the gate, but the edges without a condition count the ends.
        """
        node = self._nodes[child]
        if not self._states[parent].streamed or not self._streams.leads(parent, child):
            return False
        if not self.needs_condition(child, parent) and self._is_undecided(child, parent):
            return False
        return node.io.start_when is not StartWhen.FIRST_BATCH or self._has_condition(child, parent)

    def _is_undecided(self, child: int, parent: int) -> bool:
        return self._has_condition(child, parent) and parent not in self._states[child].edges

    def _has_condition(self, child: int, parent: int) -> bool:
        return self._nodes[parent].node_id in self._nodes[child].edge_when
