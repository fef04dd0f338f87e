"""Brings to the task's document what only the workflow knows; off the critical path, one write at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import workflow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.models import NodeRecord


class Recorder:
    """Collects changed nodes and writes them together while the previous write is under way."""

    def __init__(self, write: Callable[[list[NodeRecord], str | None], Awaitable[None]]) -> None:
        self._write = write
        self._dirty: dict[int, NodeRecord] = {}
        self._task_dirty = False
        self._cancel_reason: str | None = None
        self._running: asyncio.Task[None] | None = None

    def mark(self, record: NodeRecord) -> None:
        """Write this node soon."""
        self._dirty[record.index] = record
        self._start()

    def mark_task(self, cancel_reason: str | None = None) -> None:
        """Write the task's own fields soon, with the cancel flags when a reason is given."""
        self._task_dirty = True
        self._cancel_reason = cancel_reason or self._cancel_reason
        self._start()

    @property
    def idle(self) -> bool:
        """Whether everything marked so far is written."""
        return self._running is None

    async def flushed(self) -> None:
        """Wait until everything marked so far is written."""
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
