"""The `Task` workflow opens a task, runs the nodes of its graph and closes it.

Start it with `Coordinator.create_task`, or with Temporal alone:
`temporal workflow start --type Task --task-queue flowkit --input '{"params": {}, "graph": {...}}'`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from flowkit import reason_codes
    from flowkit.actions.changed_nodes import changeable
    from flowkit.actions.records import (
        CHANGE_GRAPH,
        COMPLETE_NODE,
        DECIDE,
        FAIL_NODE,
        PAUSE,
        PREVIEW_QUERY,
        RESUME,
        RETRY_BATCHES,
        RETRY_NODE,
        SATISFY,
        SKIP_BATCHES,
        SKIP_NODE,
    )
    from flowkit.actions.table import ACTIONS, parse_action
    from flowkit.errors import ActionRejected
    from flowkit.models import (
        FirstBatch,
        NodeStatus,
        ShardStarted,
        SilenceReport,
        SkipReason,
        TaskResult,
        TaskStatus,
        temporal_names,
    )
    from flowkit.workflows.deadlines import Deadlines, DeadlineTimer, SilentAttempts
    from flowkit.workflows.display.task_status import (
        StatusPublisher,
        failure_text,
        incomplete_text,
        open_status,
        status_view,
        stop_reason,
        task_result,
    )
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.evaluations import ConditionEvaluations
    from flowkit.workflows.local_attempts import Streak, refresh_for_workflow_task
    from flowkit.workflows.node import RunningNodes, cancel_requested
    from flowkit.workflows.opening import continues_longer, is_mostly_graph, open_or_restore
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState, encode_state
    from flowkit.workflows.updates import TaskActions, read_action

if TYPE_CHECKING:
    from collections.abc import Sequence

_NO_INPUT = RawValue(Payload())


def _action(name: str) -> workflow.UpdateMethodMultiParam[[Task, RawValue], Any]:
    """Return the update of an action, with its validator."""

    async def apply(self: Task, action: RawValue = _NO_INPUT) -> dict[str, Any]:
        return await self._apply(name, action)

    def check(self: Task, action: RawValue = _NO_INPUT) -> None:
        self._check(name, action)

    for handler in (apply, check):
        del handler.__annotations__["self"]  # Temporal takes an annotated parameter for a part of the input.
    update = workflow.update(name=name, description=ACTIONS[name].description)(apply)
    update.validator(check)
    return update


@workflow.defn(name=temporal_names.TASK)
class Task:
    """Run one task. The workflow id is the task id."""

    _state: TaskState
    _scheduler: Scheduler
    _publisher: StatusPublisher
    _document: TaskDocument
    _nodes: RunningNodes
    _conditions: ConditionEvaluations
    _deadlines: DeadlineTimer
    _silence: SilentAttempts
    _actions: TaskActions
    _event_sources: Sequence[ConditionEvaluations | DeadlineTimer | SilentAttempts]
    """The parts that have events for the main loop. It processes them in this order, after the ends of nodes."""

    def __init__(self) -> None:
        self._is_open = False
        """Whether `_open` has set the attributes above."""
        self._iterations = 0
        """Number of iterations of the main loop that did not end this run."""
        self._wake_requested = False
        """Whether the loop must iterate although no node has ended: a node began or ended its wait for a retry, has
        stored its first batch, waits for something else, or is about to repeat without backoff while the task must
        continue in a new run."""
        self._progressed = False
        """Whether this run has processed an event. A run without progress must not continue as new, to avoid a loop."""
        self._closing = False
        """Whether the task ends, so that it rejects actions."""
        self._updates_waiting = 0
        """Number of accepted updates that have not changed the state yet."""
        self._result: TaskResult | None = None

    @workflow.run
    async def run(self, task: RawValue = _NO_INPUT) -> TaskResult:
        """Run the task and return its result. Raise `task_failed`, `invalid_graph` or `task_id_taken`.

        The method decodes its input itself, so that invalid input fails the task instead of being retried forever.
        """
        body = asyncio.create_task(self._run_task(task))
        while not body.done():
            try:
                await workflow.wait([body])
            except asyncio.CancelledError:
                continue  # A cancel request interrupts only this wait. The main loop checks for it.
        outcome = body.result()
        if isinstance(outcome, TaskState):
            workflow.continue_as_new(encode_state(outcome))
        if outcome.status is TaskStatus.CANCELLED:
            raise asyncio.CancelledError
        return outcome

    async def _run_task(self, task: RawValue) -> TaskResult | TaskState:
        """Run the task until it ends, or until it must continue as a new run with the returned state."""
        await self._open(task)
        while cancel_requested() or not self._is_done:
            if cancel_requested() or self._scheduler.must_stop or self._deadlines.task_failure:
                return await self._stop()
            if self._should_continue_as_new():
                return await self._prepare_continue_as_new()
            self._iterations += 1
            self._nodes.start(self._deadlines.begin(self._scheduler.pop_ready()))
            if self._scheduler.any_due and not self._nodes.draining:
                self._conditions.start(self._scheduler.pop_due())
            await asyncio.sleep(0)  # Let the nodes schedule their activities.
            if self._nodes.concurrency is not None:
                self._nodes.concurrency.release_ended()
            self._publish_status()
            await workflow.wait_condition(self._has_events)
            self._process_events()
        if self._scheduler.failures:
            return await self._fail()
        if self._scheduler.left_incomplete:
            return await self._fail(incomplete_text(self._scheduler))
        return await self._close(TaskStatus.FINISHED)

    @property
    def _is_done(self) -> bool:
        """Whether all nodes have ended, and no action can start one again.

        A cancel whose request arrives together with the end of the last node still takes precedence.
        """
        return self._scheduler.done and self._actions.is_idle and not self._updates_waiting

    async def _open(self, task: RawValue) -> None:
        """Parse the input, and open the task or restore the state of the previous run."""
        streak = refresh_for_workflow_task(Streak())
        self._state, graph = await open_or_restore(None if task is _NO_INPUT else task)
        graph = changeable(graph, self._state.actions.changed)
        actions = self._state.actions
        self._scheduler = Scheduler(graph, self._state.nodes, actions.paused, actions.satisfied)
        self._publisher = StatusPublisher(self._state, graph, self._scheduler)
        self._document = TaskDocument(self._state, self._scheduler, self._publisher)
        deadlines = Deadlines(graph, self._state.nodes, actions, opened_at=self._state.opened.created_at)
        self._nodes = RunningNodes(
            self._state,
            self._scheduler,
            self._document,
            streak,
            deadlines,
            wake=self._wake,
            before_immediate_retry=self._before_immediate_retry,
        )
        self._conditions = ConditionEvaluations(self._scheduler, self._state.opened.settings.deployment)
        self._deadlines = DeadlineTimer(deadlines, graph, stop_nodes=self._nodes.stop)
        self._silence = SilentAttempts(
            self._scheduler, run_id=workflow.info().run_id, stop_nodes=self._nodes.stop
        )
        self._actions = TaskActions(self._state, self._scheduler, self._nodes, deadlines, self._document)
        self._event_sources = (self._conditions, self._deadlines, self._silence)
        self._is_open = True
        if self._state.rerun is not None:
            self._actions.start_rerun(self._state.rerun)
            self._state.rerun = None
        if workflow.info().continued_run_id is None:
            self._document.write_prerequisites(range(len(graph.nodes)))
        self._scheduler.end_holds()
        self._document.write_changed_nodes()
        self._publisher.set_status(TaskStatus.RUNNING)

    def _publish_status(self) -> None:
        """Update the task's own status."""
        silent = self._silence.nodes
        running = self._nodes.in_flight > len(silent)
        waits = bool(silent) or bool(self._nodes.parked)
        status = TaskStatus.RUNNING if running else open_status(self._scheduler, waits=waits)
        if status is not self._publisher.status:
            self._publisher.set_status(status)
            self._document.write_task()
        if self._publisher.may_wait:
            self._publisher.show_waits()
        if self._scheduler.pauses.paused:
            self._actions.show_drained()
        self._show_silent(silent)

    def _show_silent(self, nodes: list[int]) -> None:
        """Show these nodes, and no others, as silent. Do nothing if the task does."""
        if nodes != self._document.silent:
            self._document.write_silent(nodes)
            self._publisher.silent_nodes = frozenset(self._scheduler.nodes[index].node_id for index in nodes)

    def _wake(self) -> None:
        """Make the main loop iterate, so that it shows what has changed."""
        self._wake_requested = True

    def _has_events(self) -> bool:
        """Return whether the main loop must iterate."""
        return (
            self._wake_requested
            or self._nodes.any_ended
            or self._conditions.has_events
            or self._deadlines.has_events
            or self._silence.has_events
            or cancel_requested()
        )

    def _process_events(self) -> None:
        """Report ended nodes and other events to the scheduler, and write the changes to the task document.

        Of these nodes, only failed ones are written here: the attempt of a finished node has written its status itself.
        After a failure that stops the task, `_stop` writes the changes.
        """
        self._process_ends()
        self._wake_requested, self._progressed = False, True
        for source in self._event_sources:
            if source.has_events:
                source.process_events()
        self._nodes.give_up(self._scheduler.end_holds())
        if self._nodes.parked:
            self._document.write_throttling()
        if self._scheduler.changed and not self._scheduler.must_stop:
            self._document.write_changed_nodes()

    def _process_ends(self) -> None:
        """Report ended nodes to the scheduler. Raise the unexpected error of a node or an action if there is one."""
        for index, status in self._nodes.pop_ended():
            self._scheduler.end(index, status)
            if status is NodeStatus.FAILED:
                self._scheduler.changed.add(index)

    def _should_continue_as_new(self) -> bool:
        """Return whether the history is long enough to continue as new, and no attempt is in flight.

        If attempts keep being in flight until the history is very long, stop starting new ones.
        """
        if self._actions.updates:
            self._nodes.draining |= self._actions.is_exhausted
            if self._actions.run_is_full and self._nodes.in_flight == 0 and self._is_idle:
                return True
        info, settings = workflow.info(), self._state.opened.settings
        if not info.is_continue_as_new_suggested() or is_mostly_graph(self._state.stored):
            return False
        events, size = info.get_current_history_length(), info.get_current_history_size()
        if events >= settings.hold_starts_events or size >= settings.hold_starts_bytes:
            self._nodes.draining = True
        elif continues_longer(len(self._state.nodes)):
            return False
        return self._nodes.in_flight == 0 and self._is_idle and self._progressed

    @property
    def _is_idle(self) -> bool:
        """Whether no evaluation of conditions, no reset of nodes and no update is in progress."""
        return self._conditions.is_idle and self._actions.is_idle and not self._updates_waiting

    async def _before_immediate_retry(self) -> None:
        """Wake the main loop before an attempt without backoff, if the task must continue in a new run.

        Such an attempt does not wake the loop by itself. Without this call, a node that repeats forever would fill the
        history, and a task that has stopped starting attempts would hang after its last attempt.
        """
        if self._nodes.stopping or self._has_events() or not self._must_continue_as_new():
            return
        self._wake_requested, iteration = True, self._iterations
        await workflow.wait_condition(lambda: self._iterations != iteration or self._nodes.draining)

    def _must_continue_as_new(self) -> bool:
        if self._nodes.draining:
            return self._nodes.in_flight == 0
        return workflow.info().is_continue_as_new_suggested()

    async def _prepare_continue_as_new(self) -> TaskResult | TaskState:
        """End all waits and writes, and return the state for the next run. If the task was cancelled, stop it.

        What arrives or ends meanwhile takes effect before.
        """
        self._nodes.prepare_cancel()
        await self._cancel_nodes(grace_sec=0)
        self._show_silent([])
        if self._nodes.concurrency is not None:
            await self._nodes.concurrency.flush()
        is_settled = False
        while not is_settled:
            await workflow.wait_condition(lambda: workflow.all_handlers_finished() and self._actions.is_idle)
            self._process_ends()
            self._document.write_changed_nodes()
            await self._document.flush()
            is_settled = workflow.all_handlers_finished() and self._actions.is_idle and self._document.is_idle
        return await self._stop() if cancel_requested() else self._state

    async def _stop(self) -> TaskResult:
        """Stop a cancelled or failed task: set the cancel flags, cancel the attempts, close the task document.

        A cancel request takes precedence over a failure of a node, and that over the deadline of the task.
        """
        self._closing = True
        failed = None if cancel_requested() else self._scheduler.hard_failure
        overdue = None if failed or cancel_requested() else self._deadlines.task_failure
        fails = failed is not None or overdue is not None
        reason = stop_reason(
            failed, self._state.nodes, workflow.cancellation_reason(), overdue=overdue is not None
        )
        self._nodes.prepare_cancel()
        self._scheduler.mark_cancelling()
        self._document.write_changed_nodes()
        self._document.write_attempted()
        if fails:
            self._publisher.set_status(TaskStatus.FAILED, overdue or failure_text(self._scheduler))
        self._document.write_task(cancel_reason=reason)
        self._nodes.cancel_local()
        await self._document.await_flags()
        await self._cancel_nodes(grace_sec=self._state.opened.settings.cancel_grace_sec)
        await workflow.wait_condition(lambda: not self._updates_waiting)
        await self._actions.settle()
        for index in sorted({*self._nodes.finished(), *self._document.finished()}):
            self._scheduler.end(index, NodeStatus.FINISHED)
        skip_reason = SkipReason.TASK_FAILED if fails else SkipReason.TASK_CANCELLED
        self._scheduler.end_all(NodeStatus.CANCELLED, skip_reason)
        if fails:
            return await self._fail(overdue)
        return await self._close(TaskStatus.CANCELLED, reason)

    async def _cancel_nodes(self, grace_sec: float) -> None:
        await self._conditions.cancel()
        await self._nodes.cancel(grace_sec)

    async def _fail(self, why: str | None = None) -> TaskResult:
        """Close the task as failed, because of its failed nodes or for another reason, and raise the error."""
        reason = why or failure_text(self._scheduler)
        await self._close(TaskStatus.FAILED, reason)
        raise ApplicationError(reason, type=reason_codes.TASK_FAILED, non_retryable=True)

    async def _close(self, status: TaskStatus, reason: str | None = None) -> TaskResult:
        """Publish the final status and close the task document.

        Earlier writes end before, so that none has this status.
        """
        self._closing = True
        await self._document.write_many_unfinished()
        await self._document.flush()
        self._publisher.set_status(status, reason)
        if self._publisher.may_wait:
            self._publisher.show_waits()
        self._show_silent([])
        if self._nodes.concurrency is not None:
            await self._nodes.concurrency.close()
        result = task_result(
            workflow.info().workflow_id,
            status,
            self._scheduler.handled_failures,
            self._scheduler.failed_batches,
        )
        ran_locally = self._nodes.local is not None and self._nodes.local.ran
        await self._document.close(result, reason, local=not self._nodes.stopping and not ran_locally)
        self._result = result
        return result

    @workflow.signal(name=temporal_names.FIRST_BATCH)
    def first_batch(self, batch: FirstBatch) -> None:
        """Start the nodes that wait for the first batch of an attempt. Ignore an attempt that is not the latest one.

        The run id is not compared: the sender addresses the run, and a *Reset* gives the signals in the history of a
        run, which must have the same effect when they are replayed, to a run with another id.
        """
        if self._is_open and self._scheduler.accept_batch(batch):
            self._wake()

    @workflow.signal(name=temporal_names.SHARD_STARTED)
    def shard_started(self, started: ShardStarted) -> None:
        """Let the next shard of a node start. Ignore an attempt that does not wait for a worker any more."""
        if self._is_open:
            self._nodes.note_shard(started)

    @workflow.update(
        name=temporal_names.REPORT_SILENCE,
        description="For engines only: they report the attempts that send no heartbeats.",
    )
    async def report_silence(self, report: SilenceReport) -> None:
        """Show the reported attempts as silent, and fail those that have been silent for too long."""
        await self._await_open()
        self._silence.accept(report)
        self._actions.count_update()

    @report_silence.validator
    def _check_silence(self, report: SilenceReport) -> None:
        """Reject a report that is outdated or changes nothing."""
        is_running = self._is_open and not self._nodes.stopping
        problem = self._silence.problem(report) if is_running else "the task is not open, or its run ends"
        if problem is not None:
            raise ApplicationError(problem, type=reason_codes.FENCED, non_retryable=True)

    pause = _action(PAUSE)
    resume = _action(RESUME)
    retry_node = _action(RETRY_NODE)
    skip_node = _action(SKIP_NODE)
    complete_node = _action(COMPLETE_NODE)
    fail_node = _action(FAIL_NODE)
    retry_batches = _action(RETRY_BATCHES)
    skip_batches = _action(SKIP_BATCHES)
    decide = _action(DECIDE)
    satisfy = _action(SATISFY)
    change_graph = _action(CHANGE_GRAPH)

    def _check(self, name: str, given: RawValue) -> None:
        """Reject an action that the task does not allow. An action that arrives before the task is open waits."""
        action = read_action(name, None if given is _NO_INPUT else given)
        if self._is_open:
            self._actions.check(action, stopping=self._stops)

    async def _apply(self, name: str, given: RawValue) -> dict[str, Any]:
        """Apply an action when the task is open. Check it again, because it may have arrived before."""
        action = read_action(name, None if given is _NO_INPUT else given)
        await self._await_open()
        try:
            return await self._actions.apply(name, action, stops=lambda: self._stops)
        finally:
            self._wake()

    async def _await_open(self) -> None:
        """Wait until the task is open, so that it has nodes."""
        self._updates_waiting += 1
        try:
            await workflow.wait_condition(lambda: self._is_open)
        finally:
            self._updates_waiting -= 1

    @property
    def _stops(self) -> bool:
        """Whether the task ends, so that no action can change it any more."""
        return self._closing or cancel_requested()

    @workflow.query(name=PREVIEW_QUERY, description="What an action would affect; changes nothing.")
    def preview(self, action: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the action with this name and input would affect. Raise ActionRejected as the action would."""
        parsed = parse_action(action, given)
        if not self._is_open:
            raise ActionRejected("the task is not open yet, so it has no nodes to affect; try again")
        return self._actions.preview(parsed, stopping=self._stops)

    @property
    def current_details(self) -> str:
        """The details that Temporal's Web UI shows; empty while the task is not open."""
        return self._publisher.details() if self._is_open else ""

    @workflow.query
    def status(self) -> dict[str, Any]:
        """Return the statuses of task and nodes, the nodes' epochs, errors and next retries, and handled failures.

        A task that has failed or was cancelled also has a `reason`.
        """
        if not self._is_open:
            return status_view(TaskStatus.QUEUED, None, None)
        view = status_view(self._publisher.status, self._scheduler, self._result)
        silent = sorted(self._publisher.silent_nodes)
        reason = {"reason": self._publisher.reason} if self._publisher.reason else {}
        return {**view, **reason, **({"silent_nodes": silent} if silent else {}), **self._actions.view()}
