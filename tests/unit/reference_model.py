"""A reference model of fan-in gates and routes, which recomputes the whole graph for every question.

The model is deliberately slow and stateless: it depends only on how nodes have ended, so it shares no design with
`Scheduler`, which the tests compare with it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from flowkit.models import NodeStatus, SkipReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from flowkit.models import FanIn, Graph, Node, NodeState


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


def passed_on(node: Node, end: End) -> SkipReason:
    """Return the reason that a node which did not finish passes on to its children."""
    if end.status is NodeStatus.FAILED and node.on_failure:
        return SkipReason.ROUTING
    return end.reason if end.reason in BY_CHOICE and end.reason else SkipReason.UPSTREAM_FAILED


def routers_of(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that can start this node."""
    return [each for each in graph.nodes if node.node_id in (*each.on_success, *each.on_failure)]


def fires(router: Node, end: End | None, target: Node) -> bool:
    """Return whether a router that ended this way starts the target, once all other routers have ended."""
    after = {NodeStatus.FINISHED: router.on_success, NodeStatus.FAILED: router.on_failure}
    return end is not None and target.node_id in after.get(end.status, ())


def is_routed(graph: Graph, node: Node, ends: Sequence[End | None]) -> bool:
    """Return whether a route leads to the node: all its routers have ended, and one of them fired it."""
    routers = routers_of(graph, node)
    return all(ends[each.index] for each in routers) and any(
        fires(each, ends[each.index], node) for each in routers
    )


def can_be_routed(node: Node, routers: Sequence[Node], end: Callable[[int], End | None]) -> bool:
    """Return whether a route can still lead to the node."""
    return any(end(each.index) is None or fires(each, end(each.index), node) for each in routers)


def handled(graph: Graph, ends: Sequence[End | None], index: int) -> bool | None:
    """Return whether a failure is handled. None if targets that are open, or that wait for others, can handle it."""
    place = {node.node_id: node.index for node in graph.nodes}

    @cache
    def helps(target: int) -> bool | None:
        end = ends[target]
        if end is None or end.status is not NodeStatus.FAILED:
            return None if end is None else end == FINISHED
        below = [helps(place[each]) for each in graph.nodes[target].on_failure]
        return True if True in below else None if None in below else False

    return helps(index)


def settled(graph: Graph, ends: Sequence[End | None]) -> list[End | None]:
    """Return `ends` with all consequences: nodes that can never start are skipped, and so are their descendants."""
    parents = parents_of(graph)

    @cache
    def end(index: int) -> End | None:
        node = graph.nodes[index]
        if ends[index]:
            return ends[index]
        reasons = [] if can_open(node.fan_in, [end(i) for i in parents[index]]) else why(parents[index])
        if node.conditional and not can_be_routed(node, routers := routers_of(graph, node), end):
            finished = not routers or any(end(each.index) == FINISHED for each in routers)
            reasons += [SkipReason.ROUTING] * finished + why([each.index for each in routers])
        return End(NodeStatus.SKIPPED, max(reasons, key=STRENGTH.index)) if reasons else None

    def why(indexes: Iterable[int]) -> list[SkipReason]:
        above = [(graph.nodes[i], end(i)) for i in indexes]
        return [passed_on(node, ended) for node, ended in above if ended and ended != FINISHED]

    return [end(node.index) for node in graph.nodes]


def startable(graph: Graph, ends: Sequence[End | None]) -> set[int]:
    """Return the nodes that have not ended and whose gates are open."""
    parents = parents_of(graph)
    return {
        node.index
        for node in graph.nodes
        if ends[node.index] is None
        and is_open(node.fan_in, [ends[i] for i in parents[node.index]])
        and (not node.conditional or is_routed(graph, node, ends))
    }
