"""What an attempt's error means to the workflow. Pure: reads Temporal's errors, decides nothing."""

from __future__ import annotations

from typing import Any

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    TimeoutError,
    TimeoutType,
)

from flowkit.models import AttemptFailure, FailureKind

NATIVE_SHUTDOWN = "WorkerShutdown"
"""Type of the error with which a stopping Temporal worker hands an attempt back."""


NOT_REGISTERED = "NotFoundError"
"""Type of the error with which Temporal's library says that a worker does not know an activity."""


def read_failure(error: FailureError) -> AttemptFailure | None:
    """The failure behind `error`; None when the attempt was cancelled."""
    match error.cause if isinstance(error, ActivityError) else error:
        case CancelledError():
            return None
        case TimeoutError() as timeout:
            return _timeout(timeout)
        case ApplicationError() as failure:
            return _reported(failure)
        case other:
            return AttemptFailure(kind=FailureKind.FAILURE, code="unexpected_error", message=str(other))


def _timeout(timeout: TimeoutError) -> AttemptFailure:
    if timeout.type is TimeoutType.START_TO_CLOSE:
        return AttemptFailure(
            kind=FailureKind.FAILURE, code="timeout", message="took longer than timeout_sec"
        )
    return AttemptFailure(kind=FailureKind.LOSS, code="lease_lost", message="the executor fell silent")


def _reported(failure: ApplicationError) -> AttemptFailure:
    if failure.type == NATIVE_SHUTDOWN:
        return AttemptFailure(kind=FailureKind.HANDOVER, code="worker_shutdown", message=failure.message)
    if failure.type == NOT_REGISTERED:
        return AttemptFailure(kind=FailureKind.LOSS, code="dispatch_lost", message=failure.message)
    if detail := _details(failure):
        return AttemptFailure(**{**detail, "kind": FailureKind(detail["kind"])})
    return AttemptFailure(
        kind=FailureKind.FAILURE,
        code=failure.type or "unexpected_error",
        message=failure.message,
        permanent=failure.non_retryable,
    )


def _details(failure: ApplicationError) -> dict[str, Any] | None:
    return next((each for each in failure.details if isinstance(each, dict) and "kind" in each), None)


def is_reported(error: FailureError) -> bool:
    """Whether an executor of ours has judged the attempt; else it was something on the way."""
    failure = application_error(error)
    return failure is not None and _details(failure) is not None


def application_error(error: BaseException) -> ApplicationError | None:
    """The ApplicationError that `error` is or wraps (a local activity raises it bare)."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause if isinstance(cause, ApplicationError) else None
