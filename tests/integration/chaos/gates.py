"""Draws conditions and streaming edges for random tasks, so that their effects do not depend on the order of events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.integration.chaos.conditions import ERROR, FALSE, TRUE
from tests.integration.chaos.model import (
    BAD_CONDITION,
    FAILED,
    FINISHED,
    gate_parents,
    is_predictable,
    node_ends,
)
from tests.integration.chaos.routes import routers_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tests.integration.chaos.model import NodeEnd
    from tests.integration.chaos.plans import NodePlan

    Nodes = tuple[NodePlan, ...]
_TRIES = 5


def first_predictable(
    draw: Callable[[random.Random, Nodes], Nodes], chance: random.Random, nodes: Nodes
) -> Nodes:
    """Return the nodes as `draw` changes them; unchanged if their results always depend on the order of events."""
    tried = (draw(chance, nodes) for _ in range(_TRIES))
    return next((each for each in tried if is_predictable(each)), nodes)


def with_conditions(chance: random.Random, nodes: Nodes) -> Nodes:
    """Return the nodes with conditions on some nodes and edges."""
    if chance.random() < 0.5:
        return nodes
    ends = node_ends(nodes)

    def waits_for_all(node: NodePlan) -> bool:
        """Return whether nothing can decide about the node before all of its edges are decided."""
        finished = all(ends[parent].status == FINISHED for parent in node.parents)
        return node.fan_in == "all" and finished and not routers_of(node, nodes)

    drawn = tuple(
        replace(
            node,
            when=_verdict(chance, 0.2, errors=True),
            edge_when=_edges(chance, gate_parents(node, nodes), errors=waits_for_all(node)),
        )
        for node in nodes
    )
    return _with_errors_together(chance, drawn, [node.node_id for node in nodes if waits_for_all(node)])


def _with_errors_together(chance: random.Random, nodes: Nodes, waiting: Collection[str]) -> Nodes:
    """Return the nodes, some with conditions of a node and of its child that cannot be evaluated and are
    due together.
    """
    made = {node.node_id: node for node in nodes}
    for child in (node for node in nodes if node.node_id in waiting):
        for rival in (made[parent] for parent in child.parents):
            if set(rival.parents) <= set(child.parents) and len(rival.parents) == 1 and chance.random() < 0.5:
                made[rival.node_id] = replace(rival, when=ERROR, edge_when=())
                edges = dict(made[child.node_id].edge_when) | {rival.parents[0]: ERROR}
                made[child.node_id] = replace(made[child.node_id], edge_when=tuple(edges.items()))
    return tuple(made.values())


def _edges(chance: random.Random, parents: Sequence[str], *, errors: bool) -> tuple[tuple[str, str], ...]:
    """Return the parents with conditions, and how these turn out."""
    drawn = ((parent, _verdict(chance, 0.25, errors=errors)) for parent in parents)
    return tuple((parent, verdict) for parent, verdict in drawn if verdict)


def _verdict(chance: random.Random, share: float, *, errors: bool) -> str:
    if chance.random() > share:
        return ""
    return chance.choice([TRUE, TRUE, TRUE, FALSE, *[ERROR] * errors])


def with_streams(chance: random.Random, nodes: Nodes) -> Nodes:
    """Return the nodes with streaming edges. Most come from parents that will finish, so that the results are the same.

    Some nodes on which no other depends stream from a parent that will fail, and may fail with it.
    """
    ends = node_ends(nodes)
    finished = {node.node_id for node in nodes if ends[node.node_id].status == FINISHED and not node.call}
    together = _failing_together(nodes, ends)
    return tuple(
        node
        if node.node_id in together
        else _doomed(node)
        if chance.random() < 0.5 and _may_fail_with_parents(node, nodes, ends)
        else _streaming(chance, node, gate_parents(node, nodes), finished)
        for node in nodes
    )


def _failing_together(nodes: Nodes, ends: Mapping[str, NodeEnd]) -> set[str]:
    """Return the nodes that fail by conditions together with a child or a parent.

    A batch must not start one earlier.
    """
    bad = {name for name, end in ends.items() if end.code == BAD_CONDITION}
    pairs = ((parent, node.node_id) for node in nodes for parent in node.parents)
    return {name for pair in pairs if bad.issuperset(pair) for name in pair}


def _doomed(node: NodePlan) -> NodePlan:
    """Return a node that starts on a batch of any source, and otherwise has no reason to fail."""
    return replace(
        node, parents=node.sources, fan_in="all", first_batch=True, failure=None, when="", edge_when=()
    )


def _may_fail_with_parents(node: NodePlan, nodes: Nodes, ends: Mapping[str, NodeEnd]) -> bool:
    """Return whether a node pulls from nodes of which some fail, and has no effect on other nodes."""
    used = {name for each in nodes for name in (*each.parents, *each.sources)}
    if node.node_id in used or routers_of(node, nodes) or node.on_success or node.on_failure:
        return False
    sources = [each for each in nodes if each.node_id in node.sources]
    fails = [each for each in sources if ends[each.node_id].status == FAILED]
    others = all(ends[each.node_id].status in {FINISHED, FAILED} for each in sources)
    return others and bool(fails) and all(not each.allow_failure and not each.on_failure for each in fails)


def _streaming(
    chance: random.Random, node: NodePlan, parents: Sequence[str], finished: Collection[str]
) -> NodePlan:
    if node.call or node.needs_all_sources or chance.random() < 0.3:
        return node
    errors = ERROR in dict(node.edge_when).values()
    if parents and not errors and all(parent in finished for parent in parents) and chance.random() < 0.5:
        return replace(node, first_batch=True)
    streams = tuple(parent for parent in parents if parent in finished and chance.random() < 0.7)
    return replace(node, streams=streams)
