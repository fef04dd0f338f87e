"""A reference model of fan-in gates, which recomputes the whole graph for every question.

The model is deliberately slow and stateless: it depends only on how nodes have ended, so it shares no design with
`Scheduler`, which the tests compare with it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from flowkit.models import NodeStatus, SkipReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import FanIn, Graph, NodeState


class End(NamedTuple):
    """How a node has ended; None if it has not."""

    status: NodeStatus
    reason: SkipReason | None = None


FINISHED = End(NodeStatus.FINISHED)
BY_CHOICE = frozenset({SkipReason.ROUTING, SkipReason.CONDITION, SkipReason.USER})
STRENGTH = (SkipReason.USER, SkipReason.ROUTING, SkipReason.CONDITION, SkipReason.UPSTREAM_FAILED)


def ends_of(states: Sequence[NodeState]) -> list[End | None]:
    """Return the ends in `states`."""
    return [End(state.status, state.skip_reason) if state.status.ended else None for state in states]


def parents_of(graph: Graph) -> list[list[int]]:
    """Return the positions of each node's parents."""
    place = {node.node_id: node.index for node in graph.nodes}
    return [[place[parent] for parent in node.depends_on] for node in graph.nodes]


def is_open(fan_in: FanIn, parents: Sequence[End | None]) -> bool:
    """Return whether a gate with these parents is open."""
    if not parents:
        return True
    finished = sum(parent == FINISHED for parent in parents)
    if fan_in.mode == "all":
        return finished > 0 and all(_passes(parent) for parent in parents)
    return finished >= (1 if fan_in.mode == "any" else fan_in.count)


def _passes(parent: End | None) -> bool:
    return parent is not None and (parent == FINISHED or parent.reason in BY_CHOICE)


def can_open(fan_in: FanIn, parents: Sequence[End | None]) -> bool:
    """Return whether a gate can still open, that is, would be open if every open parent finished."""
    return is_open(fan_in, [parent or FINISHED for parent in parents])


def inherited(parents: Sequence[End | None]) -> SkipReason:
    """Return the strongest reason of the parents that ended without finishing."""
    reasons = [_passed_on(parent) for parent in parents if parent not in (None, FINISHED)]
    return max(reasons, key=STRENGTH.index)


def _passed_on(parent: End | None) -> SkipReason:
    if parent is None or parent.reason not in BY_CHOICE:
        return SkipReason.UPSTREAM_FAILED
    return parent.reason


def settled(graph: Graph, ends: Sequence[End | None]) -> list[End | None]:
    """Return `ends` with all consequences: nodes that can never start are skipped, and so are their descendants."""
    parents = parents_of(graph)

    @cache
    def end(index: int) -> End | None:
        above = [end(parent) for parent in parents[index]]
        if ends[index] or can_open(graph.nodes[index].fan_in, above):
            return ends[index]
        return End(NodeStatus.SKIPPED, inherited(above))

    return [end(node.index) for node in graph.nodes]


def startable(graph: Graph, ends: Sequence[End | None]) -> set[int]:
    """Return the nodes that have not ended and whose gates are open."""
    parents = parents_of(graph)
    return {
        node.index
        for node in graph.nodes
        if ends[node.index] is None and is_open(node.fan_in, [ends[i] for i in parents[node.index]])
    }
