"""Clocks. Code that reads the time or waits takes a clock, so that tests can control it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Protocol, runtime_checkable
from zoneinfo import available_timezones

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@runtime_checkable
class Clock(Protocol):
    """Provides the time and waiting."""

    def now_dt(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the Unix epoch."""

    def mono_ms(self) -> int:
        """Return the time of a monotonic clock in milliseconds, for measuring differences only."""

    async def sleep_ms(self, ms: float) -> None:
        """Wait for `ms` milliseconds without blocking the event loop."""


class SystemClock:
    """The clock of the operating system."""

    def now_dt(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return datetime.now(UTC)

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def mono_ms(self) -> int:
        """Return the time of the monotonic clock in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    async def sleep_ms(self, ms: float) -> None:
        """Wait for `ms` milliseconds; a negative number does not wait."""
        await asyncio.sleep(max(0.0, ms) / 1000)


class ManualClock:
    """A clock for tests. Its time changes only through `advance_ms` and `sleep_ms`, which take no real time."""

    def __init__(self, start_ms: int = 0) -> None:
        self._ms: float = start_ms
        self._slept: float = 0

    def now_dt(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return _EPOCH + timedelta(milliseconds=self.now_ms())

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the Unix epoch."""
        return int(self._ms)

    def mono_ms(self) -> int:
        """Return the milliseconds by which the clock has advanced since its creation."""
        return int(self._slept)

    def advance_ms(self, ms: float) -> None:
        """Advance the clock by `ms` milliseconds; a negative number has no effect."""
        self._ms += max(0, ms)
        self._slept += max(0, ms)

    async def sleep_ms(self, ms: float) -> None:
        """Advance the clock at once, and let other asyncio tasks run."""
        self.advance_ms(ms)
        await asyncio.sleep(0)


@cache
def time_zones() -> frozenset[str]:
    """Return the names of the time zones that this machine knows, with the same meaning on every machine."""
    return frozenset(available_timezones() - {"localtime", "Factory"})
