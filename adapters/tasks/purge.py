"""Deletion of tasks that ended long ago, with all rows that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pymongo import ASCENDING

from flowkit.adapters.mongo import Database, durable, moment, translate_errors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from flowkit.core.utils import Fields


BELONGINGS = (
    *("artifacts", "metrics_raw", "stream_progress", "worker_events", "dispatches"),
    *("stored_graphs", "input_values", "map_items", "node_shards", "batch_tries"),
)
"""Collections of the core whose rows belong to a task, which the field `task_id` names."""

_TASKS_PER_STEP = 20
"""Number of tasks in one step. Each task may have thousands of rows."""


class Purge:
    """Deletes tasks of one namespace or of none that ended before a given time.

    Each step first deletes the rows of some tasks and then their documents, so the next purge continues an interrupted
    one. Raises StoreUnavailable if MongoDB does not respond.
    """

    def __init__(
        self,
        db: Database,
        *,
        before: float,
        statuses: Collection[str],
        namespace_id: str,
        collections: Sequence[str] = BELONGINGS,
    ) -> None:
        """Prepare the purge. The rows of `collections` belong to the task that their `task_id` names."""
        self._db = durable(db)
        self._collections = collections
        self._unused: Fields = {
            "part": 0,
            "created_at": {"$lt": moment(before)},
            "namespace_id": {"$in": [namespace_id, ""]},
            "schedule_id": None,
        }
        self._before: Fields = {key: self._unused[key] for key in ("created_at", "namespace_id")}
        self._ended: Fields = {
            "status": {"$in": list(statuses)},
            "finished_at": {"$lt": moment(before)},
            "namespace_id": {"$in": [namespace_id, None]},
        }

    async def steps(self) -> AsyncIterator[list[str]]:
        """Yield the ids of the tasks, one step at a time.

        The last steps are tasks of which only a stored graph exists.
        """
        after: Fields = {}
        while page := await self._page(after):
            yield [document["id"] for document in page]
            after = {"_id": {"$gt": page[-1]["_id"]}}
        unused = await self._unused_graphs()
        for place in range(0, len(unused), _TASKS_PER_STEP):
            yield unused[place : place + _TASKS_PER_STEP]

    @translate_errors
    async def _page(self, after: Fields) -> list[Fields]:
        wanted = {**self._ended, "id": {"$type": "string"}, **after}
        found = self._db.tasks.find(wanted, {"id": 1}).sort("_id", ASCENDING).limit(_TASKS_PER_STEP)
        return [document async for document in found]

    @translate_errors
    async def _unused_graphs(self) -> list[str]:
        """Return the ids of tasks with a stored graph but no document: `create_task` could not start them."""
        found = [row["task_id"] async for row in self._db.stored_graphs.find(self._unused, {"task_id": 1})]
        known = self._db.tasks.find({"id": {"$in": found}}, {"id": 1})
        return sorted({*found} - {document["id"] async for document in known})

    @translate_errors
    async def schedules(self) -> list[str]:
        """Return the schedules that have stored a graph before the given time."""
        of_schedules = {**self._before, "part": 0, "schedule_id": {"$ne": None}}
        found = self._db.stored_graphs.find(of_schedules, {"schedule_id": 1})
        return sorted({row["schedule_id"] async for row in found})

    @translate_errors
    async def count_graphs(self, kept: Mapping[str, str]) -> int:
        """Return the number of rows with graphs that schedules have stored before the given time.

        `kept` has the id of the graph that each of the schedules uses now, which does not count; an empty text if it
        uses none.
        """
        found: int = await self._db.stored_graphs.count_documents(self._graphs_filter(kept))
        return found

    @translate_errors
    async def remove_graphs(self, kept: Mapping[str, str]) -> int:
        """Delete what `count_graphs` counts, and return the number of rows.

        A schedule that is created again or changed meanwhile has stored its graph now.
        """
        gone = await self._db.stored_graphs.delete_many(self._graphs_filter(kept))
        removed: int = gone.deleted_count
        return removed

    def _graphs_filter(self, kept: Mapping[str, str]) -> Fields:
        others = [{"schedule_id": name, "graph_id": {"$ne": graph_id}} for name, graph_id in kept.items()]
        return {**self._before, "$or": others}

    @translate_errors
    async def count(self, task_ids: Sequence[str]) -> dict[str, int]:
        """Return the number of rows of these tasks by collection, including their documents under `tasks`."""
        own = _rows_filter(task_ids)
        counts = {name: await self._db[name].count_documents(own) for name in self._collections}
        return {**counts, "tasks": await self._db.tasks.count_documents(self._documents_filter(task_ids))}

    @translate_errors
    async def remove(self, task_ids: Sequence[str]) -> dict[str, int]:
        """Delete these tasks and return the number of deleted rows by collection.

        Keep the document of a task that was opened again.
        """
        own = _rows_filter(task_ids)
        removed = {name: (await self._db[name].delete_many(own)).deleted_count for name in self._collections}
        ended = await self._db.tasks.delete_many(self._documents_filter(task_ids))
        return {**removed, "tasks": ended.deleted_count}

    def _documents_filter(self, task_ids: Sequence[str]) -> Fields:
        return {**self._ended, "id": {"$in": list(task_ids)}}


def _rows_filter(task_ids: Sequence[str]) -> Fields:
    return {"task_id": {"$in": list(task_ids)}}
