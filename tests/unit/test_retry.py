"""The decision after a failed attempt."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.property_examples import examples

from flowkit.models import AttemptFailure, FailureKind, NodeState, RetryPolicy
from flowkit.workflows.retry import (
    MAX_IDLE_YIELDS,
    MAX_LOSSES,
    Fail,
    Retry,
    backoff,
    classify,
    decide,
    is_same_loss,
)

BOOM = AttemptFailure(kind=FailureKind.FAILURE, code="boom", message="it broke")
LOST = AttemptFailure(kind=FailureKind.LOSS, code="lease_lost", message="no heartbeat")
HANDOVER = AttemptFailure(kind=FailureKind.HANDOVER, code="worker_stopping")
TAKEN = AttemptFailure(kind=FailureKind.EPOCH_TAKEN, code="epoch_taken", current_epoch=7)
YIELDED = AttemptFailure(kind=FailureKind.YIELDED, code="yielded", message="no source runs")
MONGO_UNAVAILABLE = AttemptFailure(
    kind=FailureKind.YIELDED, code="mongo_unavailable", message="MongoDB is away"
)
FENCED = AttemptFailure(kind=FailureKind.FENCED, code="fenced", message="a newer attempt")

DISPATCH_LOST = AttemptFailure(kind=FailureKind.YIELDED, code="dispatch_lost", message="not accepted")
UNCLAIMED = AttemptFailure(kind=FailureKind.YIELDED, code="unclaimed_batches", message="3 batches")

YEAR_SEC = 365 * 24 * 3600
SECONDS = st.floats(0, YEAR_SEC) | st.integers(0, YEAR_SEC)
COEFFICIENTS = (
    st.floats(1, sys.float_info.max)
    | st.integers(1, int(sys.float_info.max))
    | st.sampled_from([1.0000000000000002, 1 + 1e-12, 2, 10**300])
)


def failing(code: str, *, permanent: bool = False) -> AttemptFailure:
    """Return a reported failure."""
    return AttemptFailure(kind=FailureKind.FAILURE, code=code, message="why", permanent=permanent)


def again(policy: RetryPolicy, failure: AttemptFailure, state: NodeState, random_value: float = 0.0) -> float:
    """Return the seconds until the next attempt, and check that there is one."""
    decision = decide(policy, failure, state, random_value)
    assert isinstance(decision, Retry)
    return decision.after_sec


@pytest.mark.parametrize("retries", [0, 1, 2, 5])
def test_max_is_the_number_of_retries(retries: int) -> None:
    policy, state = RetryPolicy(max=retries), NodeState()
    for _ in range(retries):
        again(policy, BOOM, state)
    assert decide(policy, BOOM, state, 0.0) == Fail(code="boom", message="it broke")
    assert state.failures == retries + 1


def test_default_is_two_retries_after_300_seconds() -> None:
    state = NodeState()
    assert [again(RetryPolicy(), BOOM, state) for _ in range(2)] == [300.0, 300.0]
    assert isinstance(decide(RetryPolicy(), BOOM, state, 0.0), Fail)


@pytest.mark.parametrize("code", ["bad_input", "schema_mismatch"])
def test_default_permanent_reasons_are_never_retried(code: str) -> None:
    assert decide(RetryPolicy(), failing(code), NodeState(), 0.0) == Fail(code=code, message="why")


def test_reasons_in_permanent_on_are_never_retried() -> None:
    policy = RetryPolicy(permanent_on=("teapot",))
    assert isinstance(decide(policy, failing("teapot"), NodeState(), 0.0), Fail)


def test_permanent_on_replaces_the_default_reasons() -> None:
    again(RetryPolicy(permanent_on=("teapot",)), failing("bad_input"), NodeState())


def test_failure_marked_as_permanent_is_never_retried() -> None:
    failure = failing("boom", permanent=True)
    assert decide(RetryPolicy(max=9), failure, NodeState(), 0.0) == Fail(code="boom", message="why")


def test_sixth_loss_ends_the_node_as_worker_lost() -> None:
    policy, state = RetryPolicy(max=0), NodeState()
    for _ in range(5):
        again(policy, LOST, state)
    decision = decide(policy, LOST, state, 0.0)
    assert isinstance(decision, Fail)
    assert decision.code == "worker_lost"
    assert "lease_lost" in decision.message
    assert MAX_LOSSES == 5


def test_only_batches_that_the_generation_had_not_settled_before_restart_the_count_of_losses() -> None:
    policy, state = RetryPolicy(max=0), NodeState()
    for settled in range(20):
        assert again(policy, replace(LOST, settled=settled), state) in (1.0, 2.0)
    for _ in range(4):
        again(policy, replace(LOST, settled=19), state)
    again(policy, replace(UNCLAIMED, settled=20), state)
    for settled in (20, 12, 0, 20, 20):
        again(policy, replace(LOST, settled=settled), state)
    assert isinstance(decide(policy, replace(LOST, settled=20), state, 0.0), Fail)


@pytest.mark.parametrize("settled", ["7", -1, 1.5, True, None, 2**31])
def test_a_wrong_number_of_batches_counts_as_none(settled: object) -> None:
    report = {"kind": "loss", "code": "lease_lost", "settled": settled}
    assert classify("x", "y", [report], permanent=False).settled == 0
    assert classify("x", "y", [{**report, "settled": 7}], permanent=False).settled == 7


def test_losses_within_half_a_lease_have_the_same_cause_and_the_later_one_does_not_count() -> None:
    assert is_same_loss(100.0, 100.0, 45.0)
    assert is_same_loss(100.0, 122.4, 45.0)
    assert is_same_loss(100.0, 40.0, 45.0)
    assert not is_same_loss(100.0, 122.5, 45.0)
    assert not is_same_loss(-math.inf, 100.0, 45.0)
    state = NodeState(losses=5)
    decision = decide(RetryPolicy(max=0), LOST, state, 0.0, loss_counts=False)
    assert (decision, state.losses) == (Retry(after_sec=16.0), 5)


@pytest.mark.parametrize("lost_at", ["soon", -1.0, math.inf, math.nan, True, None])
def test_a_wrong_time_of_a_loss_counts_as_unknown(lost_at: object) -> None:
    report = {"kind": "loss", "code": "lease_lost", "lost_at": lost_at}
    assert classify("x", "y", [report], permanent=False).lost_at == 0.0
    assert classify("x", "y", [{**report, "lost_at": 12.5}], permanent=False).lost_at == 12.5


def test_waits_after_losses_grow_from_1_to_30_seconds() -> None:
    state = NodeState()
    waits = [again(RetryPolicy(), LOST, state) for _ in range(MAX_LOSSES)]
    assert waits == sorted(waits)
    assert waits[0] == 1.0
    assert len(set(waits)) > 1
    assert waits[-1] <= 30.0


def test_retry_policy_does_not_apply_to_losses() -> None:
    policy = RetryPolicy(max=0, backoff_sec=900.0, permanent_on=("lease_lost",))
    assert again(policy, LOST, NodeState()) == 1.0


def test_losses_do_not_use_the_retry_budget() -> None:
    policy, state = RetryPolicy(max=1, backoff_sec=5.0), NodeState(losses=5)
    assert again(policy, BOOM, state) == 5.0
    assert (state.failures, state.losses) == (1, 5)


def test_failures_do_not_use_the_loss_budget() -> None:
    state = NodeState(failures=2)
    assert again(RetryPolicy(), LOST, state) == 1.0
    assert (state.failures, state.losses) == (2, 1)


@settings(max_examples=examples(60))
@given(kinds=st.lists(st.sampled_from([BOOM, LOST, HANDOVER, TAKEN]), max_size=30), retries=st.integers(0, 6))
def test_each_budget_is_used_up_only_by_its_own_kind(kinds: list[AttemptFailure], retries: int) -> None:
    state = NodeState()
    for at, failure in enumerate(kinds, start=1):
        decision = decide(RetryPolicy(max=retries), failure, state, 0.0)
        failures, losses = (kinds[:at].count(kind) for kind in (BOOM, LOST))
        assert (state.failures, state.losses) == (failures, losses)
        assert isinstance(decision, Fail) == (failures > retries or losses > MAX_LOSSES)
        if isinstance(decision, Fail):
            return


def test_hand_over_restarts_immediately_without_using_budget() -> None:
    state = NodeState(epoch=4)
    assert [again(RetryPolicy(max=0), HANDOVER, state) for _ in range(20)] == [0.0] * 20
    assert state == NodeState(epoch=4, free=True)


def test_epoch_conflict_restarts_immediately_with_a_higher_epoch_without_using_budget() -> None:
    state = NodeState(epoch=2)
    assert again(RetryPolicy(max=0), TAKEN, state) == 0.0
    assert state == NodeState(epoch=7, free=True)


def test_epoch_conflict_never_lowers_the_epoch() -> None:
    state = NodeState(epoch=9)
    again(RetryPolicy(), TAKEN, state)
    assert state.epoch == 9


def test_fenced_attempt_ends_permanently_and_is_not_counted() -> None:
    state = NodeState()
    assert decide(RetryPolicy(), FENCED, state, 0.0) == Fail(code="fenced", message="a newer attempt")
    assert state == NodeState(free=True)


def yields(failure: AttemptFailure, state: NodeState, count: int) -> list[float]:
    """Return the waits after consecutive yields, recording the state as the workflow does."""
    waits = []
    for _ in range(count):
        waits.append(again(RetryPolicy(max=0), failure, state))
        state.reason_code = failure.code
    return waits


@pytest.mark.parametrize("failure", [YIELDED, MONGO_UNAVAILABLE], ids=["yielded", "mongo_unavailable"])
def test_waits_after_yields_double_from_1_to_30_seconds_without_using_budget(failure: AttemptFailure) -> None:
    state = NodeState()
    assert yields(failure, state, 8) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (state.failures, state.losses, state.free) == (0, 0, True)


def test_waits_after_yields_start_again_when_the_reason_changes() -> None:
    state = NodeState()
    assert yields(YIELDED, state, 3) == [1.0, 2.0, 4.0]
    assert yields(MONGO_UNAVAILABLE, state, 2) == [1.0, 2.0]
    assert yields(YIELDED, state, 1) == [1.0]


def test_waits_after_yields_start_again_after_a_failure() -> None:
    policy, state = RetryPolicy(max=9), NodeState()
    yields(MONGO_UNAVAILABLE, state, 4)
    again(policy, BOOM, state)
    state.reason_code = BOOM.code
    assert not state.free
    assert yields(MONGO_UNAVAILABLE, state, 1) == [1.0]


@pytest.mark.parametrize("failures", [[DISPATCH_LOST], [UNCLAIMED], [DISPATCH_LOST, UNCLAIMED]])
def test_twenty_yields_in_a_row_without_progress_of_a_worker_fail_the_node(
    failures: list[AttemptFailure],
) -> None:
    state = NodeState()
    for number in range(MAX_IDLE_YIELDS - 1):
        yields(failures[number % len(failures)], state, 1)
    decision = decide(RetryPolicy(), failures[-1], state, 0.0)
    assert isinstance(decision, Fail)
    assert decision.code == failures[-1].code
    assert decision.message.startswith("no worker made progress in 20 attempts in a row")
    assert failures[-1].message in decision.message


@pytest.mark.parametrize("between", [replace(UNCLAIMED, settled=1), LOST], ids=["progress", "loss"])
def test_progress_or_another_end_restarts_the_count_of_yields(between: AttemptFailure) -> None:
    state = NodeState()
    yields(UNCLAIMED, state, MAX_IDLE_YIELDS - 1)
    again(RetryPolicy(), between, state)
    state.reason_code = between.code
    assert yields(UNCLAIMED, state, 2)[-1] <= 2.0


def test_the_1025th_yield_waits_like_the_one_before() -> None:
    state = NodeState(yields=1_024, reason_code="yielded")
    assert again(RetryPolicy(), YIELDED, state) == 30.0


@settings(max_examples=examples(100))
@given(
    failure=st.sampled_from([BOOM, LOST, HANDOVER, TAKEN, YIELDED, MONGO_UNAVAILABLE, FENCED]),
    failures=st.integers(0, 10**6),
    losses=st.integers(0, 10**6),
    yielded=st.integers(0, 10**6),
    retries=st.integers(0, 10**6),
    seconds=SECONDS,
    coefficient=COEFFICIENTS,
    cap=st.none() | SECONDS,
    jitter=st.floats(0, 1),
    random_value=st.floats(0, 1),
)
def test_any_valid_counts_and_policy_give_a_finite_wait(
    failure: AttemptFailure,
    failures: int,
    losses: int,
    yielded: int,
    retries: int,
    seconds: float,
    coefficient: float,
    cap: float | None,
    jitter: float,
    random_value: float,
) -> None:
    policy = RetryPolicy(
        max=retries, backoff_sec=seconds, backoff_coefficient=coefficient, max_backoff_sec=cap, jitter=jitter
    )
    state = NodeState(failures=failures, losses=losses, yields=yielded, reason_code=failure.code)
    decision = decide(policy, failure, state, random_value)
    if isinstance(decision, Retry):
        assert 0.0 <= decision.after_sec <= YEAR_SEC
        assert isinstance(decision.after_sec, float)


def test_without_a_coefficient_all_waits_are_equal() -> None:
    assert [backoff(RetryPolicy(backoff_sec=7.0), n, 0.5) for n in (1, 2, 30)] == [7.0, 7.0, 7.0]


def test_coefficient_multiplies_each_further_wait() -> None:
    policy = RetryPolicy(max=9, backoff_sec=10.0, backoff_coefficient=2.0)
    state = NodeState()
    assert [again(policy, BOOM, state) for _ in range(4)] == [10.0, 20.0, 40.0, 80.0]


def test_losses_between_failures_do_not_lengthen_the_backoff() -> None:
    policy, state = RetryPolicy(max=9, backoff_sec=10.0, backoff_coefficient=2.0), NodeState()
    waits = [again(policy, failure, state) for failure in (BOOM, LOST, LOST, BOOM)]
    assert (waits[0], waits[3]) == (10.0, 20.0)


def test_maximum_limits_every_wait() -> None:
    policy = RetryPolicy(backoff_sec=10.0, backoff_coefficient=2.0, max_backoff_sec=25.0)
    assert [backoff(policy, n, 0.0) for n in (1, 2, 3, 4)] == [10.0, 20.0, 25.0, 25.0]


def test_maximum_of_zero_retries_immediately() -> None:
    assert backoff(RetryPolicy(max_backoff_sec=0.0), 1, 0.0) == 0.0


@pytest.mark.parametrize("random_value, wait", [(0.0, 100.0), (0.5, 90.0), (1.0, 80.0)])
def test_jitter_randomly_shortens_the_wait(random_value: float, wait: float) -> None:
    assert backoff(RetryPolicy(backoff_sec=100.0, jitter=0.2), 1, random_value) == pytest.approx(wait)


def test_jitter_is_subtracted_from_the_limited_wait() -> None:
    policy = RetryPolicy(backoff_sec=100.0, max_backoff_sec=50.0, jitter=1.0)
    assert backoff(policy, 1, 0.5) == pytest.approx(25.0)


@pytest.mark.parametrize("seconds", [0.05, 0.001, 1.5])
def test_fractional_seconds_count(seconds: float) -> None:
    assert again(RetryPolicy(backoff_sec=seconds), BOOM, NodeState()) == seconds


def test_backoff_of_zero_stays_zero() -> None:
    assert backoff(RetryPolicy(backoff_sec=0.0, backoff_coefficient=10.0), 50, 0.0) == 0.0


@pytest.mark.parametrize("coefficient", [1.5, 10.0, 1e6, 1e300])
def test_large_coefficient_does_not_overflow_a_late_retry(coefficient: float) -> None:
    policy = RetryPolicy(max=1000, backoff_sec=1.0, backoff_coefficient=coefficient, max_backoff_sec=60.0)
    assert backoff(policy, 1000, 0.0) == 60.0


@settings(max_examples=examples(80))
@given(
    seconds=st.floats(0, 1e6),
    coefficient=st.floats(1, 100),
    jitter=st.floats(0, 1),
    retry=st.integers(1, 1000),
    random_value=st.floats(0, 1),
)
def test_wait_is_between_zero_and_the_wait_without_jitter(
    seconds: float, coefficient: float, jitter: float, retry: int, random_value: float
) -> None:
    plain = RetryPolicy(backoff_sec=seconds, backoff_coefficient=coefficient)
    shaken = RetryPolicy(backoff_sec=seconds, backoff_coefficient=coefficient, jitter=jitter)
    assert 0.0 <= backoff(shaken, retry, random_value) <= backoff(plain, retry, random_value) < math.inf
