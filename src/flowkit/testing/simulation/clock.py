"""The time of a simulated task. It passes only while everybody who takes part waits for it, and then at once."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from flowkit.adapters.notifier import waits_for_others

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SETTLED = 12
"""Turns of the event loop without a change after which everybody waits. A notification needs a few to arrive."""


class Party:
    """An attempt, or the script of the test: time stands still while it works."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits = 0
        """How many of its waits, for the clock or for another party, have not ended."""
        self.looked_at = -1
        """Number of changes when it last began to wait for another party."""


_party: ContextVar[Party | None] = ContextVar("flowkit_test_party", default=None)


class Alarm:
    """A call that is due at a moment, unless it is cancelled before."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cancelled = False


_LOOK_AGAIN_SEC = 0.01
"""How soon a party that looks for something new looks again after a change."""


_TICKS = 20
"""Number of parts in which a wait is counted. However long the process is kept from running, one part has passed."""
_LONGEST_TICK_SEC = 60.0
_WORKS = 0.1
"""Share of the processor from which on a process works, and does not only wait."""


class Patience:
    """How many seconds a wait may still take. Those in which the machine did not run this process do not count.

    Of the time in which another thread of the process works, its processor time counts.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._tick = min(seconds / _TICKS, _LONGEST_TICK_SEC)

    async def wait(self, event: asyncio.Event) -> bool:
        """Return True when the event is set, False if that takes too long."""
        while self._left > 0:
            began, worked = time.monotonic(), time.process_time()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick):
                    await event.wait()
            passed = min(time.monotonic() - began, self._tick)
            used = time.process_time() - worked
            self._left -= passed if used < _WORKS * passed else min(used, passed)
            if event.is_set():
                return True
        return False


class VirtualClock:
    """A clock whose time passes only while all parties wait. Waits on it take no real time.

    It is a `flowkit.core.time.Clock`, so that handlers have it as `ctx.clock`.
    """

    def __init__(self, start: float) -> None:
        """Begin at `start`, in seconds since the Unix epoch."""
        self._begun = self.now = start
        self._order = itertools.count()
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._parties: dict[Party, None] = {}
        self._changes = 0
        self._changed = asyncio.Event()

    def now_dt(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now, UTC)

    def now_ms(self) -> int:
        """Return the current time in milliseconds since the Unix epoch."""
        return int(self.now * 1000)

    def mono_ms(self) -> int:
        """Return the milliseconds that have passed."""
        return int((self.now - self._begun) * 1000)

    async def sleep_ms(self, ms: float) -> None:
        """Wait until so much of this clock's time has passed."""
        passed = asyncio.Event()
        alarm = self.at(self.now + max(0.0, ms) / 1000, passed.set)
        try:
            with self.waiting():
                await passed.wait()
        finally:
            alarm.cancelled = True

    def at(self, moment: float, call: Callable[[], object]) -> Alarm:
        """Call `call` at a moment, in seconds since the Unix epoch."""
        alarm = Alarm(call)
        heapq.heappush(self._alarms, (moment, next(self._order), alarm))
        return alarm

    @contextmanager
    def party(self, name: str) -> Iterator[Party]:
        """Let the block take part: no time passes while it does anything but wait."""
        party = Party(name)
        self._parties[party] = None
        token, waits = _party.set(party), waits_for_others.set(self.polling)
        try:
            yield party
        finally:
            waits_for_others.reset(waits)
            _party.reset(token)
            del self._parties[party]
            self.note_change()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let time pass during the block, as far as the present party is concerned."""
        party = _party.get()
        self.note_change()
        if party is None:
            yield
            return
        party.waits += 1
        try:
            yield
        finally:
            party.waits -= 1
            self.note_change()

    @contextmanager
    def polling(self) -> Iterator[float | None]:
        """Let time pass during the block if the present party has looked for something new before, and found nothing.

        A change of anything lets it look again first. It yields how soon, in real seconds; None if nothing has changed.
        """
        party = _party.get()
        if party is None:
            yield None
            return
        has_looked, party.looked_at = party.looked_at == self._changes, self._changes
        party.waits += has_looked
        self._changed.set()
        try:
            yield None if has_looked else _LOOK_AGAIN_SEC
        finally:
            party.waits -= has_looked

    def note_change(self) -> None:
        """Note that something has happened, which others may notice first."""
        self._changes += 1
        self._changed.set()

    @property
    def working(self) -> list[str]:
        """The names of those that do not wait."""
        return [party.name for party in self._parties if not party.waits]

    async def settle(self, longest_sec: float) -> bool:
        """Return True when everybody waits, False after so many seconds without a change (see Patience)."""
        calm, seen, patience = 0, self._changes, Patience(longest_sec)
        while calm < _SETTLED:
            if self.working and not await self._changed_within(patience):
                return False
            await asyncio.sleep(0)
            if self._changes != seen:
                calm, seen, patience = 0, self._changes, Patience(longest_sec)
            else:
                calm = 0 if self.working else calm + 1
        return True

    async def news(self, longest_sec: float) -> bool:
        """Return True when something has happened that others may notice, False after so many seconds without."""
        seen, patience = self._changes, Patience(longest_sec)
        while self._changes == seen and await self._changed_within(patience):
            pass
        return self._changes != seen

    async def _changed_within(self, patience: Patience) -> bool:
        """Return True when something may have happened."""
        self._changed.clear()
        return await patience.wait(self._changed)

    def advance(self) -> bool:
        """Let time pass to the next alarm, and call it. Return False if there is none."""
        while self._alarms:
            moment, _, alarm = heapq.heappop(self._alarms)
            if not alarm.cancelled:
                self.now = max(self.now, moment)
                alarm.call()
                self.note_change()
                return True
        return False
