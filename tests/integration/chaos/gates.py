"""Draws conditions and streaming edges for random tasks, so that their effects do not depend on the order of events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.integration.chaos.conditions import ERROR, FALSE, TRUE
from tests.integration.chaos.model import FINISHED, gate_parents, is_predictable, node_ends
from tests.integration.chaos.routes import routers_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Sequence

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

    return tuple(
        replace(
            node,
            when=_verdict(chance, 0.2, errors=True),
            edge_when=_edges(chance, gate_parents(node, nodes), errors=waits_for_all(node)),
        )
        for node in nodes
    )


def _edges(chance: random.Random, parents: Sequence[str], *, errors: bool) -> tuple[tuple[str, str], ...]:
    """Return the parents with conditions, and how these turn out."""
    drawn = ((parent, _verdict(chance, 0.25, errors=errors)) for parent in parents)
    return tuple((parent, verdict) for parent, verdict in drawn if verdict)


def _verdict(chance: random.Random, share: float, *, errors: bool) -> str:
    if chance.random() > share:
        return ""
    return chance.choice([TRUE, TRUE, TRUE, FALSE, *[ERROR] * errors])


def with_streams(chance: random.Random, nodes: Nodes) -> Nodes:
    """Return the nodes with streaming edges from parents that will finish. The results remain the same."""
    ends = node_ends(nodes)
    finished = {node.node_id for node in nodes if ends[node.node_id].status == FINISHED and not node.call}
    return tuple(_streaming(chance, node, gate_parents(node, nodes), finished) for node in nodes)


def _streaming(
    chance: random.Random, node: NodePlan, parents: Sequence[str], finished: Collection[str]
) -> NodePlan:
    if node.call or chance.random() < 0.3:
        return node
    errors = ERROR in dict(node.edge_when).values()
    if parents and not errors and all(parent in finished for parent in parents) and chance.random() < 0.5:
        return replace(node, first_batch=True)
    streams = tuple(parent for parent in parents if parent in finished and chance.random() < 0.7)
    return replace(node, streams=streams)
