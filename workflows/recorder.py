"""Write state that only the workflow knows to the task document.

The writes run in the background, one at a time, so they do not delay nodes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.models import NodeRecord


class Recorder:
    """Collect changed nodes while a write is in progress, and write them together afterwards."""

    def __init__(self, write: Callable[[list[NodeRecord], str | None], Awaitable[None]]) -> None:
        self._write = write
        self._dirty: dict[int, NodeRecord] = {}
        self._task_dirty = False
        self._cancel_reason: str | None = None
        self._running: asyncio.Task[None] | None = None

    def mark(self, record: NodeRecord) -> None:
        """Schedule a write of this node."""
        self._dirty[record.index] = record
        self._start()

    def mark_task(self, cancel_reason: str | None = None) -> None:
        """Schedule a write of the task's own fields. With `cancel_reason`, the write also sets the cancel flags."""
        self._task_dirty = True
        self._cancel_reason = cancel_reason or self._cancel_reason
        self._start()

    @property
    def idle(self) -> bool:
        """Whether no write is pending or in progress."""
        return self._running is None

    async def flushed(self) -> None:
        """Wait until no write is pending or in progress."""
        while self._running is not None:
            await workflow.wait([self._running])

    def _start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            while self._dirty or self._task_dirty:
                nodes, reason = list(self._dirty.values()), self._cancel_reason
                self._dirty, self._task_dirty, self._cancel_reason = {}, False, None
                await self._write(nodes, reason)
        finally:
            self._running = None
