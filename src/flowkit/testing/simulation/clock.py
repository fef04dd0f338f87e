"""The time of a simulated task. It passes only while everybody who takes part waits for it, and then at once."""

from __future__ import annotations

import asyncio
import heapq
import itertools
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
        """Return True when everybody waits, False after so many real seconds in which nothing has happened."""
        loop, calm, seen = asyncio.get_running_loop(), 0, self._changes
        until = loop.time() + longest_sec
        while calm < _SETTLED:
            if self.working:
                try:
                    async with asyncio.timeout_at(until):
                        await self.changed()
                except TimeoutError:
                    return False
            await asyncio.sleep(0)
            if self._changes != seen:
                seen, until = self._changes, loop.time() + longest_sec
                calm = 0
            else:
                calm = 0 if self.working else calm + 1
        return True

    async def news(self, longest_sec: float | None) -> bool:
        """Return True when something has happened that others may notice, False after so many real seconds without."""
        seen = self._changes
        with suppress(TimeoutError):
            async with asyncio.timeout(longest_sec):
                while self._changes == seen:
                    await self.changed()
        return self._changes != seen

    async def changed(self) -> None:
        """Return when something has happened."""
        self._changed.clear()
        await self._changed.wait()

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
