"""Within one process: who waits for artifacts of a node learns of them at once; and who reads them, reads in turn."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator


class Subscription:
    """One listener's news."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Something was written."""
        self._event.set()

    async def wait(self, *, least: float, most: float) -> None:
        """Return when there is news, but not before `least` and not after `most` seconds."""
        await asyncio.sleep(least)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), most - least)
        self._event.clear()


class ArtifactNotifier:
    """Passes on that a node has written a batch or its marker."""

    def __init__(self) -> None:
        self._listeners: defaultdict[tuple[str, str], set[Subscription]] = defaultdict(set)

    @contextmanager
    def listener(self, task_id: str, nodes: Iterable[str]) -> Iterator[Subscription]:
        """Subscription of these nodes, until the end of the block."""
        keys, news = [(task_id, node) for node in nodes], Subscription()
        for key in keys:
            self._listeners[key].add(news)
        try:
            yield news
        finally:
            for key in keys:
                self._listeners[key].discard(news)
                if not self._listeners[key]:
                    del self._listeners[key]

    def tell(self, task_id: str, node: str) -> None:
        """`node` has written something."""
        for news in self._listeners.get((task_id, node), ()):
            news.tell()


class Held:
    """Bytes that one reader of a budget holds."""

    def __init__(self, size: int, release: Callable[[int], None]) -> None:
        self._size = size
        self._release = release

    def keep(self, size: int) -> None:
        """Give back all but `size` bytes; it never grows."""
        if size < self._size:
            self._release(self._size - size)
            self._size = size


class ByteBudget:
    """How many bytes of batches a process holds in memory at once; a single larger one passes alone."""

    def __init__(self, limit: int, readers: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()
        self.share = max(1, limit // max(1, readers))
        """What one reader may take at once, so that all get on."""

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[Held]:
        """Wait until `size` more bytes may be held, and hold them until the end of the block or until given back."""
        size = min(size, self._limit)
        while self._used + size > self._limit:
            self._freed.clear()
            await self._freed.wait()
        self._used += size
        held = Held(size, self._release)
        try:
            yield held
        finally:
            held.keep(0)

    def _release(self, size: int) -> None:
        self._used -= size
        self._freed.set()
