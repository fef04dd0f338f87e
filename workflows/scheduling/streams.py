"""Decide which nodes start on a batch of a parent, and how they end if such a parent fails later. Pure.

An edge streams if the first stored batch of the parent satisfies it. A gate that a batch has opened stays open, however
the parents end. The child therefore does its own work first. Then the ends of its parents decide, as they would without
streaming, whether it has finished or failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.models import ALL_DONE, NodeStatus, SkipReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState


TOLERATED_BY_ALL = frozenset({SkipReason.CONDITION, SkipReason.ROUTING, SkipReason.USER})
"""Skip reasons of parents that do not close an `all` gate. At least one other parent must finish."""


class Streams:
    """The streaming edges of one graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self.children: dict[int, list[int]] = {}
        """For each node from which others stream, the indexes of these."""
        self.throttling: set[int] = set()
        """The nodes for which a node with `max_ahead` waits."""
        self._parents: dict[int, list[int]] = {}
        """All parents of each node that streams from at least one of them."""
        self._edges: set[tuple[int, int]] = set()
        """The streaming edges, as parent and child."""
        self._followers: dict[int, list[str]] = {}
        """For each node from which others stream and pull, the ids of these."""
        self._failing: set[int] = set()
        self._passing: set[int] = set()
        """The open nodes of which `fails_with_parents` knows whether they must fail, so that it looks at
        each only once."""
        self.change_graph()

    def change_graph(self) -> None:
        """Find the streaming edges again, because nodes of the graph were changed or added."""
        self.children.clear()
        self._parents.clear()
        self._edges.clear()
        self._followers.clear()
        self.throttling.clear()
        self.forget()
        index_of = {node.node_id: node.index for node in self._nodes}
        for node in self._nodes:
            if node.streams_from:
                self._parents[node.index] = [index_of[parent] for parent in node.depends_on]
                self._add_child(node, [index_of[parent] for parent in node.streams_from])

    def _add_child(self, child: Node, parents: Sequence[int]) -> None:
        sources = {*child.pulls_from}
        for parent in parents:
            self._edges.add((parent, child.index))
            self.children.setdefault(parent, []).append(child.index)
            if self._nodes[parent].node_id in sources:
                self._followers.setdefault(parent, []).append(child.node_id)
                if self._nodes[parent].max_ahead:
                    self.throttling.add(child.index)

    def leads(self, parent: int, child: int) -> bool:
        """Return whether a streaming edge leads from a node to another one."""
        return (parent, child) in self._edges

    def followers(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the nodes that may start on a batch of this node and pull its batches."""
        return tuple(self._followers.get(node.index, ()))

    def fails_with_parents(self, index: int, states: Sequence[NodeState]) -> bool:
        """Return whether a node that has done its work must fail, because failed parents close its gate.

        A parent that is open counts as if it finishes, unless its own parents already make it fail. Failures that the
        task tolerates or routes do not count.
        """
        undecided = [] if self._is_known(index) else [index]
        while undecided:
            current = undecided[-1]
            parents = self._counted(current, states)
            if unknown := [
                each for each in parents if not states[each].status.ended and not self._is_known(each)
            ]:
                undecided += unknown
            else:
                found = self._failing if self._is_closed_by_failures(current, states) else self._passing
                found.add(undecided.pop())
        return index in self._failing

    def _is_known(self, index: int) -> bool:
        return index in self._failing or index in self._passing

    def forget_passing(self) -> None:
        """Forget which open nodes need not fail, because a node has ended without finishing: those below it
        may have to.
        """
        self._passing.clear()

    def forget(self) -> None:
        """Forget which open nodes must fail, because nodes start again, or conditions of edges are decided."""
        self._failing.clear()
        self._passing.clear()

    def _is_closed_by_failures(self, index: int, states: Sequence[NodeState]) -> bool:
        parents, fan_in = self._counted(index, states), self._nodes[index].fan_in
        if fan_in.mode == ALL_DONE:
            return False
        failed = [parent for parent in parents if self._has_failed(parent, states[parent])]
        if not failed or fan_in.mode == "all":
            return bool(failed)
        passing = sum(self._may_finish(parent, states[parent]) for parent in parents)
        return passing < (fan_in.count if fan_in.mode == "count" else 1)

    def _counted(self, index: int, states: Sequence[NodeState]) -> list[int]:
        """Return the parents of a node, without those behind an edge whose condition is false."""
        results = states[index].edges
        return [parent for parent in self._parents.get(index, ()) if results.get(parent, True)]

    def _has_failed(self, index: int, state: NodeState) -> bool:
        """Return whether a parent has failed, or will fail, in a way that neither the task nor a route tolerates."""
        node = self._nodes[index]
        if state.status is NodeStatus.SKIPPED:
            return state.skip_reason not in TOLERATED_BY_ALL
        if state.status is NodeStatus.CANCELLED:
            return True
        fails_itself = state.status is NodeStatus.FAILED or self._must_fail(index, state)
        return fails_itself and not (node.allow_failure or node.on_failure)

    def _may_finish(self, index: int, state: NodeState) -> bool:
        return state.status is NodeStatus.FINISHED or not (state.status.ended or index in self._failing)

    def _must_fail(self, index: int, state: NodeState) -> bool:
        return not state.status.ended and index in self._failing
