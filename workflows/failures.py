"""What an attempt's error means to the workflow. Pure: reads Temporal's errors, decides nothing.

Errors come from other processes, perhaps of a newer release or not ours at all, so nothing here relies on their form:
an exception would fail the workflow task again and again.
"""

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

from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import clean

NATIVE_SHUTDOWN = "WorkerShutdown"
"""Type of the error with which a stopping Temporal worker hands an attempt back."""


NOT_REGISTERED = "NotFoundError"
"""Type of the error with which Temporal's library says that a worker does not know an activity."""

_LARGEST_EPOCH = 2**31 - 1
_UNNAMED = "unexpected_error"


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
            return AttemptFailure(kind=FailureKind.FAILURE, code=_UNNAMED, message=_message(str(other)))


def _timeout(timeout: TimeoutError) -> AttemptFailure:
    if timeout.type is TimeoutType.START_TO_CLOSE:
        return AttemptFailure(
            kind=FailureKind.FAILURE, code="timeout", message="took longer than timeout_sec"
        )
    return AttemptFailure(kind=FailureKind.LOSS, code="lease_lost", message="the executor fell silent")


def _reported(failure: ApplicationError) -> AttemptFailure:
    message = _message(failure.message)
    if failure.type == NATIVE_SHUTDOWN:
        return AttemptFailure(kind=FailureKind.HANDOVER, code="worker_shutdown", message=message)
    if failure.type == NOT_REGISTERED:
        return AttemptFailure(kind=FailureKind.LOSS, code="dispatch_lost", message=message)
    if (detail := _details(failure)) is not None:
        return _detailed(detail, failure)
    return AttemptFailure(
        kind=FailureKind.FAILURE,
        code=_code(failure.type) or _UNNAMED,
        message=message,
        permanent=failure.non_retryable,
    )


def _detailed(detail: dict[Any, Any], failure: ApplicationError) -> AttemptFailure:
    """What an executor reported. Unknown keys are ignored, and an unknown kind is an ordinary failure."""
    message = detail.get("message")
    return AttemptFailure(
        kind=_kind(detail["kind"]),
        code=_code(detail.get("code")) or _code(failure.type) or _UNNAMED,
        message=_message(message if isinstance(message, str) else failure.message),
        permanent=detail.get("permanent") is True,
        current_epoch=_epoch(detail.get("current_epoch")),
    )


def _kind(value: object) -> FailureKind:
    return next((kind for kind in FailureKind if kind.value == value), FailureKind.FAILURE)


def _code(value: object) -> str:
    return clean(value)[:REASON_CODE_CHARS] if isinstance(value, str) else ""


def _message(text: str) -> str:
    return clean(text)[:LAST_ERROR_CHARS]


def _epoch(value: object) -> int:
    return value if isinstance(value, int) and value is not True and 0 <= value <= _LARGEST_EPOCH else 0


def _details(failure: ApplicationError) -> dict[Any, Any] | None:
    return next((each for each in failure.details if isinstance(each, dict) and "kind" in each), None)


def is_reported(error: FailureError) -> bool:
    """Whether an executor of ours has judged the attempt; else it was something on the way."""
    failure = application_error(error)
    return failure is not None and _details(failure) is not None


def application_error(error: BaseException) -> ApplicationError | None:
    """The ApplicationError that `error` is or wraps (a local activity raises it bare)."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause if isinstance(cause, ApplicationError) else None
