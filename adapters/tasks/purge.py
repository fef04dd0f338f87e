"""Removing tasks that ended long ago, and everything that belongs to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.mongo import Database, moment, translate_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

Fields = dict[str, Any]

BELONGINGS = ("artifacts", "metrics_raw", "stream_progress", "worker_events")
"""Collections whose rows belong to a task, by `task_id`."""

_OF_ONE_STEP = 20
"""Tasks that are removed together; each may have thousands of rows."""


class Purge:
    """Ended tasks of one namespace, and of none, that ended before a time.

    A step removes the rows of some tasks first and their documents last: an interrupted purge is continued by the
    next one. StoreUnavailable when MongoDB does not answer.
    """

    def __init__(self, db: Database, *, before: float, statuses: Collection[str], namespace_id: str) -> None:
        self._db = db
        self._ended: Fields = {
            "status": {"$in": list(statuses)},
            "finished_at": {"$lt": moment(before)},
            "namespace_id": {"$in": [namespace_id, None]},
        }

    async def steps(self) -> AsyncIterator[list[str]]:
        """Ids of the tasks, a step at a time."""
        behind: Fields = {}
        while page := await self._page(behind):
            yield [document["id"] for document in page]
            behind = {"_id": {"$gt": page[-1]["_id"]}}

    @translate_errors
    async def _page(self, behind: Fields) -> list[Fields]:
        wanted = {**self._ended, "id": {"$type": "string"}, **behind}
        found = self._db.tasks.find(wanted, {"id": 1}).sort("_id", ASCENDING).limit(_OF_ONE_STEP)
        return [document async for document in found]

    @translate_errors
    async def count(self, task_ids: Sequence[str]) -> dict[str, int]:
        """How many rows belong to these tasks, by collection; `tasks` are the documents themselves."""
        own = _of(task_ids)
        counts = {name: await self._db[name].count_documents(own) for name in BELONGINGS}
        return {**counts, "tasks": await self._db.tasks.count_documents(self._documents(task_ids))}

    @translate_errors
    async def remove(self, task_ids: Sequence[str]) -> dict[str, int]:
        """Remove these tasks; answers how many rows of which collection. A task that was opened again stays."""
        own = _of(task_ids)
        removed = {name: (await self._db[name].delete_many(own)).deleted_count for name in BELONGINGS}
        ended = await self._db.tasks.delete_many(self._documents(task_ids))
        return {**removed, "tasks": ended.deleted_count}

    def _documents(self, task_ids: Sequence[str]) -> Fields:
        return {**self._ended, "id": {"$in": list(task_ids)}}


def _of(task_ids: Sequence[str]) -> Fields:
    return {"task_id": {"$in": list(task_ids)}}
