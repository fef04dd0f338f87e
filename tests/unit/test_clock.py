"""Clocks, JSON and random numbers."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest

from flowkit.core.time import Clock, ManualClock, SystemClock
from flowkit.core.utils import dumps, jitter_ms, loads, stable_hash


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()])
def test_both_clocks_implement_the_clock_protocol(clock: Clock) -> None:
    assert isinstance(clock, Clock)
    assert clock.now_dt().utcoffset() == timedelta(0)
    assert isinstance(clock.now_ms(), int)
    assert isinstance(clock.mono_ms(), int)


def test_system_clock_returns_the_time_of_day() -> None:
    before, reported, after = time.time(), SystemClock().now_ms() / 1000, time.time()
    assert before - 0.001 <= reported <= after
    assert abs(SystemClock().now_dt() - datetime.now(UTC)) < timedelta(seconds=5)


async def test_system_clock_waits_on_a_monotonic_clock() -> None:
    clock = SystemClock()
    before = clock.mono_ms()
    await clock.sleep_ms(20)
    assert clock.mono_ms() - before >= 19
    await clock.sleep_ms(-5)


async def test_sleeping_on_a_manual_clock_advances_it_immediately() -> None:
    clock = ManualClock(1_000)
    await clock.sleep_ms(3_600_000)
    assert (clock.now_ms(), clock.mono_ms()) == (3_601_000, 3_600_000)
    assert clock.now_dt() == datetime(1970, 1, 1, 1, 0, 1, tzinfo=UTC)


async def test_manual_clock_keeps_fractions_and_never_goes_back() -> None:
    clock = ManualClock()
    for _ in range(4):
        await clock.sleep_ms(0.5)
    clock.advance_ms(-100)
    assert (clock.now_ms(), clock.mono_ms()) == (2, 2)


async def test_other_tasks_run_during_a_sleep_on_a_manual_clock() -> None:
    clock, ran = ManualClock(), asyncio.Event()

    async def other() -> None:
        ran.set()

    task = asyncio.create_task(other())
    await clock.sleep_ms(1)
    assert ran.is_set()
    await task


def test_json_is_compact_and_keeps_order_and_non_ascii_letters() -> None:
    value = {"b": [1, None, True], "a": "жук", 7: float("nan")}
    assert dumps(value) == '{"b":[1,null,true],"a":"жук","7":null}'.encode()
    assert loads(dumps(value)) == {"b": [1, None, True], "a": "жук", "7": None}


def test_json_converts_dates_to_text_and_rejects_other_types() -> None:
    assert dumps(datetime(2026, 1, 2, tzinfo=UTC)) == b'"2026-01-02T00:00:00Z"'
    with pytest.raises(ValueError, match="object"):
        dumps(object())


@pytest.mark.parametrize("text", ["", "{", b"\xff"])
def test_invalid_json_raises_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)


@pytest.mark.parametrize(
    ("value", "digest"),
    [
        (
            {"td": "7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90", "n": "extract", "e": 1},
            "66bb98b308392a419eb9aa348dc96402f46a8e40",
        ),
        ({"src": "u", "parent": "b1", "idx": 0}, "ad2b7bfd0ae8f741de96ce46937202d382868d69"),
    ],
)
def test_hash_equals_that_of_the_protocol(value: object, digest: str) -> None:
    assert stable_hash(value) == digest


def test_jitter_stays_within_its_range_and_above_zero() -> None:
    drawn = [jitter_ms(1_000) for _ in range(500)]
    assert min(drawn) >= 800
    assert max(drawn) <= 1_200
    assert len(set(drawn)) > 50
    assert jitter_ms(0) == 0
    assert jitter_ms(100, 0) == 100
    assert all(jitter_ms(100, 3) >= 0 for _ in range(100))
