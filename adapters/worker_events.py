"""The event log of attempts, `worker_events` (spec: collections; protocol: status events).

The log is for operators and monitoring. FlowKit bases no decision on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.mongo import (
    Database,
    duplicate_indexes,
    durable,
    ensure_index,
    expire_after,
    moment,
    translate_errors,
)
from flowkit.core.utils import stable_hash
from flowkit.limits import BATCH_UID_CHARS, LAST_ERROR_CHARS, REASON_CODE_CHARS
from flowkit.protocol.messages import FINAL_UID, EventKind
from flowkit.text import prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import AttemptFailure, AttemptInput

_TTL = "ttl_worker_events"
_EVENT = [(name, ASCENDING) for name in ("task_id", "node_id", "event_hash")]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """One event of an attempt. It contains no large values, because many events may queue up for MongoDB."""

    task_id: str
    node_id: str
    step_type: str
    epoch: int
    at: float
    event_hash: str
    """Identifies the event, so that MongoDB stores it only once even if the attempt reports it repeatedly."""
    payload: dict[str, Any]
    received_at: float | None = None
    """When it was received; None if that is when it is stored."""


class WorkerEvents:
    """The collection `worker_events`, a log of attempts."""

    def __init__(self, db: Database) -> None:
        self._events = durable(db).worker_events

    @translate_errors
    async def prepare(self) -> None:
        """Create the index. Raise StoreRefused, which names the index, if duplicate events prevent it."""
        await ensure_index(self._events, _EVENT, "uniq_worker_event", unique=True)

    @translate_errors
    async def expire_after(self, seconds: float) -> None:
        """Let MongoDB delete events this long after it stored them; 0 means never. Keep other indexes on the time."""
        await expire_after(self._events, _TTL, seconds)

    @translate_errors
    async def append(self, events: Sequence[WorkerEvent], at: float) -> None:
        """Store `events`. Those without a time of receipt get `at`. Events that exist already stay unchanged.

        Raise StoreRefused if MongoDB permanently rejects some of the events; the others are stored.
        """
        if not events:
            return
        try:
            await self._events.insert_many([_row(event, at) for event in events], ordered=False)
        except BulkWriteError as error:
            duplicate_indexes(error)


def _row(event: WorkerEvent, at: float) -> dict[str, Any]:
    at = at if event.received_at is None else event.received_at
    return {
        "task_id": event.task_id,
        "node_id": event.node_id,
        "step_type": event.step_type,
        "event_hash": event.event_hash,
        "payload": event.payload,
        "ts_ms": int(event.at * 1000),
        "recv_ts_ms": int(at * 1000),
        "attempt_epoch": event.epoch,
        "created_at": moment(at),
        "metrics_applied": False,
    }


# --- events: payloads and identities as the protocol defines them -----------------------------------------------


def accepted(attempt: AttemptInput, lease: dict[str, Any], at: float) -> WorkerEvent:
    """Return the event that an attempt has taken its epoch."""
    payload = {"lease_id": lease["lease_id"], "lease_deadline_ts_ms": lease["deadline_ts_ms"]}
    identity = {**_identity("acc", attempt), "lease": lease["lease_id"]}
    return _event(EventKind.TASK_ACCEPTED, attempt, lease["worker_id"], at, payload, identity)


def heartbeat(attempt: AttemptInput, lease: dict[str, Any], interval_sec: float, at: float) -> WorkerEvent:
    """Return the event that an attempt is alive. Each interval has at most one such event."""
    deadline_ms = int((at + attempt.lease_ttl_sec) * 1000)
    payload = {"lease_id": lease["lease_id"], "lease_deadline_ts_ms": deadline_ms}
    bucket = int(at * 1000) // max(1, int(interval_sec * 1000))
    identity = {**_identity("hb", attempt), "t": bucket}
    return _event(EventKind.TASK_HEARTBEAT, attempt, lease["worker_id"], at, payload, identity)


def batch_ok(attempt: AttemptInput, worker_id: str, batch_uid: str, batches: int, at: float) -> WorkerEvent:
    """Return the event that an attempt has stored a batch, its `batches`-th.

    The event has no metrics, because they may be large. They are in `metrics_raw`.
    """
    payload = {**_batch(attempt, batch_uid), "batches": batches}
    identity = {**_identity("bok", attempt), "uid": batch_uid}
    return _event(EventKind.BATCH_OK, attempt, worker_id, at, payload, identity)


def batch_failed(
    attempt: AttemptInput, worker_id: str, batch_uid: str, failure: AttemptFailure, at: float
) -> WorkerEvent:
    """Return the event that a batch has failed, which ends its attempt."""
    payload = {**_batch(attempt, batch_uid), **_reason(failure)}
    identity = {**_identity("bf", attempt), "uid": batch_uid}
    return _event(EventKind.BATCH_FAILED, attempt, worker_id, at, payload, identity)


def done(attempt: AttemptInput, worker_id: str, at: float) -> WorkerEvent:
    """Return the event that an attempt has finished its node.

    The event has no metrics, because they may be large. They are in `metrics_raw`.
    """
    ref = {"task_id": attempt.task_id, "node_id": attempt.node_id}
    payload = {"artifacts_ref": ref, "final_uid": FINAL_UID}
    return _event(EventKind.TASK_DONE, attempt, worker_id, at, payload, _identity("td", attempt))


def failed(attempt: AttemptInput, worker_id: str, failure: AttemptFailure, at: float) -> WorkerEvent:
    """Return the event that an attempt has failed."""
    payload = _reason(failure)
    identity = {**_identity("tf", attempt), "r": payload["reason_code"], "p": failure.permanent}
    return _event(EventKind.TASK_FAILED, attempt, worker_id, at, payload, identity)


def cancelled(attempt: AttemptInput, worker_id: str, at: float) -> WorkerEvent:
    """Return the event that an attempt has ended because of a cancel request."""
    payload = {"reason": "cancelled"}
    return _event(EventKind.CANCELLED, attempt, worker_id, at, payload, _identity("c", attempt))


def _event(
    kind: EventKind,
    attempt: AttemptInput,
    worker_id: str,
    at: float,
    payload: dict[str, Any],
    identity: dict[str, Any],
) -> WorkerEvent:
    version = {"version": attempt.version} if attempt.version else {}
    return WorkerEvent(
        task_id=attempt.task_id,
        node_id=attempt.node_id,
        step_type=attempt.role,
        epoch=attempt.epoch,
        at=at,
        event_hash=stable_hash(identity),
        payload={"kind": kind.value, "worker_id": worker_id, **version, **payload},
    )


def _identity(what: str, attempt: AttemptInput) -> dict[str, Any]:
    return {what: attempt.task_id, "n": attempt.node_id, "e": attempt.epoch}


def _reason(failure: AttemptFailure) -> dict[str, Any]:
    code, message = (
        prefix(failure.code, REASON_CODE_CHARS),
        prefix(failure.message, LAST_ERROR_CHARS),
    )
    return {"reason_code": code, "permanent": failure.permanent, "error": message or None}


def _batch(attempt: AttemptInput, batch_uid: str) -> dict[str, Any]:
    uid = prefix(batch_uid, BATCH_UID_CHARS)
    ref = {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": uid}
    return {"batch_uid": uid, "artifacts_ref": ref}
