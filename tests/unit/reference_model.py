"""A reference model of fan-in gates, streams and routes, which recomputes the whole graph for every question.

The model is deliberately slow and stateless: it depends only on how nodes have ended and which have stored a batch, so
it shares no design with `Scheduler`, which the tests compare with it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from flowkit.models import NodeStatus, SkipReason, StartWhen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

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


def batch_is_enough(node: Node, parents: Sequence[int], graph: Graph, streamed: Collection[int]) -> bool:
    """Return whether a batch of any one parent has opened the gate of the node."""
    sources = {i for i in parents if graph.nodes[i].node_id in node.streams_from}
    return node.io.start_when is StartWhen.FIRST_BATCH and bool(sources & {*streamed})


def edges_of(
    node: Node, parents: Sequence[End | None], indexes: Sequence[int], graph: Graph, streamed: Collection[int]
) -> list[End | None]:
    """Return the ends of the parents; a batch that satisfies an async edge counts as a finish."""
    waits = node.io.start_when is not StartWhen.FIRST_BATCH
    names = [graph.nodes[i].node_id in node.streams_from and i in streamed for i in indexes]
    return [FINISHED if waits and name else end for name, end in zip(names, parents, strict=True)]


def turns_failed(graph: Graph, ends: Sequence[End | None], index: int) -> bool:
    """Return whether a node that has done its work fails, because the ends of its parents would not let it start."""
    parents = parents_of(graph)

    @cache
    def turns(at: int) -> bool:
        node = graph.nodes[at]
        lost = [i for i in parents[at] if spoils(i)]
        if not node.streams_from or not lost:
            return False
        passed = [i for i in parents[at] if ends[i] == FINISHED or (ends[i] is None and not turns(i))]
        return {"all": True, "any": not passed}.get(node.fan_in.mode, len(passed) < node.fan_in.count)

    def spoils(at: int) -> bool:
        node, end = graph.nodes[at], ends[at]
        if end is None or end.status is NodeStatus.FAILED:
            return (end is not None or turns(at)) and not (node.allow_failure or node.on_failure)
        return end != FINISHED and end.reason not in BY_CHOICE

    return turns(index)


def settled(graph: Graph, ends: Sequence[End | None], streamed: Collection[int] = ()) -> list[End | None]:
    """Return `ends` with all consequences: nodes that can never start are skipped, and so are their descendants."""
    parents = parents_of(graph)

    @cache
    def end(index: int) -> End | None:
        node = graph.nodes[index]
        if ends[index]:
            return ends[index]
        edges = edges_of(node, [end(i) for i in parents[index]], parents[index], graph, streamed)
        may = can_open(node.fan_in, edges) or batch_is_enough(node, parents[index], graph, streamed)
        unsatisfied = [i for i, edge in zip(parents[index], edges, strict=True) if edge != FINISHED]
        reasons = [] if may else why(unsatisfied)
        if node.conditional and not can_be_routed(node, routers := routers_of(graph, node), end):
            finished = not routers or any(end(each.index) == FINISHED for each in routers)
            reasons += [SkipReason.ROUTING] * finished + why([each.index for each in routers])
        return End(NodeStatus.SKIPPED, max(reasons, key=STRENGTH.index)) if reasons else None

    def why(indexes: Iterable[int]) -> list[SkipReason]:
        above = [(graph.nodes[i], end(i)) for i in indexes]
        return [passed_on(node, ended) for node, ended in above if ended and ended != FINISHED]

    return [end(node.index) for node in graph.nodes]


def startable(graph: Graph, ends: Sequence[End | None], streamed: Collection[int] = ()) -> set[int]:
    """Return the nodes that have not ended and whose gates are open."""
    parents = parents_of(graph)

    def opens(node: Node) -> bool:
        own = parents[node.index]
        edges = edges_of(node, [ends[i] for i in own], own, graph, streamed)
        return is_open(node.fan_in, edges) or batch_is_enough(node, own, graph, streamed)

    return {
        node.index
        for node in graph.nodes
        if ends[node.index] is None and opens(node) and (not node.conditional or is_routed(graph, node, ends))
    }
