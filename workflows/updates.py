"""Apply actions of operators to a running task: what updates do in the workflow.

The rules are pure (`scheduling.actions`). An action takes effect in one step: the handler plans it for the present state
and changes that state without an await in between. The event history is the audit; the task keeps a short form of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.errors import ActionRejected
from flowkit.graph.field_checks import json_bytes
from flowkit.limits import REPORT_BYTES
from flowkit.models import (
    AttemptFailure,
    FailureKind,
    NodeOutcome,
    NodeReset,
    NodeStatus,
    ResetDone,
    ResetNodes,
    SkipReason,
    temporal_names,
)
from flowkit.models.actions import RERUN, PausedScope, RetryNode
from flowkit.workflows.display.details import format_pause
from flowkit.workflows.document import write_timeout
from flowkit.workflows.engine_calls import HEARTBEAT_TIMEOUT, call_engine
from flowkit.workflows.payloads import json_size, split_by_size
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.actions import (
    Audit,
    Task,
    changes_of,
    parse_action,
    plan,
    plan_rerun,
    repeated_result,
    result_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.common import RawValue

    from flowkit.models import Node, Rerun
    from flowkit.models.actions import Action
    from flowkit.workflows.deadlines import Deadlines
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.node import RunningNodes
    from flowkit.workflows.scheduling.actions import Plan
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

MOST_UPDATES = 1_900
"""Number of updates after which a run rejects further actions. Temporal allows 2,000 in a run."""

_RESET_BYTES = 300
"""Upper bound for the size of a node's reset without its id, its changed fields and its results."""

FULL_UPDATES = 1_500
"""Number of updates after which a run without attempts in flight continues as new."""


class TaskActions:
    """The actions on one task."""

    def __init__(
        self,
        state: TaskState,
        scheduler: Scheduler,
        nodes: RunningNodes,
        deadlines: Deadlines,
        document: TaskDocument,
    ) -> None:
        self._task = state
        self._state = state.actions
        self._audit = Audit(entries=state.actions.applied)
        self._scheduler = scheduler
        self._nodes = nodes
        self._deadlines = deadlines
        self._document = document
        self._updates = 0
        """Number of updates that this run has accepted."""
        self.run_is_full = False
        """Whether the run has accepted so many updates that it should continue as new."""
        self._resets: list[asyncio.Task[None]] = []

    def count_update(self) -> None:
        """Count an update of this run."""
        self._updates += 1
        self.run_is_full = self._updates >= FULL_UPDATES

    def check(self, action: Action, *, stopping: bool) -> None:
        """Raise ApplicationError, which says why, if the task rejects an action now."""
        if self._find_repeated() is None:
            self._plan(action, stopping=stopping)

    def apply(self, name: str, action: Action, *, stopping: bool) -> dict[str, Any]:
        """Apply an action and return its result. Raise ApplicationError if the task rejects it."""
        self.count_update()
        if (before := self._find_repeated()) is not None:
            return repeated_result(before)
        planned = self._plan(action, stopping=stopping)
        now, info = workflow.now().timestamp(), workflow.current_update_info()
        self._audit.add(name, action, planned, now, info.id if info is not None else "")
        self._document.acted_at = workflow.info().get_current_history_length()
        if self._nodes.local is not None:
            self._nodes.local.hold_for_ordinary()
        if planned.resets:
            self._start_reset(planned, action)
        elif planned.decision is not None:
            self._nodes.decide(planned.decision)
        elif planned.satisfies is not None:
            self._scheduler.satisfy(planned.satisfies)
        else:
            self._change_pauses(planned, action, now)
        self._document.write_actions()
        return result_of(planned, self._scheduler.nodes, self._audit.revision)

    def _change_pauses(self, planned: Plan, action: Action, now: float) -> None:
        started = [
            PausedScope(scope=scope, since=now, by=action.by, reason=action.reason)
            for scope in planned.pauses
        ]
        pauses = self._scheduler.pauses
        pauses.change(started, planned.resumes)
        self._deadlines.pause_task(pauses.whole_task, now)
        self._nodes.pause(planned.interrupts)
        self._nodes.resume()
        self.show_drained()

    @property
    def is_idle(self) -> bool:
        """Whether no reset is in progress."""
        return not self._resets

    async def cancel(self) -> None:
        """Cancel the resets in progress, because the task ends, and wait until they have ended."""
        resets = [*self._resets]
        for each in resets:
            each.cancel()
        if resets:
            await workflow.wait(resets)

    def _start_reset(self, planned: Plan, action: Action) -> None:
        """Start new generations of nodes. Attempts that run end first, then the task document shows the new generations."""
        scheduler, nodes = self._scheduler, self._nodes
        scheduler.resetting.update(planned.resets)
        waiting = [index for index in planned.resets if index not in planned.interrupts]
        nodes.detach([*waiting, *planned.unblocks])
        nodes.flag(planned.interrupts)
        if planned.changed is not None:
            self._change_node(planned.changed)
        scheduler.renew(waiting)
        scheduler.unblock(planned.unblocks)
        scheduler.rebuild(nodes.active)
        reset = asyncio.create_task(self._reset(planned, action, self._audit.revision))
        self._resets.append(reset)
        reset.add_done_callback(self._resets.remove)

    def start_rerun(self, rerun: Rerun) -> None:
        """Start nodes of an ended task again, with those that depend on them."""
        scheduler = self._scheduler
        planned = plan_rerun(rerun.nodes, scheduler.nodes, scheduler.states)
        action = RetryNode(by=rerun.by, reason=rerun.reason)
        self._audit.add(RERUN, action, planned, workflow.now().timestamp(), "")
        self._start_reset(planned, action)
        self._document.write_actions()

    def _change_node(self, node: Node) -> None:
        self._scheduler.change_node(node)
        self._state.changed[node.node_id] = changes_of(node)

    async def _reset(self, planned: Plan, action: Action, revision: int) -> None:
        try:
            if planned.interrupts:
                await self._nodes.stop_attempts(planned.interrupts)
                self._scheduler.renew(planned.interrupts)
            failure = await self._write_reset(planned, revision)
            self._finish_reset(planned, action, failure)
        except Exception as error:
            self._nodes.fail_with(error)
            raise
        finally:
            self._nodes.wake()

    async def _write_reset(self, planned: Plan, revision: int) -> AttemptFailure | None:
        """Let the engine write the new generations. Return why it rejects the results of a node, if it does.

        Temporal limits the size of payloads, so a large reset takes several calls.
        """
        states, now = self._scheduler.states, workflow.now().timestamp()
        resets = [self._make_reset(index, planned) for index in planned.resets]
        failure: AttemptFailure | None = None
        for nodes in split_by_size(resets, _measure_reset, REPORT_BYTES):
            record = ResetNodes(
                task_id=workflow.info().workflow_id,
                run_id=workflow.info().run_id,
                run_seq=self._task.opened.run_seq,
                revision=revision,
                at=now,
                nodes=nodes,
                deployment=self._task.opened.settings.deployment,
            )
            epochs, problem = await self._try_reset(record)
            if problem is not None:
                without = replace(record, nodes=[replace(each, outcome=None) for each in nodes])
                epochs, _ = await self._try_reset(without)
            for node, epoch in zip(nodes, epochs, strict=True):
                states[node.index].epoch = states[node.index].first_epoch = epoch
            failure = failure or problem
        return failure

    async def _try_reset(self, record: ResetNodes) -> tuple[Sequence[int], AttemptFailure | None]:
        """Return the reserved epochs, and why the engine rejects the write for good, if it does."""
        try:
            done = await self._call(record)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise asyncio.CancelledError from None
            cause = error.cause
            code = cause.type if isinstance(cause, ApplicationError) else None
            failure = AttemptFailure(
                kind=FailureKind.FAILURE,
                code=code or reason_codes.UNEXPECTED_ERROR,
                message=cause.message if isinstance(cause, ApplicationError) else str(cause),
                permanent=True,
            )
            return [each.epoch for each in record.nodes], failure
        return done.epochs, None

    async def _call(self, record: ResetNodes) -> ResetDone:
        first, more = record.nodes[0].node_id, len(record.nodes) - 1
        done: ResetDone = await call_engine(
            temporal_names.RESET_NODES,
            record,
            ResetDone,
            summary=f"new generation of {first}" + (f" and {more:,} more" if more else ""),
            time_limit=write_timeout(len(record.nodes)),
            heartbeat_timeout=HEARTBEAT_TIMEOUT,
        )
        return done

    def _make_reset(self, index: int, planned: Plan) -> NodeReset:
        node, state, end = self._scheduler.nodes[index], self._scheduler.states[index], planned.end
        changes = self._state.changed.get(node.node_id, {})
        outcome = None
        if end is not None and end.index == index and end.status is NodeStatus.FINISHED:
            outcome = NodeOutcome(
                metrics=dict(end.metrics),
                artifacts_ref=None if end.artifacts_ref is None else dict(end.artifacts_ref),
                batches=[*end.batches],
            )
        return NodeReset(
            index=index,
            node_id=node.node_id,
            epoch=state.epoch + 1,
            generation=state.generation,
            pulled=node.node_id in self._document.pulled,
            outcome=outcome,
            io={name: changes[name] for name in ("input_inline", "input_ref") if changes} or None,
            fields={name: changes[name] for name in ("timeout_sec", "retry_policy") if changes},
        )

    def _finish_reset(self, planned: Plan, action: Action, failure: AttemptFailure | None) -> None:
        """Let the nodes of the new generations start, and end the node about which an operator has decided."""
        scheduler, end, index = self._scheduler, planned.end, planned.changes[0].index
        is_over = end is not None or failure is not None
        scheduler.resetting.difference_update(planned.resets)
        scheduler.rebuild(self._nodes.active | ({index} if is_over else set()))
        if is_over:
            self._end_node(
                index, NodeStatus.FAILED if failure or end is None else end.status, action, failure
            )
        self._document.write_changed_nodes()

    def _end_node(
        self, index: int, status: NodeStatus, action: Action, failure: AttemptFailure | None
    ) -> None:
        scheduler = self._scheduler
        state = scheduler.states[index]
        if failure is not None:
            note_failure(state, failure.code, failure.message)
        elif status is NodeStatus.FAILED:
            by = f" by {action.by}" if action.by else ""
            reason = f": {action.reason}" if action.reason else ""
            note_failure(state, reason_codes.FAILED_BY_USER, f"failed{by}{reason}")
        skip_reason = SkipReason.USER if status is NodeStatus.SKIPPED else None
        scheduler.end(index, status, skip_reason)
        if status is not NodeStatus.FINISHED:
            scheduler.changed.add(index)

    def preview(self, action: Action, *, stopping: bool) -> dict[str, Any]:
        """Return the result that an action would have, with the present revision."""
        planned = self._plan(action, stopping=stopping)
        return result_of(planned, self._scheduler.nodes, self._audit.revision)

    def view(self) -> dict[str, Any]:
        """Return the part of the query `status` about actions: the revision, and the paused scopes."""
        view: dict[str, Any] = {"revision": self._audit.revision} if self._audit.revision else {}
        paused = [format_pause(each) for each in self._state.paused]
        satisfied = {"satisfied": [*self._state.satisfied]} if self._state.satisfied else {}
        return view | ({"paused": paused} if paused else {}) | satisfied

    def show_drained(self) -> None:
        """Write to the document which paused scopes have no attempt in flight, if that has changed."""
        flying, pauses = self._nodes.flying, self._scheduler.pauses
        drained = (each.scope for each in pauses.scopes if pauses.drained(each.scope, flying))
        self._document.write_drained(frozenset(drained))

    def _find_repeated(self) -> Any:
        info = workflow.current_update_info()
        return None if info is None else self._audit.find(info.id)

    def _plan(self, action: Action, *, stopping: bool) -> Plan:
        try:
            if stopping:
                raise ActionRejected("the task is ending, so no action can change it any more")
            if self._updates >= MOST_UPDATES:
                raise ActionRejected(
                    f"this run has accepted {self._updates:,} updates, and Temporal allows 2,000: the task continues in a "
                    "new run when no attempt is in flight; try again then, or interrupt its attempts"
                )
            return plan(action, self._describe_task())
        except ActionRejected as error:
            raise rejection(error) from None

    def _describe_task(self) -> Task:
        scheduler = self._scheduler
        return Task(
            nodes=scheduler.nodes,
            states=scheduler.states,
            pauses=scheduler.pauses,
            revision=self._audit.revision,
            resetting=scheduler.resetting,
            changed_bytes=json_bytes(self._state.changed),
            satisfied=self._state.satisfied,
        )


def _measure_reset(node: NodeReset) -> int:
    """Return an upper bound for the size of a node's reset as JSON."""
    outcome = node.outcome
    results = [outcome.metrics, outcome.artifacts_ref, outcome.batches] if outcome is not None else []
    return _RESET_BYTES + json_size([node.node_id, node.io, node.fields, results])


def read_action(name: str, given: RawValue | None) -> Action:
    """Return the action in the input of an update. Raise ApplicationError if it is not valid."""
    value = None if given is None else workflow.payload_converter().from_payload(given.payload)
    try:
        return parse_action(name, value)
    except ActionRejected as error:
        raise rejection(error) from None


def rejection(error: ActionRejected) -> ApplicationError:
    """Return the error with which Temporal rejects an update."""
    return ApplicationError(str(error), type=reason_codes.ACTION_REJECTED, non_retryable=True)
