"""Classify the failure of an attempt, and decide whether to retry the node and after which backoff. Pure.

`node` uses `classify`, then `decide`, then `note_failure`. The kind of a failure (`FailureKind`) determines its budget:
a failure of the handler uses the retry budget, a loss of the worker the budget of losses, and the others use none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.limits import ID_CHARS, LAST_ERROR_CHARS, REASON_CODE_CHARS, VERSION_CHARS
from flowkit.models import AttemptFailure, FailureKind
from flowkit.text import bounded, prefix, truncate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flowkit.models import NodeState, RetryPolicy

NATIVE_SHUTDOWN = "WorkerShutdown"
"""Type of the error that Temporal's SDK reports for an attempt when its worker shuts down."""

NOT_REGISTERED = "NotFoundError"
"""Type of the error that Temporal's SDK reports when a worker has not registered the activity."""

UNREQUESTED_CANCEL = AttemptFailure(kind=FailureKind.FAILURE, code=reason_codes.CANCELLED_BY_WORKER)
"""The failure of an attempt that ended as cancelled although FlowKit did not cancel it."""

WORKER_YIELDS = frozenset({reason_codes.DISPATCH_LOST, reason_codes.UNCLAIMED_BATCHES})
"""Yields whose cause lies with external workers. Their first repetition has almost no backoff."""

_AT_ONCE_SEC = 0.05

MAX_IDLE_YIELDS = 20
"""So many yields in a row of WORKER_YIELDS, in which no worker makes progress, fail the node."""

MAX_LOSSES = 5
"""Budget of losses in a row in which the node makes no progress: with one more, it fails as `worker_lost`."""

_UNNAMED = reason_codes.UNEXPECTED_ERROR
_LARGEST = 2**31 - 1

_FIXED_BACKOFF_MAX_SEC = 30.0
_FIXED_DOUBLINGS = 5
"""Number of doublings after which a backoff of one second reaches `_FIXED_BACKOFF_MAX_SEC`."""

_LONGEST_BACKOFF_SEC = 365 * 24 * 3600.0
_LARGEST_FACTOR = 1e9
"""Largest product of backoff coefficients; a larger one could exceed the range of a float."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Decision to start the next attempt after `after_sec` seconds."""

    after_sec: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """Decision that the node has failed permanently."""

    code: str
    message: str


def classify(
    error_type: str | None, message: str, details: Iterable[Any], *, permanent: bool
) -> AttemptFailure:
    """Return the failure that an error of an activity reports.

    FlowKit's workers and engines put an `AttemptFailure` into the error's `details`. Errors of other components are
    recognized by their type; those with an unknown type are ordinary failures.
    """
    text = _message(message)
    if error_type == NATIVE_SHUTDOWN:
        return AttemptFailure(kind=FailureKind.HANDOVER, code=reason_codes.WORKER_SHUTDOWN, message=text)
    if error_type == NOT_REGISTERED:
        return AttemptFailure(kind=FailureKind.LOSS, code=reason_codes.DISPATCH_LOST, message=text)
    if (report := find_report(details)) is not None:
        return _read_report(report, error_type, message)
    code = _code(error_type) or _UNNAMED
    return AttemptFailure(kind=FailureKind.FAILURE, code=code, message=text, permanent=permanent)


def find_report(details: Iterable[Any]) -> dict[Any, Any] | None:
    """Return the `AttemptFailure`, as a dict, in the details of an error. None if FlowKit did not report the error."""
    return next((each for each in details if isinstance(each, dict) and "kind" in each), None)


def _read_report(report: dict[Any, Any], error_type: str | None, message: str) -> AttemptFailure:
    """Read the report of a worker or engine. Ignore unknown keys; treat an unknown kind as a failure."""
    text = report.get("message")
    return AttemptFailure(
        kind=_kind(report["kind"]),
        code=_code(report.get("code")) or _code(error_type) or _UNNAMED,
        message=_message(text if isinstance(text, str) else message),
        permanent=report.get("permanent") is True,
        current_epoch=_whole(report.get("current_epoch")),
        worker=_short(report.get("worker"), ID_CHARS),
        version=_short(report.get("version"), VERSION_CHARS),
        pinned=_short(report.get("pinned"), VERSION_CHARS),
        settled=_whole(report.get("settled")),
        lost_at=_seconds(report.get("lost_at")),
    )


def _short(value: object, chars: int) -> str:
    return bounded(value, chars) if isinstance(value, str) else ""


def _kind(value: object) -> FailureKind:
    return next((kind for kind in FailureKind if kind.value == value), FailureKind.FAILURE)


def _code(value: object) -> str:
    return prefix(value, REASON_CODE_CHARS) if isinstance(value, str) else ""


def _message(text: str) -> str:
    return bounded(text, LAST_ERROR_CHARS)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value is not True and 0 <= value <= _LARGEST else 0


def _seconds(value: object) -> float:
    return value if isinstance(value, float) and 0 <= value < math.inf else 0.0


def decide(
    policy: RetryPolicy,
    failure: AttemptFailure,
    state: NodeState,
    random_value: float,
    *,
    loss_counts: bool = True,
) -> Retry | Fail:
    """Count `failure` in `state` and decide whether to retry.

    `retry_policy.max` limits failures, and MAX_LOSSES limits losses in a row without progress: the
    generation has stored or set aside no further batch meanwhile. Hand-overs, epoch conflicts and yields do
    not count against any budget, but MAX_IDLE_YIELDS limits the yields of external workers in a row. A
    fenced attempt is outdated, so its node fails without a retry. `random_value`, from 0 to 1, determines
    the jitter. `loss_counts` is False for a loss that belongs to one that has counted (`is_same_loss`).
    """
    state.free = failure.kind is not FailureKind.FAILURE
    match failure.kind:
        case FailureKind.HANDOVER:
            return Retry(after_sec=0.0)
        case FailureKind.EPOCH_TAKEN:
            state.epoch = max(state.epoch, failure.current_epoch)
            return Retry(after_sec=0.0)
        case FailureKind.YIELDED:
            return _after_yield(failure, state)
        case FailureKind.LOSS:
            return _after_loss(failure, state, counts=loss_counts)
        case FailureKind.FENCED:
            return Fail(code=failure.code, message=failure.message)
    return _after_failure(policy, failure, state, random_value)


def is_same_loss(counted_at: float, lost_at: float, lease_ttl_sec: float) -> bool:
    """Return whether two losses of attempts of one node have probably the same cause, such as a worker that ran both.

    The heartbeats of a worker, and an outage of Temporal, end for all its attempts at about the same time.
    An attempt that takes over the work of a lost one begins a lease later.
    """
    return lost_at < counted_at + lease_ttl_sec / 2


def _after_yield(failure: AttemptFailure, state: NodeState) -> Retry | Fail:
    in_a_row = state.reason_code == failure.code or {state.reason_code, failure.code} <= WORKER_YIELDS
    state.yields = 1 if _note_progress(failure, state) or not in_a_row else state.yields + 1
    if failure.code in WORKER_YIELDS and state.yields >= MAX_IDLE_YIELDS:
        message = (
            f"no worker made progress in {state.yields} attempts in a row, the last one: {failure.message}; check the "
            "workers of the role, their status topic and their batch uids"
        )
        return Fail(code=failure.code, message=message)
    return Retry(after_sec=yield_backoff(failure.code, state.yields))


def _after_loss(failure: AttemptFailure, state: NodeState, *, counts: bool) -> Retry | Fail:
    _note_progress(failure, state)
    state.losses += counts
    if state.losses > MAX_LOSSES:
        message = (
            f"the node lost the process that ran it {state.losses} times without storing a further "
            "batch, the last time "
            f"as {failure.code}"
        )
        return Fail(code=reason_codes.WORKER_LOST, message=message)
    return Retry(after_sec=fixed_backoff(state.losses))


def _note_progress(failure: AttemptFailure, state: NodeState) -> bool:
    """Forget earlier losses, and return True, if the generation has stored or set aside further batches since."""
    if failure.settled <= state.settled:
        return False
    state.settled, state.losses = failure.settled, 0
    return True


def _after_failure(
    policy: RetryPolicy, failure: AttemptFailure, state: NodeState, random_value: float
) -> Retry | Fail:
    state.failures += 1
    if failure.permanent or failure.code in policy.permanent_on or state.failures > policy.max:
        return Fail(code=failure.code, message=failure.message)
    return Retry(after_sec=backoff(policy, state.failures, random_value))


def backoff(policy: RetryPolicy, retry: int, random_value: float) -> float:
    """Return the backoff in seconds, as `policy` defines it, before retry number `retry`, counted from 1."""
    wait = policy.backoff_sec
    if policy.backoff_coefficient > 1.0 and wait > 0:
        steps = min(float(retry - 1), math.log(_LARGEST_FACTOR) / math.log(policy.backoff_coefficient))
        wait *= float(policy.backoff_coefficient) ** steps
    if policy.max_backoff_sec is not None:
        wait = min(wait, policy.max_backoff_sec)
    return min(wait, _LONGEST_BACKOFF_SEC) * (1.0 - policy.jitter * random_value)


def fixed_backoff(count: int) -> float:
    """Return the backoff in seconds after the `count`-th loss or yield, counted from 1: 1, 2, 4, … up to 30.

    It does not depend on the node's retry policy.
    """
    doublings = min(max(count - 1, 0), _FIXED_DOUBLINGS)
    return min(2.0**doublings, _FIXED_BACKOFF_MAX_SEC)


def yield_backoff(code: str, count: int) -> float:
    """Return the backoff in seconds after the `count`-th consecutive yield with this code, counted from 1.

    The first backoff is almost zero if an external worker dropped a command or missed inputs.
    """
    if code not in WORKER_YIELDS:
        return fixed_backoff(count)
    return _AT_ONCE_SEC if count == 1 else fixed_backoff(count - 1)


def note_failure(state: NodeState, code: str, message: str, ran_by: str = "") -> None:
    """Store the reason code and the error text of a failure in `state`, truncated to their limits.

    `ran_by` (`describe_runner`) ends the text.
    """
    state.reason_code = code[:REASON_CODE_CHARS]
    text = f"{code}: {message}" if message and message != code else code
    state.last_error = truncate(text, LAST_ERROR_CHARS - len(ran_by)) + ran_by


def describe_runner(failure: AttemptFailure) -> str:
    """Return the worker whose handler failed and its version, to follow the error; empty if no handler failed."""
    if not failure.worker:
        return ""
    return f" (worker {failure.worker}{f', version {failure.version}' if failure.version else ''})"
