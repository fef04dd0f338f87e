"""Warnings about nodes that external workers run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.errors import BadInput
from flowkit.graph.input_adapters import PULL, parse_pull

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from flowkit.models import Graph, Node


def external_warnings(graph: Graph, roles: Collection[str]) -> Iterator[str]:
    """Yield a warning for each node of an external role that pulls unchanged batches from several nodes."""
    for node in graph.nodes:
        if node.max_ahead and node.type in roles:
            yield (
                f"node {node.node_id!r}: io.max_ahead has no effect, because FlowKit cannot hold the workers of the "
                f"external role {node.type!r}"
            )
        sources = _sources(node) if node.type in roles else ()
        if len(sources) > 1:
            yield (
                f"node {node.node_id!r} has the external role {node.type!r} and pulls from {len(sources)} nodes "
                f"({', '.join(map(repr, sources))}): their batch uids must differ, because external workers treat equal "
                "ones as one batch; the attempt fails as batch_uid_clash if they do not"
            )


def _sources(node: Node) -> tuple[str, ...]:
    """Return the nodes from which a node pulls unchanged batches. Rechunking makes uids unique."""
    inline = node.io.input_inline or {}
    if inline.get("input_adapter") != PULL:
        return ()
    try:
        return tuple(dict.fromkeys(parse_pull(inline, parents=node.depends_on).from_nodes))
    except BadInput:
        return ()
