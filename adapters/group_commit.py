"""Group commit: one call to MongoDB for all the writes that arrive while an earlier call is in progress.

A single writer does not wait. The busier the database, the larger the groups: a hundred concurrent attempts need far
fewer than a hundred calls. Each caller still waits until MongoDB has acknowledged its own write.

A write to a large document takes as long as a hundred writes to it together. With a `Pace`, groups of slow writes
therefore wait until no further write arrives for a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pymongo.errors import PyMongoError

from flowkit.adapters.mongo import is_outage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

T = TypeVar("T")

_MAX_GROUP = 100
"""The largest number of writes in one group."""


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


class Pace(Generic[T]):
    """Decides how long a group waits for more writes. Groups wait only if writes to a document are slow and concurrent.

    `documents` returns the number of documents that a group changes: a group of many small documents is slow as well,
    but does not become faster by waiting.
    """

    SLOW_SEC = 0.05
    """Writes that take less do not wait. A document of a thousand nodes takes less, on a machine without other load."""

    LONGEST_SEC = 0.2
    """An inline attempt has two seconds for two writes."""

    _SAMPLES = 4
    """How many of the latest writes must be slow. A busy machine delays single writes."""

    _CONCURRENT = 2.0
    """Smallest average size of groups. The writes of a chain arrive one by one, and gain nothing from waiting."""

    _GAPS = 3
    """In how many parts a group divides its longest wait. It ends after the first part in which no write arrives."""

    def __init__(self, documents: Callable[[Sequence[T]], int]) -> None:
        self._documents = documents
        self._latest: deque[tuple[float, int]] = deque(maxlen=self._SAMPLES)
        """The seconds for each document, and the number of writes."""

    def wrote(self, items: Sequence[T], seconds: float) -> None:
        """Record the time that a group took."""
        self._latest.append((seconds / self._documents(items), len(items)))

    @property
    def wait_sec(self) -> float:
        """Return the longest time that the next group waits: as long as a write takes. Return 0 for fast writes."""
        fastest = min((seconds for seconds, _ in self._latest), default=0.0)
        size = sum(size for _, size in self._latest) / self._SAMPLES
        if len(self._latest) < self._SAMPLES or fastest < self.SLOW_SEC or size < self._CONCURRENT:
            return 0.0
        return min(fastest, self.LONGEST_SEC)

    async def gather(self, waiting: Callable[[], int]) -> None:
        """Wait while writes arrive, at most `wait_sec`. `waiting` returns the number of writes that have arrived."""
        gap = self.wait_sec / self._GAPS
        for _ in range(self._GAPS if gap else 0):
            before = waiting()
            if before >= _MAX_GROUP:
                return
            await asyncio.sleep(gap)
            if waiting() == before:
                return


class GroupCommit(Generic[T]):
    """Groups writes of one kind. All callers must run on one event loop.

    `alone` performs one write or raises its error. `together` performs several writes and returns the indexes of those
    that it did not perform. GroupCommit passes each of these to `alone`, so that an error reaches the right caller.
    Both functions must be idempotent, because GroupCommit may repeat a write that has already succeeded.
    """

    def __init__(
        self,
        alone: Callable[[T], Awaitable[None]],
        together: Callable[[Sequence[T]], Awaitable[Collection[int]]],
        pace: Pace[T] | None = None,
    ) -> None:
        self._pace = pace
        self._alone = alone
        self._together = together
        self._busy = False
        self._waiting: list[_Waiter[T]] = []
        self._group: asyncio.Task[None] | None = None

    async def write(self, item: T) -> None:
        """Return once `item` is written. Raise the error of `alone`, or PyMongoError if MongoDB is unavailable."""
        if self._busy or (self._pace and self._pace.wait_sec):
            waiter = _Waiter(item, asyncio.get_running_loop().create_future())
            self._waiting.append(waiter)
            if not self._busy:
                self._start_next_group()
            await waiter.written
            return
        self._busy = True
        try:
            with self._measured([item]):
                await self._alone(item)
        finally:
            self._start_next_group()

    @contextmanager
    def _measured(self, items: Sequence[T]) -> Iterator[None]:
        """Record the time of the block, which writes `items`."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self._pace:
                self._pace.wrote(items, time.monotonic() - began)

    def _start_next_group(self) -> None:
        """Start writing the items that arrived during the previous call, if any."""
        self._busy = bool(self._waiting)
        if self._busy:
            self._group = asyncio.create_task(self._write_group())

    async def _write_group(self) -> None:
        if self._pace:
            await self._pace.gather(lambda: len(self._waiting))
        group, self._waiting = self._waiting[:_MAX_GROUP], self._waiting[_MAX_GROUP:]
        wanted = [waiter for waiter in group if not waiter.written.done()]
        try:
            if wanted:
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
            with self._measured(items):
                return await self._together(items)
        except Exception as error:
            if isinstance(error, PyMongoError) and is_outage(error):
                raise
            return range(len(items))
