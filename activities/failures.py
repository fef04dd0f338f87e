"""The border where our errors become Temporal's: one place decides what is retried natively.

An attempt's failure travels as an AttemptFailure in the error's details; its code is the error's type, so that the
Web UI shows `bad_input` and not `ApplicationError`.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from flowkit.errors import EpochTaken, Fenced, FlowKitError
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind


def refusal(error: FlowKitError) -> ApplicationError:
    """`error` as an engine activity raises it: retried natively only when it says that it may heal.

    A refusal is an answer like any other: Temporal's log need not show it with a traceback.
    """
    category = ApplicationErrorCategory.UNSPECIFIED if error.retryable else ApplicationErrorCategory.BENIGN
    return ApplicationError(
        cut(str(error)), type=error.code, non_retryable=not error.retryable, category=category
    )


def failed_attempt(failure: AttemptFailure) -> ApplicationError:
    """`failure` as an executor reports it: never retried natively, the workflow decides.

    Benign: it is an expected outcome, which Temporal's log need not show with a traceback.
    """
    return ApplicationError(
        cut(failure.message) or failure.code[:REASON_CODE_CHARS],
        asdict(replace(failure, code=failure.code[:REASON_CODE_CHARS], message=cut(failure.message))),
        type=failure.code[:REASON_CODE_CHARS],
        non_retryable=True,
        category=ApplicationErrorCategory.BENIGN,
    )


def from_error(error: FlowKitError) -> AttemptFailure:
    """What one of our own errors means for the attempt that met it."""
    message = cut(str(error))
    match error:
        case EpochTaken():
            return AttemptFailure(
                kind=FailureKind.EPOCH_TAKEN, code=error.code, message=message, current_epoch=error.current
            )
        case Fenced():
            return AttemptFailure(kind=FailureKind.FENCED, code=error.code, message=message)
        case _:
            return AttemptFailure(
                kind=FailureKind.FAILURE, code=error.code, message=message, permanent=not error.retryable
            )


def failure(code: str, message: str, *, permanent: bool) -> AttemptFailure:
    """An attempt that counts against the node's retries."""
    return AttemptFailure(kind=FailureKind.FAILURE, code=code, message=cut(message), permanent=permanent)


def handed_over(message: str) -> AttemptFailure:
    """A worker gives the attempt back: it goes on elsewhere, at no charge."""
    return AttemptFailure(kind=FailureKind.HANDOVER, code="worker_shutdown", message=message)


def lost(code: str, message: str) -> AttemptFailure:
    """The executor of an attempt went away."""
    return AttemptFailure(kind=FailureKind.LOSS, code=code, message=message)


def cut(text: str) -> str:
    """`text`, no longer than `last_error` may be."""
    return text if len(text) <= LAST_ERROR_CHARS else text[: LAST_ERROR_CHARS - 1] + "…"
