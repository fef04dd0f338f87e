"""The dispatch records of one node while the events of one poll (a set of Kafka records) are applied to them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches.record import DispatchState, key_of
from flowkit.bridge.rules.leases import renewed

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.rules.reading import BadEvent, StatusEvent


_RENEWED_BY = 0.1
"""Fraction of its duration by which a lease must have been extended before the extension is stored."""


class NodeRun:
    """The dispatch records of one node during one poll, and the changes that are still to be written."""

    def __init__(
        self, records: dict[str, Dispatch], at: float, flagged: Awaitable[set[str]] | None = None
    ) -> None:
        self.records = dict(records)
        self.at = at
        self.flagged = flagged
        """The tasks with a cancel flag, for the task itself or for one of its nodes. They may still be being read."""
        self._batches: Counter[str] = Counter()
        """Batches stored since the last write of a record, by key."""
        self._stored = {key: record.lease for key, record in records.items() if record.lease}
        """Stored leases by key."""

    def record_of(self, event: StatusEvent | BadEvent) -> Dispatch | None:
        """Return the current record of the attempt that an event is about."""
        return self.records.get(record_key(event))

    def put(self, record: Dispatch) -> None:
        """Replace a record by its new state."""
        self.records[record.key] = record

    def renew(self, event: StatusEvent) -> None:
        """Renew the lease of the event's sender."""
        record = self.record_of(event)
        if record is not None and record.lease is not None:
            self.put(replace(record, lease=renewed(record.lease, event, self.at)))

    def count(self, key: str) -> None:
        """Count a batch that was stored."""
        self._batches[key] += 1
        self.put(replace(self.records[key], batches=self.records[key].batches + 1))

    def add_batches(self, key: str, batches: int) -> None:
        """Note batches that earlier polls have stored and that are in no write of the record yet."""
        self._batches[key] += batches

    def take_batches(self, key: str) -> int:
        """Return and forget the number of batches stored since the last write of a record."""
        return self._batches.pop(key, 0)

    def due_renewals(self) -> list[str]:
        """Return the keys of records to write: new batches, or a lease whose stored state is clearly earlier."""
        return [
            key for key, record in self.records.items() if self._batches.get(key) or self._is_due(key, record)
        ]

    def _is_due(self, key: str, record: Dispatch) -> bool:
        lease = record.lease
        if lease is None or record.state is not DispatchState.OPEN:
            return False
        stored, step = self._stored.get(key), lease.ttl_sec * _RENEWED_BY
        if stored is None or stored.ended:
            return True
        # The deadline may have been stored by a bridge whose clock is ahead, so that it does not increase for a while.
        later_sec = (lease.worker_ts_ms - stored.worker_ts_ms) / 1000
        return lease.expires_at - stored.expires_at > step or later_sec > step

    def accepted(self, record: Dispatch) -> None:
        """Replace a record after its lease was stored."""
        self.put(record)
        if record.lease is not None:
            self._stored[record.key] = record.lease


def record_key(event: StatusEvent | BadEvent) -> str:
    """Return the key of the dispatch record that an event is about."""
    assert event.epoch is not None, "a malformed record is attributed before it is handled"
    return key_of(*event.node, event.epoch)
