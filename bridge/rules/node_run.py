"""The dispatch records of one node while the events of one poll are applied to them. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches.record import key_of
from flowkit.bridge.rules.leases import renewed

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.rules.reading import StatusEvent


class NodeRun:
    """The dispatch records of one node during one poll, and what is to be written about them."""

    def __init__(self, records: dict[str, Dispatch], at: float) -> None:
        self.records = dict(records)
        self.at = at
        self._renewed: dict[str, int] = {}
        """Batches stored since the last write of a record, by key."""

    def record_of(self, event: StatusEvent) -> Dispatch | None:
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
            self._renewed.setdefault(record.key, 0)

    def count(self, key: str) -> None:
        """Count a batch that was stored."""
        self._renewed[key] = self._renewed.get(key, 0) + 1
        self.put(replace(self.records[key], batches=self.records[key].batches + 1))

    def take_renewals(self) -> list[tuple[str, int]]:
        """Return and forget the keys of renewed records, with the number of stored batches."""
        renewals, self._renewed = [*self._renewed.items()], {}
        return renewals


def record_key(event: StatusEvent) -> str:
    """Return the key of the dispatch record that an event is about."""
    envelope = event.envelope
    return key_of(envelope.task_id, envelope.node_id, envelope.attempt_epoch)
