"""Run one node: its attempts, what follows a failed attempt, and the waits between attempts.

The module follows the order of an attempt:

1. `_run_attempt` increments the epoch.
2. `_execute` schedules the attempt as an activity, or as a local one (`local_attempts`).
3. `read_failure` translates Temporal's error into an `AttemptFailure`, with `retry.classify` for reported errors.
4. `_prepare_retry` stores in the node's state what `retry.decide` returns: another attempt or the node's failure.
5. `_wait_for_retry` waits until the next attempt may start.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

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
from flowkit.models import AttemptFailure, AttemptInput, FailureKind, NodeStatus
from flowkit.temporal_names import role_queue
from flowkit.workflows.budget import json_size
from flowkit.workflows.display.summaries import attempt_summary, timer_summary
from flowkit.workflows.engine_calls import cause_of, without_defaults
from flowkit.workflows.local_attempts import fall_back
from flowkit.workflows.retry import (
    NOT_REGISTERED,
    UNREQUESTED_CANCEL,
    WORKER_YIELDS,
    Fail,
    classify,
    decide,
    note_failure,
)

if TYPE_CHECKING:
    from flowkit.models import Node, NodeState, Settings
    from flowkit.workflows.node_context import NodeRunContext

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

_INPUT_OVERHEAD_BYTES = 500
"""Estimated size of an attempt's input without the node's `io`."""

_SOURCE_REPEATS = 2
"""How often an attempt's input lists the node's sources: in `io` and in `sources`."""


async def run_node(context: NodeRunContext, node: Node, state: NodeState) -> NodeStatus | None:
    """Run attempts of `node` until it finishes or fails. Return None if the task stops before that.

    The loop begins with the wait for a retry, because a new run of the workflow (continue-as-new) may start during one.
    """
    while not context.is_draining():
        await _wait_for_retry(context, node, state)
        async with context.slot_of(node, state):
            local = await context.local.choose(node, state)
            if not local:
                await context.reserve_input_bytes(_input_bytes(context, node))
            if context.is_draining():
                return None
            with context.count_in_flight():
                failure = await _run_attempt(context, node, state, local=local)
        if context.is_stopping():
            return None
        failure = context.stop_failure(node.index) or failure
        if failure is None:
            state.last_error = state.reason_code = None
            return NodeStatus.FINISHED
        if not _prepare_retry(context, node, state, failure):
            return NodeStatus.FAILED
        if state.next_retry_at is None:
            await context.before_immediate_retry()
    return None


def _input_bytes(context: NodeRunContext, node: Node) -> int:
    """Return the estimated size of an attempt's input."""
    failed, sources = context.failed_nodes(node), node.pulls_from
    return (
        node.io_bytes
        + _INPUT_OVERHEAD_BYTES
        + (json_size(failed) if failed else 0)
        + (_SOURCE_REPEATS * json_size(sources) if sources else 0)
    )


async def _run_attempt(
    context: NodeRunContext, node: Node, state: NodeState, *, local: bool
) -> AttemptFailure | None:
    """Run the node's next attempt. Return why it failed, or None if it succeeded."""
    follows_wait, started_at = state.status is NodeStatus.DEFERRED, workflow.now()
    state.epoch += 1
    state.status, state.next_retry_at = NodeStatus.RUNNING, None
    if follows_wait:
        context.on_retry_state_change(node.index)
    try:
        await _execute(context, node, state, local=local)
    except FailureError as error:
        failure = read_failure(error) or UNREQUESTED_CANCEL
        ran_sec = (workflow.now() - started_at).total_seconds()
        if ran_sec >= _YIELD_RESET_SEC and failure.code not in WORKER_YIELDS:
            state.yields = 0
        return fall_back(state, error, failure) if local else failure
    return None


async def _execute(context: NodeRunContext, node: Node, state: NodeState, *, local: bool) -> None:
    """Run the activity of the current attempt.

    The result is not decoded because the workflow does not use it, and a newer worker may return a different type.
    """
    attempt, settings = attempt_input(context, node, state), context.settings
    if local:
        return await context.local.run(node, state, attempt)
    context.local.hold_for_ordinary()
    await workflow.execute_activity(
        node.io.fn if node.is_function else node.type,
        without_defaults(attempt),
        result_type=RawValue,
        task_queue=queue_of(node, settings),
        activity_id=f"{node.node_id}.{state.epoch}",
        summary=attempt_summary(node, state),
        heartbeat_timeout=timedelta(seconds=settings.lease_ttl_sec),
        start_to_close_timeout=_NO_TIMEOUT,
        retry_policy=_TEMPORAL_RETRY,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
    )


def attempt_input(context: NodeRunContext, node: Node, state: NodeState) -> AttemptInput:
    """Return the input of the node's current attempt."""
    settings, streams = context.settings, context.streams
    followers = streams.followers(node) if node.max_ahead else ()
    return AttemptInput(
        task_id=context.task_id,
        node_id=node.node_id,
        index=node.index,
        role=node.type,
        epoch=state.epoch,
        generation=state.generation,
        io=node.io,
        sources=context.source_epochs(node),
        lease_ttl_sec=settings.lease_ttl_sec,
        cancel_grace_sec=settings.cancel_grace_sec,
        deployment=settings.deployment,
        timeout_sec=node.timeout_sec or (settings.function_timeout_sec if node.is_function else None),
        failed_nodes=context.failed_nodes(node),
        signal_first_batch=bool(streams.children(node.index)) and not state.streamed,
        max_ahead=node.max_ahead if followers else 0,
        followers=followers,
    )


def queue_of(node: Node, settings: Settings) -> str:
    """Return the task queue of a node's attempts: the queue of its role, or the queue of coordinator functions."""
    if not node.is_function:
        return role_queue(settings.queue, node.type)
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


def _prepare_retry(context: NodeRunContext, node: Node, state: NodeState, failure: AttemptFailure) -> bool:
    """Store the decision about a failed attempt in `state`. Return whether the node runs again."""
    random_value = workflow.random().random() if node.retry_policy.jitter else 0.0
    decision = decide(node.retry_policy, failure, state, random_value)
    if isinstance(decision, Fail):
        note_failure(state, decision.code, decision.message)
        return False
    if decision.after_sec > 0:
        note_failure(state, failure.code, failure.message)
        state.status = NodeStatus.DEFERRED
        state.next_retry_at = workflow.now().timestamp() + decision.after_sec
        context.on_retry_state_change(node.index)
    return True


async def _wait_for_retry(context: NodeRunContext, node: Node, state: NodeState) -> None:
    """Wait until `next_retry_at`. After a yield, the wait ends early if a source node starts an attempt or ends."""
    wait_sec = (state.next_retry_at or 0.0) - workflow.now().timestamp()
    if wait_sec <= 0:
        return
    summary = timer_summary(node, state, wait_sec)
    if state.reason_code != FailureKind.YIELDED:
        await workflow.sleep(wait_sec, summary=summary)
        return
    progress = context.source_progress(node)
    with suppress(TimeoutError):
        await workflow.wait_condition(
            lambda: context.source_progress(node) != progress, timeout=wait_sec, timeout_summary=summary
        )
