"""Clocks. Code that reads the time or waits takes a clock, so that tests can control it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from zoneinfo import available_timezones

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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


def steady_sec() -> float:
    """Return the seconds since an arbitrary moment by a clock that is never set, and that runs on while the machine is
    suspended, where the system has one. The holder of a lease judges by it whether others may have taken the lease.
    """
    return time.clock_gettime(_STEADY)


_STEADY: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_OBSERVED = 100_000
"""How many leases one observer remembers. It observes a forgotten one anew."""


class LeaseObserver:
    """Says for how long this process has seen no renewal of a lease, by its own monotonic clock.

    Clocks of machines differ, so no time that the holder has written says when a lease ends. The holder only has to
    change a value of the lease when it renews it. A process that sees the same value for as long as the lease lasts may
    take over what the holder has. One that has just started therefore waits for one whole lease.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds, and is never set."""
        self._seen: OrderedDict[Hashable, tuple[Hashable, float]] = OrderedDict()
        self._clock = clock

    def now(self) -> float:
        """Return the present moment. Ask for it before each read of leases: a process may be frozen after the read."""
        return self._clock()

    def value_of(self, lease: Hashable) -> Any:
        """Return the value of a lease that this process has seen last; None if it has seen none."""
        known = self._seen.get(lease)
        return None if known is None else known[0]

    def unchanged_sec(self, lease: Hashable, value: Hashable, read_at: float) -> float:
        """Return for how many seconds a lease has had the value that a read, which began at `read_at`, has found.

        Return 0 for a value that an observer sees for the first time, or anew after another one.
        """
        known = self._seen.pop(lease, None)
        since = known[1] if known is not None and known[0] == value else self.now()
        self._seen[lease] = value, since
        if len(self._seen) > _OBSERVED:
            self._seen.popitem(last=False)
        return max(0.0, read_at - since)


@cache
def time_zones() -> frozenset[str]:
    """Return the names of the time zones that this machine knows, with the same meaning on every machine."""
    return frozenset(available_timezones() - {"localtime", "Factory"})
