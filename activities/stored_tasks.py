"""Read the graphs that `create_task` stored in MongoDB, and check that a task and an engine use the same database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from temporalio.exceptions import ApplicationError

from flowkit.adapters.tasks.stored_graphs import StoredGraphs, unpack_task
from flowkit.errors import GraphError, WrongDeployment
from flowkit.graph.validation import parse_graph

if TYPE_CHECKING:
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import OpenTask, StoredGraph


class StoredTasks:
    """The stored graphs of one database, for the activities of an engine."""

    def __init__(self, tasks: TaskStore) -> None:
        self._tasks = tasks
        self._graphs = StoredGraphs(tasks.database)

    async def part(self, task_id: str, stored: StoredGraph, part: int) -> bytes:
        """Return one part of a stored graph.

        Raise an error that Temporal retries if the graph is in another database. Raise GraphError if it was deleted.
        """
        await check_database(self._tasks, task_id, stored.deployment)
        found = await self._graphs.part(task_id, stored.graph_id, part)
        if found is None:
            missing = f"part {part + 1} of {stored.parts} of the graph of task {task_id!r}"
            raise GraphError(
                [f"{missing} is not in the collection stored_graphs: create the task again, with another id"]
            )
        return found

    async def completed(self, opening: OpenTask, stored: StoredGraph) -> OpenTask:
        """Return `opening` with the stored graph and params. Raise GraphError if the graph is not valid."""
        parts = [await self.part(opening.task_id, stored, part) for part in range(stored.parts)]
        task = await asyncio.to_thread(_validated, b"".join(parts))
        return replace(opening, graph=task["graph"], params=task["params"])


def _validated(content: bytes) -> dict[str, Any]:
    """Return the graph and params in a stored graph. Takes a second for 20,000 nodes."""
    task = unpack_task(content)
    parse_graph(task["graph"], max_nodes=None, max_bytes=None)
    return task


async def check_database(tasks: TaskStore, task_id: str, wanted: str) -> None:
    """Raise an error if the task uses a different database. Temporal retries it, since another engine may fit."""
    ours = await tasks.deployment()
    if wanted and wanted != ours:
        raise ApplicationError(
            f"the document of task {task_id!r} is in the database with id {wanted}, but this engine uses {ours}: "
            "set the same MONGO_URL and MONGO_DATABASE for all engines of the queue",
            type=WrongDeployment.code,
        )
