"""Commits the offsets of handled records while the next records are handled."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Offsets = Mapping[Any, int]

PAUSE_SEC = 0.05
"""How long a commit waits for the offsets of further records, so that many short polls share one commit."""


class Commits:
    """The commits of one client: one at a time, each with the latest offsets of all partitions."""

    def __init__(self, commit: Callable[[Offsets], Awaitable[None]]) -> None:
        self._commit = commit
        self._due: dict[Any, int] = {}
        self._running: asyncio.Task[None] | None = None
        self._at_once = asyncio.Event()

    def add(self, offsets: Offsets) -> None:
        """Commit these offsets soon. Call it only after everything before them is handled."""
        self._due |= offsets
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def check(self) -> None:
        """Raise the error of a failed commit, if any."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    async def finish(self, limit: float) -> None:
        """Commit at once what is due. Return when that is done or has failed, or after `limit` seconds."""
        self._at_once.set()
        try:
            if self._running is not None:
                await asyncio.wait([self._running], timeout=limit)
        finally:
            self._at_once.clear()

    async def stop(self) -> None:
        """Drop what is not committed yet."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while self._due:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SEC):
                    await self._at_once.wait()
            offsets, self._due = self._due, {}
            await self._commit(offsets)
