"""Group commit: what is to be written while a write is under way goes with the next one, together.

A lone writer does not wait. The busier the database, the larger the groups: a hundred attempts at once then cost a
fraction of a hundred calls, and each still waits until its own write is acknowledged.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pymongo.errors import PyMongoError

from flowkit.adapters.mongo import away

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

T = TypeVar("T")

_MOST = 100
"""Writes of one group."""


@dataclass(frozen=True, slots=True)
class _Waiter(Generic[T]):
    """Somebody whose write goes with a group."""

    item: T
    written: asyncio.Future[None]

    def tell(self, error: BaseException | None) -> None:
        """It is written, or this is why not. Nobody listens when the wait was cancelled."""
        if self.written.done():
            return
        if error is None:
            self.written.set_result(None)
        else:
            self.written.set_exception(error)


class GroupCommit(Generic[T]):
    """Writes of one kind, on one event loop.

    `alone` does one write, or raises why it cannot be. `together` does several and answers the places of those that
    it has left undone: they are written alone, where an error belongs to one of them. Both must bear a repetition of
    what is already written.
    """

    def __init__(
        self,
        alone: Callable[[T], Awaitable[None]],
        together: Callable[[Sequence[T]], Awaitable[Collection[int]]],
    ) -> None:
        self._alone = alone
        self._together = together
        self._busy = False
        self._waiting: list[_Waiter[T]] = []
        self._group: asyncio.Task[None] | None = None

    async def write(self, item: T) -> None:
        """Return when `item` is written. Raises what `alone` raises, or the driver's error when MongoDB is away."""
        if self._busy:
            waiter = _Waiter(item, asyncio.get_running_loop().create_future())
            self._waiting.append(waiter)
            await waiter.written
            return
        self._busy = True
        try:
            await self._alone(item)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Let those who came meanwhile have their turn."""
        self._busy = bool(self._waiting)
        if self._busy:
            self._group = asyncio.create_task(self._write_group())

    async def _write_group(self) -> None:
        group, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
        wanted = [waiter for waiter in group if not waiter.written.done()]
        try:
            if wanted:
                await self._write(wanted)
        except PyMongoError as error:
            for waiter in wanted:
                waiter.tell(error)
        finally:
            for waiter in wanted:
                waiter.written.cancel()
            self._go_on()

    async def _write(self, wanted: Sequence[_Waiter[T]]) -> None:
        left = await self._left_undone([waiter.item for waiter in wanted])
        for place in set(range(len(wanted))).difference(left):
            wanted[place].tell(None)
        single = [wanted[place] for place in left]
        ends = await asyncio.gather(*(self._alone(waiter.item) for waiter in single), return_exceptions=True)
        for waiter, end in zip(single, ends, strict=True):
            waiter.tell(end)

    async def _left_undone(self, items: Sequence[T]) -> Collection[int]:
        try:
            return await self._together(items)
        except Exception as error:
            if isinstance(error, PyMongoError) and away(error):
                raise
            return range(len(items))
