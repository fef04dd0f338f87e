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
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.rules.reading import StatusEvent


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


_RUNNING = frozenset({EventKind.TASK_ACCEPTED, EventKind.TASK_HEARTBEAT, EventKind.TASK_RESUMED})
"""Events that show that their worker has a run in progress."""

TERMINAL = frozenset({EventKind.TASK_DONE, EventKind.TASK_FAILED, EventKind.CANCELLED})


def judge(record: Dispatch | None, event: StatusEvent) -> Verdict:
    """Return what `event` means for the attempt with this dispatch record."""
    if record is None:
        return Verdict.UNKNOWN
    if record.state is not DispatchState.OPEN:
        return _after_the_end(record, event)
    if event.event.kind is EventKind.TASK_ACCEPTED:
        return _acceptance(record, event)
    lease = record.lease
    if lease is None:
        return Verdict.ACCEPT
    if event.worker_id not in ("", lease.worker_id):
        return _foreign(event)
    return Verdict.IGNORE if _outdated(record, event) else Verdict.APPLY


def lease_id_of(event: StatusEvent) -> str:
    """Return the lease id that an event contains, or an empty string."""
    return str(getattr(event.event, "lease_id", ""))


def _acceptance(record: Dispatch, event: StatusEvent) -> Verdict:
    lease, lease_id = record.lease, lease_id_of(event)
    if lease is not None and (lease.lease_id == lease_id or _named_later(record, event)):
        return Verdict.APPLY
    if lease is not None and _outdated(record, event):
        return Verdict.IGNORE if event.worker_id == lease.worker_id else Verdict.STOP_WORKER
    return Verdict.ACCEPT


def _outdated(record: Dispatch, event: StatusEvent) -> bool:
    """Return whether the event names a lease that a later one has replaced. Its worker may own the later one, too.

    Signals contain only the epoch, so a signal about the earlier lease would stop the worker's current run.
    """
    lease_id = lease_id_of(event)
    return bool(lease_id) and lease_id in record.past_leases


def _named_later(record: Dispatch, event: StatusEvent) -> bool:
    """Return whether the acceptance belongs to a run whose other events, which name no lease, arrived first."""
    lease = record.lease
    return lease is not None and not lease.lease_id and lease.worker_id == event.worker_id


def _foreign(event: StatusEvent) -> Verdict:
    return Verdict.STOP_WORKER if event.event.kind in _RUNNING else Verdict.IGNORE


def _after_the_end(record: Dispatch, event: StatusEvent) -> Verdict:
    """Return the verdict on an event that arrives after the end. A late heartbeat of the same worker is normal."""
    outcome = record.outcome
    ended_itself = outcome is not None and outcome.worker_id and outcome.worker_id == event.worker_id
    return Verdict.IGNORE if ended_itself else _foreign(event)
