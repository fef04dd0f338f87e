"""Decides which events of external workers apply to an attempt, and how they renew its lease. Pure.

See docs/protocol.md, "Which events count" and "Leases", and the hazards H7 and H15 to H17.

Fencing comes before deduplication, because two workers with the same epoch send events with the same ids.

Workers run on other machines, whose clocks differ. FlowKit therefore takes only the duration of a lease from a
message, and starts its own clock when it receives the message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches import DispatchState, WorkerLease, key_of
from flowkit.protocol.messages import EventKind

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from flowkit.adapters.dispatches import Dispatch
    from flowkit.bridge.rules.messages import BadEvent, StatusEvent

TERMINAL = frozenset({EventKind.TASK_DONE, EventKind.TASK_FAILED, EventKind.CANCELLED})
"""Events after which their worker has no run in progress."""

_SHORTEST_SEC = 0.5
_LONGEST_SEC = 24 * 3600.0

_MARGIN = 0.1
"""Fraction of its duration by which a lease is extended, to allow for delays in Kafka and the network."""

_RENEWED_BY = 0.1
"""Fraction of its duration by which a lease must have been extended before the extension is stored."""


class Verdict(Enum):
    """What an event means for its attempt."""

    ACCEPT = auto()
    """The sender becomes the owner of the run, possibly instead of an earlier worker."""
    APPLY = auto()
    """The event is from the worker that owns the run."""
    IGNORE = auto()
    """The event changes nothing."""
    STOP_WORKER = auto()
    """The event changes nothing, and its sender runs an attempt that it no longer owns: signal it to stop."""
    UNKNOWN = auto()
    """No bridge of this database has dispatched the attempt."""


def judge(record: Dispatch | None, event: StatusEvent) -> Verdict:
    """Return what `event` means for the attempt with this dispatch record."""
    if record is None:
        return Verdict.UNKNOWN
    if event.role != record.attempt.role and event.event.kind is not EventKind.TASK_HEARTBEAT:
        return Verdict.IGNORE
    if record.state is not DispatchState.OPEN:
        return _judge_late(record, event)
    if event.event.kind is EventKind.TASK_ACCEPTED:
        return _judge_acceptance(record, event)
    lease = record.lease
    if lease is None:
        return Verdict.ACCEPT if event.role == record.attempt.role else Verdict.IGNORE
    if event.worker_id != lease.worker_id:
        return _judge_foreign(event)
    return Verdict.APPLY if _is_of_lease(record, lease, event) else Verdict.IGNORE


def lease_id_of(event: StatusEvent) -> str:
    """Return the lease id that an event contains, or an empty string."""
    return str(getattr(event.event, "lease_id", ""))


def is_from_owner(record: Dispatch, bad: BadEvent) -> bool:
    """Return whether a malformed record is about this open attempt, and no other worker than its owner has sent it."""
    if record.state is not DispatchState.OPEN or bad.role != record.attempt.role or bad.worker_id == "":
        return False
    return bad.worker_id is None or record.lease is None or bad.worker_id == record.lease.worker_id


def _judge_acceptance(record: Dispatch, event: StatusEvent) -> Verdict:
    lease, lease_id = record.lease, lease_id_of(event)
    if lease is None:
        return Verdict.ACCEPT
    if event.worker_id == lease.worker_id:
        if not lease.lease_id or lease.lease_id == lease_id:
            return Verdict.APPLY
        return Verdict.IGNORE if lease_id in record.past_leases else Verdict.ACCEPT
    return Verdict.STOP_WORKER if lease_id in (lease.lease_id, *record.past_leases) else Verdict.ACCEPT


def _is_of_lease(record: Dispatch, lease: WorkerLease, event: StatusEvent) -> bool:
    """Return whether an event of the owner belongs to its current lease. Only some kinds of events name a lease.

    A lease has no id if events that name none arrived before the acceptance. On the topic of another role, an
    event must name the lease: whoever may write there may know the worker, but not what it received for its own role.
    """
    lease_id = lease_id_of(event)
    if event.role != record.attempt.role:
        return lease_id != "" and lease_id == lease.lease_id
    if lease.lease_id or not lease_id:
        return lease_id in ("", lease.lease_id)
    return lease_id not in record.past_leases


def _judge_foreign(event: StatusEvent) -> Verdict:
    """Return the verdict on an event of a worker without a lease. It gets a signal unless the event ends its run.

    A worker that owns a later lease of the epoch gets none, because signals name only the epoch.
    """
    return Verdict.IGNORE if event.event.kind in TERMINAL else Verdict.STOP_WORKER


def _judge_late(record: Dispatch, event: StatusEvent) -> Verdict:
    """Return the verdict on an event that arrives after the end. A late heartbeat of the same worker is normal."""
    outcome = record.outcome
    ended_itself = outcome is not None and outcome.worker_id and outcome.worker_id == event.worker_id
    return Verdict.IGNORE if ended_itself else _judge_foreign(event)


def new_lease(record: Dispatch, event: StatusEvent, received_at: float) -> WorkerLease:
    """Return the lease of the worker that takes the run with `event`."""
    ttl_sec = _ttl_sec(event) or record.attempt.lease_ttl_sec
    return WorkerLease(
        worker_id=event.worker_id,
        lease_id=lease_id_of(event),
        ttl_sec=ttl_sec,
        expires_at=_deadline(ttl_sec, received_at),
        worker_ts_ms=event.envelope.ts_ms,
    )


def renewed(lease: WorkerLease, event: StatusEvent, received_at: float) -> WorkerLease:
    """Return the lease after an event of its worker. Every event renews it, and a deadline never moves back."""
    ttl_sec = _ttl_sec(event) or lease.ttl_sec
    return replace(
        lease,
        ttl_sec=ttl_sec,
        expires_at=max(lease.expires_at, _deadline(ttl_sec, received_at)),
        worker_ts_ms=max(lease.worker_ts_ms, event.envelope.ts_ms),
        ended=False,
    )


def left_sec(lease: WorkerLease, silent_sec: float) -> float:
    """Return for how long a lease still lasts. `silent_sec` is the time since its last event, by one clock."""
    return 0.0 if lease.ended else lease.ttl_sec * (1 + _MARGIN) - silent_sec


def document_deadline_ms(event: StatusEvent, lease: WorkerLease) -> int:
    """Return the deadline for the task document: the one in the event, or else the one of the lease."""
    given: int | None = getattr(event.event, "lease_deadline_ts_ms", None)
    return int(lease.expires_at * 1000) if given is None else given


def _ttl_sec(event: StatusEvent) -> float | None:
    """Return the duration that an event grants, or None if it grants none or an implausible one."""
    deadline_ms: int | None = getattr(event.event, "lease_deadline_ts_ms", None)
    if deadline_ms is None:
        return None
    ttl_sec = (deadline_ms - event.envelope.ts_ms) / 1000
    return ttl_sec if _SHORTEST_SEC <= ttl_sec <= _LONGEST_SEC else None


def _deadline(ttl_sec: float, received_at: float) -> float:
    return received_at + ttl_sec * (1 + _MARGIN)


class PolledNode:
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
