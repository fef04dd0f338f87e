"""Call the engine's activities, which read and write MongoDB."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, is_cancelled_exception

from flowkit.workflows.display.summaries import fit_summary

_UNLIMITED_RETRIES = RetryPolicy(
    initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10)
)
_ONCE = RetryPolicy(maximum_attempts=1)
_LOCAL_TIMEOUT = timedelta(seconds=2)
_CALL_TIMEOUT = timedelta(seconds=10)

HEARTBEAT_TIMEOUT = timedelta(seconds=10)
"""Time after which Temporal retries an activity that sends heartbeats and whose engine crashed."""


async def call_engine(
    name: str,
    record: object,
    result_type: type[Any] | None = None,
    *,
    summary: str,
    time_limit: timedelta = _CALL_TIMEOUT,
    heartbeat_timeout: timedelta | None = None,
    activity_id: str | None = None,
) -> Any:
    """Run an activity on the engine's task queue, and return its result. Retry it until MongoDB responds.

    `time_limit` limits each try. A cancel ends the wait at once.
    """
    return await workflow.execute_activity(
        name,
        record,
        result_type=result_type,
        activity_id=activity_id,
        start_to_close_timeout=time_limit,
        heartbeat_timeout=heartbeat_timeout,
        retry_policy=_UNLIMITED_RETRIES,
        summary=fit_summary(summary),
    )


async def call_locally_first(
    name: str,
    record: object,
    result_type: type[Any] | None = None,
    *,
    summary: str,
    heartbeat_timeout: timedelta | None = None,
    time_limit: timedelta = _CALL_TIMEOUT,
) -> Any:
    """Run an activity of the engine as a local one, which saves a round trip through the server.

    A local activity has no retries and little time, because the workflow receives no events meanwhile. If it fails, but
    neither because of a cancel nor because the engine rejects the record, the regular activity follows.
    Only that one has `time_limit` and `heartbeat_timeout`.
    """
    try:
        return await workflow.execute_local_activity(
            name,
            record,
            result_type=result_type,
            schedule_to_close_timeout=_LOCAL_TIMEOUT,
            retry_policy=_ONCE,
            summary=fit_summary(summary),
        )
    except FailureError as error:
        if is_cancelled_exception(error) or _is_rejection(error):
            raise
    return await call_engine(
        name,
        record,
        result_type,
        summary=summary,
        time_limit=time_limit,
        heartbeat_timeout=heartbeat_timeout,
    )


def _is_rejection(error: FailureError) -> bool:
    cause = cause_of(error)
    return isinstance(cause, ApplicationError) and cause.non_retryable


def cause_of(error: FailureError) -> BaseException | None:
    """Return the error inside an ActivityError. A local activity raises its error without wrapping it."""
    return error.cause if isinstance(error, ActivityError) else error
