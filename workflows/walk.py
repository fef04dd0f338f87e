"""One node, from its opened gate to its end: attempts, backoff, slots.

Acts only; what follows a failure is decided in `policy`.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from flowkit.limits import ACTIVATION_INPUT_BYTES, LAST_ERROR_CHARS
from flowkit.models import AttemptFailure, AttemptInput, AttemptResult, FailureKind, NodeStatus, slim
from flowkit.workflows.failures import NOT_REGISTERED, is_reported, read_failure
from flowkit.workflows.policy import Again, decide
from flowkit.workflows.waiting import attempt_text, timer_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flowkit.models import Node, NodeState, Settings

_NATIVE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=["TemporalTimeout:StartToClose", NOT_REGISTERED],
)
"""Temporal itself retries nothing but a lost heartbeat: everything an executor reports is non-retryable."""

_ONE_TRY = RetryPolicy(maximum_attempts=1)
_LOCAL_TIMEOUT = timedelta(seconds=2)
"""A local activity makes the task deaf to cancels: what takes longer goes through the server."""

_LONGEST_ROW = 50
"""Local activities in a row, which one workflow task may hold; then one goes through the server, where cancels wait."""

_NO_TIMEOUT = timedelta(days=365)
_INPUT_OVERHEAD = 500


@dataclass(kw_only=True)
class Flight:
    """What all nodes of one task share while they run."""

    task_id: str
    settings: Settings
    halted: Callable[[], bool]
    """Whether no attempt may begin any more; asked right before each."""
    epoch_of: Callable[[str], int]
    """Epoch of an ended node, 0 while it is open."""
    stirred: Callable[[int], None]
    """Told when a node begins to wait for its retry, and when it goes on."""
    progress_of: Callable[[Node], int] = lambda node: 0
    """A number that changes when a source of a pulling node begins an attempt or ends."""
    alone: Callable[[], bool] = lambda: False
    """Whether only one node is open, so that a local activity holds nobody up."""
    in_flight: int = 0
    row: int = 0
    """Local activities since the last ordinary one."""
    _slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    _spent: int = 0
    _spent_at: int = -1
    _budget: asyncio.Lock = field(default_factory=asyncio.Lock)

    def slots(self, role: str) -> asyncio.Semaphore:
        """The window of a role."""
        return self._slots.setdefault(role, asyncio.Semaphore(self.settings.window))

    @contextmanager
    def airborne(self) -> Iterator[None]:
        """Count an attempt while it is in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def spend(self, size: int) -> None:
        """Wait for a later workflow task when this one already schedules too many bytes of input."""
        async with self._budget:
            while not self._affords(size):
                await workflow.sleep(0.001, summary="next batch of starts")
            self._spent += size

    def _affords(self, size: int) -> bool:
        now = workflow.info().get_current_history_length()
        if now != self._spent_at:
            self._spent, self._spent_at = 0, now
        return self._spent == 0 or self._spent + size <= ACTIVATION_INPUT_BYTES


async def run_node(flight: Flight, node: Node, state: NodeState) -> NodeStatus | None:
    """Run attempts of `node` until it finished or failed; None when it was stopped before."""
    while not flight.halted():
        await _wait_for_retry(flight, node, state)
        async with flight.slots(node.type):
            await flight.spend(node.io_bytes + _INPUT_OVERHEAD)
            if flight.halted():
                return None
            with flight.airborne():
                failure = await _attempt(flight, node, state)
        if flight.halted() and state.status is NodeStatus.CANCELLING:
            return None
        if failure is None:
            state.last_error = state.reason_code = None
            return NodeStatus.FINISHED
        if not _goes_on(flight, node, state, failure):
            return NodeStatus.FAILED
    return None


async def _wait_for_retry(flight: Flight, node: Node, state: NodeState) -> None:
    if state.next_retry_at is None:
        return
    wait = state.next_retry_at - workflow.now().timestamp()
    if wait <= 0:
        return
    summary = timer_text(node, state, wait)
    if state.reason_code != FailureKind.YIELDED:
        await workflow.sleep(wait, summary=summary)
        return
    seen = flight.progress_of(node)
    with suppress(TimeoutError):
        await workflow.wait_condition(
            lambda: flight.progress_of(node) != seen, timeout=wait, timeout_summary=summary
        )


async def _attempt(flight: Flight, node: Node, state: NodeState) -> AttemptFailure | None:
    waited = state.status is NodeStatus.DEFERRED
    state.epoch += 1
    state.status, state.next_retry_at = NodeStatus.RUNNING, None
    if waited:
        flight.stirred(node.index)
    try:
        await _execute(flight, node, state)
    except FailureError as error:
        unasked = AttemptFailure(kind=FailureKind.FAILURE, code="cancelled_by_worker")
        return read_failure(error) or unasked
    return None


async def _execute(flight: Flight, node: Node, state: NodeState) -> AttemptResult:
    given, settings = slim(attempt_input(flight, node, state)), flight.settings
    if _may_be_quick(flight, node) and (done := await _execute_quickly(node, state, given)) is not None:
        return done
    flight.row = 0
    queue, name, default = f"{settings.queue}.{node.type}", node.type, None
    if node.is_function:
        queue, name, default = settings.queue, node.io.fn, settings.function_timeout_sec
    timeout = node.timeout_sec or default
    result: AttemptResult = await workflow.execute_activity(
        name,
        given,
        result_type=AttemptResult,
        task_queue=queue,
        activity_id=f"{node.node_id}.{state.epoch}",
        summary=attempt_text(node, state),
        heartbeat_timeout=timedelta(seconds=settings.lease_ttl_sec),
        start_to_close_timeout=timedelta(seconds=timeout) if timeout else _NO_TIMEOUT,
        retry_policy=_NATIVE_RETRY,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )
    return result


def _may_be_quick(flight: Flight, node: Node) -> bool:
    built_in = node.is_function and node.io.fn in flight.settings.local_functions
    quick = built_in and flight.alone() and flight.row < _LONGEST_ROW
    flight.row += quick
    return quick


async def _execute_quickly(node: Node, state: NodeState, given: dict[str, Any]) -> AttemptResult | None:
    """One try of a built-in function without a round trip through the server; None when that was not to be."""
    try:
        result: AttemptResult = await workflow.execute_local_activity(
            node.io.fn,
            given,
            result_type=AttemptResult,
            schedule_to_close_timeout=_LOCAL_TIMEOUT,
            retry_policy=_ONE_TRY,
            summary=attempt_text(node, state),
        )
    except FailureError as error:
        if is_cancelled_exception(error) or is_reported(error):
            raise
        return None
    return result


def attempt_input(flight: Flight, node: Node, state: NodeState) -> AttemptInput:
    """What the executor of the node's current attempt gets."""
    return AttemptInput(
        task_id=flight.task_id,
        node_id=node.node_id,
        index=node.index,
        role=node.type,
        epoch=state.epoch,
        generation=state.generation,
        io=node.io,
        sources={parent: epoch for parent in node.pulls_from if (epoch := flight.epoch_of(parent))}
        if node.pulls
        else {},
        lease_ttl_sec=flight.settings.lease_ttl_sec,
        cancel_grace_sec=flight.settings.cancel_grace_sec,
        deployment=flight.settings.deployment,
        qualify_uids=flight.settings.qualify_uids,
    )


def _goes_on(flight: Flight, node: Node, state: NodeState, failure: AttemptFailure) -> bool:
    chance = workflow.random().random() if node.retry_policy.jitter else 0.0
    decision = decide(node.retry_policy, failure, state, chance)
    if isinstance(decision, Again):
        if decision.after > 0:
            note_failure(state, failure.code, failure.message)
            state.status = NodeStatus.DEFERRED
            state.next_retry_at = workflow.now().timestamp() + decision.after
            flight.stirred(node.index)
        return True
    note_failure(state, decision.code, decision.message)
    return False


def note_failure(state: NodeState, code: str, message: str) -> None:
    """Keep what documents and people are told of a failure."""
    state.reason_code = code
    state.last_error = (f"{code}: {message}" if message and message != code else code)[:LAST_ERROR_CHARS]
