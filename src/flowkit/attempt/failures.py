"""Converts FlowKit's errors into Temporal's, and decides which errors Temporal itself retries.

The details of the Temporal error contain the failure of the attempt as an AttemptFailure. The reason code is the type
of the error, so that the Web UI shows `bad_input` instead of `ApplicationError`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from flowkit import reason_codes
from flowkit.core.user_code import error_text, place_of
from flowkit.errors import EpochTaken, Fenced, FlowKitError, RoleHeld, StoreUnavailable, VersionPinned
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import bounded, prefix, truncate

if TYPE_CHECKING:
    from flowkit.masks import AttemptMask


_RAISED_CHARS = LAST_ERROR_CHARS - 900
"""Longest text of an exception; the rest of `last_error` is for its reason code, its place, an advice and
the worker."""


def refusal(error: FlowKitError) -> ApplicationError:
    """Return `error` as an engine activity raises it. Temporal retries it only if it is marked as retryable.

    A non-retryable error is an expected outcome, so it is benign: Temporal's log shows no traceback for it.
    """
    category = ApplicationErrorCategory.UNSPECIFIED if error.retryable else ApplicationErrorCategory.BENIGN
    return ApplicationError(
        cut(str(error)), type=error.code, non_retryable=not error.retryable, category=category
    )


def failed_attempt(failure: AttemptFailure) -> ApplicationError:
    """Return `failure` as the error that an attempt raises. Temporal never retries it; the workflow decides.

    A failed attempt is an expected outcome, so the error is benign: Temporal's log shows no traceback for it.
    """
    code, message = cut_code(failure.code), cut(failure.message)
    return ApplicationError(
        message or code,
        asdict(replace(failure, code=code, message=message)),
        type=code,
        non_retryable=True,
        category=ApplicationErrorCategory.BENIGN,
    )


def from_error(error: FlowKitError) -> AttemptFailure:
    """Return the failure of an attempt that ended with a FlowKitError."""
    message = cut(str(error))
    match error:
        case EpochTaken():
            return AttemptFailure(
                kind=FailureKind.EPOCH_TAKEN, code=error.code, message=message, current_epoch=error.current
            )
        case Fenced():
            return AttemptFailure(kind=FailureKind.FENCED, code=error.code, message=message)
        case VersionPinned():
            return AttemptFailure(
                kind=FailureKind.HANDOVER, code=error.code, message=message, pinned=error.pinned
            )
        case StoreUnavailable() | RoleHeld():
            return yielded(error.code, message)
        case _:
            return AttemptFailure(
                kind=FailureKind.FAILURE, code=error.code, message=message, permanent=not error.retryable
            )


def failure(code: str, message: str, *, permanent: bool) -> AttemptFailure:
    """Return a failure that uses one retry of the node's retry budget."""
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=cut_code(code), message=cut(message), permanent=permanent
    )


def unexpected(error: BaseException) -> AttemptFailure:
    """Return the failure for an exception that no handler classified. It uses one retry of the node's retry budget."""
    return failure(reason_codes.UNEXPECTED_ERROR, describe_raised(error), permanent=False)


def describe_raised(error: BaseException, *, advice: str = "") -> str:
    """Return the text of an exception, the line of the user's code that raised it, and what to do about it.

    A long text is cut before the place, so that `last_error` always has the place.
    """
    place = place_of(error)
    ending = f"{place and f', at {place}'}{advice and f'; {advice}'}"
    return f"{truncate(error_text(error), _RAISED_CHARS)}{ending}"


def without_secrets(found: AttemptFailure, mask: AttemptMask) -> AttemptFailure:
    """Return a failure whose message shows no secret of the attempt."""
    return replace(found, message=cut(mask.error(found.message)))


def timed_out(limit_sec: float) -> AttemptFailure:
    """Return the failure of an attempt that exceeded its time limit of `limit_sec` seconds."""
    return failure(
        reason_codes.TIMEOUT, f"the attempt took longer than {limit_sec:g} s (timeout_sec)", permanent=False
    )


def yielded(code: str, message: str) -> AttemptFailure:
    """Return the yield of an attempt that cannot proceed for an external reason. Its retry uses no budget."""
    return AttemptFailure(kind=FailureKind.YIELDED, code=code, message=cut(message))


def handed_over(message: str) -> AttemptFailure:
    """Return the hand-over of an attempt whose worker shuts down. Another worker continues, which uses no budget."""
    return AttemptFailure(kind=FailureKind.HANDOVER, code=reason_codes.WORKER_SHUTDOWN, message=message)


def lost(code: str, message: str, lost_at: float = 0.0, *, settled: int = 0) -> AttemptFailure:
    """Return the loss of an attempt whose worker disappeared or cannot run it.

    `settled` is the number of batches that the generation of the node has stored or set aside.
    """
    return AttemptFailure(kind=FailureKind.LOSS, code=code, message=message, lost_at=lost_at, settled=settled)


def cut(text: str) -> str:
    """Return `text` as valid UTF-8, truncated to the length limit of `last_error`."""
    return bounded(text, LAST_ERROR_CHARS)


def cut_code(code: str) -> str:
    """Return `code` as valid UTF-8, truncated to the length limit of a reason code."""
    return prefix(code, REASON_CODE_CHARS)
