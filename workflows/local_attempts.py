"""Run attempts as local activities, inside the engine that runs the workflow, which saves a round trip through the server."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind
from flowkit.temporal_names import INLINE_ATTEMPT
from flowkit.workflows.display.summaries import attempt_summary, inline_summary
from flowkit.workflows.retry import find_report

if TYPE_CHECKING:
    from flowkit.models import Node, NodeState

_ONCE = RetryPolicy(maximum_attempts=1)
"""Temporal does not retry a local activity, because the workflow receives no cancel requests meanwhile."""

FALLBACK = AttemptFailure(
    kind=FailureKind.HANDOVER, code=reason_codes.NOT_LOCAL, message="the attempt continues as an ordinary one"
)
"""The end of an inline attempt that the engine cannot run. An ordinary attempt follows at once and at no charge."""


async def run_inline(node: Node, state: NodeState, payload: dict[str, Any], *, timeout_sec: float) -> None:
    """Run the node's current attempt inside the engine. Raise FailureError as an ordinary attempt does."""
    await workflow.execute_local_activity(
        INLINE_ATTEMPT,
        payload,
        result_type=RawValue,
        activity_id=f"{node.node_id}.{state.epoch}",
        schedule_to_close_timeout=timedelta(seconds=timeout_sec),
        retry_policy=_ONCE,
        cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        summary=inline_summary(node, state),
    )


async def try_function(node: Node, state: NodeState, payload: dict[str, Any], *, timeout_sec: float) -> bool:
    """Run a built-in function once as a local activity.

    Return whether it succeeded. Raise FailureError if it was cancelled or reported an error; after any other failure,
    such as a timeout, the caller runs it as a regular activity.
    """
    try:
        await workflow.execute_local_activity(
            node.io.fn,
            payload,
            result_type=RawValue,
            schedule_to_close_timeout=timedelta(seconds=timeout_sec),
            retry_policy=_ONCE,
            summary=attempt_summary(node, state),
        )
    except FailureError as error:
        if is_cancelled_exception(error) or is_reported(error):
            raise
        return False
    return True


def falls_back(error: FailureError) -> bool:
    """Return whether an inline attempt must be repeated as an ordinary one.

    Its engine does not host the role, or it did not end in time.
    """
    return not is_cancelled_exception(error) and not is_reported(error)


def is_reported(error: FailureError) -> bool:
    """Return whether a worker or engine of FlowKit reported the error; otherwise, it comes from another component."""
    return _report(error) is not None


def _report(error: FailureError) -> dict[Any, Any] | None:
    cause = cause_of(error)
    return find_report(cause.details) if isinstance(cause, ApplicationError) else None


def cause_of(error: FailureError) -> BaseException | None:
    """Return the error inside an ActivityError. A local activity raises its error without wrapping it."""
    return error.cause if isinstance(error, ActivityError) else error
