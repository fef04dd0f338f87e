"""Clocks: what reads the time or waits takes one, so that a test can set it."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol, runtime_checkable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@runtime_checkable
class Clock(Protocol):
    """Where a process takes its time from."""

    def now_dt(self) -> datetime:
        """The time of day, in UTC and aware of it."""

    def now_ms(self) -> int:
        """The same in milliseconds since the epoch."""

    def mono_ms(self) -> int:
        """Milliseconds of a clock that is never set back; good for differences only."""

    async def sleep_ms(self, ms: float) -> None:
        """Wait; others run meanwhile."""


class SystemClock:
    """The machine's time."""

    def now_dt(self) -> datetime:
        """The time of day, in UTC and aware of it."""
        return datetime.now(UTC)

    def now_ms(self) -> int:
        """The same in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def mono_ms(self) -> int:
        """Milliseconds of a clock that is never set back."""
        return time.monotonic_ns() // 1_000_000

    async def sleep_ms(self, ms: float) -> None:
        """Wait."""
        await asyncio.sleep(max(0.0, ms) / 1000)


class ManualClock:
    """A clock that stands still until somebody sleeps on it or sets it forward; sleeping takes no real time."""

    def __init__(self, start_ms: int = 0) -> None:
        self._ms: float = start_ms
        self._slept: float = 0

    def now_dt(self) -> datetime:
        """The time of day, in UTC and aware of it."""
        return _EPOCH + timedelta(milliseconds=self.now_ms())

    def now_ms(self) -> int:
        """The same in milliseconds since the epoch."""
        return int(self._ms)

    def mono_ms(self) -> int:
        """Milliseconds since the clock was made."""
        return int(self._slept)

    def advance_ms(self, ms: float) -> None:
        """Set the clock forward; a negative number changes nothing."""
        self._ms += max(0, ms)
        self._slept += max(0, ms)

    async def sleep_ms(self, ms: float) -> None:
        """Set the clock forward at once, and let others run."""
        self.advance_ms(ms)
        await asyncio.sleep(0)
