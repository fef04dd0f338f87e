"""The engine's own activities: open a task, record what only its workflow knows, close it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity

from flowkit.activities.failures import refusal
from flowkit.errors import FlowKitError, GraphError, StoreRefused
from flowkit.models import CloseTask, NodeStatus, Opened, OpenTask, RecordTask
from flowkit.storable import storage_problems
from flowkit.workflows.validation import raise_if, too_many_nodes, unknown_function

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping

    from flowkit.activities.home import HomeLoop
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.store import TaskStore
    from flowkit.models import NodeRecord, Settings

T = TypeVar("T")


class TaskActivities:
    """`open_task`, `record` and `close_task` over one database."""

    def __init__(
        self,
        *,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        home: HomeLoop,
        settings: Settings,
        functions: Mapping[str, Any],
        max_nodes: int,
    ) -> None:
        self._tasks = tasks
        self._artifacts = artifacts
        self._home = home
        self._settings = settings
        self._functions = functions
        self._max_nodes = max_nodes

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities, for a Temporal worker."""
        return [self.open_task, self.record, self.close_task]

    @activity.defn(name="open_task")
    async def open_task(self, opening: OpenTask) -> Opened:
        """Take the task's document over, or insert it; answer the settings the task keeps."""
        return await self._guarded(self._open(opening))

    @activity.defn(name="record")
    async def record(self, record: RecordTask) -> None:
        """Write transitions and flags of a running task."""
        await self._guarded(self._record(record))

    @activity.defn(name="close_task")
    async def close_task(self, close: CloseTask) -> bool:
        """Write the end of a task; False when there is no document to write to."""
        return await self._guarded(self._close(close))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._home.run(work)
        except FlowKitError as error:
            raise refusal(error) from None

    async def _open(self, opening: OpenTask) -> Opened:
        self._check(opening)
        try:
            run_seq, epochs = await self._tasks.open_task(opening)
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
        await self._tasks.record(record)
        await self._mark_ended(record.task_id, record.nodes, record.at)

    async def _close(self, close: CloseTask) -> bool:
        found = await self._tasks.close_task(close)
        await self._mark_ended(close.task_id, close.nodes, close.at)
        return found

    async def _mark_ended(self, task_id: str, nodes: Collection[NodeRecord], at: float) -> None:
        """Markers for nodes that ended without one although somebody pulls from them."""
        for node in nodes:
            if node.marker and node.status.ended and node.status is not NodeStatus.FINISHED:
                await self._artifacts.mark_complete(
                    task_id, node.node_id, node.epoch, {"ended": node.status.value}, at
                )
