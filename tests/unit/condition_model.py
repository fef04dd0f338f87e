"""The reference model of gates and routes, extended by conditions. Like that model, it recomputes the whole graph.

An edge whose condition is undecided counts as an open parent, and one whose condition is false as a parent that was
skipped for `condition`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tests.unit.reference_model import (
    FINISHED,
    End,
    can_be_routed,
    can_open,
    is_open,
    is_routed,
    parents_of,
    passed_on,
    routers_of,
)

from flowkit.models import NodeStatus, SkipReason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.models import Graph, Node

STRENGTH = (SkipReason.USER, SkipReason.ROUTING, SkipReason.CONDITION, SkipReason.UPSTREAM_FAILED)
FALSE = End(NodeStatus.SKIPPED, SkipReason.CONDITION)

Place = tuple[int, int | None]
"""A condition: its node, and the parent if it is the condition of an edge."""


class View(NamedTuple):
    """A graph, how its nodes have ended, and the results of its conditions."""

    graph: Graph
    ends: Sequence[End | None]
    results: Mapping[Place, bool]

    def parents(self, node: Node) -> list[End | None]:
        """Return how the gate of a node sees its parents."""
        return [self.seen(node, parent, self.ends[parent]) for parent in parents_of(self.graph)[node.index]]

    def seen(self, node: Node, parent: int, end: End | None) -> End | None:
        """Return how the gate of a node sees a parent that ended as `end`."""
        if end != FINISHED or self.graph.nodes[parent].node_id not in node.edge_when:
            return end
        result = self.results.get((node.index, parent))
        return None if result is None else FINISHED if result else FALSE

    def gate_is_open(self, node: Node) -> bool:
        """Return whether the gate and the route of an open node are open."""
        routed = not node.conditional or is_routed(self.graph, node, self.ends)
        return self.ends[node.index] is None and routed and is_open(node.fan_in, self.parents(node))


def settled(view: View) -> list[End | None]:
    """Return the ends with all consequences: nodes that can never start are skipped, and so are their descendants."""
    graph, parents = view.graph, parents_of(view.graph)

    @cache
    def end(index: int) -> End | None:
        node = graph.nodes[index]
        if view.ends[index]:
            return view.ends[index]
        seen = [(parent, view.seen(node, parent, end(parent))) for parent in parents[index]]
        reasons = [] if can_open(node.fan_in, [each for _, each in seen]) else why(seen)
        if node.conditional and not can_be_routed(node, routers := routers_of(graph, node), end):
            ended = [(each.index, end(each.index)) for each in routers]
            finished = not routers or any(each == FINISHED for _, each in ended)
            reasons += [SkipReason.ROUTING] * finished + why(ended)
        return End(NodeStatus.SKIPPED, max(reasons, key=STRENGTH.index)) if reasons else None

    def why(above: list[tuple[int, End | None]]) -> list[SkipReason]:
        return [passed_on(graph.nodes[i], ended) for i, ended in above if ended and ended != FINISHED]

    return [end(node.index) for node in graph.nodes]


def startable(view: View) -> set[int]:
    """Return the open nodes whose gates are open and whose own condition is true."""
    decided = (node for node in view.graph.nodes if node.when is None or view.results.get((node.index, None)))
    return {node.index for node in decided if view.gate_is_open(node)}


def due(view: View) -> set[Place]:
    """Return the undecided conditions that must be evaluated now."""
    place = {node.node_id: node.index for node in view.graph.nodes}
    found: set[Place] = set()
    for node in view.graph.nodes:
        if view.gate_is_open(node):
            found |= {(node.index, None)} if node.when is not None else set()
        elif view.ends[node.index] is None:
            finished = [place[parent] for parent in node.edge_when if view.ends[place[parent]] == FINISHED]
            found |= {(node.index, parent) for parent in finished}
    return found - view.results.keys()
