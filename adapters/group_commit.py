"""Group commit: one call to MongoDB for all the writes that arrive while an earlier call is in progress.

A single writer does not wait. The busier the database, the larger the groups: a hundred concurrent attempts need far
fewer than a hundred calls. Each caller still waits until MongoDB has acknowledged its own write.

MongoDB rewrites a document for each update, so an update of a large one costs as much as a group of a hundred. With an
interval, concurrent writes therefore wait for each other. The writes of a chain, which come one by one, do not wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pymongo.errors import PyMongoError

from flowkit.adapters.mongo import is_outage
from flowkit.core.instruments import GROUP_SIZE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

T = TypeVar("T")

_MAX_GROUP = 100
"""The largest number of writes in one group."""

_CONCURRENT = 2
"""How many writes of one call show that writes come at the same time. Those of a chain come one by one."""

_PARTS = 4
"""In how many parts an interval is divided. A group waits no longer after a part in which no write arrived."""


@dataclass(frozen=True, slots=True)
class _Waiter(Generic[T]):
    """A caller of `GroupCommit.write` whose item waits for the next group."""

    item: T
    written: asyncio.Future[None]

    def resolve(self, error: BaseException | None) -> None:
        """Report the write's success, or its error, to the caller. Do nothing if the caller no longer waits."""
        if self.written.done():
            return
        if error is None:
            self.written.set_result(None)
        else:
            self.written.set_exception(error)


class GroupCommit(Generic[T]):
    """Groups writes of one kind. All callers must run on one event loop.

    `alone` performs one write or raises its error. `together` performs several writes and returns the indexes of those
    that it did not perform. GroupCommit passes each of these to `alone`, so that an error reaches the right caller.
    Both functions must be idempotent, because GroupCommit may repeat a write that has already succeeded.

    While several writes come at the same time, calls begin `interval_sec` apart, or earlier if no more writes arrive.
    `kind` names the writes in metrics.
    """

    def __init__(
        self,
        kind: str,
        alone: Callable[[T], Awaitable[None]],
        together: Callable[[Sequence[T]], Awaitable[Collection[int]]],
        *,
        interval_sec: float = 0.0,
    ) -> None:
        self._kind = kind
        self._alone = alone
        self._together = together
        self._interval_sec = interval_sec
        self._began_at = float("-inf")
        """When the latest call began, by the clock of the event loop."""
        self._size = 0
        """How many writes the latest call contained."""
        self._busy = False
        self._waiting: list[_Waiter[T]] = []
        self._group: asyncio.Task[None] | None = None

    async def write(self, item: T) -> None:
        """Return once `item` is written. Raise the error of `alone`, or PyMongoError if MongoDB is unavailable."""
        if self._busy or (self._interval_sec and self._pause_sec()):
            waiter = _Waiter(item, asyncio.get_running_loop().create_future())
            self._waiting.append(waiter)
            if not self._busy:
                self._start_next_group()
            await waiter.written
            return
        self._busy = True
        try:
            self._note_call(1)
            await self._alone(item)
        finally:
            self._start_next_group()

    def _note_call(self, size: int) -> None:
        GROUP_SIZE.observe(size, self._kind)
        if self._interval_sec:
            self._began_at, self._size = asyncio.get_running_loop().time(), size

    def _pause_sec(self) -> float:
        """Return how long the next call may wait for more writes: 0 unless it, or the one before, has several."""
        waiting = len(self._waiting)
        if not self._interval_sec or max(self._size, waiting) < _CONCURRENT or waiting >= _MAX_GROUP:
            return 0.0
        return max(0.0, self._began_at + self._interval_sec - asyncio.get_running_loop().time())

    async def _gather(self) -> None:
        """Wait for more writes, but not once a part of the interval has passed in which none arrived."""
        while pause_sec := self._pause_sec():
            before = len(self._waiting)
            await asyncio.sleep(min(pause_sec, self._interval_sec / _PARTS))
            if len(self._waiting) == before:
                return

    def _start_next_group(self) -> None:
        """Start writing the items that arrived during the previous call, if any, and whose callers still wait."""
        if not self._waiting:
            self._busy = False
            return
        self._waiting = [waiter for waiter in self._waiting if not waiter.written.done()]
        self._busy = bool(self._waiting)
        if self._busy:
            self._group = asyncio.create_task(self._write_group())

    async def _write_group(self) -> None:
        wanted: list[_Waiter[T]] = []
        try:
            await self._gather()
            group, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
            wanted = [waiter for waiter in group if not waiter.written.done()]
            if wanted:
                self._note_call(len(wanted))
                await self._write(wanted)
        except PyMongoError as error:
            for waiter in wanted:
                waiter.resolve(error)
        finally:
            for waiter in wanted:
                waiter.written.cancel()
            self._start_next_group()

    async def _write(self, wanted: Sequence[_Waiter[T]]) -> None:
        remaining = await self._write_together([waiter.item for waiter in wanted])
        for index in set(range(len(wanted))).difference(remaining):
            wanted[index].resolve(None)
        single = [wanted[index] for index in remaining]
        results = await asyncio.gather(
            *(self._alone(waiter.item) for waiter in single), return_exceptions=True
        )
        for waiter, result in zip(single, results, strict=True):
            waiter.resolve(result)

    async def _write_together(self, items: Sequence[T]) -> Collection[int]:
        """Return the indexes of the items that still have to be written one by one."""
        try:
            return await self._together(items)
        except Exception as error:
            if isinstance(error, PyMongoError) and is_outage(error):
                raise
            return range(len(items))
