"""Shared heartbeat and cancel-flag handling for the attempts of one process, which limits the load of many attempts.

Use these classes on the loop of Temporal's worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.core.loop_portal import LoopPortal

_logger = logging.getLogger("flowkit.worker")

HEARTBEAT_THROTTLE = timedelta(seconds=1)
"""Maximum time until an attempt sees a cancel or Terminate. Temporal's default is most of the lease."""

_HEARTBEAT_SEC = 1.0
_MAX_HEARTBEATS_PER_SEC = 20
"""Limit for all attempts of a process together. With more attempts, each sends fewer heartbeats.

Cancels are not delayed, because the cancel flags also report them.
"""

_AFTER_ERROR_SEC = 1.0


async def restart_on_error(loop: Callable[[], Awaitable[None]], node_id: str) -> None:
    """Run one of the background loops of an attempt. Log an unexpected error and run the loop again.

    An error in one loop must not end the attempt or its other loops, such as its heartbeats.
    """
    while True:
        try:
            await loop()
        except Exception:
            _logger.exception("background work for node %s failed; retrying", node_id)
            await asyncio.sleep(_AFTER_ERROR_SEC)
        else:
            return


class HeartbeatThrottle:
    """Limits the rate of the heartbeats of a process, however many attempts it runs."""

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
        """Return the seconds between two heartbeats of an attempt, at most a quarter of its lease."""
        return heartbeat_pause_sec(self._attempts, lease_ttl_sec)


def heartbeat_pause_sec(attempts: int, lease_ttl_sec: float) -> float:
    """Return the seconds between two heartbeats of each of `attempts` attempts, at most a quarter of the lease."""
    return min(max(_HEARTBEAT_SEC, attempts / _MAX_HEARTBEATS_PER_SEC), lease_ttl_sec / 4)


class CancelFlagPoller:
    """Reads the cancel flags of all tasks that have attempts in this process with a single query."""

    def __init__(self, tasks: TaskStore, portal: LoopPortal, every_sec: float) -> None:
        self._tasks = tasks
        self._portal = portal
        self._every_sec = every_sec
        self._watched: Counter[str] = Counter()
        self._read: asyncio.Task[set[str]] | None = None
        self._read_at = 0.0

    @contextmanager
    def watching(self, task_id: str) -> Iterator[None]:
        """Include the flags of this task in the reads while the block runs."""
        self._watched[task_id] += 1
        try:
            yield
        finally:
            self._watched[task_id] -= 1
            if not self._watched[task_id]:
                del self._watched[task_id]

    async def any_set(self, task_id: str) -> bool:
        """Return whether the task had a cancel flag at the latest read, which ended at most `every_sec` seconds ago.

        Only one read is in progress at a time: those of a large document may take longer than `every_sec`, and would
        pile up in MongoDB.
        """
        due = time.monotonic() - self._read_at >= self._every_sec
        if self._read is None or (self._read.done() and due):
            self._read = asyncio.create_task(self._portal.run(self._tasks.flagged([*self._watched])))
            self._read.add_done_callback(self._ended)
        return task_id in await asyncio.shield(self._read)

    def _ended(self, read: asyncio.Task[set[str]]) -> None:
        """Note when a read ended. A caller that waits for it receives its error."""
        self._read_at = time.monotonic()
        if not read.cancelled():
            read.exception()
