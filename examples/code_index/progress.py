"""How far a task has come: statuses from its workflow, counts of batches from MongoDB."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from temporalio.client import WorkflowHandle

ANSWER_WITHIN = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """One node, as a person wants to see it."""

    node: str
    role: str
    status: str = "queued"
    attempt: int = 0
    batches: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A task and its nodes, in the order of the graph."""

    task_id: str
    status: str
    nodes: tuple[NodeProgress, ...]


class Follower:
    """Asks how far one task has come."""

    def __init__(self, handle: WorkflowHandle[Any, Any], db: Any) -> None:
        self._handle = handle
        self._db = db

    async def progress(self) -> Progress:
        """Where the task is now."""
        view = await self._handle.query("status", rpc_timeout=ANSWER_WITHIN)
        return progress_of(self._handle.id, view, await self._batches(), time.time())

    async def _batches(self) -> dict[str, int]:
        """Stored batches of each node."""
        mine = {"$match": {"task_id": self._handle.id, "status": "partial"}}
        counted = self._db.artifacts.aggregate(
            [mine, {"$group": {"_id": "$node_id", "batches": {"$sum": 1}}}]
        )
        return {row["_id"]: row["batches"] async for row in counted}


def progress_of(task_id: str, view: Mapping[str, Any], batches: Mapping[str, int], now: float) -> Progress:
    """What the answer of the `status` query and the counts of batches say together. Pure."""
    nodes = (
        NodeProgress(
            node=node["node_id"],
            role=node["type"],
            status=node["status"],
            attempt=node["attempt_epoch"],
            batches=batches.get(node["node_id"], 0),
            note=_note(node, now),
        )
        for node in view["nodes"]
    )
    return Progress(task_id=task_id, status=view["status"], nodes=tuple(nodes))


def _note(node: Mapping[str, Any], now: float) -> str:
    error = node["last_error"] or ""
    if node["status"] == "deferred" and node["next_retry_at"]:
        return f"retry in {max(0.0, node['next_retry_at'] - now):.1f} s: {error}"
    if node["status"] == "running" and error:
        return f"after {error}"
    return error or node["skip_reason"] or ""
