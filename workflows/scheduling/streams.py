"""Decide which nodes start on a batch of a parent, and how they end if such a parent fails later. Pure.

An edge streams if the first stored batch of the parent satisfies it. A gate that a batch has opened stays open, however
the parents end. The child therefore does its own work first. Then the ends of its parents decide, as they would without
streaming, whether it has finished or failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.models import ALL_DONE, NodeStatus
from flowkit.workflows.scheduling.gates import TOLERATED_BY_ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState


class Streams:
    """The streaming edges of one graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.children: dict[int, list[int]] = {}
        """For each node from which others stream, the indexes of these."""
        self.holders: set[int] = set()
        """The nodes for which a node with `max_ahead` waits."""
        self._parents: dict[int, list[int]] = {}
        """All parents of each node that streams from at least one of them."""
        self.change_graph()

    def change_graph(self) -> None:
        """Find the streaming edges again, because nodes of the graph were changed or added."""
        self.children.clear()
        self._parents.clear()
        index_of = {node.node_id: node.index for node in self._nodes}
        for node in self._nodes:
            if node.streams_from:
                self._parents[node.index] = [index_of[parent] for parent in node.depends_on]
            for parent in node.streams_from:
                self.children.setdefault(index_of[parent], []).append(node.index)
        self.holders = {
            child
            for index, children in self.children.items()
            for child in children
            if self._nodes[index].max_ahead and self._nodes[index].node_id in self._nodes[child].pulls_from
        }

    def followers(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the nodes that may start on a batch of this node and pull its batches."""
        children = [self._nodes[child] for child in self.children.get(node.index, ())]
        return tuple(child.node_id for child in children if node.node_id in child.pulls_from)

    def fails_with_parents(self, index: int, states: Sequence[NodeState]) -> bool:
        """Return whether a node that has done its work must fail, because failed parents close its gate.

        A parent that is open counts as if it finishes, unless its own parents already make it fail. Failures that the
        task tolerates or routes do not count.
        """
        fails: dict[int, bool] = {}
        undecided = [index]
        while undecided:
            current = undecided[-1]
            open_parents = [
                parent for parent in self._counted(current, states) if not states[parent].status.ended
            ]
            if unknown := [parent for parent in open_parents if parent not in fails]:
                undecided += unknown
            else:
                fails[undecided.pop()] = self._is_closed_by_failures(current, states, fails)
        return fails[index]

    def _is_closed_by_failures(self, index: int, states: Sequence[NodeState], fails: dict[int, bool]) -> bool:
        parents, fan_in = self._counted(index, states), self._nodes[index].fan_in
        if fan_in.mode == ALL_DONE:
            return False
        failed = [parent for parent in parents if self._has_failed(parent, states[parent], fails)]
        if not failed or fan_in.mode == "all":
            return bool(failed)
        passing = sum(_may_finish(states[parent]) and not fails.get(parent, False) for parent in parents)
        return passing < (fan_in.count if fan_in.mode == "count" else 1)

    def _counted(self, index: int, states: Sequence[NodeState]) -> list[int]:
        """Return the parents of a node, without those behind an edge whose condition is false."""
        results = states[index].edges
        return [parent for parent in self._parents.get(index, ()) if results.get(parent, True)]

    def _has_failed(self, index: int, state: NodeState, fails: dict[int, bool]) -> bool:
        """Return whether a parent has failed, or will fail, in a way that neither the task nor a route tolerates."""
        node = self._nodes[index]
        if state.status is NodeStatus.SKIPPED:
            return state.skip_reason not in TOLERATED_BY_ALL
        if state.status is NodeStatus.CANCELLED:
            return True
        fails_itself = state.status is NodeStatus.FAILED or fails.get(index, False)
        return fails_itself and not (node.allow_failure or node.on_failure)


def _may_finish(state: NodeState) -> bool:
    return state.status is NodeStatus.FINISHED or not state.status.ended
