"""Notifications within one process: writers of batches and claims notify the nodes that wait for them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from flowkit.adapters.entries import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")

MOST_KEPT = 1_000
"""How many notifications with a row a listener keeps. Beyond that, it has to read the database."""

waits_for_others: ContextVar[Callable[[], AbstractContextManager[float | None]]] = ContextVar(
    "flowkit_waits_for_others", default=nullcontext
)
"""What surrounds a wait for other nodes, and yields the longest time of it in seconds; None for no limit.

Meanwhile, the time of a simulated clock passes.
"""


class Claimed(NamedTuple):
    """Claims that a node has just made."""

    consumer: str
    batches: int
    """How many batches it has claimed for the first time."""
    began: float
    """When the write of the claims began, in seconds of `time.monotonic`."""


class Listener(Generic[T]):
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
        """Return after a notification, but no later than after `most` seconds.

        If the wait is cut short, the listener has to read the database.
        """
        with suppress(TimeoutError), waits_for_others.get()() as limit:
            is_cut = limit is not None and limit < most
            try:
                async with asyncio.timeout(limit if is_cut else most):
                    await self._event.wait()
            except TimeoutError:
                self._must_read = self._must_read or is_cut
                raise

    def take(self) -> tuple[list[tuple[str, T]], bool]:
        """Return the rows since the last call with their nodes, and whether to read the database for others."""
        taken = self._kept, self._must_read
        self._kept, self._must_read = [], False
        self._event.clear()
        return taken


class Notifier(Generic[T]):
    """Notifies the listeners of a node of the rows that concern the node, within one process."""

    def __init__(self) -> None:
        self._listeners: defaultdict[tuple[str, str], set[Listener[T]]] = defaultdict(set)

    @contextmanager
    def listener(self, task_id: str, nodes: Iterable[str]) -> Iterator[Listener[T]]:
        """Subscribe to these nodes of a task until the end of the block."""
        keys, own = [(task_id, node) for node in nodes], Listener[T]()
        for key in keys:
            self._listeners[key].add(own)
        try:
            yield own
        finally:
            for key in keys:
                self._listeners[key].discard(own)
                if not self._listeners[key]:
                    del self._listeners[key]

    def notify(self, task_id: str, node: str, row: T | None = None) -> None:
        """Notify the listeners of `node` of a stored row. With None, they read the database."""
        for listener in self._listeners.get((task_id, node), ()):
            listener.notify(node, row)


class ArtifactNotifier(Notifier[Entry]):
    """Notifies the listeners of a node of each batch that the node stores, and of its complete marker (None)."""


class ClaimNotifier(Notifier[Claimed]):
    """Notifies the listeners of a node of the claims that other nodes make of its batches."""
