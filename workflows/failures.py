"""Translate Temporal's errors into attempt failures. Pure: `retry` decides what happens next.

Errors come from other processes, which may run a newer release or other software. This module therefore accepts any
form of error. An exception raised here would make the workflow task fail repeatedly.
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

from flowkit import reason_codes
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import clean

NATIVE_SHUTDOWN = "WorkerShutdown"
"""Type of the error that a Temporal worker reports for an attempt when the worker shuts down."""


NOT_REGISTERED = "NotFoundError"
"""Type of the error that Temporal's SDK reports when a worker has not registered the activity."""

UNREQUESTED_CANCEL = AttemptFailure(kind=FailureKind.FAILURE, code=reason_codes.CANCELLED_BY_WORKER)
"""The failure of an attempt that ended as cancelled although FlowKit did not cancel it."""

_LARGEST_EPOCH = 2**31 - 1
_UNNAMED = reason_codes.UNEXPECTED_ERROR


def read_failure(error: FailureError) -> AttemptFailure | None:
    """Return the failure that `error` reports, or None if the attempt was cancelled."""
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
            kind=FailureKind.FAILURE, code=reason_codes.TIMEOUT, message="took longer than timeout_sec"
        )
    return AttemptFailure(
        kind=FailureKind.LOSS, code=reason_codes.LEASE_LOST, message="the executor fell silent"
    )


def _reported(failure: ApplicationError) -> AttemptFailure:
    message = _message(failure.message)
    if failure.type == NATIVE_SHUTDOWN:
        return AttemptFailure(kind=FailureKind.HANDOVER, code=reason_codes.WORKER_SHUTDOWN, message=message)
    if failure.type == NOT_REGISTERED:
        return AttemptFailure(kind=FailureKind.LOSS, code=reason_codes.DISPATCH_LOST, message=message)
    if (detail := _details(failure)) is not None:
        return _detailed(detail, failure)
    return AttemptFailure(
        kind=FailureKind.FAILURE,
        code=_code(failure.type) or _UNNAMED,
        message=message,
        permanent=failure.non_retryable,
    )


def _detailed(detail: dict[Any, Any], failure: ApplicationError) -> AttemptFailure:
    """Read the details of an executor's report. Ignore unknown keys; treat an unknown kind as a failure."""
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
    """Return whether a FlowKit executor reported the error; otherwise Temporal or another component raised it."""
    failure = application_error(error)
    return failure is not None and _details(failure) is not None


def application_error(error: BaseException) -> ApplicationError | None:
    """Return the ApplicationError that `error` is or wraps, or None. A local activity raises it unwrapped."""
    cause = error.cause if isinstance(error, ActivityError) else error
    return cause if isinstance(cause, ApplicationError) else None
