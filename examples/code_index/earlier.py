"""What earlier runs of the demo have left on servers that belong to the demo alone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio.service import RPCError

from flowkit.models import TaskStatus

if TYPE_CHECKING:
    from temporalio.client import Client

_CLOSED = [status.value for status in TaskStatus if status.closed]


async def forget_earlier_tasks(client: Client, db: Any) -> None:
    """Remove the documents of all tasks; their histories stay in Temporal.

    A task that is still open was left by a demo that was killed: nobody will ever run it, so it is terminated.
    The stand-in for MongoDB has no secondary indexes: every run would be slower than the one before.
    """
    async for task in db.tasks.find({"status": {"$nin": _CLOSED}}, {"_id": 0, "id": 1}):
        with suppress(RPCError):
            await client.get_workflow_handle(task["id"]).terminate("left behind by an earlier demo")
    for collection in (db.artifacts, db.metrics_raw, db.stream_progress, db.worker_events, db.tasks):
        await collection.delete_many({})
