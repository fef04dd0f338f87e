"""Coordination of readers within one process: notifications of new rows, and a memory budget for batches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from flowkit.adapters.entries import Entry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

T = TypeVar("T")

MOST_KEPT = 1_000
"""How many notifications with a row a subscription keeps. Beyond that, its listener has to read the database."""


class Claimed(NamedTuple):
    """Claims that a node has just made."""

    consumer: str
    batches: int
    """How many batches it has claimed for the first time."""
    began: float
    """When the write of the claims began, in seconds of `time.monotonic`."""


class Subscription(Generic[T]):
    """Notifications for one listener about the nodes that it listens to."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._kept: list[tuple[str, T]] = []
        self._must_read = False

    def notify(self, node: str, row: T | None) -> None:
        """Notify the listener of a row of `node`. With None, the listener has to read the database."""
        if row is None or len(self._kept) >= MOST_KEPT:
            self._must_read = True
        else:
            self._kept.append((node, row))
        self._event.set()

    async def wait(self, most: float) -> None:
        """Return after a notification, but no later than after `most` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), most)

    def take(self) -> tuple[list[tuple[str, T]], bool]:
        """Return the rows since the last call with their nodes, and whether to read the database for others."""
        taken = self._kept, self._must_read
        self._kept, self._must_read = [], False
        self._event.clear()
        return taken


class Notifier(Generic[T]):
    """Notifies the listeners of a node of the rows that concern the node, within one process."""

    def __init__(self) -> None:
        self._listeners: defaultdict[tuple[str, str], set[Subscription[T]]] = defaultdict(set)

    @contextmanager
    def listener(self, task_id: str, nodes: Iterable[str]) -> Iterator[Subscription[T]]:
        """Subscribe to these nodes of a task until the end of the block."""
        keys, subscription = [(task_id, node) for node in nodes], Subscription[T]()
        for key in keys:
            self._listeners[key].add(subscription)
        try:
            yield subscription
        finally:
            for key in keys:
                self._listeners[key].discard(subscription)
                if not self._listeners[key]:
                    del self._listeners[key]

    def notify(self, task_id: str, node: str, row: T | None = None) -> None:
        """Notify the listeners of `node` of a stored row. With None, they read the database."""
        for subscription in self._listeners.get((task_id, node), ()):
            subscription.notify(node, row)


class ArtifactNotifier(Notifier[Entry]):
    """Notifies the listeners of a node of each batch that the node stores, and of its complete marker (None)."""


class ClaimNotifier(Notifier[Claimed]):
    """Notifies the listeners of a node of the claims that other nodes make of its batches."""


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

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the bytes during the block, and hold them again after it, even beyond the limit of the budget."""
        size, self._size = self._size, 0
        self._release(size)
        try:
            yield
        finally:
            self._size = size
            self._release(-size)


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
