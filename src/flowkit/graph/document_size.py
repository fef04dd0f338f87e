"""Check on submission that a task document stays small enough while its task runs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.limits import EXTERNAL_NODES, NODE_STATE_BYTES, TASK_DOCUMENT_BYTES
from flowkit.models import RUNTIME_KEYS
from flowkit.storable import stored_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


def document_problem(
    params: Mapping[str, Any], graph: Mapping[str, Any], parents: Iterable[Sequence[str]]
) -> str | None:
    """Return the problem of a task whose document would become too large, or None.

    `parents` are the parents of each node, which the document holds even if the graph gives them as edges. The given
    values must be storable (see `storage_problems`).
    """
    nodes = [_stored_node(raw, own) for raw, own in zip(graph["nodes"], parents, strict=True)]
    sizes = {
        "params": stored_bytes(params),
        "graph": stored_bytes({**graph, "nodes": nodes}) + NODE_STATE_BYTES * len(nodes),
    }
    total = sum(sizes.values())
    if total <= TASK_DOCUMENT_BYTES:
        return None
    field = max(sizes, key=lambda name: sizes[name])
    return (
        f"{field} has {sizes[field]:,} bytes of BSON, so that the task document would have {total:,}, more than "
        f"{TASK_DOCUMENT_BYTES:,}: {_REMEDIES[field]}"
    )


_REMEDIES = {
    "params": "put data into a store and pass a reference",
    "graph": f"split the task, or put data into a store and pass a reference; each node counts {NODE_STATE_BYTES} "
    "bytes for its state",
}


def _stored_node(raw: Mapping[str, Any], parents: Sequence[str]) -> dict[str, Any]:
    given = {key: value for key, value in raw.items() if key not in RUNTIME_KEYS}
    return {**given, "depends_on": list(parents)}


def external_problem(nodes: Sequence[Mapping[str, Any]], roles: Collection[str]) -> str | None:
    """Return the problem of a graph with an external role and more than EXTERNAL_NODES nodes, or None."""
    if len(nodes) <= EXTERNAL_NODES or not roles:
        return None
    found = next((node for node in nodes if node["type"] in roles), None)
    if found is None:
        return None
    return (
        f"node {found['node_id']!r}: type is the external role {found['type']!r}, and graph.nodes has {len(nodes):,} "
        f"entries, more than {EXTERNAL_NODES:,}: external workers read the whole task document twice a second; split "
        "the task, or run the role with native workers"
    )
