"""Run one node from the opening of its gate to its end: attempts, backoff and slots.

The module `retry` decides what follows a failure.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, AttemptInput, NodeStatus
from flowkit.temporal_names import role_queue
from flowkit.workflows.failures import NOT_REGISTERED, UNREQUESTED_CANCEL, is_reported, read_failure
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
"""Temporal retries only attempts whose heartbeats stopped. Every error that an executor reports is non-retryable."""

_ONE_TRY = RetryPolicy(maximum_attempts=1)
_LOCAL_TIMEOUT = timedelta(seconds=2)
"""Time limit of a local activity. The workflow receives no cancel requests while a local activity runs."""

_MAX_LOCAL_STREAK = 50
"""Longest run of local activities. A regular activity follows, so that the workflow receives cancel requests."""

_NO_TIMEOUT = timedelta(days=365)
"""Temporal requires a timeout. The executor enforces a node's `timeout_sec`, because it does not count outages."""

_STEADY_SEC = 60.0
"""Run time after which an attempt counts as productive, so that the backoff after yields starts again."""

_INPUT_OVERHEAD = 500


async def run_node(context: NodeRunContext, node: Node, state: NodeState) -> NodeStatus | None:
    """Run attempts of `node` until it finishes or fails. Return None if the task stops before that."""
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
        if not _prepare_retry(context, node, state, failure):
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
    if state.reason_code != reason_codes.YIELDED:
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
        return read_failure(error) or UNREQUESTED_CANCEL
    return None


async def _execute(context: NodeRunContext, node: Node, state: NodeState) -> None:
    """Run an attempt.

    The result is not decoded because the workflow does not use it, and a newer worker may return a different type.
    """
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
    """Return the task queue of a node's attempts: the queue of its role, or the queue of coordinator functions."""
    if not node.is_function:
        return role_queue(settings.queue, node.type)
    own = node.io.fn in settings.local_functions
    return settings.queue if own else settings.function_queue or settings.queue


def _use_local_activity(context: NodeRunContext, node: Node) -> bool:
    built_in = node.is_function and node.io.fn in context.settings.local_functions
    quick = built_in and context.is_only_running_node() and context.local_streak < _MAX_LOCAL_STREAK
    context.local_streak += quick
    return quick


async def _executed_quickly(node: Node, state: NodeState, given: dict[str, Any]) -> bool:
    """Try a built-in function once as a local activity, which saves a round trip through the server.

    Return False if the try failed for a reason other than a cancel or an error that the function reported.
    """
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
    """Return the input of the node's current attempt."""
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


def _prepare_retry(context: NodeRunContext, node: Node, state: NodeState, failure: AttemptFailure) -> bool:
    """Store the decision about a failed attempt in `state`. Return whether the node runs again."""
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
    """Store the reason code and the error text of a failure in `state`, truncated to their limits."""
    state.reason_code = code[:REASON_CODE_CHARS]
    state.last_error = (f"{code}: {message}" if message and message != code else code)[:LAST_ERROR_CHARS]
