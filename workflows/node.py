"""One node, from its opened gate to its end: attempts, backoff, slots.

Acts only; what follows a failure is decided in `policy`.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, AttemptInput, FailureKind, NodeStatus
from flowkit.workflows.failures import NOT_REGISTERED, is_reported, read_failure
from flowkit.workflows.payloads import slim
from flowkit.workflows.retry import Retry, decide
from flowkit.workflows.summaries import attempt_text, timer_text

if TYPE_CHECKING:
    from flowkit.models import Node, NodeState, Settings
    from flowkit.workflows.node_context import NodeRunContext

_NATIVE_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1),
    backoff_coefficient=1.0,
    non_retryable_error_types=["TemporalTimeout:StartToClose", NOT_REGISTERED],
)
"""Temporal itself retries nothing but a lost heartbeat: everything an executor reports is non-retryable."""

_ONE_TRY = RetryPolicy(maximum_attempts=1)
_LOCAL_TIMEOUT = timedelta(seconds=2)
"""A local activity makes the task deaf to cancels: what takes longer goes through the server."""

_MAX_LOCAL_STREAK = 50
"""Local activities in a row, which one workflow task may hold; then one goes through the server, where cancels wait."""

_NO_TIMEOUT = timedelta(days=365)
"""Temporal asks for a timeout; `timeout_sec` of a node is enforced by the executor, which does not count outages."""

_STEADY_SEC = 60.0
"""An attempt that ran so long was no vain try: the waits after yields begin anew."""

_INPUT_OVERHEAD = 500


async def run_node(context: NodeRunContext, node: Node, state: NodeState) -> NodeStatus | None:
    """Run attempts of `node` until it finished or failed; None when it was stopped before."""
    while not context.draining():
        await _wait_for_retry(context, node, state)
        async with context.slot(node.type):
            await context.reserve_input_bytes(node.io_bytes + _INPUT_OVERHEAD)
            if context.draining():
                return None
            with context.count_in_flight():
                failure = await _attempt(context, node, state)
        if context.draining() and state.status is NodeStatus.CANCELLING:
            return None
        if failure is None:
            state.last_error = state.reason_code = None
            return NodeStatus.FINISHED
        if not _goes_on(context, node, state, failure):
            return NodeStatus.FAILED
        if state.next_retry_at is None:
            await context.repeating()
    return None


async def _wait_for_retry(context: NodeRunContext, node: Node, state: NodeState) -> None:
    if state.next_retry_at is None:
        return
    wait = state.next_retry_at - workflow.now().timestamp()
    if wait <= 0:
        return
    summary = timer_text(node, state, wait)
    if state.reason_code != FailureKind.YIELDED:
        await workflow.sleep(wait, summary=summary)
        return
    seen = context.progress_of(node)
    with suppress(TimeoutError):
        await workflow.wait_condition(
            lambda: context.progress_of(node) != seen, timeout=wait, timeout_summary=summary
        )


async def _attempt(context: NodeRunContext, node: Node, state: NodeState) -> AttemptFailure | None:
    waited, began = state.status is NodeStatus.DEFERRED, workflow.now()
    state.epoch += 1
    state.status, state.next_retry_at = NodeStatus.RUNNING, None
    if waited:
        context.on_retry_state_change(node.index)
    try:
        await _execute(context, node, state)
    except FailureError as error:
        if (workflow.now() - began).total_seconds() >= _STEADY_SEC:
            state.yields = 0
        unasked = AttemptFailure(kind=FailureKind.FAILURE, code="cancelled_by_worker")
        return read_failure(error) or unasked
    return None


async def _execute(context: NodeRunContext, node: Node, state: NodeState) -> None:
    """Run an attempt. Its result is not decoded: nothing depends on it, and a newer worker may return anything."""
    given, settings = slim(attempt_input(context, node, state)), context.settings
    if _use_local_activity(context, node) and await _executed_quickly(node, state, given):
        return
    context.local_streak = 0
    await workflow.execute_activity(
        node.io.fn if node.is_function else node.type,
        given,
        result_type=RawValue,
        task_queue=queue_of(node, settings),
        activity_id=f"{node.node_id}.{state.epoch}",
        summary=attempt_text(node, state),
        heartbeat_timeout=timedelta(seconds=settings.lease_ttl_sec),
        start_to_close_timeout=_NO_TIMEOUT,
        retry_policy=_NATIVE_RETRY,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )


def queue_of(node: Node, settings: Settings) -> str:
    """The task queue of a node's attempts: its role's, or the one of functions."""
    if not node.is_function:
        return f"{settings.queue}.{node.type}"
    own = node.io.fn in settings.local_functions
    return settings.queue if own else settings.function_queue or settings.queue


def _use_local_activity(context: NodeRunContext, node: Node) -> bool:
    built_in = node.is_function and node.io.fn in context.settings.local_functions
    quick = built_in and context.is_only_running_node() and context.local_streak < _MAX_LOCAL_STREAK
    context.local_streak += quick
    return quick


async def _executed_quickly(node: Node, state: NodeState, given: dict[str, Any]) -> bool:
    """One try of a built-in function without a round trip through the server; False when that did not work."""
    try:
        await workflow.execute_local_activity(
            node.io.fn,
            given,
            result_type=RawValue,
            schedule_to_close_timeout=_LOCAL_TIMEOUT,
            retry_policy=_ONE_TRY,
            summary=attempt_text(node, state),
        )
    except FailureError as error:
        if is_cancelled_exception(error) or is_reported(error):
            raise
        return False
    return True


def attempt_input(context: NodeRunContext, node: Node, state: NodeState) -> AttemptInput:
    """What the executor of the node's current attempt gets."""
    settings = context.settings
    return AttemptInput(
        task_id=context.task_id,
        node_id=node.node_id,
        index=node.index,
        role=node.type,
        epoch=state.epoch,
        generation=state.generation,
        io=node.io,
        sources={parent: epoch for parent in node.pulls_from if (epoch := context.epoch_of(parent))}
        if node.pulls
        else {},
        lease_ttl_sec=settings.lease_ttl_sec,
        cancel_grace_sec=settings.cancel_grace_sec,
        deployment=settings.deployment,
        timeout_sec=node.timeout_sec or (settings.function_timeout_sec if node.is_function else None),
        qualify_uids=settings.qualify_uids,
    )


def _goes_on(context: NodeRunContext, node: Node, state: NodeState, failure: AttemptFailure) -> bool:
    random_value = workflow.random().random() if node.retry_policy.jitter else 0.0
    decision = decide(node.retry_policy, failure, state, random_value)
    if isinstance(decision, Retry):
        if decision.after > 0:
            note_failure(state, failure.code, failure.message)
            state.status = NodeStatus.DEFERRED
            state.next_retry_at = workflow.now().timestamp() + decision.after
            context.on_retry_state_change(node.index)
        return True
    note_failure(state, decision.code, decision.message)
    return False


def note_failure(state: NodeState, code: str, message: str) -> None:
    """Keep what documents and people are told of a failure."""
    state.reason_code = code[:REASON_CODE_CHARS]
    state.last_error = (f"{code}: {message}" if message and message != code else code)[:LAST_ERROR_CHARS]
