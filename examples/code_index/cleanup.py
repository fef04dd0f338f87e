"""Delete what earlier runs of the demo left on servers that only the demo uses."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio.service import RPCError

from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from temporalio.client import Client

_CLOSED = [status.value for status in TaskStatus if status.closed]


async def delete_earlier_tasks(client: Client, db: Any) -> None:
    """Delete the documents of all tasks; their histories stay in Temporal.

    Terminate tasks that are still open: they belong to a demo that was killed, and no engine will continue them.
    Without this, each run would be slower, because the stand-in for MongoDB has no secondary indexes.
    """
    async for task in db.tasks.find({"status": {"$nin": _CLOSED}}, {"_id": 0, "id": 1}):
        with suppress(RPCError):
            await client.get_workflow_handle(task["id"]).terminate("remaining from an earlier demo")
    for collection in (
        db.artifacts,
        db.metrics_raw,
        db.stream_progress,
        db.node_shards,
        db.worker_events,
        db.tasks,
    ):
        await collection.delete_many({})
