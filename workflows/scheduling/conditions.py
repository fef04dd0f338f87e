"""The conditions of a graph (`when`): which are due, and how their results change the parents that a gate sees. Pure.

The rules never evaluate an expression. The workflow lets an activity evaluate those that are due, and
stores the results in the states of the nodes. The condition of a node is due when its gate and its route
have opened. The condition of an edge is due when the parent has finished, or has stored a batch from which
the child streams, while the gate of the child is still undecided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.models.columns import pack
from flowkit.workflows.payloads import truncate_longest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flowkit.models import Node
    from flowkit.models.columns import Packed

BY_CONDITION = NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.CONDITION)
"""What a child sees of a parent behind an edge whose condition is false."""


class DueCondition(NamedTuple):
    """A condition to evaluate: that of a node, or that of the edge from `parent` to the node."""

    node: int
    parent: int | None = None


class Conditions:
    """The conditions of one graph. `states` are the complete states of the nodes, which hold the results."""

    def __init__(self, nodes: Sequence[Node], states: Sequence[NodeState]) -> None:
        self._nodes = nodes
        self._states = states
        self.due: dict[DueCondition, None] = {}
        """The conditions that have become due since the last call of `pop_due`, in the order of becoming due."""
        self._asked: dict[int, set[DueCondition]] = {}
        """The conditions that have become due before, by each of their nodes: that of an edge has two."""

    def passes(self, child: int, parent: int) -> bool | None:
        """Return the result of an edge's condition, and True for an edge without one.

        The first call for an undecided edge, for which this returns None, makes its condition due.
        """
        if self._nodes[parent].node_id not in self._nodes[child].edge_when:
            return True
        result = self._states[child].edges.get(parent)
        if result is None:
            self._ask(DueCondition(child, parent))
        return result

    def may_start(self, index: int) -> bool:
        """Return whether a node with a condition may start when its gate opens. An undecided condition becomes due."""
        if self._states[index].condition:
            return True
        self._ask(DueCondition(index))
        return False

    def _ask(self, due: DueCondition) -> None:
        if due not in self._asked.get(due.node, ()):
            for index in _nodes_of(due):
                self._asked.setdefault(index, set()).add(due)
            self.due[due] = None

    def store(self, due: DueCondition, result: bool) -> None:
        """Store the result of a condition in the state of its node."""
        if due.parent is None:
            self._states[due.node].condition = result
        else:
            self._states[due.node].edges[due.parent] = result

    def forget(self, index: int) -> None:
        """Let the conditions of a node, and those of the edges from and to it, become due again."""
        for due in self._asked.pop(index, ()):
            for other in _nodes_of(due):
                self._asked.get(other, set()).discard(due)
            self.due.pop(due, None)

    def pop_due(self, is_blocked: Callable[[DueCondition], bool]) -> list[DueCondition]:
        """Return the conditions that have become due since the last call. Those that are blocked stay due."""
        due = [each for each in self.due if not is_blocked(each)]
        self.due = dict.fromkeys(each for each in self.due if is_blocked(each))
        return due

    def text_of(self, due: DueCondition) -> str:
        """Return the expression of a condition."""
        node = self._nodes[due.node]
        text = node.when if due.parent is None else node.edge_when[self._nodes[due.parent].node_id]
        return text or ""


def _nodes_of(due: DueCondition) -> tuple[int, ...]:
    return (due.node,) if due.parent is None else (due.node, due.parent)


_CODES_BYTES = 200_000
"""Largest reason codes in the input of an evaluation. Only thousands of different codes need more and are truncated."""


def facts_of(states: Mapping[str, NodeState]) -> Packed:
    """Return what expressions can read of these nodes, by node id (see `EvaluateConditions.nodes`)."""
    facts: dict[tuple[NodeStatus, str | None], list[str]] = {}
    for node_id, state in states.items():
        code = state.reason_code if state.status is NodeStatus.FAILED else None
        facts.setdefault((state.status, code), []).append(node_id)
    codes = truncate_longest([code for _, code in facts], _CODES_BYTES)
    return pack(
        [
            [status.value, code, ids]
            for (status, _), code, ids in zip(facts, codes, facts.values(), strict=True)
        ]
    )
