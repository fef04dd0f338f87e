"""Queries for displaying tasks to users. FlowKit bases no decision on their results."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import DESCENDING

from flowkit.adapters.dispatches import ACTIVE_STATES
from flowkit.adapters.mongo import Database, durable, ensure_index, translate_errors
from flowkit.adapters.tasks.fields import WAITS_FOR
from flowkit.models import OPEN_TASK_STATUSES
from flowkit.validation.arguments import require, task_id_problem

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


_EXTERNAL_RUN = {"_id": 0, "node_id": 1, "attempt_epoch": 1, "lease.worker_id": 1, "batches": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalRun:
    """One attempt of an external role."""

    worker_id: str | None
    """The worker that has accepted the attempt; None while no worker has."""
    batches: int
    """Number of batches that the worker has reported."""
    waits_for: str
    """What the attempt waits for while no worker has accepted it; may be empty."""


class TaskQueries:
    """Queries on `tasks` and `artifacts` for display. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, db: Database) -> None:
        self._db = durable(db)

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
    async def external_runs(self, task_id: str) -> dict[tuple[str, int], ExternalRun]:
        """Return the attempts of a task that bridges have dispatched and that have no outcome, by node id and epoch."""
        require(task_id_problem(task_id))
        active = {"task_id": task_id, "state": {"$in": ACTIVE_STATES}}
        found = self._db.dispatches.find(active, _EXTERNAL_RUN)
        runs = {(row["node_id"], row["attempt_epoch"]): row async for row in found}
        waits = await self._waits(task_id) if any(not row.get("lease") for row in runs.values()) else {}
        return {key: _external_run(row, waits.get(key[0])) for key, row in runs.items()}

    async def _waits(self, task_id: str) -> dict[str, str]:
        names = {"_id": 0, "graph.nodes.node_id": 1, f"graph.nodes.{WAITS_FOR}": 1}
        stored = await self._db.tasks.find_one({"id": task_id}, names)
        nodes = stored["graph"]["nodes"] if stored else []
        return {node["node_id"]: node[WAITS_FOR] for node in nodes if node.get(WAITS_FOR)}

    @translate_errors
    async def open_counts(self) -> dict[str, int]:
        """Return the number of open tasks by status."""
        return await self._counted(
            self._db.tasks, {"$match": {"status": {"$in": OPEN_TASK_STATUSES}}}, "$status"
        )

    async def _counted(self, collection: Any, match: dict[str, Any], by: str) -> dict[str, int]:
        rows = await aggregated(collection, [match, {"$group": {"_id": by, "count": {"$sum": 1}}}])
        return {row["_id"]: row["count"] for row in rows}


def _external_run(row: dict[str, Any], waits_for: str | None) -> ExternalRun:
    worker_id = (row.get("lease") or {}).get("worker_id")
    batches = int(row.get("batches") or 0)
    return ExternalRun(
        worker_id=worker_id, batches=batches, waits_for="" if worker_id is not None else waits_for or ""
    )


async def aggregated(collection: Any, pipeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of an aggregation.

    Motor's `aggregate` returns a cursor; that of PyMongo's asynchronous client returns an awaitable of a cursor.
    """
    cursor = collection.aggregate(pipeline)
    if inspect.isawaitable(cursor):
        cursor = await cursor
    return [row async for row in cursor]
