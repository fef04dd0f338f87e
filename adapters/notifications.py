"""Coordination of readers within one process: notifications of new artifacts, and a memory budget for batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator


class Subscription:
    """Notifications for one listener about new artifacts of the nodes that it listens to."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Notify the listener that one of its nodes has stored an artifact."""
        self._event.set()

    async def wait(self, *, least: float, most: float) -> None:
        """Return after a notification, but no sooner than `least` seconds and no later than `most` seconds."""
        await asyncio.sleep(least)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), most - least)
        self._event.clear()


class ArtifactNotifier:
    """Notifies the listeners of a node when the node stores a batch or its complete marker."""

    def __init__(self) -> None:
        self._listeners: defaultdict[tuple[str, str], set[Subscription]] = defaultdict(set)

    @contextmanager
    def listener(self, task_id: str, nodes: Iterable[str]) -> Iterator[Subscription]:
        """Subscribe to these nodes of a task until the end of the block."""
        keys, subscription = [(task_id, node) for node in nodes], Subscription()
        for key in keys:
            self._listeners[key].add(subscription)
        try:
            yield subscription
        finally:
            for key in keys:
                self._listeners[key].discard(subscription)
                if not self._listeners[key]:
                    del self._listeners[key]

    def notify(self, task_id: str, node: str) -> None:
        """Notify the listeners that `node` has stored a batch or its complete marker."""
        for subscription in self._listeners.get((task_id, node), ()):
            subscription.notify()


class Held:
    """The bytes of a ByteBudget that one reader holds."""

    def __init__(self, size: int, release: Callable[[int], None]) -> None:
        self._size = size
        self._release = release

    def keep(self, size: int) -> None:
        """Release all but `size` bytes. Do nothing if the reader holds no more than that."""
        if size < self._size:
            self._release(self._size - size)
            self._size = size


class ByteBudget:
    """Limits how many bytes of batches a process holds in memory at once.

    A batch that is larger than the limit uses the whole budget while a reader holds it.
    """

    def __init__(self, limit: int, readers: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()
        self.share = max(1, limit // max(1, readers))
        """The bytes that one reader may request at once, so that all readers make progress."""

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[Held]:
        """Wait until `size` bytes are free, then hold them until the end of the block or until `keep` releases them."""
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
