"""Write the state that only the workflow knows to the task document in MongoDB, and close the document.

The writes run in the background, one at a time, so they do not delay nodes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.graph.task_input import NewTask
from flowkit.models import CloseTask, NodeStatus, RecordTask, TaskStatus
from flowkit.workflows.display.reports import fit_into_close, node_record, pulled_nodes, split_record
from flowkit.workflows.display.task_status import is_dead
from flowkit.workflows.engine_calls import close_document, open_document, record_document

if TYPE_CHECKING:
    from flowkit.models import NodeRecord, TaskResult
    from flowkit.workflows.display.task_status import StatusPublisher
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState


class TaskDocument:
    """The task document of a running task.

    Changes that occur while a write is in progress are written together afterwards.
    """

    def __init__(self, state: TaskState, scheduler: Scheduler, publisher: StatusPublisher) -> None:
        self._state = state
        self._scheduler = scheduler
        self._publisher = publisher
        self._pulled = pulled_nodes(scheduler.nodes)
        self._changed_nodes: dict[int, NodeRecord] = {}
        self._task_changed = False
        self._cancel_reason: str | None = None
        self._silent: list[int] = []
        """The nodes that the document shows as silent."""
        self._heard: set[int] = set()
        """The nodes to show as no longer silent."""
        self._writing: asyncio.Task[None] | None = None

    def write_node(self, index: int, cancel_reason: str | None = None) -> None:
        """Schedule a write of the node's present state. With `cancel_reason`, it sets the node's own cancel flag."""
        self._changed_nodes[index] = self._node_record(index, cancel_reason)
        self._start_writing()

    def write_changed_nodes(self) -> None:
        """Schedule a write of the nodes that the scheduler lists as changed, and clear that list."""
        for index in sorted(self._scheduler.changed):
            self.write_node(index)
        self._scheduler.changed.clear()

    def write_task(self, cancel_reason: str | None = None) -> None:
        """Schedule a write of the task's own fields. With `cancel_reason`, the write also sets the cancel flags."""
        self._task_changed = True
        self._cancel_reason = cancel_reason or self._cancel_reason
        self._start_writing()

    def show_silent(self, nodes: list[int]) -> None:
        """Schedule a write that shows these nodes, and no others, as silent. Do nothing if the document does."""
        if nodes != self._silent:
            self._heard = (self._heard | {*self._silent}) - {*nodes}
            self._silent = nodes
            self.write_task()

    @property
    def is_idle(self) -> bool:
        """Whether no write is pending or in progress."""
        return self._writing is None

    async def flush(self) -> None:
        """Wait until no write is pending or in progress."""
        while self._writing is not None:
            await workflow.wait([self._writing])

    async def close(self, result: TaskResult, reason: str | None) -> None:
        """Write the final state of the task. `reason` says why it failed or was cancelled.

        If the document no longer exists, open it again first.
        """
        await self.flush()
        record = self._close_record(result, reason)
        while not await close_document(record, nodes=len(self._scheduler.nodes)):
            await open_document(_new_task(self._state))
            await self.write_many_unfinished()

    async def write_many_unfinished(self) -> None:
        """Write the nodes that did not finish, if they are too many for the close."""
        unfinished = self._unfinished()
        if not fit_into_close([self._node_record(index) for index in unfinished]):
            for index in unfinished:
                self.write_node(index)
            await self.flush()

    def _start_writing(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._changed_nodes or self._task_changed:
                nodes, reason = list(self._changed_nodes.values()), self._cancel_reason
                self._changed_nodes, self._task_changed, self._cancel_reason = {}, False, None
                await self._write(nodes, reason)
        finally:
            self._writing = None

    async def _write(self, nodes: list[NodeRecord], cancel_reason: str | None) -> None:
        record = RecordTask(
            task_id=workflow.info().workflow_id,
            run_id=workflow.info().run_id,
            run_seq=self._state.opened.run_seq,
            at=workflow.now().timestamp(),
            nodes=nodes,
            status=self._publisher.status,
            status_history=self._publisher.history,
            cancel_reason=cancel_reason,
            deployment=self._state.opened.settings.deployment,
            status_history_omitted=self._publisher.omitted,
            silent={index: self._scheduler.nodes[index].node_id for index in self._silent},
            heard=sorted(self._heard),
        )
        self._heard.clear()
        for part in split_record(record):
            await record_document(part)

    def _close_record(self, result: TaskResult, reason: str | None) -> CloseTask:
        unfinished = self._unfinished()
        nodes = [self._node_record(index) for index in unfinished]
        fit = fit_into_close(nodes)
        return CloseTask(
            task_id=result.task_id,
            run_id=workflow.info().run_id,
            run_seq=self._state.opened.run_seq,
            at=workflow.now().timestamp(),
            status=result.status,
            status_history=self._publisher.history,
            nodes=nodes if fit else [],
            unfinished={} if fit else self._by_status(unfinished),
            handled_failures=result.handled_failures,
            handled_failures_omitted=result.handled_failures_omitted,
            reason=reason,
            deployment=self._state.opened.settings.deployment,
            status_history_omitted=self._publisher.omitted,
            dead=result.status is TaskStatus.FAILED and is_dead(self._scheduler),
        )

    def _unfinished(self) -> list[int]:
        states = self._scheduler.states
        return [i for i, state in enumerate(states) if state.status is not NodeStatus.FINISHED]

    def _by_status(self, indexes: list[int]) -> dict[NodeStatus, list[int]]:
        found: dict[NodeStatus, list[int]] = {}
        for index in indexes:
            found.setdefault(self._scheduler.states[index].status, []).append(index)
        return found

    def _node_record(self, index: int, cancel_reason: str | None = None) -> NodeRecord:
        node = self._scheduler.nodes[index]
        pulled = node.node_id in self._pulled
        return node_record(node, self._scheduler.states[index], pulled=pulled, cancel_reason=cancel_reason)


def _new_task(state: TaskState) -> NewTask:
    return NewTask(params=state.params, graph=state.graph, stored=state.stored)
