"""The `worker_events` of one running attempt, whose number stays small even for a long attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flowkit.adapters.worker_events import accepted, batch_failed, batch_ok, heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.worker_events import WorkerEvent
    from flowkit.models import AttemptFailure, AttemptInput

YOUNG_SEC = 5.0
"""An attempt that succeeds within this time writes only its end."""

_SPARSER = 20
"""The gap between two rows of one kind is at least the attempt's age divided by this, which limits their number."""


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
