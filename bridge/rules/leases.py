"""Leases of external workers (docs/protocol.md, "Leases"). Pure.

Workers run on other machines, whose clocks differ. FlowKit therefore takes only the duration of a lease from a
message, and starts its own clock when it receives the message.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches.record import WorkerLease
from flowkit.bridge.rules.fencing import lease_id_of

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.rules.reading import StatusEvent

_SHORTEST_SEC = 0.5
_LONGEST_SEC = 24 * 3600.0
_MARGIN = 0.1
"""Fraction of its duration by which a lease is extended, to allow for delays in Kafka and the network."""


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
