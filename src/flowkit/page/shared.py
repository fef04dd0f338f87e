"""Reads whose result many pages share: they ask for the same at the same time, again and again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

_REUSE: Final = 4.0
"""A result is reused for this many times the seconds that its read took, so that reads keep a server busy for at most a
fifth of the time."""
_SHORTEST_REUSE_SEC: Final = 1.0


class SharedReads(Generic[T]):
    """Results of a read, by what was read. At most one read of each runs at a time, for all callers."""

    def __init__(
        self,
        read: Callable[[str], Coroutine[Any, Any, T]],
        *,
        most_sec: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Share the results of `read`. One that takes more than `most_sec` seconds ends with TimeoutError."""
        self._read = read
        self._most_sec = most_sec
        self._clock = clock
        self._running: dict[str, asyncio.Task[T]] = {}
        self._results: dict[str, tuple[T, float]] = {}
        """Results, and until when they are reused."""

    async def get(self, key: str) -> T:
        """Return a result, which may be a moment old. Raise what the read raises."""
        self._forget_old()
        if (found := self._results.get(key)) is not None:
            return found[0]
        if (running := self._running.get(key)) is None:
            running = self._running[key] = asyncio.create_task(self._run(key))
            running.add_done_callback(_retrieve)
        return await asyncio.shield(running)

    def _forget_old(self) -> None:
        now = self._clock()
        self._results = {key: found for key, found in self._results.items() if found[1] > now}

    async def _run(self, key: str) -> T:
        began = self._clock()
        try:
            async with asyncio.timeout(self._most_sec):
                result = await self._read(key)
            ended = self._clock()
            self._results[key] = result, ended + max(_SHORTEST_REUSE_SEC, _REUSE * (ended - began))
            return result
        finally:
            del self._running[key]

    async def close(self) -> None:
        """End the reads that run."""
        running = [*self._running.values()]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a read that no caller awaits any more; asyncio would log it."""
    if not task.cancelled():
        task.exception()
