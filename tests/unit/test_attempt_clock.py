"""The clock of an attempt excludes waits for MongoDB, even when they overlap."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit.adapters.outages import (
    AttemptClock,
    clock_stopped,
    covered,
    measured_by,
    retry_while_unavailable,
)
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda two: (min(two), max(two))))


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> AttemptClock:
    return AttemptClock(time)


def test_running_time_counts(clock: AttemptClock, time: Time) -> None:
    time.now = 3.0
    assert clock.spent() == 3.0


def test_stopped_time_does_not_count(clock: AttemptClock, time: Time) -> None:
    time.now = 1.0
    with clock.stopped():
        time.now = 61.0
        assert clock.spent() == 1.0
    time.now = 62.0
    assert clock.spent() == 2.0


def test_short_waits_count_so_that_a_busy_handler_times_out(clock: AttemptClock, time: Time) -> None:
    for _ in range(1_000):
        with clock.stopped():
            time.now += 0.01
    assert clock.spent() == pytest.approx(10.0)


def test_overlapping_waits_are_excluded_once(clock: AttemptClock, time: Time) -> None:
    with clock.stopped(), ExitStack() as inner:
        time.now = 5.0
        inner.enter_context(clock.stopped())
        time.now = 8.0
        inner.close()
        time.now = 10.0
        assert clock.spent() == 0.0
    time.now = 11.0
    assert clock.spent() == 1.0


@pytest.mark.parametrize(
    ("limit", "spent", "look"), [(None, 5.0, None), (4.0, 1.0, 3.0), (4.0, 4.0, 0.0), (4.0, 9.0, 0.0)]
)
def test_next_check_is_when_the_limit_can_be_reached(
    clock: AttemptClock, time: Time, limit: float | None, spent: float, look: float | None
) -> None:
    time.now = spent
    assert clock.next_check(limit) == look


def test_stopped_clock_is_checked_regularly(clock: AttemptClock, time: Time) -> None:
    with clock.stopped():
        time.now = 100.0
        assert clock.next_check(0.001) == 0.25


@given(SPANS)
def test_covered_time_is_the_union_of_all_spans(spans: list[tuple[int, int]]) -> None:
    seconds = {second for since, until in spans for second in range(since, until)}
    assert covered(spans) == len(seconds)


async def test_outage_stops_the_clock_of_the_waiting_attempt(clock: AttemptClock, time: Time) -> None:
    failures = [StoreUnavailable("away")] * 3

    async def call() -> str:
        time.now += 60.0
        if failures:
            raise failures.pop()
        return "stored"

    with measured_by(clock):
        assert await retry_while_unavailable(call) == "stored"
    assert clock.spent() == 0.0


@pytest.mark.parametrize("measured", [True, False])
def test_clock_is_stopped_only_within_an_attempt(measured: bool, time: Time) -> None:
    def wait() -> None:
        with clock_stopped():
            time.now += 5.0

    clock = AttemptClock(time)
    call: Callable[[], None] = wait
    if measured:
        with measured_by(clock):
            call()
    else:
        call()
    assert clock.spent() == (0.0 if measured else 5.0)
