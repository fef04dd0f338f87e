"""The border where our errors become Temporal's: one place decides what is retried natively.

An attempt's failure travels as an AttemptFailure in the error's details; its code is the error's type, so that the
Web UI shows `bad_input` and not `ApplicationError`.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from flowkit.errors import EpochTaken, Fenced, FlowKitError, StoreUnavailable
from flowkit.limits import LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import clean, error_text


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
    code, message = cut_code(failure.code), cut(failure.message)
    return ApplicationError(
        message or code,
        asdict(replace(failure, code=code, message=message)),
        type=code,
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
        case StoreUnavailable():
            return not_now(error.code, message)
        case _:
            return AttemptFailure(
                kind=FailureKind.FAILURE, code=error.code, message=message, permanent=not error.retryable
            )


def failure(code: str, message: str, *, permanent: bool) -> AttemptFailure:
    """An attempt that counts against the node's retries."""
    return AttemptFailure(
        kind=FailureKind.FAILURE, code=cut_code(code), message=cut(message), permanent=permanent
    )


def unexpected(error: BaseException) -> AttemptFailure:
    """An attempt that ended with an exception which nobody has classified; counts against the node's retries."""
    return failure("unexpected_error", error_text(error), permanent=False)


def timed_out(limit_sec: float) -> AttemptFailure:
    """An attempt that took too long."""
    return failure("timeout", f"the attempt took longer than {limit_sec:g} s (timeout_sec)", permanent=False)


def not_now(code: str, message: str) -> AttemptFailure:
    """An attempt that cannot proceed for a reason outside of it: the workflow tries again later, at no charge."""
    return AttemptFailure(kind=FailureKind.YIELDED, code=code, message=cut(message))


def handed_over(message: str) -> AttemptFailure:
    """A worker gives the attempt back: it goes on elsewhere, at no charge."""
    return AttemptFailure(kind=FailureKind.HANDOVER, code="worker_shutdown", message=message)


def lost(code: str, message: str) -> AttemptFailure:
    """The executor of an attempt went away."""
    return AttemptFailure(kind=FailureKind.LOSS, code=code, message=message)


def cut(text: str) -> str:
    """`text` as UTF-8 can carry it, no longer than `last_error` may be."""
    text = clean(text)
    return text if len(text) <= LAST_ERROR_CHARS else text[: LAST_ERROR_CHARS - 1] + "…"


def cut_code(code: str) -> str:
    """`code` as UTF-8 can carry it, no longer than a reason code may be."""
    return clean(code)[:REASON_CODE_CHARS]
