"""The engine's own activities: open a task, record what only its workflow knows, close it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit.adapters.markers import Markers
from flowkit.attempt.failures import refusal
from flowkit.errors import (
    FlowKitError,
    GraphError,
    StoreRefused,
    StoreTooLarge,
    StoreUnavailable,
    WrongDeployment,
)
from flowkit.graph.validation import raise_if, too_many_nodes, unknown_function
from flowkit.models import CloseTask, Opened, OpenTask, RecordTask
from flowkit.storable import storage_problems

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

    from flowkit.activities.loop_portal import LoopPortal
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import Settings

T = TypeVar("T")

_BEAT_SEC = 0.5
"""A call that is under way tells Temporal so; a dead engine's is tried elsewhere soon."""


async def unknown_namespace() -> str:
    """For engines without a Temporal server, and those that it does not tell its namespace's id."""
    return ""


class TaskActivities:
    """`open_task`, `record` and `close_task` over one database."""

    def __init__(
        self,
        *,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        portal: LoopPortal,
        settings: Settings,
        functions: Mapping[str, Any],
        max_nodes: int,
        namespace_id: Callable[[], Awaitable[str]] = unknown_namespace,
    ) -> None:
        self._tasks = tasks
        self._markers = Markers(tasks.database, artifacts.notifier)
        self._portal = portal
        self._settings = settings
        self._functions = functions
        self._max_nodes = max_nodes
        self._namespace_id = namespace_id

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities, for a Temporal worker."""
        return [self.open_task, self.record, self.close_task]

    @activity.defn(name="open_task")
    async def open_task(self, opening: OpenTask) -> Opened:
        """Take the task's document over, or insert it; answer the settings the task keeps."""
        return await self._guarded(self._open(opening, await self._namespace_id()))

    @activity.defn(name="record")
    async def record(self, record: RecordTask) -> None:
        """Write transitions and flags of a running task."""
        async with _beating():
            await self._guarded(self._record(record))

    @activity.defn(name="close_task")
    async def close_task(self, close: CloseTask) -> bool:
        """Write the end of a task; False when there is no document to write to."""
        async with _beating():
            return await self._guarded(self._close(close))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._portal.run(work)
        except FlowKitError as error:
            raise refusal(error) from None

    async def _open(self, opening: OpenTask, namespace_id: str) -> Opened:
        self._check(opening)
        database_id = await self._tasks.deployment()
        try:
            run_seq, epochs = await self._tasks.open_task(
                opening, namespace_id=namespace_id, database_id=database_id
            )
        except StoreRefused:
            raise_if(storage_problems({"params": opening.params, "graph": opening.graph}))
            raise
        return Opened(run_seq=run_seq, settings=self._settings, created_at=opening.at, epochs=epochs)

    def _check(self, opening: OpenTask) -> None:
        """What only the engine can judge: its own limit and its own functions."""
        nodes = opening.graph["nodes"]
        problems = [unknown_function(node, self._functions) for node in nodes]
        problems.append(too_many_nodes(len(nodes), self._max_nodes))
        if found := [problem for problem in problems if problem]:
            raise GraphError(found)

    async def _record(self, record: RecordTask) -> None:
        await self._check_database(record.task_id, record.deployment)
        await self._tasks.record(record)
        await self._markers.write(record.task_id, record.nodes, record.at)

    async def _close(self, close: CloseTask) -> bool:
        await self._check_database(close.task_id, close.deployment)
        found = await self._end(close)
        await self._markers.write(close.task_id, close.nodes, close.at)
        return found

    async def _end(self, close: CloseTask) -> bool:
        """A task ends some day, whatever MongoDB says today; only a document that is too large is given up."""
        try:
            return await self._tasks.close_task(close)
        except StoreTooLarge:
            raise
        except StoreRefused as error:
            raise StoreUnavailable(str(error)) from None

    async def _check_database(self, task_id: str, wanted: str) -> None:
        """Another engine of the queue may have the right database, so Temporal tries again."""
        ours = await self._tasks.deployment()
        if wanted and wanted != ours:
            raise ApplicationError(
                f"the document of task {task_id!r} is in database {wanted}, this engine's is {ours}: "
                "give all engines of the queue the same MONGO_URL and MONGO_DATABASE",
                type=WrongDeployment.code,
            )


@asynccontextmanager
async def _beating() -> AsyncIterator[None]:
    """Heartbeats of the activity that runs, from its own loop, whatever the portal's loop is busy with."""
    beats = asyncio.create_task(_send_heartbeats())
    try:
        yield
    finally:
        beats.cancel()


async def _send_heartbeats() -> None:
    while True:
        await asyncio.sleep(_BEAT_SEC)
        activity.heartbeat()
