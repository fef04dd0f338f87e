"""Decide whether to retry a node after a failed attempt, and after which backoff. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.models import FailureKind

if TYPE_CHECKING:
    from flowkit.models import AttemptFailure, NodeState, RetryPolicy

MAX_LOSSES = 5
"""Budget of losses: with one more, the node fails as `worker_lost`."""

_FREE_BACKOFF_MAX_SEC = 30.0
_FREE_DOUBLINGS = 5
"""Number of doublings after which a backoff of one second reaches `_FREE_BACKOFF_MAX_SEC`."""

_LONGEST_BACKOFF_SEC = 365 * 24 * 3600.0
_LARGEST_FACTOR = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Decision to start the next attempt after `after` seconds; `why` is the reason code."""

    after: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    """Decision that the node has failed permanently."""

    code: str
    message: str


def decide(
    policy: RetryPolicy, failure: AttemptFailure, state: NodeState, random_value: float
) -> Retry | Fail:
    """Count `failure` in `state` and decide whether to retry.

    `retry_policy.max` limits failures, and MAX_LOSSES limits losses. Hand-overs, epoch conflicts and yields do not
    count against any budget. `random_value`, from 0 to 1, determines the jitter.
    """
    state.free = failure.kind is not FailureKind.FAILURE
    match failure.kind:
        case FailureKind.HANDOVER:
            return Retry(after=0.0, why=failure.code)
        case FailureKind.EPOCH_TAKEN:
            state.epoch = max(state.epoch, failure.current_epoch)
            return Retry(after=0.0, why=failure.code)
        case FailureKind.YIELDED:
            state.yields = state.yields + 1 if state.reason_code == failure.code else 1
            return Retry(after=free_backoff(state.yields), why=failure.code)
        case FailureKind.LOSS:
            return _after_loss(failure, state)
        case FailureKind.FENCED:
            return Fail(code=failure.code, message=failure.message)
    state.failures += 1
    return _after_failure(policy, failure, state, random_value)


def _after_loss(failure: AttemptFailure, state: NodeState) -> Retry | Fail:
    state.losses += 1
    if state.losses > MAX_LOSSES:
        return Fail(
            code=reason_codes.WORKER_LOST,
            message=f"lost {state.losses} executors, the last as {failure.code}",
        )
    return Retry(after=free_backoff(state.losses), why=failure.code)


def free_backoff(count: int) -> float:
    """Return the backoff in seconds after the `count`-th loss or yield, counted from 1: 1, 2, 4, … up to 30."""
    doublings = min(max(count - 1, 0), _FREE_DOUBLINGS)
    return min(2.0**doublings, _FREE_BACKOFF_MAX_SEC)


def _after_failure(
    policy: RetryPolicy, failure: AttemptFailure, state: NodeState, random_value: float
) -> Retry | Fail:
    if failure.permanent or failure.code in policy.permanent_on or state.failures > policy.max:
        return Fail(code=failure.code, message=failure.message)
    return Retry(after=backoff(policy, state.failures, random_value), why=failure.code)


def backoff(policy: RetryPolicy, retry: int, random_value: float) -> float:
    """Return the backoff in seconds before retry number `retry`, counted from 1."""
    wait = policy.backoff_sec
    if policy.backoff_coefficient > 1.0 and wait > 0:
        steps = min(float(retry - 1), math.log(_LARGEST_FACTOR) / math.log(policy.backoff_coefficient))
        wait *= float(policy.backoff_coefficient) ** steps
    if policy.max_backoff_sec is not None:
        wait = min(wait, policy.max_backoff_sec)
    return min(wait, _LONGEST_BACKOFF_SEC) * (1.0 - policy.jitter * random_value)
