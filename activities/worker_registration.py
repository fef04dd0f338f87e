"""What a worker process shows of itself: its row in `worker_registry`, its attempts in `worker_events`.

Both are for people and monitoring, so neither may cost an attempt anything: they are written in the background, and
a MongoDB that is away is logged once and met again later.
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
from flowkit.activities.attempts import AttemptFailed
from flowkit.activities.background import BackgroundLoop
from flowkit.adapters.worker_events import WorkerEvents, cancelled, done, failed
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.attempt.failures import from_error, handed_over
from flowkit.errors import FlowKitError, StoreDenied, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.worker_events import WorkerEvent
    from flowkit.models import AttemptInput

_logger = logging.getLogger("flowkit.worker")

_WAITING = 10_000
"""Events that wait for MongoDB at most: some megabytes, or a minute of a very busy worker."""

_PAUSE_SEC = 1.0

_HEARTBEAT_SEC = 20.0

_CHUNK = 500
_PATIENCE_SEC = 5.0
"""How long a start or stop waits for MongoDB; what was not said by then is said later, or never."""


class EventLog:
    """Events of attempts on their way into `worker_events`.

    An attempt that succeeds within five seconds leaves one event, its end. A longer one also leaves its start, a row
    for its batches about once a second at first and ever more rarely later, and heartbeats: `artifacts` and
    `metrics_raw` have a row for every batch, so this never becomes the largest collection.

    Events are collected and written together, about once a second. They are a log and not truth: when MongoDB is away
    for long, the oldest are dropped.
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
        self._most = waiting
        self._pause_sec = pause_sec
        self._heartbeat_sec = heartbeat_sec
        self._waiting: deque[WorkerEvent] = deque()
        self._running: dict[str, AttemptLog] = {}
        """Attempts that run, by their lease."""
        self._news = asyncio.Event()
        self._prepared = False
        self._outage = OutageLogger("events of attempts cannot be written")
        self.loop = BackgroundLoop("events of attempts", self._write_news)
        self.lost = 0
        """Events that were given up."""

    @contextmanager
    def attempt(
        self, attempt: AttemptInput, lease: dict[str, Any], was_cancelled: Callable[[], bool]
    ) -> Iterator[AttemptLog]:
        """Log an attempt that has begun and, on leaving, how it has ended."""
        worker_id, own = lease["worker_id"], lease["lease_id"]
        log = AttemptLog(
            attempt, lease, self.add, batch_gap_sec=self._pause_sec, heartbeat_sec=self._heartbeat_sec
        )
        self._running[own] = log
        self._news.set()
        try:
            yield log
        except BaseException as error:
            log.end(_ended(attempt, worker_id, error, asked=was_cancelled()), failed=True)
            raise
        else:
            log.end(done(attempt, worker_id, time.time()), failed=False)
        finally:
            del self._running[own]

    def add(self, event: WorkerEvent) -> None:
        """Take an event, on the loop that runs `run`; never waits."""
        self._waiting.append(event)
        self._keep_bounded()
        self._news.set()

    def _keep_bounded(self) -> None:
        while len(self._waiting) > self._most:
            self._waiting.popleft()
            if not self.lost:
                _logger.warning("more than %d events wait for MongoDB; the oldest are given up", self._most)
            self.lost += 1

    async def prepare(self) -> None:
        """Create the index. StoreRefused when duplicates prevent it."""
        if not self._prepared:
            await self._events.prepare()
            self._prepared = True

    async def run(self) -> None:
        """Write events until cancelled."""
        await self.loop.run()

    async def _write_news(self) -> None:
        await self._news.wait()
        await asyncio.sleep(self._pause_sec)
        self._news.clear()
        for log in [*self._running.values()]:
            log.tick(time.time())
        written = False
        try:
            written = await self.flush()
        finally:
            if not written or self._running:
                self._news.set()

    async def flush(self) -> bool:
        """Write what waits; False when it waits on because MongoDB does not answer."""
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
            _logger.warning("some of %d events were given up: %s", len(events), error)
        except (FlowKitError, asyncio.CancelledError):
            self._waiting.extendleft(reversed(events))
            self._keep_bounded()
            raise

    async def close(self) -> None:
        """Write what waits, if MongoDB takes it soon."""
        for log in self._running.values():
            log.begin()
        try:
            async with asyncio.timeout(_PATIENCE_SEC):
                await self.flush()
        except TimeoutError as error:
            self._outage.failed(error)
        if lost := self.lost + len(self._waiting):
            _logger.warning("%d events of attempts were never written", lost)


def _ended(attempt: AttemptInput, worker_id: str, error: BaseException, *, asked: bool) -> WorkerEvent:
    match error:
        case AttemptFailed():
            return failed(attempt, worker_id, error.failure, time.time())
        case FlowKitError():
            return failed(attempt, worker_id, from_error(error), time.time())
        case _ if asked:
            return cancelled(attempt, worker_id, time.time())
        case _:
            return failed(attempt, worker_id, _HANDED_OVER, time.time())


_HANDED_OVER = handed_over("the attempt was handed back before its end")


class WorkerRegistration:
    """One worker process in `worker_registry`, with its `events`, on the loop that calls it."""

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
    ) -> None:
        self._leaked_threads = leaked_threads
        self._registry = WorkerRegistry(db)
        self._worker_id = worker_id
        self._roles = tuple(roles)
        self._version = version
        self._capacity = capacity
        self._interval_sec = announce_interval_sec
        self._session = secrets.token_hex(8)
        self._prepared = False
        self._shown = False
        self._outage = OutageLogger(f"worker {worker_id} cannot be shown in worker_registry")
        self._duties: list[asyncio.Task[None]] = []
        self.loop = BackgroundLoop("announcing the worker", self._attend)
        self.events = EventLog(WorkerEvents(db), heartbeat_sec=hb_interval_sec)

    async def prepare(self) -> None:
        """Create the indexes. A MongoDB that is away is met again later.

        StoreRefused when duplicates prevent one, StoreDenied when the user has no right to make it.
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
        """Come online; from now on the row is kept fresh and events are written."""
        await self._announce()
        self._duties = [asyncio.create_task(self.loop.run()), asyncio.create_task(self.events.run())]

    async def stop(self) -> None:
        """Write the last events and go offline, in five seconds or not at all. Attempts must have ended before."""
        duties, self._duties = self._duties, []
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)
        if duties:
            await asyncio.gather(self.events.close(), self._quietly(self._go_offline))

    async def _attend(self) -> None:
        await asyncio.sleep(self._interval_sec if self._shown else min(self._interval_sec, _PATIENCE_SEC))
        await self._announce()

    async def _announce(self) -> None:
        await self._quietly(self._show)

    async def _quietly(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SEC):
                await call()
        except (FlowKitError, TimeoutError) as error:
            self._outage.failed(error)
            self.loop.failed(error)
        else:
            self._outage.recovered()
            self.loop.worked()

    async def _show(self) -> None:
        await self._prepare_registry()
        if not (self._shown and await self._is_seen()):
            await self._registry.online(
                self._worker_id,
                self._roles,
                self._version,
                self._capacity,
                time.time(),
                session=self._session,
                leaked_threads=self._leaked_threads(),
                announce_interval_sec=self._interval_sec,
            )
            self._shown = True

    async def _is_seen(self) -> bool:
        return await self._registry.seen(
            self._worker_id, time.time(), session=self._session, leaked_threads=self._leaked_threads()
        )

    async def _go_offline(self) -> None:
        self._shown = False
        await self._registry.offline(self._worker_id, time.time(), session=self._session)


class OutageLogger:
    """Logs an outage once when it begins, and once when it is over."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_down = False

    def failed(self, error: Exception) -> None:
        """Log the first failure of an outage."""
        if not self._is_down:
            _logger.warning("%s: %s; trying on", self._what, str(error) or "no answer in time")
        self._is_down = True

    def recovered(self) -> None:
        """Log the end of an outage, if there was one."""
        if self._is_down:
            _logger.info("no longer true: %s", self._what)
        self._is_down = False
