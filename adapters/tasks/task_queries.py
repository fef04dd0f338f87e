"""Queries for displaying tasks to users. FlowKit bases no decision on their results."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pymongo import DESCENDING

from flowkit.adapters.mongo import Database, ensure_index, translate_errors
from flowkit.arguments import require, task_id_problem
from flowkit.models import OPEN_TASK_STATUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUMMARY = {
    "_id": 0,
    "id": 1,
    "status": 1,
    "reason": 1,
    "started_at": 1,
    "finished_at": 1,
    "params.pipeline_name": 1,
    "graph.name": 1,
}


class TaskQueries:
    """Queries on `tasks` and `artifacts` for display. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes for these queries."""
        await ensure_index(self._db.tasks, [("started_at", DESCENDING)], "ix_task_started")

    @translate_errors
    async def newest(self, status: str | None, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` tasks, newest first and without their nodes. `status` None selects every status."""
        wanted = {} if status is None else {"status": status}
        found = self._db.tasks.find(wanted, _SUMMARY).sort("started_at", DESCENDING).limit(limit)
        return [document async for document in found]

    @translate_errors
    async def document(self, task_id: str) -> dict[str, Any] | None:
        """Return a task document; None if there is none. Raise ConfigError if the task id is invalid."""
        require(task_id_problem(task_id))
        found: dict[str, Any] | None = await self._db.tasks.find_one({"id": task_id}, {"_id": 0})
        return found

    @translate_errors
    async def batches(self, task_id: str) -> dict[str, int]:
        """Return the number of stored batches by node id. Raise ConfigError if the task id is invalid."""
        require(task_id_problem(task_id))
        stored = {"$match": {"task_id": task_id, "status": "partial"}}
        return await self._counted(self._db.artifacts, stored, "$node_id")

    @translate_errors
    async def open_counts(self) -> dict[str, int]:
        """Return the number of open tasks by status."""
        return await self._counted(
            self._db.tasks, {"$match": {"status": {"$in": OPEN_TASK_STATUSES}}}, "$status"
        )

    async def _counted(self, collection: Any, match: dict[str, Any], by: str) -> dict[str, int]:
        rows = await aggregated(collection, [match, {"$group": {"_id": by, "count": {"$sum": 1}}}])
        return {row["_id"]: row["count"] for row in rows}


async def aggregated(collection: Any, pipeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of an aggregation.

    Motor's `aggregate` returns a cursor; that of PyMongo's asynchronous client returns an awaitable of a cursor.
    """
    cursor = collection.aggregate(pipeline)
    if inspect.isawaitable(cursor):
        cursor = await cursor
    return [row async for row in cursor]
