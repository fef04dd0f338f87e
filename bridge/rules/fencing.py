"""Decides which events of external workers apply to an attempt. Pure.

See docs/protocol.md, "Which events count", and the hazards H7 and H15 to H17.

Fencing comes before deduplication, because two workers with the same epoch send events with the same ids.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches.record import DispatchState
from flowkit.protocol.kinds import EventKind

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch, WorkerLease
    from flowkit.bridge.rules.reading import BadEvent, StatusEvent


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


TERMINAL = frozenset({EventKind.TASK_DONE, EventKind.TASK_FAILED, EventKind.CANCELLED})
"""Events after which their worker has no run in progress."""


def judge(record: Dispatch | None, event: StatusEvent) -> Verdict:
    """Return what `event` means for the attempt with this dispatch record."""
    if record is None:
        return Verdict.UNKNOWN
    if event.role != record.attempt.role and event.event.kind is not EventKind.TASK_HEARTBEAT:
        return Verdict.IGNORE
    if record.state is not DispatchState.OPEN:
        return _after_the_end(record, event)
    if event.event.kind is EventKind.TASK_ACCEPTED:
        return _acceptance(record, event)
    lease = record.lease
    if lease is None:
        return Verdict.ACCEPT if event.role == record.attempt.role else Verdict.IGNORE
    if event.worker_id != lease.worker_id:
        return _foreign(event)
    return Verdict.APPLY if _is_of_lease(record, lease, event) else Verdict.IGNORE


def lease_id_of(event: StatusEvent) -> str:
    """Return the lease id that an event contains, or an empty string."""
    return str(getattr(event.event, "lease_id", ""))


def is_from_owner(record: Dispatch, bad: BadEvent) -> bool:
    """Return whether a malformed record is about this open attempt, and no other worker than its owner has sent it."""
    if record.state is not DispatchState.OPEN or bad.role != record.attempt.role or bad.worker_id == "":
        return False
    return bad.worker_id is None or record.lease is None or bad.worker_id == record.lease.worker_id


def _acceptance(record: Dispatch, event: StatusEvent) -> Verdict:
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

    A lease has no id if events that name none arrived before the acceptance.
    """
    lease_id = lease_id_of(event)
    if lease.lease_id or not lease_id:
        return lease_id in ("", lease.lease_id)
    return event.role == record.attempt.role and lease_id not in record.past_leases


def _foreign(event: StatusEvent) -> Verdict:
    """Return the verdict on an event of a worker without a lease. It gets a signal unless the event ends its run.

    A worker that owns a later lease of the epoch gets none, because signals name only the epoch.
    """
    return Verdict.IGNORE if event.event.kind in TERMINAL else Verdict.STOP_WORKER


def _after_the_end(record: Dispatch, event: StatusEvent) -> Verdict:
    """Return the verdict on an event that arrives after the end. A late heartbeat of the same worker is normal."""
    outcome = record.outcome
    ended_itself = outcome is not None and outcome.worker_id and outcome.worker_id == event.worker_id
    return Verdict.IGNORE if ended_itself else _foreign(event)
