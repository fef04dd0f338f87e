"""Errors of activities in the form in which the workflow receives them."""

from __future__ import annotations

from temporalio.exceptions import ActivityError, RetryState


def wrapped(cause: BaseException) -> ActivityError:
    """Return `cause` as the workflow receives it from an activity."""
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="w",
        activity_type="crawler",
        activity_id="extract.1",
        retry_state=RetryState.NON_RETRYABLE_FAILURE,
    )
    error.__cause__ = cause
    return error
