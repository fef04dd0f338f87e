"""What an attempt's error means to the workflow. Pure: reads Temporal's errors, decides nothing."""

from __future__ import annotations

from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, TimeoutError, TimeoutType

from flowkit.models import AttemptFailure, FailureKind

NATIVE_SHUTDOWN = "WorkerShutdown"
"""Type of the error with which a stopping Temporal worker hands an attempt back."""


def read_failure(error: ActivityError) -> AttemptFailure | None:
    """The failure behind `error`; None when the attempt was cancelled."""
    match error.cause:
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
    for detail in failure.details:
        if isinstance(detail, dict) and "kind" in detail:
            return AttemptFailure(**{**detail, "kind": FailureKind(detail["kind"])})
    return AttemptFailure(
        kind=FailureKind.FAILURE,
        code=failure.type or "unexpected_error",
        message=failure.message,
        permanent=failure.non_retryable,
    )


def application_error(error: BaseException) -> ApplicationError | None:
    """The ApplicationError that `error` is or wraps (a local activity raises it bare)."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause if isinstance(cause, ApplicationError) else None
