"""Awaits the ends of the tasks of all backfills of an engine with one query.

A long poll of Temporal for each task would hold a stream of the connection that the engine's own polls use, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from flowkit.errors import FlowKitError
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

_logger = logging.getLogger("flowkit.engine.worker")

_LOOK_SEC = 0.25


class TaskEnds:
    """Wakes those who wait for tasks when the documents of these tasks show an end."""

    def __init__(self, find_ended: Callable[[Collection[str]], Awaitable[Collection[str]]]) -> None:
        """`find_ended` returns which of some tasks have ended."""
        self._find_ended = find_ended
        self._awaited: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._looked = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    async def wait(self, task_id: str, at_most_sec: float) -> bool:
        """Return True when the document of a task shows its end, or False after some time."""
        self._awaited[task_id] += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(at_most_sec), self._looked:
                await self._looked.wait_for(lambda: task_id in self._ended)
        except TimeoutError:
            return False
        finally:
            self._awaited[task_id] -= 1
            if not self._awaited[task_id]:
                del self._awaited[task_id]
        return True

    async def _look(self) -> None:
        """Look for ends while anybody waits."""
        while self._awaited:
            await asyncio.sleep(_LOOK_SEC)
            try:
                self._ended = {*await self._find_ended([*self._awaited])}
            except FlowKitError as error:
                _logger.debug("the ends of tasks are not known: %s", one_line(error))
                continue
            async with self._looked:
                self._looked.notify_all()
