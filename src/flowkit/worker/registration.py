"""Reports a worker process to MongoDB: its row in `worker_registry` and its attempts in `worker_events`.

Both collections are for monitoring only, so they must not slow down or fail an attempt. The worker writes them in the
background. If MongoDB is unavailable, the worker logs the outage once and retries later.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from flowkit.activities.attempt_log import AttemptEventLog
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.attempt.background import BackgroundLoop, OutageLogger
from flowkit.errors import FlowKitError, StoreDenied, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.worker_registry import HostedHandler

_HEARTBEAT_SEC = 20.0

_MONGO_TIMEOUT_SEC = 5.0
"""How long a start or stop waits for MongoDB. After a start, a failed write is retried; after a stop, it is lost."""


class WorkerRegistration:
    """Keeps the row of one worker process in `worker_registry` and its `events`. It runs on the caller's loop."""

    def __init__(
        self,
        db: Database,
        *,
        worker_id: str,
        roles: Sequence[str],
        version: str,
        capacity: int,
        announce_interval_sec: float,
        leaked_threads: Callable[[], int] = lambda: 0,
        hb_interval_sec: float = _HEARTBEAT_SEC,
        queue: str = "",
        handlers: Sequence[HostedHandler] = (),
    ) -> None:
        self._queue = queue
        self._handlers = handlers
        self._leaked_threads = leaked_threads
        self._registry = WorkerRegistry(db)
        self._worker_id = worker_id
        self._roles = tuple(roles)
        self._version = version
        self._capacity = capacity
        self._interval_sec = announce_interval_sec
        self._session = secrets.token_hex(8)
        self._prepared = False
        self._is_registered = False
        self._outage = OutageLogger(f"update worker {worker_id} in worker_registry")
        self._loops: list[asyncio.Task[None]] = []
        self._announcing: asyncio.Task[None] | None = None
        """The latest announcement. Its write could overwrite `offline` if `stop` did not wait for it."""
        self.loop = BackgroundLoop("announcing the worker", self._announce_later)
        self.events = AttemptEventLog(WorkerEvents(db), heartbeat_sec=hb_interval_sec)

    async def prepare(self) -> None:
        """Create the indexes. If MongoDB is unavailable, log it and retry later.

        Raise StoreRefused if duplicates prevent an index, and StoreDenied if the user may not create it.
        """
        try:
            await self._prepare_registry()
            await self.events.prepare()
        except StoreDenied:
            raise
        except StoreUnavailable as error:
            self._outage.failed(error)

    async def _prepare_registry(self) -> None:
        if not self._prepared:
            await self._registry.prepare()
            self._prepared = True

    async def start(self) -> None:
        """Register the worker as online, then keep its row up to date and write events in the background."""
        await self._announce()
        self._loops = [asyncio.create_task(self.loop.run()), asyncio.create_task(self.events.run())]

    async def stop(self) -> None:
        """Write the last events and register the worker as offline. Call this after all attempts have ended.

        Writes that take more than five seconds are dropped.
        """
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        if self._announcing is not None:
            await asyncio.gather(self._announcing, return_exceptions=True)
        if loops:
            await asyncio.gather(self.events.close(), self._log_outage_of(self._go_offline))

    async def _announce_later(self) -> None:
        retry_sec = min(self._interval_sec, _MONGO_TIMEOUT_SEC)
        await asyncio.sleep(self._interval_sec if self._is_registered else retry_sec)
        await self._announce()

    async def _announce(self) -> None:
        self._announcing = asyncio.create_task(self._log_outage_of(self._register))
        await asyncio.shield(self._announcing)

    async def _log_outage_of(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_MONGO_TIMEOUT_SEC):
                await call()
        except (FlowKitError, TimeoutError) as error:
            self._outage.failed(error)
            self.loop.failed(error)
        else:
            self._outage.recovered()
            self.loop.worked()

    async def _register(self) -> None:
        await self._prepare_registry()
        if not (self._is_registered and await self._refresh_row()):
            await self._registry.register(
                self._worker_id,
                self._roles,
                self._version,
                self._capacity,
                time.time(),
                session=self._session,
                leaked_threads=self._leaked_threads(),
                announce_interval_sec=self._interval_sec,
                queue=self._queue,
                handlers=self._handlers,
            )
            self._is_registered = True

    async def _refresh_row(self) -> bool:
        return await self._registry.refresh(
            self._worker_id, time.time(), session=self._session, leaked_threads=self._leaked_threads()
        )

    async def _go_offline(self) -> None:
        self._is_registered = False
        await self._registry.mark_offline(self._worker_id, time.time(), session=self._session)
