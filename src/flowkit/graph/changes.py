"""Change the graph of a running task: add nodes, and change nodes that have not started. Pure.

A change never removes a node, moves a node to another index, or changes what an existing node waits for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.graph.routes import ROUTING_KEYS, list_targets
from flowkit.text import names, printed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flowkit.models import Graph, Node

CHANGEABLE = ("io", "retry_policy", "timeout_sec", "deadline_sec", "when")
"""The fields of a node that can change before it starts."""

_DERIVED = ("streams_from", "max_ahead", "io_bytes", "expressions")
"""What the normalization derives from these fields."""


def merge_patch(value: object, patch: object) -> Any:
    """Return a JSON value with a merge patch applied (RFC 7396): objects are merged, and null removes a key."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), part)
    return merged


def change_graph(
    graph: Mapping[str, Any], added: Mapping[str, Any], changed: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a graph with the `nodes`, `edges` and `edges_ex` of `added`, and with other nodes at the
    indexes `changed`.
    """
    nodes = [changed.get(index, node) for index, node in enumerate(graph["nodes"])]
    edges = {
        name: [*(graph.get(name) or []), *added[name]] for name in ("edges", "edges_ex") if added.get(name)
    }
    return {**graph, **edges, "nodes": [*nodes, *(added.get("nodes") or [])]}


def change_problems(
    before: Graph, after: Graph, added: Mapping[str, Any], changed: Collection[int]
) -> Iterator[str]:
    """Yield why a valid changed graph cannot continue a task that has begun with the graph `before`."""
    new = {node.node_id for node in after.nodes[len(before.nodes) :]}
    for raw in added.get("nodes") or ():
        targets = {target for key in ROUTING_KEYS for target in list_targets(raw, key)}
        if old := sorted(targets - new):
            yield (
                f"node {raw['node_id']!r}: routing names {names(old)}, but a new node can route only "
                "to new nodes; add a "
                "new target"
            )
    for index, (old_node, new_node) in enumerate(zip(before.nodes, after.nodes, strict=False)):
        if problem := _alteration(old_node, new_node, may_change=index in changed):
            yield problem


def _alteration(before: Node, after: Node, *, may_change: bool) -> str | None:
    """Return the problem of a change that alters a node in another way than it may; None if it does not."""
    free = (*CHANGEABLE, *_DERIVED) if may_change else ()
    if replace(before, **{name: getattr(after, name) for name in free}) == after:
        return None
    if (before.on_success, before.on_failure) != (after.on_success, after.on_failure):
        how = "how it routes: connect the new nodes to the targets of its 'routing' instead"
    else:
        how = "what it waits for: edges and routes can lead only to new nodes"
    return f"the change alters node {before.node_id!r}, namely {how}"


def edge_problem(new: Collection[str], edges: Sequence[tuple[object, object]]) -> str | None:
    """Return the problem of the first edge that does not lead to a new node, or None."""
    for source, target in edges:
        if not isinstance(target, str) or target not in new:
            return (
                f"the edge [{printed(source)}, {printed(target)}] does not lead to a new node; what "
                "an existing node waits "
                "for cannot change"
            )
    return None
