"""Reports a worker process to MongoDB: its row in `worker_registry` and its attempts in `worker_events`.

Both collections are for monitoring only, so they must not slow down or fail an attempt. The worker writes them in the
background. If MongoDB is unavailable, the worker logs the outage once and retries later.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flowkit.activities.attempt_log import AttemptLog
from flowkit.adapters.worker_events import WorkerEvents, cancelled, done, failed
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.attempt.background import BackgroundLoop
from flowkit.attempt.failures import from_error, handed_over
from flowkit.attempt.outages import OutageLogger
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import FlowKitError, StoreDenied, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.worker_events import WorkerEvent
    from flowkit.adapters.worker_registry import HostedHandler
    from flowkit.models import AttemptInput

_logger = logging.getLogger("flowkit.worker")

_WAITING = 10_000
"""The largest number of queued events: a few megabytes, or one minute of a very busy worker."""

_PAUSE_SEC = 1.0
"""The time between two writes of events."""

_HEARTBEAT_SEC = 20.0

_CHUNK = 500
_MONGO_TIMEOUT_SEC = 5.0
"""How long a start or stop waits for MongoDB. After a start, a failed write is retried; after a stop, it is lost."""


class EventLog:
    """Queues the events of attempts and writes them to `worker_events`.

    An attempt that succeeds within five seconds writes one event, its end. A longer attempt also writes its start, its
    heartbeats, and a row for its batches: about once a second at first, then less and less often. `artifacts` and
    `metrics_raw` have a row for every batch, so `worker_events` never becomes the largest collection.

    The log writes its queued events together, about once a second. The events are only a log: if MongoDB is unavailable
    for a long time, the oldest ones are dropped.
    """

    def __init__(
        self,
        events: WorkerEvents,
        *,
        waiting: int = _WAITING,
        pause_sec: float = _PAUSE_SEC,
        heartbeat_sec: float = _HEARTBEAT_SEC,
    ) -> None:
        self._events = events
        self._max_waiting = waiting
        self._pause_sec = pause_sec
        self._heartbeat_sec = heartbeat_sec
        self._waiting: deque[WorkerEvent] = deque()
        self._running: dict[str, AttemptLog] = {}
        """Logs of the running attempts by lease id."""
        self._wake = asyncio.Event()
        self._prepared = False
        self._outage = OutageLogger("write events of attempts")
        self.loop = BackgroundLoop("events of attempts", self._write_queued)
        self.lost = 0
        """Number of events that were dropped."""

    @contextmanager
    def attempt(
        self, attempt: AttemptInput, lease: dict[str, Any], was_cancelled: Callable[[], bool]
    ) -> Iterator[AttemptLog]:
        """Log the start of an attempt and, when the block exits, its end."""
        worker_id, own = lease["worker_id"], lease["lease_id"]
        log = AttemptLog(
            attempt, lease, self.add, batch_gap_sec=self._pause_sec, heartbeat_sec=self._heartbeat_sec
        )
        self._running[own] = log
        self._wake.set()
        try:
            yield log
        except BaseException as error:
            log.end(_ended(attempt, worker_id, error, was_cancelled=was_cancelled()), failed=True)
            raise
        else:
            log.end(done(attempt, worker_id, time.time()), failed=False)
        finally:
            del self._running[own]

    def add(self, event: WorkerEvent) -> None:
        """Queue an event without waiting. Call this only on the loop that runs `run`."""
        self._waiting.append(event)
        self._keep_bounded()
        self._wake.set()

    def _keep_bounded(self) -> None:
        while len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            if not self.lost:
                _logger.warning(
                    "more than %d events wait for MongoDB; FlowKit drops the oldest", self._max_waiting
                )
            self.lost += 1

    async def prepare(self) -> None:
        """Create the index. Raise StoreRefused if duplicates prevent it."""
        if not self._prepared:
            await self._events.prepare()
            self._prepared = True

    async def run(self) -> None:
        """Write events until cancelled."""
        await self.loop.run()

    async def _write_queued(self) -> None:
        await self._wake.wait()
        await asyncio.sleep(self._pause_sec)
        self._wake.clear()
        for log in [*self._running.values()]:
            log.tick(time.time())
        written = False
        try:
            written = await self.flush()
        finally:
            if not written or self._running:
                self._wake.set()

    async def flush(self) -> bool:
        """Write the queued events. Return False if MongoDB does not accept them; they stay in the queue."""
        try:
            await self.prepare()
            while self._waiting:
                await self._write([self._waiting.popleft() for _ in range(min(_CHUNK, len(self._waiting)))])
        except FlowKitError as error:
            self._outage.failed(error)
            self.loop.failed(error)
            return False
        self._outage.recovered()
        self.loop.worked()
        return True

    async def _write(self, events: Sequence[WorkerEvent]) -> None:
        try:
            await self._events.append(events, time.time())
        except StoreRefused as error:
            _logger.warning("MongoDB rejected some of %d events: %s", len(events), error)
        except (FlowKitError, asyncio.CancelledError):
            self._waiting.extendleft(reversed(events))
            self._keep_bounded()
            raise

    async def close(self) -> None:
        """Write the queued events, but wait for MongoDB at most five seconds."""
        for log in self._running.values():
            log.begin()
        try:
            async with asyncio.timeout(_MONGO_TIMEOUT_SEC):
                await self.flush()
        except TimeoutError as error:
            self._outage.failed(error)
        if lost := self.lost + len(self._waiting):
            _logger.warning("%d events of attempts were not written", lost)


def _ended(
    attempt: AttemptInput, worker_id: str, error: BaseException, *, was_cancelled: bool
) -> WorkerEvent:
    match error:
        case AttemptFailed():
            return failed(attempt, worker_id, error.failure, time.time())
        case FlowKitError():
            return failed(attempt, worker_id, from_error(error), time.time())
        case _ if was_cancelled:
            return cancelled(attempt, worker_id, time.time())
        case _:
            return failed(attempt, worker_id, _HANDED_OVER, time.time())


_HANDED_OVER = handed_over("the attempt was handed over before its end")


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
        handlers: Sequence[HostedHandler] = (),
    ) -> None:
        self._handlers = handlers
        self._conflicts: list[dict[str, Any]] = []
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
        self.events = EventLog(WorkerEvents(db), heartbeat_sec=hb_interval_sec)

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
            await self._registry.online(
                self._worker_id,
                self._roles,
                self._version,
                self._capacity,
                time.time(),
                session=self._session,
                leaked_threads=self._leaked_threads(),
                announce_interval_sec=self._interval_sec,
                handlers=self._handlers,
            )
            self._is_registered = True
        if self._handlers:
            self._log_conflicts(await self._registry.show_conflicts(self._worker_id, self._handlers))

    def _log_conflicts(self, conflicts: list[dict[str, Any]]) -> None:
        """Log the processes that host another version of a handler, if they have changed."""
        if conflicts != self._conflicts:
            for each in conflicts:
                _logger.warning(
                    "%s hosts another version of the handler of role %s than %s, which hosts %s",
                    self._worker_id,
                    each["role"],
                    each["worker_id"],
                    each["version"],
                )
        self._conflicts = conflicts

    async def _refresh_row(self) -> bool:
        return await self._registry.seen(
            self._worker_id, time.time(), session=self._session, leaked_threads=self._leaked_threads()
        )

    async def _go_offline(self) -> None:
        self._is_registered = False
        await self._registry.offline(self._worker_id, time.time(), session=self._session)
