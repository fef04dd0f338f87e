"""A thread with an event loop for handlers, which must not share the loop of a user's own Temporal worker."""

from __future__ import annotations

import asyncio
from typing import Self

from flowkit.connection import WorkerThread
from flowkit.core.loop_portal import LoopPortal


class HandlerThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self._thread = WorkerThread("flowkit-handlers", lambda: [_IdleService(self)])
        self.portal: LoopPortal
        """Access to the loop, after `started`."""

    @classmethod
    async def started(cls) -> Self:
        """Return a new thread whose loop is running."""
        thread = cls()
        await thread._thread.start()
        return thread

    async def stop(self) -> None:
        """Cancel what still runs on the loop, and wait until the thread has ended."""
        await self._thread.stop()


class _IdleService:
    """Keeps the loop of a thread running, and gives access to it."""

    def __init__(self, thread: HandlerThread) -> None:
        thread.portal = LoopPortal()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `shutdown`."""
        await self._stop.wait()

    async def shutdown(self) -> None:
        """End `run`."""
        self._stop.set()
