"""The fields of a task document about attempts that send no heartbeats, and about nodes that the workflow stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.adapters.mongo import moment

if TYPE_CHECKING:
    from flowkit.models import NodeRecord, RecordTask

Fields = dict[str, Any]

SILENT = "silent"
"""The `liveness` of a task, and of its nodes, whose attempts send no heartbeats."""


def shown_silent(record: RecordTask) -> Fields:
    """Return the `$set` of the fields that show silent nodes, or that none is silent any more."""
    if record.silent:
        suspected: Fields = {
            "state": "suspected",
            "suspected_at": moment(record.at),
            "silent_nodes": [*record.silent.values()],
        }
        nodes = {f"graph.nodes.{index}.liveness": SILENT for index in record.silent}
        return {"liveness": SILENT, "coordinator.liveness": suspected, **nodes}
    if not record.heard:
        return {}
    return {"coordinator.liveness": {"state": "ok"}}


def heard_again(record: RecordTask) -> Fields:
    """Return the `$unset` for nodes that are no longer silent."""
    gone = {} if record.silent or not record.heard else {"liveness": ""}
    return gone | {f"graph.nodes.{index}.liveness": "" for index in record.heard}


def own_flag(node: NodeRecord, run_id: str) -> Fields:
    """Return the `$set` for the cancel flag of a single node. The run id distinguishes it from a direct write."""
    if node.cancel_reason is None:
        return {}
    path = f"graph.nodes.{node.index}.coordinator"
    return {f"{path}.cancel_reason": node.cancel_reason, f"{path}.cancel_run_id": run_id}
