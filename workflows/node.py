"""The nodes of a task that run: their attempts, what follows a failed attempt, and the waits between attempts.

`RunningNodes` starts nodes as asyncio tasks, collects how they ended, and cancels them. `run_node` runs one
of them. Its functions follow the order of an attempt:

1. `_run_attempt` increments the epoch.
2. `_execute` schedules the attempt as an activity, or as a local one (`local_attempts`).
3. `read_failure` translates Temporal's error into an `AttemptFailure`, with `retry.classify` for reported errors.
4. `_prepare_retry` stores in the node's state what `retry.decide` returns: another attempt or the node's failure.
5. `_wait_for_retry` waits until the next attempt may start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import (
    ApplicationError,
    CancelledError,
    FailureError,
    TimeoutType,
)
from temporalio.exceptions import (
    TimeoutError as AttemptTimeout,
)

from flowkit import reason_codes
from flowkit.actions.plans import end_of_approval
from flowkit.actions.scopes import list_function_sources
from flowkit.limits import ACTIVATION_INPUT_BYTES
from flowkit.models import APPROVE, AttemptFailure, AttemptInput, FailureKind, NodeStatus
from flowkit.models.temporal_names import role_queue
from flowkit.workflows.display.details import wait_for_sources
from flowkit.workflows.display.summaries import attempt_summary, delay_summary, hold_summary, timer_summary
from flowkit.workflows.engine_calls import cause_of
from flowkit.workflows.evaluations import evaluate_values, value_failure, value_request
from flowkit.workflows.local_attempts import fall_back, local_attempts_of
from flowkit.workflows.payloads import json_size, read_failed_batches, read_runner, without_defaults
from flowkit.workflows.retry import (
    NOT_REGISTERED,
    UNREQUESTED_CANCEL,
    WORKER_YIELDS,
    Fail,
    classify,
    decide,
    describe_runner,
    note_failure,
)
from flowkit.workflows.scheduling.scheduler import HOLD
from flowkit.workflows.shards import Shards
from flowkit.workflows.slots import Slots, TaskSlots, concurrency_slots_of

if TYPE_CHECKING:
    from collections.abc import (
        Awaitable,
        Callable,
        Collection,
        Coroutine,
        Iterable,
        Iterator,
        KeysView,
        Mapping,
    )
    from contextlib import AbstractAsyncContextManager

    from flowkit.actions.plans import NodeEnd
    from flowkit.models import Node, NodeState, Settings, ShardStarted
    from flowkit.workflows.deadlines import Deadlines
    from flowkit.workflows.document import TaskDocument
    from flowkit.workflows.local_attempts import LocalAttempts, Streak
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

_TEMPORAL_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=["TemporalTimeout:StartToClose", NOT_REGISTERED],
)
"""Temporal's own retry policy. It applies only when the heartbeats of an attempt stop, or a bridge stops.

The second try of the activity belongs to the same attempt and does not run the handler again. A native worker fails it
as `lease_lost`, so that this module starts a new attempt; a bridge continues to supervise the external worker. All
other errors are non-retryable for Temporal, so that this module decides about retries.
"""

_NO_TIMEOUT = timedelta(days=365)
"""Temporal requires a timeout. Workers, engines and bridges enforce `timeout_sec`, so that outages do not count."""

_YIELD_RESET_SEC = 60.0
"""An attempt that ran this long resets the backoff after yields to its first value."""

INTERRUPTED = AttemptFailure(
    kind=FailureKind.HANDOVER, code=reason_codes.INTERRUPTED, message="a pause has stopped the attempt"
)

_INPUT_OVERHEAD_BYTES = 500
"""Estimated size of an attempt's input without the node's `io`."""

_SOURCE_REPEATS = 2
"""How often an attempt's input lists the node's sources: in `io` and in `sources`."""

MAX_VERSIONS = 5
"""Versions of a role that the details of a task show."""

MAX_ROLES = 200
"""Roles whose versions a task notes, since one run hands them over to the next."""

MOST_EVALUATIONS = 50
"""How many nodes of a task have their values by expression evaluated at once.

Their activities count, with those of the attempts, towards the 2,000 pending activities that Temporal
allows a workflow.
"""


@dataclass(slots=True, eq=False)
class OpenNode:
    """A node of the present generation that has started, and whose end the main loop has not processed."""

    index: int
    task: asyncio.Task[None] | None = None
    """What runs its attempts, with what comes before and between them, or waits for the decision about its failure."""
    begun: bool = False
    """Whether `task` has taken its first step."""
    outcome: AttemptFailure | None = None
    """What counts in place of the end of its attempt or its wait, because the node was withdrawn."""
    status: NodeStatus | None = None
    """How it has ended, which the main loop processes next."""

    @property
    def is_live(self) -> bool:
        """Whether it runs an attempt, or waits."""
        return self.task is not None and not self.task.done()

    def cancel(self) -> None:
        """Cancel what it runs or waits for. What has not begun does not begin."""
        if self.task is not None and (self.begun or self.outcome is None):
            self.task.cancel()


class RetryWaits:
    """The waits for retries of a task's nodes, and of their shards. An action can end them."""

    def __init__(self) -> None:
        self._waits: dict[int, dict[asyncio.Task[None], None]] = {}
        """The waits in progress, by the index of the node."""

    @property
    def nodes(self) -> Collection[int]:
        """The indexes of the nodes that wait, or of which a shard waits."""
        return self._waits.keys()

    async def run(self, index: int, wait: Coroutine[Any, Any, None]) -> None:
        """Await `wait`, or until `end` is called for the node."""
        task = asyncio.create_task(wait)
        waits = self._waits.setdefault(index, {})
        waits[task] = None
        try:
            await workflow.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            del waits[task]
            if not waits:
                self._waits.pop(index, None)

    def end(self, index: int) -> None:
        """End the waits of a node and its shards."""
        for task in self._waits.get(index, ()):
            task.cancel()


class RunningNodes:
    """The nodes of a task that have started and whose end the main loop has not yet processed.

    They share the slots of the task, and the bytes of input that one workflow task (an activation of the
    workflow by the server) may schedule.
    """

    def __init__(
        self,
        state: TaskState,
        scheduler: Scheduler,
        document: TaskDocument,
        streak: Streak,
        deadlines: Deadlines,
        *,
        wake: Callable[[], None],
        before_immediate_retry: Callable[[], Awaitable[None]],
    ) -> None:
        """Run the nodes of `scheduler`.

        `wake` makes the main loop iterate although no node has ended. `before_immediate_retry` is awaited before a node
        runs again without backoff; it may wait until the task continues in a new run.
        """
        settings = state.opened.settings
        self.settings = settings
        self._state = state
        self.scheduler = scheduler
        self.document = document
        self.wake = wake
        self.before_immediate_retry = before_immediate_retry
        self._deadlines = deadlines
        self.draining = False
        """Whether the task has stopped starting attempts because it must continue in a new run, or because it stops."""
        self.stopping = False
        """Whether the main loop has ended, so that the task as a whole ends its running nodes."""
        self._open: dict[int, OpenNode] = {}
        """The nodes that run, wait, or have ended, by index."""
        self._ended: list[OpenNode] = []
        """Those that have ended, in the order in which they did."""
        self.parked = document.parked
        """The nodes that would run without a pause."""
        self._given_up: dict[asyncio.Task[None], None] = {}
        """What runs of earlier generations of nodes. How it ends does not count."""
        self._flights: Counter[int] = Counter()
        """The numbers of attempts that are scheduled or running, of nodes that have any. Those of earlier
        generations count."""
        self._streak = streak
        self.local = self._find_local()
        self.concurrency = concurrency_slots_of(state, is_draining=self.starts_no_attempts, on_change=wake)
        self._task_slots = TaskSlots(Slots(limit=settings.max_in_flight, window=settings.window))
        self.evaluations = asyncio.Semaphore(MOST_EVALUATIONS)
        """Limits the evaluations of values by expression. A node holds no slot meanwhile, so it cannot block others."""
        self.retry_waits = RetryWaits()
        self.shards: dict[int, Shards] = {}
        """The shards of the nodes that run shards."""
        self._cancelling: set[asyncio.Task[None]] = set()
        """What cancels attempts when their cancel flags are written. The event loop alone would not keep it."""
        self._error: Exception | None = None
        """An unexpected error of a node. It fails the workflow task, so that Temporal shows it."""
        self._reserved = 0
        """Bytes of input that nodes have reserved in the present workflow task."""
        self._reserved_at = -1
        """Length of the history when `_reserved` was last set to 0."""
        self._reserving = asyncio.Lock()
        self._versions = state.versions
        self.pins = state.pins
        """For each role, the version that the task has fixed, as far as known."""

    def _find_local(self) -> LocalAttempts | None:
        return local_attempts_of(
            self.settings, self.scheduler, self._streak, is_only_running_node=lambda: len(self._open) == 1
        )

    def change_graph(self) -> None:
        """Note that nodes were added to the graph, or changed."""
        self.local = self.local or self._find_local()

    @property
    def document_bytes(self) -> int:
        """Size of the task document, as an estimate; 0 if it is small."""
        return self._state.opened.document_bytes

    @property
    def in_flight(self) -> int:
        """Number of nodes with an attempt that is scheduled or running."""
        return len(self._flights)

    @property
    def flying(self) -> KeysView[int]:
        """The nodes whose attempts are scheduled or running."""
        return self._flights.keys()

    @contextmanager
    def flight(self, index: int) -> Iterator[None]:
        """Count an attempt of a node that is scheduled or runs. A node with shards may have several."""
        self._flights[index] += 1
        try:
            yield
        finally:
            self._flights[index] -= 1
            if self._flights[index] <= 0:  # less if `cancel` has given up the attempt before
                del self._flights[index]

    def note_shard(self, started: ShardStarted) -> None:
        """Note that the attempt of a shard has begun. Ignore nodes that run no shards."""
        index = self.scheduler.index_of.get(started.node_id)
        if index is not None and index in self.shards:
            self.shards[index].note_started(started)

    def starts_no_attempts(self) -> bool:
        """Return whether the task must not start an attempt: it is draining, or its cancel was requested."""
        return self.draining or cancel_requested()

    def starts_no_attempt_of(self, node: Node) -> bool:
        """Return whether this node must not start an attempt, also because it is paused, being reset, or
        after a failure.
        """
        scheduler = self.scheduler
        return (
            self.starts_no_attempts()
            or node.index in scheduler.pauses.paused
            or node.index in scheduler.resetting
            or scheduler.must_not_start(node.index)
        )

    def prepare_cancel(self) -> None:
        """Start no more attempts, because the main loop has ended and `cancel` ends the running nodes."""
        self.draining = self.stopping = True

    @property
    def any_ended(self) -> bool:
        """Whether `pop_ended` has a node to return or an error to raise."""
        return bool(self._ended) or self._error is not None

    def start(self, indexes: Iterable[int]) -> None:
        """Start these nodes, except those that must not start any more."""
        indexes = [index for index in indexes if not self.scheduler.must_not_start(index)]
        for index in indexes:
            if self.scheduler.states[index].held_until is not None:
                self._hold(index)
            elif index in self.scheduler.pauses.paused:
                self._park(index)
        starting = [
            (self.scheduler.nodes[index], self.scheduler.states[index])
            for index in indexes
            if index not in self.parked and self.scheduler.states[index].held_until is None
        ]
        if self.local is not None:
            self.local.note_starts(starting, with_conditions=self.scheduler.any_due)
        for node, state in starting:
            started = self._open[node.index] = OpenNode(node.index)
            started.task = asyncio.create_task(self._run(started, node, state))

    async def _run(self, open_node: OpenNode, node: Node, state: NodeState) -> None:
        open_node.begun, status = True, None
        try:
            if open_node.outcome is None:
                status = await run_node(self, node, state)
        except asyncio.CancelledError:
            if open_node.outcome is None and not self.is_given_up():
                raise
        except Exception as error:
            self._error = error
            raise
        if not self.is_given_up():
            self._continue(open_node, status)

    def _continue(self, open_node: OpenNode, status: NodeStatus | None) -> None:
        """End a node with `status`, or with the failure with which it was withdrawn. Otherwise, let it start again.

        If it is paused, it waits for that without a slot.
        """
        index, outcome = open_node.index, open_node.outcome
        if status is not None:
            self._end(index, status)
        elif outcome is not None and outcome is not INTERRUPTED:
            self._fail(index, outcome)
        elif not self.starts_no_attempts():
            self._open.pop(index, None)
            self.start([index])

    def _fail(self, index: int, failure: AttemptFailure) -> None:
        state = self.scheduler.states[index]
        note_failure(state, failure.code, failure.message)
        state.next_retry_at = None
        self._end(index, NodeStatus.FAILED)

    def is_given_up(self) -> bool:
        """Return whether the present asyncio task runs a node that was given up."""
        return asyncio.current_task() in self._given_up

    def _end(self, index: int, status: NodeStatus) -> None:
        """Let the main loop process the end of a node, or hold its failure until an operator decides."""
        if status is NodeStatus.FAILED and self.scheduler.holds_failure(index):
            self._open.pop(index, None)
            self.scheduler.states[index].held_until = HOLD
            self._hold(index)
        else:
            self._note_end(index, status)

    def _note_end(self, index: int, status: NodeStatus) -> None:
        self.parked.discard(index)
        ended = self._open.setdefault(index, OpenNode(index))
        ended.status = status
        self._ended.append(ended)

    def _hold(self, index: int) -> None:
        """Keep a failed node open until an operator decides about it, at most for its `hold_sec`.

        A run that ends hands `held_until` over to the next one, which waits.
        """
        node, state, now = (
            self.scheduler.nodes[index],
            self.scheduler.states[index],
            workflow.now().timestamp(),
        )
        if state.held_until == HOLD:
            state.held_until, state.waits_since = now + (node.hold_sec or 0.0), now
        state.status, state.next_retry_at, state.wait = NodeStatus.DEFERRED, None, None
        state.deadline_at = state.deadline_left = None
        self.document.write_node(index)
        self.parked.discard(index)
        if not self.stopping:
            self._open[index] = OpenNode(index, asyncio.create_task(self._await_decision(node, state)))
        self.wake()

    async def _await_decision(self, node: Node, state: NodeState) -> None:
        left = max((state.held_until or 0.0) - workflow.now().timestamp(), 0.0)
        await workflow.sleep(left, summary=hold_summary(node, left))
        state.held_until = None
        self._note_end(node.index, NodeStatus.FAILED)

    @property
    def active(self) -> set[int]:
        """The nodes that have started, or would have without a pause, and whose end the main loop has not processed."""
        return {*self._open, *self.parked}

    def give_up(self, indexes: Iterable[int]) -> None:
        """Withdraw nodes that start a new generation, or end by a decision. How what they run ends does not count."""
        gone = {*indexes}
        if not gone:
            return
        given_up = [self._open.pop(index) for index in sorted(gone) if index in self._open]
        self.parked.difference_update(gone)
        self._ended = [each for each in self._ended if each.index not in gone]
        for task in [each.task for each in given_up if each.task is not None]:
            self._given_up[task] = None
            task.add_done_callback(lambda task: self._given_up.pop(task, None))
        self._cancel(given_up, reason_codes.INTERRUPTED)

    def withdraw(self, outcomes: Mapping[int, AttemptFailure], reason: str) -> None:
        """Withdraw open nodes, with `outcomes` in place of how what they run or wait for ends.

        With INTERRUPTED, a node starts again as soon as it is not paused; with another failure, it fails. `reason` is
        the cancel reason of the attempts.
        """
        withdrawn = [self._open[index] for index in outcomes if index in self._open]
        withdrawn = [each for each in withdrawn if each.status is None]
        for each in withdrawn:
            if each.outcome is None or each.outcome is INTERRUPTED:
                each.outcome = outcomes[each.index]
        self._cancel(withdrawn, reason)

    def _cancel(self, withdrawn: Iterable[OpenNode], reason: str) -> None:
        """Cancel the waits of nodes at once, and attempts when their cancel flags have reached MongoDB.

        An attempt that is being cancelled already keeps its flag. `flying` shows when an attempt has ended.
        """
        flagged: list[OpenNode] = []
        for each in withdrawn:
            state = self.scheduler.states[each.index]
            if each.index not in self._flights:
                each.cancel()
            elif state.status is NodeStatus.RUNNING:
                state.status = NodeStatus.CANCELLING
                self.document.write_node(each.index, cancel_reason=reason)
                flagged.append(each)
        if flagged:
            cancelling = asyncio.create_task(self._cancel_when_flagged(flagged))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)

    async def _cancel_when_flagged(self, flagged: Iterable[OpenNode]) -> None:
        """Cancel attempts when their flags have reached MongoDB, except those that have ended by themselves."""
        await self.document.await_flags()
        for each in flagged:
            if each.outcome is not None or each.task in self._given_up:
                each.cancel()

    def end_as_decided(self, *ends: NodeEnd) -> None:
        """End open nodes in the state of the task, at once, as a person or a rule has decided."""
        self.give_up(end.index for end in ends)
        for end in ends:
            state = self.scheduler.states[end.index]
            state.wait = None
            if end.failure is not None:
                note_failure(state, *end.failure)
        self.scheduler.end_as_decided({end.index: end.status for end in ends}, self.active)
        # The document shows ends with an outcome already.
        self.scheduler.changed.update(end.index for end in ends if end.outcome is None)
        self.document.write_changed_nodes()
        self.wake()

    def defer(self, index: int, until: float) -> None:
        """Show that a node waits for its retry, and runs no attempt meanwhile."""
        state = self.scheduler.states[index]
        state.status, state.next_retry_at = NodeStatus.DEFERRED, until
        self.wake()
        self.document.write_node(index)

    async def await_retry(self, index: int, wait: Coroutine[Any, Any, None]) -> None:
        """Await `wait`, or until `end_wait` is called for the node."""
        await self.retry_waits.run(index, wait)

    def end_wait(self, index: int) -> None:
        """Let a node, and its shards, start the next attempt without the rest of the wait for a retry.

        A paused node starts it when it is resumed.
        """
        state = self.scheduler.states[index]
        state.next_retry_at = state.retry_left = None
        self.retry_waits.end(index)
        self.document.write_node(index)
        self.wake()

    def fail_with(self, error: Exception) -> None:
        """Let the main loop raise an unexpected error, which fails the workflow task, so that Temporal shows it."""
        self._error = error

    def pause(self, interrupts: Iterable[int]) -> None:
        """Let the nodes that are paused now wait without slots. Stop the attempts of the nodes `interrupts`.

        A node whose attempt is in flight follows when the attempt has ended.
        """
        paused, states = self.scheduler.pauses.paused, self.scheduler.states
        idle = [index for index in self._open if index in paused and index not in self._flights]
        waiting = [index for index in idle if states[index].held_until is None]
        self.withdraw(dict.fromkeys([*interrupts, *waiting], INTERRUPTED), reason_codes.INTERRUPTED)

    def resume(self) -> None:
        """Start the parked nodes that are no longer paused."""
        freed = [index for index in sorted(self.parked) if index not in self.scheduler.pauses.paused]
        self.parked.difference_update(freed)
        now = workflow.now().timestamp()
        for index in freed:
            state = self.scheduler.states[index]
            self._deadlines.resume(index, now)
            if state.retry_left is not None:
                state.next_retry_at, state.retry_left = now + state.retry_left, None
            self._write_parked(index)
        self.start(index for index in freed if not self.scheduler.states[index].status.ended)

    def _park(self, index: int) -> None:
        """Let a paused node wait without a slot. Its deadline and its wait for a retry stand still.

        A delay with `until` keeps its moment: it reads it again when it continues.
        """
        state, now = self.scheduler.states[index], workflow.now().timestamp()
        self.parked.add(index)
        self._deadlines.pause(index, now)
        if state.next_retry_at is not None:
            delay, left = self.scheduler.nodes[index].delay, max(0.0, state.next_retry_at - now)
            state.retry_left = left if delay is None or delay.until is None else None
            state.next_retry_at = None
        if state.epoch > state.first_epoch and state.status is not NodeStatus.DEFERRED:
            state.status = NodeStatus.DEFERRED
        self._write_parked(index)
        self.wake()

    def _write_parked(self, index: int) -> None:
        """Write a node that was paused or resumed, if the document shows it."""
        is_deferred = self.scheduler.states[index].status is NodeStatus.DEFERRED
        if is_deferred or index in self.scheduler.streams.throttling:
            self.document.write_node(index)

    def take_outcome(self, index: int) -> AttemptFailure | None:
        """Return what counts in place of how the attempt of a node has ended, and forget it. None if it counts."""
        open_node = self._open.get(index)
        if open_node is None:
            return None
        outcome, open_node.outcome = open_node.outcome, None
        return outcome

    def pop_ended(self) -> list[tuple[int, NodeStatus]]:
        """Return the nodes that have ended since the last call, with their statuses, in the order in which they ended.

        Raise the unexpected error of a node if there was one.
        """
        if self._error is not None:
            raise self._error
        ended, self._ended = self._ended, []
        for each in ended:
            self._open.pop(each.index, None)
        return [(each.index, each.status) for each in ended if each.status is not None]

    def finished(self) -> list[int]:
        """Return the nodes whose attempts finished although the task was to stop, and which the main loop did not see.

        Their last writes were made, and the document may show them as finished.
        """
        return [each.index for each in self._ended if each.status is NodeStatus.FINISHED]

    def slot_of(self, node: Node, state: NodeState) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds a slot for the next attempt of `node`, in all limits that apply."""
        if self.concurrency is None or node.is_function:
            return self._task_slots.slot(node.type)
        return self.concurrency.slot(node, state, lambda: self._task_slots.slot(node.type))

    def note_runner(self, node: Node, worker: str, version: str) -> None:
        """Note the version with which an attempt of a role ran, and its worker. Do nothing without a version."""
        seen = self._versions.get(node.type)
        if not version or (seen is None and len(self._versions) >= MAX_ROLES):
            return
        if seen is None:
            self._versions[node.type] = {version: worker}
        elif version not in seen and len(seen) < MAX_VERSIONS:
            seen[version] = worker

    def note_pin(self, node: Node, version: str) -> None:
        """Note the version that the task has fixed for the role of a node. Do nothing without a version."""
        if (
            version
            and self.scheduler.pins_versions
            and (node.type in self.pins or len(self.pins) < MAX_ROLES)
        ):
            self.pins[node.type] = version

    def queue_of(self, node: Node) -> str:
        """Return the task queue of the node's next attempt."""
        return queue_of(node, self.settings, self.pins.get(node.type, ""))

    async def await_sources(self, node: Node, wait_sec: float, seen: int | None, summary: str) -> None:
        """Wait after a yield until a source of the node starts an attempt or ends, at most `wait_sec`.

        `seen` is the progress of the sources when the attempt began that has yielded. While no source runs, such as one
        that is held or paused, a further attempt would find nothing, so the wait then has no limit. If
        `seen` is unknown, because the wait began in an earlier run or before a pause, one attempt looks.
        """
        scheduler, state = self.scheduler, self.scheduler.states[node.index]
        known = scheduler.source_progress(node) if seen is None else seen
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: scheduler.source_progress(node) != known, timeout=wait_sec, timeout_summary=summary
            )
        if seen is None or not scheduler.is_stalled(node, seen):
            return
        if state.status is NodeStatus.DEFERRED:
            state.next_retry_at, state.wait = None, wait_for_sources(node, scheduler)
            self.document.write_node(node.index)
            self.wake()
        try:
            await workflow.wait_condition(lambda: not scheduler.is_stalled(node, seen))
        finally:
            state.wait = None

    async def reserve_input_bytes(self, size: int) -> None:
        """Reserve `size` bytes for the input of an activity.

        Waits for a later workflow task if this one already schedules more input than Temporal accepts at once.
        """
        async with self._reserving:
            while not self._fits_workflow_task(size):
                await workflow.sleep(0.001, summary="schedule the next attempts")
            self._reserved += size

    def _fits_workflow_task(self, size: int) -> bool:
        """Return whether this workflow task may schedule `size` more bytes. The first call of each resets the count."""
        length = workflow.info().get_current_history_length()  # It changes with each workflow task.
        if length != self._reserved_at:
            self._reserved, self._reserved_at = 0, length
        return self._reserved == 0 or self._reserved + size <= ACTIVATION_INPUT_BYTES

    def stop(self, failures: Mapping[int, AttemptFailure], reason: str) -> None:
        """End open nodes with these failures, in place of any other outcome, when their attempts have ended.

        `reason` is the cancel reason of the attempts. Nodes that wait, for example for a retry, end at once, and
        approvals with their default decision. The other nodes of the task continue, as far as its rules for failures
        allow.
        """
        live: dict[int, AttemptFailure] = {}
        decided: list[NodeEnd] = []
        for index, failure in failures.items():
            open_node, approval = self._open.get(index), self.scheduler.nodes[index].approval
            if index in self.scheduler.resetting or (open_node is not None and open_node.status is not None):
                continue
            if approval is not None:
                approves = approval.default == APPROVE
                decided.append(end_of_approval(index, approves=approves, comment=failure.message))
            elif open_node is not None and open_node.is_live:
                live[index] = failure
            else:
                self._fail(index, failure)
        if decided:  # Together, because the gates of all nodes are decided anew.
            self.end_as_decided(*decided)
        self.withdraw(live, reason)

    def cancel_local(self) -> None:
        """Cancel the attempts that run inside the engine.

        Commands, such as the one that writes the cancel flags, wait for the end of these attempts.
        """
        for index in sorted(self.local.nodes) if self.local is not None else ():
            if index in self._open:
                self._open[index].cancel()

    async def cancel(self, grace_sec: float) -> None:
        """Cancel the running nodes and wait until they stop, at most `grace_sec`. 0 means without a limit.

        Nothing waits for the attempts that have not stopped by then.
        """
        running = [*(each.task for each in self._open.values() if each.task is not None), *self._given_up]
        for each in running:
            each.cancel()
        if running:
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: all(each.done() for each in running),
                    timeout=grace_sec or None,
                    timeout_summary="let the attempts stop",
                )
        for each in running:
            if each.done() and not each.cancelled():
                each.exception()  # Mark the exception as retrieved; otherwise, asyncio logs it.
        self._open.clear()
        self._flights.clear()


def cancel_requested() -> bool:
    """Return whether a cancel of the task was requested."""
    return workflow.cancellation_reason() is not None


async def run_node(nodes: RunningNodes, node: Node, state: NodeState) -> NodeStatus | None:
    """Store the values by expression of `node`, then run its attempts until it finishes or fails.

    Return None if the task stops before that.
    """
    if nodes.starts_no_attempt_of(node):
        return None
    if node.approval is not None:
        await _await_approval(nodes, node, state)
    if node.delay is not None:
        return await _await_delay(nodes, node, state)
    if node.expressions and not state.evaluated:
        evaluated = await _evaluate_values(nodes, node, state)
        if not evaluated:
            return None if evaluated is None else NodeStatus.FAILED
    if node.parallel > 1:
        processed = await _run_shards(nodes, node, state)
        if processed is not NodeStatus.FINISHED:
            return processed
    return await _run_attempts(nodes, node, state)


async def _run_shards(nodes: RunningNodes, node: Node, state: NodeState) -> NodeStatus | None:
    """Let shards process the batches of a node. Return `Shards.run`.

    The loop begins with the wait for a retry of the attempt that follows them, as `_run_attempts` does.
    """
    await _wait_for_retry(nodes, node, state)
    shards = Shards(nodes, node, state, lambda shard: _run_activity(nodes, node, state, None, shard))
    nodes.shards[node.index], nodes.scheduler.shard_epochs[node.index] = shards, shards.epochs
    try:
        processed = await shards.run()
        if processed is not NodeStatus.FAILED:
            await nodes.before_immediate_retry()
        return processed
    finally:
        if nodes.shards.get(node.index) is shards:
            del nodes.shards[node.index], nodes.scheduler.shard_epochs[node.index]


async def _await_approval(nodes: RunningNodes, node: Node, state: NodeState) -> None:
    """Show that a node waits for an approval. `RunningNodes.end_as_decided` ends the wait."""
    if state.status is not NodeStatus.DEFERRED:  # An earlier run of the task has shown it otherwise.
        state.status, state.waits_since = NodeStatus.DEFERRED, workflow.now().timestamp()
    nodes.document.write_node(node.index)
    nodes.wake()
    await asyncio.get_running_loop().create_future()  # A condition would be checked after each event.


async def _await_delay(nodes: RunningNodes, node: Node, state: NodeState) -> NodeStatus | None:
    """Wait until the delay of a node has passed."""
    now, delay = workflow.now().timestamp(), node.delay
    assert delay is not None
    if state.next_retry_at is None:
        state.next_retry_at = (delay.until or 0.0) if delay.sec is None else now + delay.sec
    state.status = NodeStatus.DEFERRED
    nodes.document.write_node(node.index)
    nodes.wake()
    left = state.next_retry_at - now
    if left > 0:
        await workflow.sleep(left, summary=delay_summary(node, left))
    state.next_retry_at = None
    nodes.scheduler.changed.add(node.index)
    return NodeStatus.FINISHED


async def _run_attempts(nodes: RunningNodes, node: Node, state: NodeState) -> NodeStatus | None:
    """Run attempts of `node`.

    The loop begins with the wait for a retry, because a new run of the workflow (continue-as-new) may start during one.
    """
    seen: int | None = None
    while not nodes.starts_no_attempt_of(node):
        await _wait_for_retry(nodes, node, state, seen)
        ready_at = workflow.now().timestamp()
        async with nodes.slot_of(node, state):
            local = await _choose_local(nodes, node, state)
            if local is None:
                await nodes.reserve_input_bytes(_input_bytes(nodes.scheduler, node))
            if nodes.starts_no_attempt_of(node):
                return None
            seen = nodes.scheduler.source_progress(node)
            failure = await _run_attempt(nodes, node, state, local, ready_at)
        if nodes.stopping or nodes.is_given_up():
            return NodeStatus.FINISHED if failure is None else None
        failure = nodes.take_outcome(node.index) or failure
        if failure is None:
            return NodeStatus.FINISHED
        if not _prepare_retry(nodes, node, state, failure):
            return NodeStatus.FAILED
        if state.next_retry_at is None:
            await nodes.before_immediate_retry()
    return None


async def _evaluate_values(nodes: RunningNodes, node: Node, state: NodeState) -> bool | None:
    """Let an activity store the values by expression of a node. Return whether the node may run.

    Return None if the node must not start any more when its turn comes.
    """
    async with nodes.evaluations:
        request = value_request(nodes.scheduler, node, workflow.info().workflow_id, nodes.settings.deployment)
        await nodes.reserve_input_bytes(_INPUT_OVERHEAD_BYTES + json_size([request.texts, request.nodes]))
        if nodes.starts_no_attempt_of(node):
            return None
        if nodes.local is not None:
            nodes.local.yield_to_ordinary()
        failure = value_failure(node, state, await evaluate_values(request))
    if failure is not None:
        note_failure(state, failure.code, failure.message)
    return failure is None


async def _choose_local(nodes: RunningNodes, node: Node, state: NodeState) -> LocalAttempts | None:
    """Return the local attempts of the task if the next attempt of `node` is one of them, otherwise None."""
    return nodes.local if nodes.local is not None and await nodes.local.choose(node, state) else None


def _input_bytes(scheduler: Scheduler, node: Node) -> int:
    """Return the estimated size of an attempt's input."""
    failed, sources = scheduler.failed_nodes(node), node.pulls_from
    return (
        node.io_bytes
        + _INPUT_OVERHEAD_BYTES
        + (json_size(failed) if failed else 0)
        + (_SOURCE_REPEATS * json_size(sources) if sources else 0)
    )


async def _run_attempt(
    nodes: RunningNodes, node: Node, state: NodeState, local: LocalAttempts | None, ready_at: float
) -> AttemptFailure | None:
    """Run the node's next attempt. Return why it failed, or None if it succeeded."""
    if workflow.now().timestamp() <= ready_at:
        ready_at = 0.0
    result = await _run_activity(nodes, node, state, local, ready_at=ready_at)
    if isinstance(result, AttemptFailure):
        return result
    if node.quarantine is not None:
        state.failed_batches = read_failed_batches(result)
    return None


async def _run_activity(
    nodes: RunningNodes,
    node: Node,
    state: NodeState,
    local: LocalAttempts | None,
    shard: int = 0,
    *,
    ready_at: float = 0.0,
) -> Any:
    """Run the node's next attempt, and return its result, or why it failed.

    `shard` is the number of its shard, if any; `ready_at` since when the attempt has waited, if it has.
    """
    follows_wait, started_at = state.status is NodeStatus.DEFERRED, workflow.now()
    state.epoch += 1
    state.status, state.next_retry_at = NodeStatus.RUNNING, None
    if follows_wait:
        nodes.wake()
    try:
        with nodes.flight(node.index):
            result = await _execute(nodes, node, state, local, shard, ready_at)
    except FailureError as error:
        failure = read_failure(error) or UNREQUESTED_CANCEL
        nodes.note_runner(node, failure.worker, failure.version)
        nodes.note_pin(node, failure.pinned or nodes.pins.get(node.type) or failure.version)
        ran_sec = (workflow.now() - started_at).total_seconds()
        if ran_sec >= _YIELD_RESET_SEC and failure.code not in WORKER_YIELDS:
            state.yields = 0
        return failure if local is None else fall_back(state, error, failure)
    worker, version = read_runner(result)
    nodes.note_runner(node, worker, version)
    nodes.note_pin(node, version)
    return result


async def _execute(
    nodes: RunningNodes,
    node: Node,
    state: NodeState,
    local: LocalAttempts | None,
    shard: int,
    ready_at: float,
) -> Any:
    """Run the activity of the current attempt and return its result.

    The result is not decoded, because a newer worker may return a different type.
    """
    settings = nodes.settings
    attempt = attempt_input(
        nodes.scheduler, settings, workflow.info().workflow_id, node, document_bytes=nodes.document_bytes
    )
    if shard or ready_at:
        attempt = replace(attempt, shard=shard, ready_at=ready_at)
    if local is not None:
        return await local.run(node, state, attempt)
    if nodes.local is not None:
        nodes.local.yield_to_ordinary()
    return await workflow.execute_activity(
        node.io.fn if node.is_function else node.type,
        without_defaults(attempt),
        result_type=RawValue,
        task_queue=nodes.queue_of(node),
        activity_id=f"{node.node_id}.{state.epoch}",
        summary=attempt_summary(node, state, shard),
        heartbeat_timeout=timedelta(seconds=settings.lease_ttl_sec),
        start_to_close_timeout=_NO_TIMEOUT,
        retry_policy=_TEMPORAL_RETRY,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )


def attempt_input(
    scheduler: Scheduler, settings: Settings, task_id: str, node: Node, *, document_bytes: int = 0
) -> AttemptInput:
    """Return the input of the node's current attempt."""
    state, streams = scheduler.states[node.index], scheduler.streams
    followers = streams.followers(node) if node.max_ahead else ()
    return AttemptInput(
        task_id=task_id,
        node_id=node.node_id,
        index=node.index,
        role=node.type,
        epoch=state.epoch,
        generation=state.generation,
        io=node.io,
        sources=_source_epochs(scheduler, node),
        lease_ttl_sec=settings.lease_ttl_sec,
        cancel_grace_sec=settings.cancel_grace_sec,
        deployment=settings.deployment,
        timeout_sec=node.timeout_sec or (settings.function_timeout_sec if node.is_function else None),
        failed_nodes=scheduler.failed_nodes(node),
        signal_first_batch=node.index in streams.children and not state.streamed,
        max_ahead=node.max_ahead if followers else 0,
        followers=followers,
        by_expression=bool(node.expressions),
        parallel=node.parallel,
        maps=node.map is not None,
        quarantine=node.quarantine,
        first_epoch=state.first_epoch,
        kept=state.kept,
        failures=state.failures,
        streams=bool(node.streams_from),
        document_bytes=document_bytes,
        source_first_epochs={}
        if not scheduler.has_generations
        else _first_epochs(scheduler, (*node.pulls_from, *followers, *list_function_sources(node))),
        pin=scheduler.pins_versions and not node.is_function,
    )


def _first_epochs(scheduler: Scheduler, node_ids: Iterable[str]) -> dict[str, int]:
    """Return the first epochs of the generations of these nodes, without those that have had one generation."""
    found = {name: scheduler.index_of[name] for name in node_ids if name in scheduler.index_of}
    return {name: first for name, index in found.items() if (first := scheduler.states[index].first_epoch)}


def _source_epochs(scheduler: Scheduler, node: Node) -> dict[str, int]:
    """Return the epochs of the source nodes, from which `node` pulls artifacts, that have ended."""
    if not node.pulls:
        return {}
    states = {source: scheduler.states[scheduler.index_of[source]] for source in node.pulls_from}
    return {source: state.epoch for source, state in states.items() if state.status.ended and state.epoch}


def queue_of(node: Node, settings: Settings, version: str = "") -> str:
    """Return the task queue of a node's attempts: the queue of its role, or the queue of coordinator functions.

    `version` is the one that the task has fixed for the role, if any.
    """
    if not node.is_function:
        return role_queue(settings.queue, node.type, version)
    built_in = node.io.fn in settings.local_functions
    return settings.queue if built_in else settings.function_queue or settings.queue


def read_failure(error: FailureError) -> AttemptFailure | None:
    """Return the failure that `error` reports, or None if Temporal reports that the attempt was cancelled.

    Errors come from other processes, which may run a newer release or other software. The function therefore accepts
    any form of error; an exception raised here would make the workflow task fail repeatedly.
    """
    match cause_of(error):
        case CancelledError():
            return None
        case AttemptTimeout(type=TimeoutType.START_TO_CLOSE):
            message = "the attempt took longer than timeout_sec"
            return AttemptFailure(kind=FailureKind.FAILURE, code=reason_codes.TIMEOUT, message=message)
        case AttemptTimeout():
            message = "no heartbeat arrived before the lease expired"
            return AttemptFailure(kind=FailureKind.LOSS, code=reason_codes.LEASE_LOST, message=message)
        case ApplicationError() as failure:
            return classify(failure.type, failure.message, failure.details, permanent=failure.non_retryable)
        case other:
            return classify(None, str(other), details=(), permanent=False)


def _prepare_retry(nodes: RunningNodes, node: Node, state: NodeState, failure: AttemptFailure) -> bool:
    """Store the decision about a failed attempt in `state`. Return whether the node runs again."""
    random_value = workflow.random().random() if node.retry_policy.jitter else 0.0
    decision = decide(node.retry_policy, failure, state, random_value)
    if isinstance(decision, Fail):
        note_failure(state, decision.code, decision.message, describe_runner(failure))
        return False
    if decision.after_sec > 0:
        note_failure(state, failure.code, failure.message, describe_runner(failure))
        nodes.defer(node.index, workflow.now().timestamp() + decision.after_sec)
    return True


async def _wait_for_retry(nodes: RunningNodes, node: Node, state: NodeState, seen: int | None = None) -> None:
    """Wait until `next_retry_at`, or after a yield until `RunningNodes.await_sources` returns.

    An action can end the wait.
    """
    if state.next_retry_at is None:
        return
    wait_sec = state.next_retry_at - workflow.now().timestamp()
    if wait_sec <= 0:
        return
    summary = timer_summary(node, state, wait_sec)
    if state.reason_code != FailureKind.YIELDED:
        wait = workflow.sleep(wait_sec, summary=summary)
    else:
        wait = nodes.await_sources(node, wait_sec, seen, summary)
    await nodes.await_retry(node.index, wait)
