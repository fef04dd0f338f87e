"""Count the parents of each node for its gate: their first batches, their ends, and the conditions of the edges. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.models import NodeStatus, StartWhen
from flowkit.workflows.scheduling.conditions import BY_CONDITION
from flowkit.workflows.scheduling.gates import (
    Gate,
    add_batch,
    add_end,
    higher_precedence,
    inherited_reason,
    remove_end,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState, SkipReason
    from flowkit.workflows.scheduling.conditions import Conditions


class FanIns:
    """The gates of one graph. `states` are the complete states of the nodes."""

    def __init__(self, nodes: Sequence[Node], states: Sequence[NodeState], conditions: Conditions) -> None:
        self._nodes = nodes
        self._states = states
        self._conditions = conditions
        index_of = {node.node_id: node.index for node in nodes}
        self._parents = [[index_of[parent] for parent in node.depends_on] for node in nodes]
        self.gates = [Gate(open_parents=len(node.depends_on)) for node in nodes]
        """The gate of each node. A node without parents has one that is open."""

    def count_batch(self, child: int, parent: int) -> None:
        """Count the first batch of a parent from which `child` streams, unless the condition of the edge is undecided."""
        result = self._conditions.passes(child, parent)
        if result is True:
            add_batch(self._nodes[child], self.gates[child])
        elif result is False:
            add_end(self.gates[child], BY_CONDITION)

    def count_late_batch(self, child: int, parent: int) -> None:
        """Count the first batch of a parent whose end was counted before, because a signal came late.

        The condition of an edge from a finished parent is the same for its batch, so its end has counted already.
        """
        end, conditional = self._states[parent], self._has_condition(child, parent)
        opens = self._nodes[child].io.start_when is StartWhen.FIRST_BATCH
        if conditional and end.status is NodeStatus.FINISHED:
            passes = self._conditions.passes(child, parent)
            self.gates[child].opened_by_batch |= opens and passes is True
        else:
            if conditional or not opens:
                remove_end(self.gates[child], end)
            self.count_batch(child, parent)

    def count_end(self, child: int, parent: int) -> None:
        """Count an ended parent, unless the condition of the edge is undecided or a batch decides about the edge."""
        if not self._is_decided_by_batch(child, parent):
            seen = self._conditions.parent_seen_by(child, parent)
            if seen is not None:
                add_end(self.gates[child], seen)

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
                reason = higher_precedence(reason, inherited_reason(self._nodes[parent], seen))
        return reason

    def _unsatisfied(self, child: int, parent: int) -> NodeState | None:
        """Return how a parent counts that has ended, or whose edge is false; None if a batch satisfies the edge."""
        if self._is_decided_by_batch(child, parent):
            return BY_CONDITION if self._conditions.passes(child, parent) is False else None
        if not self._states[parent].status.ended:
            return None
        return self._conditions.parent_seen_by(child, parent)

    def _is_decided_by_batch(self, child: int, parent: int) -> bool:
        """Return whether the first batch of a parent decides about the edge, so that the end of the parent does not.

        With `start_when: first_batch`, a batch opens the gate, but the edges without a condition count the ends.
        """
        node, source = self._nodes[child], self._nodes[parent]
        if source.node_id not in node.streams_from or not self._states[parent].streamed:
            return False
        return node.io.start_when is not StartWhen.FIRST_BATCH or self._has_condition(child, parent)

    def _has_condition(self, child: int, parent: int) -> bool:
        return self._nodes[parent].node_id in self._nodes[child].edge_when
