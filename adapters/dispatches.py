"""The collection `dispatches`: what the bridges know about each attempt that an external worker runs.

All bridges share the records, so any bridge can continue an attempt that another one dispatched. A record stays small
however many batches its node has.

Every update has its condition in its own filter, so any number of bridges can write the same record: an outcome is
stored once, and an outdated write changes nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic import dataclasses as wire
from pymongo import ASCENDING, ReturnDocument, UpdateOne
from pymongo.errors import DuplicateKeyError

from flowkit.adapters.mongo import Database, aggregated, durable, ensure_index, moment, translate_errors
from flowkit.core.instruments import ATTEMPT_TIME, ATTEMPTS_ENDED
from flowkit.core.utils import Fields, stable_hash
from flowkit.errors import StoreRefused
from flowkit.graph.input_adapters import PullArgs
from flowkit.models import AttemptFailure, AttemptInput, FailureKind
from flowkit.validation.invalid import describe

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from flowkit.core.time import LeaseObserver

_logger = logging.getLogger("flowkit.bridge")


_STORED_LEASE = 1.2
"""How many times its duration a stored lease lasts: bridges allow for delays, and do not store each renewal."""

PAST_LEASES = 16
"""Maximum number of earlier leases that a record keeps, to recognize redelivered acceptances."""


_INDEXES = {
    "ix_dispatch_task_node": ("task_id", "node_id"),
    "ix_dispatch_owner_updated": ("owner", "updated_at"),
    "ix_dispatch_state_role": ("state", "role"),
    "ix_dispatch_state_worker": ("state", "lease.worker_id"),
}

_WANTED = {
    "_id": 0,
    "node_id": 1,
    "attempt_epoch": 1,
    "accepted_at": 1,
    "lease.expires_at": 1,
    "lease.ttl_sec": 1,
}


class DispatchState(StrEnum):
    """State of a dispatch record."""

    OPEN = "open"
    """The command was or will be sent, and the attempt has no outcome yet."""
    FINISHING = "finishing"
    """The worker has finished, and a bridge checks whether it has read all of its inputs."""
    ENDED = "ended"
    """The record contains the outcome, which Temporal may not know yet."""
    REPORTED = "reported"
    """Temporal knows the outcome, or the attempt no longer exists there."""


ACTIVE_STATES = [DispatchState.OPEN.value, DispatchState.FINISHING.value]
"""States of attempts without a final outcome."""

_LOST = FailureKind.LOSS.outcome
_OPEN = DispatchState.OPEN.value
_FINISHING = DispatchState.FINISHING.value
_ACTIVE = {"$in": ACTIVE_STATES}
"""Filter for attempts without a final outcome."""
_UNREPORTED = {"$in": [_OPEN, _FINISHING, DispatchState.ENDED.value]}


class OutcomeKind(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_LATE: Fields = {
    "state": {"$nin": ACTIVE_STATES},
    "outcome.kind": OutcomeKind.CANCELLED.value,
    "accepted_at": None,
    "settled": {"$ne": True},
}
"""Filter for records with `Dispatch.may_begin_late`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended, according to a terminal event of its worker or a decision of a bridge."""

    kind: OutcomeKind
    at: float
    worker_id: str = ""
    failure: AttemptFailure | None = None
    """Set if `kind` is `failed`."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Final metrics. The record drops them once the outcome is reported."""
    artifacts_ref: dict[str, Any] | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLease:
    """The worker that runs an attempt."""

    worker_id: str
    lease_id: str
    ttl_sec: float
    expires_at: float
    """Seconds since the Unix epoch, by the clock of the bridge that received the event. Clocks of bridges differ."""
    worker_ts_ms: int
    """Time of the worker's latest event, by the worker's clock."""
    ended: bool = False
    """Whether the worker has announced that it stopped or restarted. A later event of the worker revokes that."""

    def is_later(self, known: WorkerLease | None) -> bool:
        """Return whether this lease contains an event that `known` does not."""
        if known is None or known.lease_id != self.lease_id:
            return True
        return self.expires_at > known.expires_at or self.worker_ts_ms > known.worker_ts_ms


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CancelRequest:
    """A request to stop an attempt."""

    reason: str
    at: float


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """One dispatch record. Records are unique for each task, node and epoch."""

    attempt: AttemptInput
    """The input of the attempt's activity, without `io`, which would make the record large."""
    run_id: str
    queue: str
    """Task queue of the engine."""
    topic: str
    partition: int
    end_offset: int
    """Lower bound for the end of the partition before the command was sent. A search for the command begins here."""
    dedup_id: str
    cancel_token: str
    owner: str
    """Id of the bridge that supervises the attempt."""
    created_at: float
    pull: PullArgs | None = None
    """Arguments of the pulling input adapter, if the node has one."""
    offset: int | None = None
    """Offset of the command; None while it is unknown."""
    state: DispatchState = DispatchState.OPEN
    lease: WorkerLease | None = None
    past_leases: tuple[str, ...] = ()
    accepted_at: float | None = None
    batches: int = 0
    cancel: CancelRequest | None = None
    outcome: Outcome | None = None
    settled: bool = False
    """Whether no worker runs the attempt any more, although none had accepted it when it was cancelled."""

    @property
    def active(self) -> bool:
        """Whether the attempt has no final outcome yet."""
        return self.state in ACTIVE_STATES

    @property
    def may_begin_late(self) -> bool:
        """Whether a worker may still read the command of this cancelled attempt, or runs it.

        `lease` shows the worker.
        """
        was_cancelled = self.outcome is not None and self.outcome.kind is OutcomeKind.CANCELLED
        return not self.active and was_cancelled and self.accepted_at is None and not self.settled

    @property
    def key(self) -> str:
        """The `_id` of the record."""
        return key_of(self.attempt.task_id, self.attempt.node_id, self.attempt.epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCommand:
    """The place of the command of an open attempt."""

    key: str
    """The `_id` of the dispatch record."""
    role: str
    partition: int
    accepted: bool
    """Whether a worker runs the attempt."""


_ADAPTER = TypeAdapter(Dispatch)
_ATTEMPT = TypeAdapter(AttemptInput)
_PULL = TypeAdapter(PullArgs)


@lru_cache(maxsize=10_000)
def key_of(task_id: str, node_id: str, epoch: int) -> str:
    """Return the `_id` of the record for one attempt."""
    return stable_hash({"t": task_id, "n": node_id, "e": epoch})


def to_document(record: Dispatch) -> Fields:
    """Return the document of a record.

    Attempt and pull arguments are JSON texts, because node ids may contain characters that MongoDB rejects in names.
    """
    attempt = record.attempt
    fields = {name: getattr(record, name) for name in _NAMES}
    return {
        "_id": record.key,
        "task_id": attempt.task_id,
        "node_id": attempt.node_id,
        "attempt_epoch": attempt.epoch,
        "role": attempt.role,
        **fields,
        "state": record.state.value,
        "past_leases": list(record.past_leases),
        "lease": None if record.lease is None else asdict(record.lease),
        "cancel": None if record.cancel is None else asdict(record.cancel),
        "outcome": None if record.outcome is None else outcome_fields(record.outcome),
        "attempt": _ATTEMPT.dump_json(attempt, exclude_defaults=True).decode(),
        "pull": None if record.pull is None else _PULL.dump_json(record.pull).decode(),
    }


def from_document(document: Fields) -> Dispatch:
    """Return the record of a document. Raise pydantic's ValidationError (a ValueError) if it is none."""
    known = {name: document[name] for name in _NAMES if name in document}
    attempt, pull = json.loads(document["attempt"]), document.get("pull")
    return _ADAPTER.validate_python({**known, "attempt": attempt, "pull": json.loads(pull) if pull else None})


_NAMES = tuple(name for name in Dispatch.__dataclass_fields__ if name not in ("attempt", "pull"))


def outcome_fields(outcome: Outcome) -> Fields:
    """Return an outcome as it is stored."""
    fields = asdict(outcome)
    failure = outcome.failure
    stored = None if failure is None else {**asdict(failure), "kind": failure.kind.value}
    return {**fields, "kind": outcome.kind.value, "failure": stored}


class DispatchStore:
    """The collection `dispatches` of one database."""

    def __init__(self, db: Database) -> None:
        self._records = durable(db).dispatches
        self._unreadable: set[str] = set()

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes."""
        for name, fields in _INDEXES.items():
            await ensure_index(self._records, [(field, ASCENDING) for field in fields], name)

    @translate_errors
    async def insert(self, record: Dispatch) -> Dispatch:
        """Store a new record, and return it. If the attempt has a record already, return that one."""
        document = {**to_document(record), "updated_at": moment(record.created_at)}
        try:
            await self._records.insert_one(document)
        except DuplicateKeyError:
            stored = await self._records.find_one({"_id": record.key})
            return _read_record(stored) if stored else record
        return record

    @translate_errors
    async def find(self, task_id: str, node_id: str, epoch: int) -> Dispatch | None:
        """Return the record of one attempt, or None."""
        found = await self._records.find_one({"_id": key_of(task_id, node_id, epoch)})
        return _read_record(found) if found else None

    @translate_errors
    async def find_all(self, keys: Collection[str]) -> dict[str, Dispatch]:
        """Return the records with these keys. Keys without a record are absent from the result."""
        if not keys:
            return {}
        cursor = self._records.find({"_id": {"$in": list(keys)}})
        return {record.key: record for record in await self._read_all(cursor)}

    @translate_errors
    async def store_offset(self, key: str, partition: int, offset: int) -> None:
        """Store where the command of a record is in its topic."""
        await self._records.update_one({"_id": key}, {"$set": {"partition": partition, "offset": offset}})

    @translate_errors
    async def adopt(self, key: str, owner: str, at: float) -> Dispatch | None:
        """Make `owner` the bridge that supervises the attempt, and return the record; None if there is none."""
        found = await self._records.find_one_and_update(
            {"_id": key},
            {"$set": {"owner": owner, "updated_at": moment(at)}},
            return_document=ReturnDocument.AFTER,
        )
        return _read_record(found) if found else None

    @translate_errors
    async def accept(self, record: Dispatch, lease: WorkerLease, at: float) -> bool:
        """Make the worker of `lease` the owner of the run. Return False if the attempt has ended or changed.

        The record remembers the previous lease, so that a redelivered acceptance cannot take the run back.
        """
        previous = record.lease.lease_id if record.lease else None
        update: Fields = {"$set": {"lease": asdict(lease), "updated_at": moment(at)}}
        if previous is not None:
            update["$push"] = {"past_leases": {"$each": [previous], "$slice": -PAST_LEASES}}
        if record.accepted_at is None:
            update["$set"]["accepted_at"] = at
        wanted = {"lease.lease_id": previous} if previous is not None else {"lease": None}
        done = await self._records.update_one({"_id": record.key, "state": _OPEN, **wanted}, update)
        return bool(done.matched_count)

    @translate_errors
    async def renew(self, renewals: Sequence[tuple[Dispatch, int]], at: float) -> bool:
        """Extend the leases of records after events of their workers, in one call. Each comes with its new batches.

        A deadline never moves back. An attempt that has ended, or that another worker owns, stays unchanged; the
        method returns False if there is one.
        """
        updates = [
            _renewal(record.key, record.lease, batches, at)
            for record, batches in renewals
            if record.lease is not None
        ]
        if not updates:
            return True
        done = await self._records.bulk_write([UpdateOne(*each) for each in updates], ordered=False)
        return bool(done.matched_count == len(updates))

    @translate_errors
    async def expire(self, key: str, lease_id: str, worker_ts_ms: int, at: float) -> bool:
        """End a lease, unless its worker has sent an event after `worker_ts_ms`, by the worker's clock."""
        wanted = {"_id": key, "state": _OPEN, "lease.lease_id": lease_id}
        quiet = {"lease.worker_ts_ms": {"$lte": worker_ts_ms}}
        done = await self._records.update_one(
            {**wanted, **quiet}, {"$set": {"lease.ended": True, "updated_at": moment(at)}}
        )
        return bool(done.matched_count)

    @translate_errors
    async def extend(self, key: str, lease_id: str, until: float, at: float) -> None:
        """Extend a lease without an event of its worker, unless it has ended."""
        await self._records.update_one(
            {"_id": key, "state": _OPEN, "lease.lease_id": lease_id, "lease.ended": {"$ne": True}},
            {"$max": {"lease.expires_at": until}, "$set": {"updated_at": moment(at)}},
        )

    @translate_errors
    async def request_cancel(self, key: str, reason: str, at: float) -> Dispatch | None:
        """Store the first cancel request of an active attempt. Return the record; None if the attempt has ended."""
        request = {"cancel": {"reason": reason, "at": at}, "updated_at": moment(at)}
        await self._records.update_one({"_id": key, "state": _ACTIVE, "cancel": None}, {"$set": request})
        found = await self._records.find_one({"_id": key, "state": _ACTIVE})
        return _read_record(found) if found else None

    @translate_errors
    async def keep(self, key: str, outcome: Outcome, batches: int = 0) -> Dispatch | None:
        """Store the outcome of an open attempt until a bridge has checked its inputs; None if it is not open."""
        return await self._move({"_id": key, "state": _OPEN}, _FINISHING, outcome, batches)

    @translate_errors
    async def end(
        self, key: str, outcome: Outcome, batches: int = 0, *, owner: str | None = None
    ) -> Dispatch | None:
        """Store the final outcome of an active attempt, and return the record; None if it has ended already.

        With `owner`, also return None, and change nothing, if another bridge supervises the attempt.
        """
        wanted: Fields = {"_id": key, "state": _ACTIVE, **({} if owner is None else {"owner": owner})}
        return await self._move(wanted, DispatchState.ENDED.value, outcome, batches)

    @translate_errors
    async def count_as_cancelled(self, record: Dispatch) -> None:
        """Replace the outcome of an ended record by that of `record`, and store its cancel request."""
        assert record.outcome is not None
        assert record.cancel is not None
        outcome, cancel = outcome_fields(record.outcome), asdict(record.cancel)
        await self._records.update_one(
            {"_id": record.key, "state": DispatchState.ENDED.value},
            {"$set": {"outcome": outcome, "cancel": cancel}},
        )

    @translate_errors
    async def end_unchanged(self, record: Dispatch, outcome: Outcome) -> Dispatch | None:
        """Store the outcome of an open attempt, unless its lease has changed since `record` was read."""
        lease = record.lease
        if lease is None:
            same: Fields = {"lease": None}
        else:
            same = {
                "lease.lease_id": lease.lease_id,
                "lease.expires_at": {"$lte": lease.expires_at},
                "lease.worker_ts_ms": {"$lte": lease.worker_ts_ms},
            }
        return await self._move(
            {"_id": record.key, "state": _OPEN, **same}, DispatchState.ENDED.value, outcome
        )

    async def _move(self, wanted: Fields, state: str, outcome: Outcome, batches: int = 0) -> Dispatch | None:
        """Move a record to `state` if it matches `wanted`, and add `batches` to its count of stored batches."""
        stored = {"state": state, "outcome": outcome_fields(outcome), "updated_at": moment(outcome.at)}
        found = await self._records.find_one_and_update(
            wanted, {"$set": stored, **_batches_update(batches)}, return_document=ReturnDocument.AFTER
        )
        record = _read_record(found) if found else None
        if record is not None and state == DispatchState.ENDED.value:
            _count_end(record, outcome)
        return record

    @translate_errors
    async def mark_reported(self, key: str, batches: int | None = None) -> None:
        """Record that Temporal knows the outcome, and the final number of batches if it is known.

        This drops the final metrics, which are in `metrics_raw` now.
        """
        known: Fields = {} if batches is None else {"batches": batches}
        await self._records.update_one(
            {"_id": key, "state": DispatchState.ENDED.value},
            {"$set": {"state": DispatchState.REPORTED.value, "outcome.metrics": {}, **known}},
        )

    @translate_errors
    async def find_owned(self, owner: str, since: float | None = None) -> list[Dispatch]:
        """Return the active records that a bridge supervises; with `since`, all its records that changed since then."""
        if since is None:
            return await self._read({"owner": owner, "state": _ACTIVE})
        return await self._read({"owner": owner, "updated_at": {"$gte": moment(since)}})

    @translate_errors
    async def find_unchanged(
        self, before: float, roles: Iterable[str], *, after: str, limit: int = 100
    ) -> list[Dispatch]:
        """Return records of `roles` that are not reported and have not changed since `before`.

        They are the first ones, by key, behind the key `after`.
        """
        wanted = {"state": _UNREPORTED, "role": {"$in": list(roles)}, "updated_at": {"$lt": moment(before)}}
        found = self._records.find({**wanted, "_id": {"$gt": after}})
        return await self._read_all(found.sort("_id", ASCENDING).limit(limit))

    @translate_errors
    async def find_placed_by_others(self, owner: str, roles: Iterable[str]) -> list[PlacedCommand]:
        """Return the commands of open attempts of `roles` that bridges other than `owner` supervise."""
        wanted = {"state": _OPEN, "role": {"$in": list(roles)}, "owner": {"$ne": owner}}
        placed = self._records.find(wanted, {"role": 1, "partition": 1, "lease.lease_id": 1})
        return [
            PlacedCommand(
                key=each["_id"],
                role=each["role"],
                partition=each["partition"],
                accepted=each.get("lease") is not None,
            )
            async for each in placed
        ]

    @translate_errors
    async def disown(self, key: str, owner: str) -> None:
        """End the supervision by `owner`. When Temporal runs the activity again, a bridge adopts the record."""
        await self._records.update_one({"_id": key, "owner": owner}, {"$set": {"owner": ""}})

    @translate_errors
    async def find_open_before(self, task_id: str, node_id: str, epoch: int) -> list[Dispatch]:
        """Return the open records of earlier attempts of a node."""
        return await self._read(
            {"task_id": task_id, "node_id": node_id, "attempt_epoch": {"$lt": epoch}, "state": _ACTIVE}
        )

    @translate_errors
    async def find_late(self, task_id: str, node_id: str, epoch: int) -> list[Dispatch]:
        """Return the earlier attempts of a node that a worker may still begin, or runs, although they were
        cancelled.
        """
        return await self._read(
            {"task_id": task_id, "node_id": node_id, "attempt_epoch": {"$lt": epoch}, **_LATE}
        )

    @translate_errors
    async def note_late_run(self, key: str, lease: WorkerLease) -> None:
        """Store which worker runs a cancelled attempt."""
        await self._records.update_one({"_id": key, **_LATE}, {"$set": {"lease": asdict(lease)}})

    @translate_errors
    async def settle(self, key: str) -> None:
        """Note that no worker begins or runs a cancelled attempt any more."""
        await self._records.update_one({"_id": key, **_LATE}, {"$set": {"settled": True}})

    @translate_errors
    async def find_held_by(self, worker_ids: Iterable[str]) -> list[Dispatch]:
        """Return the open records of runs that these workers own."""
        return await self._read({"state": _OPEN, "lease.worker_id": {"$in": list(worker_ids)}})

    @translate_errors
    async def find_unfinished(self, role: str, queue: str) -> tuple[int, Dispatch | None]:
        """Return the number of attempts of a role that have no outcome yet, and one of them."""
        wanted: Fields = {"state": _ACTIVE, "role": role, "queue": queue}
        found = await self._records.find_one(wanted)
        count = await self._records.count_documents(wanted) if found else 0
        return count, _read_record(found) if found else None

    @translate_errors
    async def count_open(self, roles: Iterable[str]) -> dict[str, int]:
        """Return the number of attempts without an outcome for each of `roles`."""
        return {role: await self._records.count_documents({"state": _ACTIVE, "role": role}) for role in roles}

    @translate_errors
    async def oldest_unaccepted(self, queue: str) -> dict[str, float]:
        """Return when the oldest attempt of an engine queue was dispatched that no worker has accepted, by role.

        Times are in seconds since the Unix epoch.
        """
        unaccepted = {"state": _OPEN, "queue": queue, "accepted_at": None}
        grouped = {"_id": "$role", "since": {"$min": "$created_at"}}
        rows = await aggregated(self._records, [{"$match": unaccepted}, {"$group": grouped}])
        return {row["_id"]: row["since"] for row in rows}

    async def _read(self, wanted: Fields) -> list[Dispatch]:
        return await self._read_all(self._records.find(wanted))

    async def _read_all(self, cursor: Any) -> list[Dispatch]:
        """Return the records that `cursor` finds. Skip those that cannot be read, with one warning for each."""
        records = []
        async for document in cursor:
            try:
                records.append(_read_record(document))
            except StoreRefused as error:
                if document["_id"] not in self._unreadable:
                    self._unreadable.add(document["_id"])
                    _logger.warning("%s; the bridge ignores it", error)
        return records


def _read_record(document: Fields) -> Dispatch:
    """Return the record of a document. Raise StoreRefused if it is none."""
    try:
        return from_document(document)
    except (ValueError, KeyError, TypeError) as error:
        node, epoch, task = (document.get(name) for name in ("node_id", "attempt_epoch", "task_id"))
        raise StoreRefused(
            f"the dispatch record {document['_id']!r} of node {node!r}, attempt {epoch}, of task {task!r} cannot be "
            f"read: {_find_problem(error)}. If a newer release of FlowKit wrote it, run that release; "
            "otherwise delete it"
        ) from error


def _find_problem(error: Exception) -> str:
    """Return the problems of a document, without its values, which may be large."""
    if isinstance(error, ValidationError):
        return describe(error, hides=lambda path, value: True, quotes=False)
    return f"{type(error).__name__}: {error}"


def _count_end(record: Dispatch, outcome: Outcome) -> None:
    """Count the end of an attempt of an external worker, which has run since a worker accepted it."""
    role, failure = record.attempt.role, outcome.failure
    ended, reason = ("cancelled", "") if outcome.kind is OutcomeKind.CANCELLED else ("succeeded", "")
    if failure is not None:
        ended, reason = failure.kind.outcome, failure.code
    ATTEMPTS_ENDED.add(role, ended, reason)
    if record.accepted_at is not None and ended != _LOST:
        ATTEMPT_TIME.observe(max(0.0, outcome.at - record.accepted_at), role, ended)


def _batches_update(batches: int) -> Fields:
    return {"$inc": {"batches": batches}} if batches else {}


def _renewal(key: str, lease: WorkerLease, batches: int, at: float) -> tuple[Fields, Fields]:
    """Return the filter and the update that renew a lease."""
    update: Fields = {
        "$max": {"lease.expires_at": lease.expires_at, "lease.worker_ts_ms": lease.worker_ts_ms},
        "$set": {"lease.ttl_sec": lease.ttl_sec, "lease.ended": False, "updated_at": moment(at)},
    }
    wanted = {"_id": key, "state": _OPEN, "lease.lease_id": lease.lease_id}
    return wanted, update | _batches_update(batches)


@translate_errors
async def last_event_times(db: Database, task_id: str) -> dict[tuple[str, int], float]:
    """Return the time of the last event by node id and epoch, for the attempts that a worker has accepted.

    Every event extends a lease by its duration and a margin. The result may be too late by this margin, a tenth of the
    duration, but is never too early, because a bridge stores every extension that exceeds the margin.
    """
    running = {"task_id": task_id, "state": DispatchState.OPEN.value, "accepted_at": {"$ne": None}}
    return {
        (row["node_id"], row["attempt_epoch"]): _heard_at(row)
        async for row in durable(db).dispatches.find(running, _WANTED)
    }


@translate_errors
async def external_runs(
    db: Database, task_id: str, node_ids: Sequence[str], leases: LeaseObserver
) -> dict[str, bool]:
    """Return whether a worker runs the current attempt, for those of these nodes that a bridge has dispatched.

    A worker runs it from its acceptance until it has finished, or until its lease has not been renewed in time.
    """
    read_at = leases.now()
    active = {"task_id": task_id, "node_id": {"$in": list(node_ids)}, "state": {"$in": ACTIVE_STATES}}
    found = durable(db).dispatches.find(active, {"node_id": 1, "state": 1, "lease": 1})
    return {row["node_id"]: _is_run(row, leases, read_at) async for row in found}


def _is_run(row: dict[str, Any], leases: LeaseObserver, read_at: float) -> bool:
    lease = row.get("lease") or {}
    if row["state"] != DispatchState.OPEN.value or not lease or lease.get("ended"):
        return False
    value = (lease.get("lease_id"), lease.get("expires_at"), lease.get("worker_ts_ms"))
    lasts_sec = float(lease.get("ttl_sec") or 0.0) * _STORED_LEASE
    return leases.unchanged_sec(row["_id"], value, read_at) < lasts_sec


def _heard_at(row: dict[str, Any]) -> float:
    lease = row.get("lease") or {}
    granted_at = float(lease.get("expires_at") or 0.0) - float(lease.get("ttl_sec") or 0.0)
    return max(float(row["accepted_at"]), granted_at)
