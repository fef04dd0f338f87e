"""The conditions and streaming edges of random tasks, as users write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.integration.chaos.plans import NodePlan

TRUE, FALSE, ERROR = "true", "false", "error"
EXPRESSIONS = {
    TRUE: "size(params) == 0",
    FALSE: "size(params) > 0",
    ERROR: "params.missing == 1",
}
"""Conditions by how they turn out in a task without params."""


def when(verdict: str) -> dict[str, str]:
    """Return the key `when` of a condition that turns out like this; nothing for an empty text."""
    return {"when": EXPRESSIONS[verdict]} if verdict else {}


def entries(nodes: Iterable[NodePlan]) -> list[dict[str, Any]]:
    """Return the entries of `edges_ex`."""
    return [
        {
            "from": parent,
            "to": node.node_id,
            **_mode(parent, node),
            **when(dict(node.edge_when).get(parent, "")),
        }
        for node in nodes
        for parent in node.parents
        if parent in node.streams or parent in dict(node.edge_when)
    ]


def _mode(parent: str, node: NodePlan) -> dict[str, str]:
    return {"mode": "async"} if parent in node.streams else {}
