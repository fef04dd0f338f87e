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

    from flowkit.models import Node, NodeState
    from flowkit.workflows.scheduling.conditions import Conditions


class FanIns:
    """The gates of one graph. `states` are the complete states of the nodes."""

    def __init__(self, nodes: Sequence[Node], states: Sequence[NodeState], conditions: Conditions) -> None:
        self._nodes = nodes
        self._states = states
        self._conditions = conditions
        self.gates = [Gate(open_parents=len(node.depends_on)) for node in nodes]
        """The gate of each node. A node without parents has one that is open."""

    def count_batch(self, child: int, parent: int) -> None:
        """Count the first batch of a parent from which `child` streams, unless the condition of the edge is undecided."""
        result = self._conditions.passes(child, parent)
        if result is True:
            add_batch(self._nodes[child], self.gates[child])
        elif result is False:
            self._add_end(child, parent, BY_CONDITION)

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
                self._add_end(child, parent, seen)

    def count_decided(self, child: int, parent: int) -> None:
        """Count a parent when the condition of its edge, which was undecided, has its result."""
        if self._is_decided_by_batch(child, parent):
            self.count_batch(child, parent)
        else:
            self.count_end(child, parent)

    def _add_end(self, child: int, parent: int, seen: NodeState) -> None:
        gate = self.gates[child]
        add_end(gate, seen)
        gate.reason = higher_precedence(gate.reason, inherited_reason(self._nodes[parent], seen))

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
