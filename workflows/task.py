"""The `Task` workflow opens a task, runs the nodes of its graph and closes it.

Start it with `Coordinator.create_task`, or with Temporal alone:
`temporal workflow start --type Task --task-queue flowkit --input '{"params": {}, "graph": {...}}'`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from flowkit import reason_codes, temporal_names
    from flowkit.graph.task_input import NewTask
    from flowkit.models import (
        CloseTask,
        Node,
        NodeRecord,
        NodeState,
        NodeStatus,
        RecordTask,
        SkipReason,
        TaskResult,
        TaskStatus,
    )
    from flowkit.workflows import views
    from flowkit.workflows.current_details import TaskDetails
    from flowkit.workflows.document_activities import close_document, open_document, record_document
    from flowkit.workflows.node import run_node
    from flowkit.workflows.node_context import NodeRunContext
    from flowkit.workflows.opening import enter
    from flowkit.workflows.recorder import Recorder
    from flowkit.workflows.reports import fitted, node_record, parts_of, pulled_nodes, status_view
    from flowkit.workflows.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState, encode_state

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAG_HEAD_START = 1.0
"""Seconds that a stopping task waits for its cancel flags to reach MongoDB before it cancels the attempts."""

_ABSENT = RawValue(Payload())

WAKE = "wake-main-loop"
"""Patch id: an attempt repeated without backoff wakes the main loop when the task must continue in a new run."""

PARTS = "record-parts"
"""Patch id: a write that is too large for one activity is split into several."""


@workflow.defn(name=temporal_names.TASK)
class Task:
    """Run one task. The workflow id is the task id."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, NodeStatus]] = []
        self._running: dict[int, asyncio.Task[None]] = {}
        self._draining = False
        self._leaving = False
        """Whether the main loop has ended because the task stops or continues in a new run."""
        self._turns = 0
        """Number of times the main loop has decided not to continue in a new run."""
        self._retry_state_changed = False
        self._progressed = False
        self._node_error: Exception | None = None
        """An unexpected error of a node. It fails the workflow task, so that Temporal shows it."""
        self._scheduler: Scheduler | None = None
        self._display: TaskDetails | None = None
        self._result: TaskResult | None = None

    @workflow.run
    async def run(self, task: RawValue = _ABSENT) -> TaskResult:
        """Run the task and return its result. Raise `task_failed`, `invalid_graph` or `task_id_taken`.

        The method decodes its input itself, so that invalid input fails the task instead of being retried forever.
        """
        body = asyncio.create_task(self._run_task(task))
        while not body.done():
            try:
                await workflow.wait([body])
            except asyncio.CancelledError:
                continue
        outcome = body.result()
        if isinstance(outcome, TaskState):
            workflow.continue_as_new(encode_state(outcome))
        if outcome.status is TaskStatus.CANCELLED:
            raise asyncio.CancelledError
        return outcome

    @workflow.query(name=temporal_names.STATUS_QUERY)
    def status(self) -> dict[str, Any]:
        """Return the statuses, epochs, errors, skip reasons, retries and handled failures of the task so far."""
        status = TaskStatus.QUEUED if self._display is None else self._display.status
        return status_view(status, self._scheduler, self._result)

    async def _run_task(self, task: RawValue) -> TaskResult | TaskState:
        self._state, self._graph = await enter(None if task is _ABSENT else task)
        self._pulled = pulled_nodes(self._graph.nodes)
        self._scheduler = scheduler = Scheduler(self._graph, self._state.nodes)
        self._context = self._new_context(scheduler)
        self._display = display = TaskDetails(self._state, self._graph, scheduler)
        self._recorder = Recorder(lambda nodes, reason: self._record(display, nodes, reason))
        display.set_status(TaskStatus.RUNNING)
        while not scheduler.done:
            if _cancelled() or scheduler.hard_failure:
                return await self._stop(scheduler, display)
            if self._should_continue_as_new():
                return await self._prepare_continue_as_new(scheduler, display)
            self._turns += 1
            self._start(scheduler.pop_ready())
            await asyncio.sleep(0)
            self._publish_status(scheduler, display)
            await workflow.wait_condition(self._has_events)
            self._settle(scheduler)
        if scheduler.failures:
            return await self._fail(scheduler, display)
        return await self._close(scheduler, display, TaskStatus.FINISHED, None)

    def _new_context(self, scheduler: Scheduler) -> NodeRunContext:
        index_of = {node.node_id: node.index for node in scheduler.nodes}

        def epoch_of(node_id: str) -> int:
            state = scheduler.states[index_of[node_id]]
            return state.epoch if state.status.ended else 0

        return NodeRunContext(
            task_id=workflow.info().workflow_id,
            settings=self._state.opened.settings,
            draining=lambda: self._draining or _cancelled(),
            epoch_of=epoch_of,
            progress_of=lambda node: sum(
                progress(scheduler.states[index_of[name]]) for name in node.pulls_from
            ),
            on_retry_state_change=self._on_retry_state_change,
            is_only_running_node=lambda: len(self._running) == 1,
            repeating=self._before_repeating,
        )

    def _start(self, ready: list[int]) -> None:
        for index in ready:
            node, state = self._graph.nodes[index], self._state.nodes[index]
            self._running[index] = asyncio.create_task(self._run_node(node, state))

    async def _run_node(self, node: Node, state: NodeState) -> None:
        try:
            status = await run_node(self._context, node, state)
        except Exception as error:
            self._node_error = error
            raise
        if status is not None:
            self._ended.append((node.index, status))

    async def _before_repeating(self) -> None:
        """Wake the main loop before an attempt without backoff, if the task must continue in a new run.

        Such an attempt does not wake the main loop by itself. Without this call, a node that repeats forever would fill
        the history, and a task that holds back its starts would hang after its last attempt.
        """
        if self._leaving or self._has_events() or not self._has_to_continue():
            return
        if workflow.patched(WAKE):
            self._retry_state_changed, turn = True, self._turns
            await workflow.wait_condition(lambda: self._turns != turn or self._draining)

    def _has_to_continue(self) -> bool:
        if self._draining:
            return self._context.in_flight == 0
        return workflow.info().is_continue_as_new_suggested()

    def _on_retry_state_change(self, index: int) -> None:
        """Handle that a node starts to wait for its retry, or that its next attempt starts."""
        self._retry_state_changed = True
        if self._state.nodes[index].status is NodeStatus.DEFERRED:
            self._mark(index)

    def _has_events(self) -> bool:
        return self._retry_state_changed or bool(self._ended) or self._node_error is not None or _cancelled()

    def _settle(self, scheduler: Scheduler) -> None:
        """Report the nodes that have ended to the scheduler, in the order in which they ended."""
        if self._node_error is not None:
            raise self._node_error
        ended, self._ended = self._ended, []
        self._retry_state_changed, self._progressed = False, True
        for index, status in ended:
            self._running.pop(index, None)
            scheduler.end(index, status)
            if status is NodeStatus.FAILED:
                scheduler.changed.add(index)
        if scheduler.hard_failure is None:
            self._mark_changed(scheduler)

    def _mark_changed(self, scheduler: Scheduler) -> None:
        for index in sorted(scheduler.changed):
            self._mark(index)
        scheduler.changed.clear()

    def _mark(self, index: int) -> None:
        self._recorder.mark(self._node_record(index))

    def _node_record(self, index: int) -> NodeRecord:
        node = self._graph.nodes[index]
        return node_record(node, self._state.nodes[index], pulled=node.node_id in self._pulled)

    def _publish_status(self, scheduler: Scheduler, display: TaskDetails) -> None:
        """Update the task's own status and its current details."""
        status = TaskStatus.RUNNING if self._context.in_flight else views.open_status(scheduler)
        if display.set_status(status):
            self._recorder.mark_task()
        display.refresh()

    def _should_continue_as_new(self) -> bool:
        """Return whether the history is long enough to continue as new, and no attempt is in flight."""
        info, settings = workflow.info(), self._state.opened.settings
        if not info.is_continue_as_new_suggested():
            return False
        events, size = info.get_current_history_length(), info.get_current_history_size()
        if events >= settings.hold_starts_events or size >= settings.hold_starts_bytes:
            self._draining = True
        return self._context.in_flight == 0 and self._progressed

    async def _prepare_continue_as_new(
        self, scheduler: Scheduler, display: TaskDetails
    ) -> TaskResult | TaskState:
        """Finish all pending work, then return the state for the next run, or the result if the task was cancelled."""
        self._draining = self._leaving = True
        await self._end_running(display, grace=0)
        await self._recorder.flushed()
        await workflow.wait_condition(workflow.all_handlers_finished)
        return await self._stop(scheduler, display) if _cancelled() else self._state

    async def _stop(self, scheduler: Scheduler, display: TaskDetails) -> TaskResult:
        """Stop a cancelled or failed task: set the cancel flags, end the attempts, close the task document."""
        failed = None if _cancelled() else scheduler.hard_failure
        reason = views.stop_reason(failed, self._state.nodes, workflow.cancellation_reason())
        self._draining = self._leaving = True
        self._mark_cancelling(scheduler)
        if failed is not None:
            display.set_status(TaskStatus.FAILED)
        self._recorder.mark_task(cancel_reason=reason)
        await _wait(lambda: self._recorder.idle, _FLAG_HEAD_START, "let the cancel flags reach MongoDB")
        await self._end_running(display, grace=self._state.opened.settings.cancel_grace_sec)
        skipped = SkipReason.TASK_CANCELLED if failed is None else SkipReason.TASK_FAILED
        scheduler.stop(ran=NodeStatus.CANCELLED, skipped=skipped)
        if failed is not None:
            return await self._fail(scheduler, display)
        return await self._close(scheduler, display, TaskStatus.CANCELLED, reason)

    def _mark_cancelling(self, scheduler: Scheduler) -> None:
        for index, state in enumerate(self._state.nodes):
            if state.status is NodeStatus.RUNNING:
                state.status = NodeStatus.CANCELLING
                scheduler.changed.add(index)
        self._mark_changed(scheduler)

    async def _end_running(self, display: TaskDetails, grace: float) -> None:
        display.stop()
        running = list(self._running.values())
        for node in running:
            node.cancel()
        if running:
            await _wait(lambda: all(node.done() for node in running), grace or None, "let the attempts stop")
        for node in running:
            if node.done() and not node.cancelled():
                node.exception()
        self._running.clear()

    async def _fail(self, scheduler: Scheduler, display: TaskDetails) -> TaskResult:
        reason = views.failure_text(scheduler)
        await self._close(scheduler, display, TaskStatus.FAILED, reason)
        raise ApplicationError(reason, type=reason_codes.TASK_FAILED, non_retryable=True)

    async def _close(
        self, scheduler: Scheduler, display: TaskDetails, status: TaskStatus, reason: str | None
    ) -> TaskResult:
        display.set_status(status)
        display.finish(reason if status is TaskStatus.CANCELLED else None)
        await self._recorder.flushed()
        close = self._close_record(scheduler, display, reason)
        while not await close_document(close, nodes=len(scheduler.nodes)):
            await open_document(NewTask(params=self._state.params, graph=self._state.graph))
        self._result = TaskResult(
            task_id=close.task_id, status=status, handled_failures=scheduler.handled_failures
        )
        return self._result

    def _close_record(self, scheduler: Scheduler, display: TaskDetails, reason: str | None) -> CloseTask:
        unfinished = [
            i for i, state in enumerate(scheduler.states) if state.status is not NodeStatus.FINISHED
        ]
        return fitted(
            CloseTask(
                task_id=workflow.info().workflow_id,
                run_id=workflow.info().run_id,
                run_seq=self._state.opened.run_seq,
                at=workflow.now().timestamp(),
                status=display.status,
                status_history=display.history,
                nodes=[self._node_record(index) for index in unfinished],
                handled_failures=scheduler.handled_failures,
                reason=reason,
                deployment=self._state.opened.settings.deployment,
                status_history_omitted=display.omitted,
            )
        )

    async def _record(self, display: TaskDetails, nodes: list[NodeRecord], cancel_reason: str | None) -> None:
        record = RecordTask(
            task_id=workflow.info().workflow_id,
            run_id=workflow.info().run_id,
            run_seq=self._state.opened.run_seq,
            at=workflow.now().timestamp(),
            nodes=nodes,
            status=display.status,
            status_history=display.history,
            cancel_reason=cancel_reason,
            deployment=self._state.opened.settings.deployment,
            status_history_omitted=display.omitted,
        )
        parts = parts_of(record)
        for part in parts if len(parts) > 1 and workflow.patched(PARTS) else [record]:
            await record_document(part)


def progress(state: NodeState) -> int:
    """Return a number that increases with each attempt of a node and when the node ends."""
    return 2 * state.epoch + state.status.ended


async def _wait(done: Callable[[], bool], seconds: float | None, timer: str) -> None:
    """Wait until `done` returns true, for at most `seconds`. The Web UI shows the timer under the name `timer`."""
    with suppress(TimeoutError):
        await workflow.wait_condition(done, timeout=seconds, timeout_summary=timer)


def _cancelled() -> bool:
    return workflow.cancellation_reason() is not None
