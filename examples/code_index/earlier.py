"""What earlier runs of the demo have left in its database."""

from __future__ import annotations

from typing import Any

from flowkit.models import TaskStatus

_ENDED = [status.value for status in TaskStatus if status.closed]


async def forget_ended_tasks(db: Any) -> None:
    """Remove the documents of tasks that have ended; their histories stay in Temporal.

    The stand-in for MongoDB has no secondary indexes: every run would be slower than the one before.
    """
    tasks = db.tasks.find({"status": {"$in": _ENDED}}, {"_id": 0, "id": 1})
    ended = {"$in": [task["id"] async for task in tasks]}
    for collection in (db.artifacts, db.metrics_raw, db.stream_progress):
        await collection.delete_many({"task_id": ended})
    await db.tasks.delete_many({"id": ended})
