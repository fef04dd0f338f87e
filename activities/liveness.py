"""What the attempts of one process share, so that many of them cost little more than one: heartbeats, looks for flags.

Used on the loop of Temporal's worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from flowkit.activities.loop_portal import LoopPortal
    from flowkit.adapters.tasks.task_store import TaskStore

_logger = logging.getLogger("flowkit.worker")

_BEAT_SEC = 1.0
_BEATS_PER_SEC = 20
"""Of all attempts of a process: with more than this many, each beats less often. The flags still tell of cancels."""

_AFTER_ERROR_SEC = 1.0


async def steadily(duty: Callable[[], Awaitable[None]], node_id: str) -> None:
    """Run one of the duties beside an attempt; after an unexpected error log it and run the duty again.

    An error in one duty must end neither the attempt nor its other duties, such as its heartbeats.
    """
    while True:
        try:
            await duty()
        except Exception:
            _logger.exception("attending node %s failed; trying again", node_id)
            await asyncio.sleep(_AFTER_ERROR_SEC)
        else:
            return


class HeartbeatThrottle:
    """Keeps the heartbeats of a process at a bounded rate, however many attempts it runs."""

    def __init__(self) -> None:
        self._attempts = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count an attempt while it runs."""
        self._attempts += 1
        try:
            yield
        finally:
            self._attempts -= 1

    def pause_sec(self, lease_ttl_sec: float) -> float:
        """Seconds between two heartbeats of an attempt: never more than a quarter of its lease."""
        return min(max(_BEAT_SEC, self._attempts / _BEATS_PER_SEC), lease_ttl_sec / 4)


class CancelFlagPoller:
    """Looks for cancel flags once for all tasks that have attempts here, however many there are."""

    def __init__(self, tasks: TaskStore, portal: LoopPortal, every_sec: float) -> None:
        self._tasks = tasks
        self._portal = portal
        self._every_sec = every_sec
        self._watched: Counter[str] = Counter()
        self._read: asyncio.Task[set[str]] | None = None
        self._read_at = 0.0

    @contextmanager
    def watching(self, task_id: str) -> Iterator[None]:
        """Let the next looks see the flags of this task."""
        self._watched[task_id] += 1
        try:
            yield
        finally:
            self._watched[task_id] -= 1
            if not self._watched[task_id]:
                del self._watched[task_id]

    async def any_set(self, task_id: str) -> bool:
        """Whether any cancel flag of a watched task was up at the latest look, which is no older than `every_sec`."""
        now = time.monotonic()
        if self._read is None or now - self._read_at >= self._every_sec:
            self._read_at = now
            self._read = asyncio.create_task(self._portal.run(self._tasks.flagged([*self._watched])))
            self._read.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task_id in await asyncio.shield(self._read)
