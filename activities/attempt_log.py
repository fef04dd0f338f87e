"""The log of attempts in `worker_events`, which stays small even for long attempts.

The collection is for monitoring only, so it must not slow down or fail an attempt. The log is written in
the background. If MongoDB is unavailable, it logs the outage once and retries later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_events import (
    WorkerEvents,
    accepted,
    batch_failed,
    batch_ok,
    cancelled,
    done,
    failed,
    heartbeat,
)
from flowkit.attempt.background import BackgroundLoop, OutageLogger
from flowkit.attempt.failures import from_error, handed_over
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import FlowKitError, StoreRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flowkit.adapters.worker_events import WorkerEvent
    from flowkit.models import AttemptFailure, AttemptInput


_logger = logging.getLogger("flowkit.worker")

_WAITING = 10_000
"""The largest number of queued events: a few megabytes, or one minute of a very busy worker."""

_PAUSE_SEC = 1.0
"""The time between two writes of events."""

_HEARTBEAT_SEC = 20.0

_CHUNK = 500
"""Events of one write."""

_CLOSE_SEC = 5.0
"""How long `close` waits for MongoDB."""

_HANDED_OVER = handed_over("the attempt was handed over before its end")

YOUNG_SEC = 5.0
"""An attempt that succeeds within this time writes only its end."""

_SPARSER = 20
"""The gap between two rows of one kind is at least the attempt's age divided by this, which limits their number."""


class AttemptEventLog:
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
            log.end(_end_event(attempt, worker_id, error, was_cancelled=was_cancelled()), failed=True)
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
            async with asyncio.timeout(_CLOSE_SEC):
                await self.flush()
        except TimeoutError as error:
            self._outage.failed(error)
        if lost := self.lost + len(self._waiting):
            _logger.warning("%d events of attempts were not written", lost)


def _end_event(
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


class AttemptLog:
    """Collects and coalesces the events of one attempt from its start to its end.

    The methods neither wait nor write. They count batches; `tick`, which EventLog calls about once a second, creates
    events from the counts.
    """

    def __init__(
        self,
        attempt: AttemptInput,
        lease: dict[str, Any],
        add: Callable[[WorkerEvent], None],
        *,
        batch_gap_sec: float,
        heartbeat_sec: float,
    ) -> None:
        self._attempt = attempt
        self._lease = lease
        self._add = add
        self._begun_at = time.time()
        self._started = False
        self._batch_gap_sec = batch_gap_sec
        self._heartbeat_sec = heartbeat_sec
        self._batches = 0
        self._last_batch: tuple[str, float] | None = None
        self._failed: WorkerEvent | None = None
        self._batch_row_at = self._heartbeat_at = self._begun_at

    def batch_ok(self, batch_uid: str) -> None:
        """Count a batch whose result is stored."""
        self._batches += 1
        self._last_batch = batch_uid, time.time()

    def batch_failed(self, batch_uid: str, failure: AttemptFailure) -> None:
        """Record the failed batch that ends the attempt."""
        self._failed = batch_failed(self._attempt, self._worker_id, batch_uid, failure, time.time())

    def tick(self, now: float) -> None:
        """Add the events that are due, once the attempt is older than YOUNG_SEC."""
        if now - self._begun_at >= YOUNG_SEC:
            self.begin()
            if self._is_due(self._batch_row_at, self._batch_gap_sec, now):
                self._add_batches(now)
            if self._is_due(self._heartbeat_at, self._heartbeat_sec, now):
                self._heartbeat_at = now
                self._add(heartbeat(self._attempt, self._lease, self._heartbeat_sec, now))

    def begin(self) -> None:
        """Add the start event, unless it was already added."""
        if not self._started:
            self._started = True
            self._add(accepted(self._attempt, self._lease, self._begun_at))

    def end(self, event: WorkerEvent, *, failed: bool) -> None:
        """Add the end event, after the start and batch events that explain it. A quick success adds only its end."""
        now = time.time()
        old = now - self._begun_at >= YOUNG_SEC
        if failed or old:
            self.begin()
        if old:
            self._add_batches(now)
        if failed and self._failed is not None:
            self._add(self._failed)
        self._add(event)

    @property
    def _worker_id(self) -> str:
        return str(self._lease["worker_id"])

    def _is_due(self, last: float, gap_sec: float, now: float) -> bool:
        return now - last >= max(gap_sec, (now - self._begun_at) / _SPARSER)

    def _add_batches(self, now: float) -> None:
        if self._last_batch is not None:
            (uid, at), self._last_batch = self._last_batch, None
            self._batch_row_at = now
            self._add(batch_ok(self._attempt, self._worker_id, uid, self._batches, at))
