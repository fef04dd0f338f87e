"""Begins, extends and finishes attempts, and fences them. No other code takes an epoch or writes a lease to a document.

The state of an attempt is an entry of a document: status, epoch, run and lease. The entry of a node's attempt is
`graph.nodes.<i>` of the task document. All code here takes the entry as a parameter, so an attempt may have
another one.

The first write of an attempt is a compare-and-set: it takes the epoch of the entry if the epoch is new. Every later
write has its fence in its own filter: the epoch and the run of the attempt. If the filter matches nothing, FlowKit
reads the document afterwards to find the cause. No path is part of two operators of one update, because MongoDB rejects
such updates. Concurrent writes share a group commit.
"""

from __future__ import annotations

import asyncio
import copy
import re
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import bson
from bson.raw_bson import RawBSONDocument
from cachetools import LRUCache
from pymongo import UpdateOne

from flowkit.adapters.group_commit import GroupCommit
from flowkit.adapters.mongo import moment, translate_errors, undecoded, with_room
from flowkit.adapters.tasks.cancel_flags import (
    FLAG_PATHS,
    NODE_FLAGS,
    NOT_FLAGGED,
    Flagged,
    flag_of,
    unset_of_flags,
)
from flowkit.adapters.tasks.fields import (
    ATTEMPT_ENDED_AT,
    FAILURES,
    PAUSED,
    PINNED,
    SCHEDULED_AT,
    SECRET_PARAMS,
    pin_path,
    read_pins,
)
from flowkit.adapters.tasks.room import make_room
from flowkit.core.utils import Fields
from flowkit.errors import EpochTaken, Fenced, StoreRefused, VersionPinned
from flowkit.models import OPEN_NODE_STATUSES, NodeStatus, waits
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from flowkit.masks import Path
    from flowkit.models import AttemptInput
    from flowkit.models.waits import NodeWait

Update = dict[str, Fields]

NOT_CLOSED: Fields = {"closed_run_id": {"$exists": False}}
"""Filter for documents of tasks that no run has closed."""

_REWRITTEN_BYTES_PER_SEC = 50_000_000
"""How fast concurrent attempts of one process let MongoDB rewrite the same large document."""

_LARGE_DOCUMENTS = 100
"""How many large documents have a group commit of their own."""

_ALIVE = [NodeStatus.RUNNING.value, NodeStatus.CANCELLING.value]

_PARAMS: Fields = {"_id": 0, "params": 1, SECRET_PARAMS: 1, SCHEDULED_AT: 1}
"""Projection with the params of a task, and its nominal time."""

_KEPT_BYTES = 2 * 2**20
"""Memory for the params of runs whose attempts have ended, for their next attempts."""
_LARGEST_KEPT_BYTES = 32 * 2**10
"""The largest params that are kept. Of a node with larger ones, a read is a small part of the work."""
_OBJECT_BYTES = 1_000
"""What an entry takes beside the BSON."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class StoredParams:
    """The params of a task as MongoDB has sent them.

    Most handlers do not read them, and objects need three times the memory.
    """

    stored: Any = None
    scheduled_at: str | None = None
    """The nominal time at which a schedule has started the task, as RFC 3339 text in UTC."""
    secrets: tuple[Path, ...] = ()
    """Where the schema of the params says that they are secret."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> StoredParams:
        """Return the params in a document that was read with their projection."""
        secrets = tuple(map(tuple, document.get(SECRET_PARAMS) or ()))
        return cls(stored=document.get("params"), scheduled_at=document.get(SCHEDULED_AT), secrets=secrets)

    def decode(self) -> Fields:
        """Return the params, as a new dict."""
        if isinstance(self.stored, RawBSONDocument):
            return bson.decode(self.stored.raw)
        return copy.deepcopy(self.stored or {})

    @property
    def kept_bytes(self) -> int:
        """Return about how many bytes of memory it takes to keep them."""
        stored = self.stored
        return _OBJECT_BYTES + len(
            stored.raw if isinstance(stored, RawBSONDocument) else bson.encode(stored or {})
        )


class KnownParams:
    """The params that this process has read, by task and run, so that later attempts need not read them again.

    They do not change within a run. Large ones are known only while an attempt holds them.
    """

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[str, str], StoredParams] = WeakValueDictionary()
        self._kept: LRUCache[tuple[str, str], StoredParams] = LRUCache(
            _KEPT_BYTES, getsizeof=lambda params: params.kept_bytes
        )

    def get(self, task_id: str, run_id: str) -> StoredParams | None:
        """Return the params of a run of a task, or None if they have to be read."""
        kept: StoredParams | None = self._kept.get((task_id, run_id))
        return kept or self._held.get((task_id, run_id))

    def note(self, task_id: str, run_id: str, params: StoredParams) -> None:
        """Remember what was read."""
        self._held[task_id, run_id] = params
        if params.kept_bytes <= _LARGEST_KEPT_BYTES:
            self._kept[task_id, run_id] = params


class TriedBefore(Exception):
    """Raised if an earlier try of an attempt has begun. Temporal runs a local activity again after a crash."""

    def __init__(self, node_id: str, *, finished: bool) -> None:
        self.finished = finished
        """Whether the earlier try has also finished the node."""
        super().__init__(
            f"the engine that ran this attempt of node {node_id!r} stopped, or its workflow task timed out"
        )


def new_lease(worker_id: str, until: float, version: str = "") -> Fields:
    """Return a new lease as stored in documents. `until` is its deadline in seconds since the Unix epoch.

    `version` is that of the handler, if the worker knows it.
    """
    lease = {
        "worker_id": clean(worker_id),
        "lease_id": str(uuid.uuid4()),
        "deadline_ts_ms": int(until * 1000),
    }
    return {**lease, "version": version} if version else lease


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEntry:
    """Where the state of an attempt is stored, and the filters and updates of the attempt's writes."""

    document: Fields
    """Filter for the document that contains the entry."""
    path: str
    """Path of the entry in the document."""
    owner: Fields
    """Fields of the entry that never change. An entry with other values belongs to something else."""
    epoch: int
    """Epoch of the attempt."""
    failures: int = 0
    """Number of failed attempts before it, in its generation."""
    pin: Fields = field(default_factory=dict)
    """Path and version that the attempt fixes for its role, if the task pins versions."""

    def path_of(self, name: str) -> str:
        """Return the path of a field of the entry."""
        return f"{self.path}.{name}"

    @property
    def owned_filter(self) -> Fields:
        """Return the filter for the document if the entry belongs to the attempt's owner."""
        return self.document | {self.path_of(name): value for name, value in self.owner.items()}

    def new_epoch_filter(self) -> Fields:
        """Return the filter for a document that is neither closed nor flagged, and in which the epoch is new.

        It is the narrowest of these filters, but matches nearly always.
        """
        new = {self.path_of("attempt_epoch"): {"$lt": self.epoch}}
        return {**self.owned_filter, **NOT_CLOSED, **NOT_FLAGGED, **new, **self._pin_filter}

    @property
    def _pin_filter(self) -> Fields:
        """Return the filter for a document that has fixed no version for the role, or that of the attempt."""
        return {path: {"$in": [None, version]} for path, version in self.pin.items()}

    def new_or_leased_filter(self, lease: Fields) -> Fields:
        """Return the filter of `new_epoch_filter`, which also matches if the epoch was taken with this lease."""
        epoch, lease_id = self.path_of("attempt_epoch"), self.path_of("lease.lease_id")
        new = self.new_epoch_filter()
        return {
            **{path: value for path, value in new.items() if path != epoch},
            "$or": [{epoch: new[epoch]}, {epoch: self.epoch, lease_id: lease["lease_id"]}],
        }

    def begin_filter(self, run_id: str) -> Fields:
        """Return the filter for a document in which the attempt may begin: its epoch is new or belongs to this run."""
        epoch, run, status = (self.path_of(name) for name in ("attempt_epoch", "run_id", "status"))
        own = {epoch: self.epoch, run: run_id, status: {"$in": OPEN_NODE_STATUSES}}
        new_or_own = {"$or": [{epoch: {"$lt": self.epoch}}, own]}
        return {**self.owned_filter, "closed_run_id": {"$ne": run_id}, **new_or_own, **self._pin_filter}

    def begin_at_once_filter(self, run_id: str) -> Fields:
        """Return the filter of `begin_filter`, limited to documents that are neither closed nor flagged.

        Nearly all documents match this filter, and it makes the fastest query.
        """
        return self.begin_filter(run_id) | NOT_CLOSED | NOT_FLAGGED

    def taken_filter(self, run_id: str) -> Fields:
        """Return the filter for a document in which the entry has the epoch and the run of the attempt."""
        return {
            **self.owned_filter,
            self.path_of("attempt_epoch"): self.epoch,
            self.path_of("run_id"): run_id,
        }

    def running_filter(self, run_id: str) -> Fields:
        """Return the fence of the attempt: the filter for a document in which it is still running."""
        return {**self.taken_filter(run_id), self.path_of("status"): NodeStatus.RUNNING.value}

    def alive_filter(self, run_id: str) -> Fields:
        """Return the filter for a document in which the attempt is running, or being cancelled."""
        return {**self.taken_filter(run_id), self.path_of("status"): {"$in": _ALIVE}}

    def begin_set(self, run_id: str, lease: Fields, at: float) -> Fields:
        """Return the `$set` of the attempt's first write."""
        fields: Fields = {
            self.path_of("status"): NodeStatus.RUNNING.value,
            self.path_of("attempt_epoch"): self.epoch,
            self.path_of("run_id"): run_id,
            self.path_of("lease"): lease,
            self.path_of("started_at"): moment(at),
            "last_event_recv_ms": int(at * 1000),
            "updated_at": moment(at),
            **self.pin,
        }
        if self.epoch > 1:
            fields[self.path_of("next_retry_at_ms")] = None
            fields[self.path_of(FAILURES)] = self.failures
        return fields

    def begin_unset(self) -> Fields:
        """Return the `$unset` of the attempt's first write: fields that an earlier end has left."""
        left = ("finished_at", ATTEMPT_ENDED_AT, "skip_reason", *waits.FIELDS, PAUSED, *NODE_FLAGS)
        return {self.path_of(name): "" for name in left}

    def finish_set(self, at: float) -> Fields:
        """Return the `$set` of the attempt's last write."""
        fields: Fields = {
            self.path_of("status"): NodeStatus.FINISHED.value,
            self.path_of("finished_at"): moment(at),
            self.path_of("last_event_recv_ms"): int(at * 1000),
            "last_event_recv_ms": int(at * 1000),
            "updated_at": moment(at),
        }
        if self.epoch > 1:
            fields[self.path_of("last_error")] = None
        return fields

    def projection(self, *names: str) -> Fields:
        """Return the projection of fields of the entry, and of all entries beside it: it cannot contain an index."""
        path = ".".join(segment for segment in self.path.split(".") if not segment.isdigit())
        return {"_id": 0} | {f"{path}.{name}": 1 for name in (*self.owner, *names)}

    def read(self, stored: Fields | None) -> Fields:
        """Return the entry of a document; `{}` if there is none, or if it belongs to something else."""
        found: Any = stored
        for segment in self.path.split("."):
            inner = (
                {str(index): each for index, each in enumerate(found)} if isinstance(found, list) else found
            )
            found = inner.get(segment) if isinstance(inner, dict) else None
        return found if isinstance(found, dict) and self.owner.items() <= found.items() else {}


def entry_of_node(attempt: AttemptInput) -> AttemptEntry:
    """Return the entry of an attempt that runs a whole node: the node in the task document."""
    return AttemptEntry(
        document={"id": attempt.task_id},
        path=f"graph.nodes.{attempt.index}",
        owner={"node_id": attempt.node_id},
        epoch=attempt.epoch,
        failures=attempt.failures,
        pin={pin_path(attempt.role): attempt.version} if attempt.pin and attempt.version else {},
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Write:
    entry: AttemptEntry
    fence: Callable[[], Fields]
    """Returns the filter under which a group may contain the write. It may be narrower than the filter of `alone`."""
    update: Update
    alone: Callable[[], Awaitable[None]]
    """Performs the write by itself, and raises the cause if it must not happen."""
    read: Fields | None = None
    """Receives the params of the task (`params`), which the same call reads; None if the caller does not need them."""


class Attempts:
    """The attempts whose entries are in one collection. `entry_of` returns the entry of an attempt.

    Methods raise StoreUnavailable if MongoDB does not respond; a retry may succeed. They raise StoreRefused for errors
    that no retry can fix.
    """

    def __init__(
        self,
        collection: Any,
        *,
        reopen: Callable[[str, str], Awaitable[None]],
        entry_of: Callable[[AttemptInput], AttemptEntry] = entry_of_node,
    ) -> None:
        self._collection = collection
        self._undecoded = undecoded(collection)
        self.params = KnownParams()
        self._entry_of = entry_of
        self._reopen = reopen
        """Called with a task id and the id of the run that continues the task."""
        self._writes = self._group_commit()
        self._leases = self._group_commit("leases")
        """Their updates use another operator for a field that the begin and the end of an attempt change as well."""
        self._large: LRUCache[str, GroupCommit[_Write]] = LRUCache(_LARGE_DOCUMENTS)
        """The begins and ends in large documents, by task, so that those in other documents do not wait for them."""

    def _group_commit(self, kind: str = "attempts", interval_sec: float = 0.0) -> GroupCommit[_Write]:
        return GroupCommit[_Write](
            kind, alone=lambda write: write.alone(), together=self._write_together, interval_sec=interval_sec
        )

    def _writes_of(self, attempt: AttemptInput) -> GroupCommit[_Write]:
        """Return the group commit of the begin and the end of an attempt."""
        if not attempt.document_bytes:
            return self._writes
        if attempt.task_id not in self._large:
            self._large[attempt.task_id] = self._group_commit(
                interval_sec=attempt.document_bytes / _REWRITTEN_BYTES_PER_SEC
            )
        return self._large[attempt.task_id]

    @translate_errors
    async def begin(
        self,
        attempt: AttemptInput,
        run_id: str,
        lease: Fields,
        at: float,
        *,
        once: bool = False,
        read: Fields | None = None,
    ) -> None:
        """Perform the first write of an attempt, which takes the epoch. Clear cancel flags of an earlier run.

        With `read`, the same call also reads the params of the task and adds them to `read` as `params`,
        which are StoredParams.

        If the task pins versions, the write also fixes the version of the role, unless the task has one.

        Raise EpochTaken if another run has used the epoch, Fenced if this run has closed the task, VersionPinned if the
        task has fixed another version, and Flagged if a cancel flag is set that is not from an earlier run.
        With `once`, raise TriedBefore if this run has taken the epoch with another lease.
        """
        entry = self._entry_of(attempt)
        update = {"$set": entry.begin_set(run_id, lease, at), "$unset": entry.begin_unset()}
        take = partial(self._begin_once, lease) if once else self._begin
        alone = partial(take, entry, attempt, run_id, update, read)
        write = _Write(entry=entry, fence=entry.new_epoch_filter, update=update, alone=alone, read=read)
        await self._writes_of(attempt).write(write)

    @translate_errors
    async def finish(self, attempt: AttemptInput, run_id: str, at: float) -> None:
        """Perform the last write of an attempt, which finishes the node.

        Raise Fenced if a newer attempt has the entry. Do not change a node that is being cancelled.
        """
        entry = self._entry_of(attempt)
        update = {"$set": entry.finish_set(at)}
        alone = partial(self._finish, entry, attempt, run_id, update)
        fence = partial(entry.running_filter, run_id)
        await self._writes_of(attempt).write(_Write(entry=entry, fence=fence, update=update, alone=alone))

    @translate_errors
    async def extend_lease(self, attempt: AttemptInput, run_id: str, deadline_ms: int, at: float) -> None:
        """Extend the lease of a running attempt to `deadline_ms` (Unix time in milliseconds). Keep a later deadline."""
        entry = self._entry_of(attempt)
        fence = entry.running_filter(run_id)
        later = {entry.path_of("lease.deadline_ts_ms"): deadline_ms, "last_event_recv_ms": int(at * 1000)}
        update = {"$max": later}
        alone = partial(self._extend, fence, update)
        await self._leases.write(_Write(entry=entry, fence=lambda: fence, update=update, alone=alone))

    @translate_errors
    async def show_lease(
        self, attempt: AttemptInput, run_id: str, lease: Fields, at: float, accepted_at: float
    ) -> None:
        """Show the worker that runs an attempt, and its lease, instead of what the attempt waits for.

        The attempt began when its first worker accepted it, and not when a bridge received it.
        """
        entry = self._entry_of(attempt)
        received = dict.fromkeys((entry.path_of("last_event_recv_ms"), "last_event_recv_ms"), int(at * 1000))
        started = {entry.path_of("started_at"): moment(accepted_at)}
        shown = {entry.path_of("lease"): lease, **started, **received}
        unset = {entry.path_of(name): "" for name in waits.FIELDS}
        await self._update(entry.running_filter(run_id), {"$set": shown, "$unset": unset})

    @translate_errors
    async def show_failed_batches(self, attempt: AttemptInput, run_id: str, failed: int) -> None:
        """Show how many batches a node has set aside, just before its attempt finishes it.

        A node that is being cancelled shows it as well: the attempt may finish it nevertheless.
        """
        entry = self._entry_of(attempt)
        await self._update(entry.alive_filter(run_id), {"$set": {entry.path_of("failed_batches"): failed}})

    @translate_errors
    async def show_wait(
        self, attempt: AttemptInput, run_id: str, wait: NodeWait | None, *, holders: str
    ) -> None:
        """Show what an attempt waits for; None removes it, also after the attempt's end.

        Show nothing once the lease has passed to a worker, whose id does not begin with `holders`.
        """
        entry = self._entry_of(attempt)
        worker_id = entry.path_of("lease.worker_id")
        if wait is None:
            unset = {entry.path_of(name): "" for name in waits.FIELDS}
            await self._update(entry.taken_filter(run_id), {"$unset": unset})
        else:
            waiting = {**entry.running_filter(run_id), worker_id: {"$regex": f"^{re.escape(holders)}"}}
            shown = {entry.path_of(name): value for name, value in waits.stored_wait(wait).items()}
            await self._update(waiting, {"$set": shown})

    @translate_errors
    async def check_fence(self, attempt: AttemptInput, run_id: str) -> None:
        """Raise Fenced unless the entry still has the epoch and the run of this attempt."""
        if await self._collection.find_one(self._entry_of(attempt).taken_filter(run_id), {"_id": 1}) is None:
            raise Fenced(f"node {attempt.node_id!r} has replaced its attempt {attempt.epoch}")

    @translate_errors
    async def find_holder(self, attempt: AttemptInput) -> tuple[str, str] | None:
        """Return worker id and version in the entry's lease if this attempt or a later one has begun, otherwise None.

        The version is empty if the lease has none, as those of functions and of external workers.
        """
        entry = self._entry_of(attempt)
        begun = {**entry.owned_filter, entry.path_of("attempt_epoch"): {"$gte": attempt.epoch}}
        stored = await self._collection.find_one(begun, entry.projection("lease"))
        if stored is None:
            return None
        lease = entry.read(stored).get("lease") or {}
        return lease.get("worker_id", ""), lease.get("version", "")

    @translate_errors
    async def read_epoch(self, attempt: AttemptInput) -> int:
        """Return the current epoch of the attempt's entry; 0 without a document."""
        entry = self._entry_of(attempt)
        stored = await self._collection.find_one(entry.document, entry.projection("attempt_epoch"))
        return int(entry.read(stored).get("attempt_epoch") or 0)

    async def _begin_once(
        self,
        lease: Fields,
        entry: AttemptEntry,
        attempt: AttemptInput,
        run_id: str,
        update: Update,
        read: Fields | None,
    ) -> None:
        """Take the epoch unless an earlier try has. The lease distinguishes a repeated write of this try."""
        if not await self._update(entry.new_or_leased_filter(lease), update, read):
            await self._check_tries(attempt, run_id)
            await self._begin(entry, attempt, run_id, update, read)

    async def _check_tries(self, attempt: AttemptInput, run_id: str) -> None:
        """Raise TriedBefore if this run has already taken the epoch."""
        entry = self._entry_of(attempt)
        stored = await self._collection.find_one(entry.taken_filter(run_id), entry.projection("status"))
        if stored is not None:
            finished = entry.read(stored)["status"] == NodeStatus.FINISHED
            raise TriedBefore(attempt.node_id, finished=finished)

    async def _begin(
        self, entry: AttemptEntry, attempt: AttemptInput, run_id: str, update: Update, read: Fields | None
    ) -> None:
        if not await self._update(entry.begin_at_once_filter(run_id), update, read):
            await self._clear_flags(attempt, run_id)
            await self._begin_again(attempt, run_id, update, read)

    async def _clear_flags(self, attempt: AttemptInput, run_id: str) -> None:
        """Clear the flags of an earlier run. Raise Flagged if a current flag prevents the attempt from beginning.

        Do nothing if anything other than a flag prevents it.
        """
        hindered = self._entry_of(attempt).begin_filter(run_id) | {"coordinator.cancelled": True}
        flagged = await self._collection.find_one(hindered, FLAG_PATHS | {"closed_run_id": 1})
        if flagged is None:
            return
        flag = flag_of(flagged)
        if flag.run_id == run_id or (flag.run_id is None and "closed_run_id" not in flagged):
            raise Flagged(flag)
        same = {"id": attempt.task_id, "coordinator.cancel_run_id": flag.run_id}
        await self._update(same, {"$unset": unset_of_flags(flagged)})

    async def _begin_again(
        self, attempt: AttemptInput, run_id: str, update: Update, read: Fields | None
    ) -> None:
        """Begin in a document that was closed or flagged before. Raise the cause if the attempt must not begin."""
        if not await self._update(self._entry_of(attempt).begin_filter(run_id) | NOT_FLAGGED, update, read):
            await self._explain_refusal(attempt, run_id)
        await self._reopen(attempt.task_id, run_id)

    async def _explain_refusal(self, attempt: AttemptInput, run_id: str) -> None:
        entry = self._entry_of(attempt)
        wanted = entry.projection("attempt_epoch") | {"closed_run_id": 1, PINNED: 1}
        stored = await self._collection.find_one(entry.document, wanted)
        if stored is None:
            raise StoreRefused(f"there is no document for task {attempt.task_id!r}")
        if stored.get("closed_run_id") == run_id:
            raise Fenced(f"task {attempt.task_id!r} has ended")
        if not (found := entry.read(stored)):
            raise StoreRefused(f"the document of task {attempt.task_id!r} contains another graph")
        pinned = read_pins(stored).get(attempt.role)
        if entry.pin and pinned not in (None, attempt.version) and found["attempt_epoch"] < attempt.epoch:
            raise VersionPinned(attempt.role, attempt.version, pinned)
        raise EpochTaken(found["attempt_epoch"])

    async def _finish(self, entry: AttemptEntry, attempt: AttemptInput, run_id: str, update: Update) -> None:
        if not await self._update(entry.running_filter(run_id), update):
            await self.check_fence(attempt, run_id)

    async def _extend(self, fence: Fields, update: Update) -> None:
        await self._update(fence, update)

    async def _update(self, condition: Fields, update: Update, read: Fields | None = None) -> bool:
        """Update a document. Return False if none matches. With `read`, add the params of the task to `read`.

        The errors of other nodes leave room for the update.
        """
        write = partial(self._update_once, condition, update, read)
        return await with_room(write, partial(make_room, self._collection, condition["id"]))

    async def _update_once(self, condition: Fields, update: Update, read: Fields | None) -> bool:
        if read is None:
            return bool((await self._collection.update_one(condition, update)).matched_count)
        stored = await self._undecoded.find_one_and_update(condition, update, projection=_PARAMS)
        if stored is None:
            return False
        read["params"] = StoredParams.of(stored)
        return True

    async def _write_together(self, writes: Sequence[_Write]) -> Sequence[int]:
        """Write one update for each document, all in one call. Return the indexes of the writes to perform one by one.

        If a fence does not match, return all indexes. The call's result does not show which writes succeeded, and
        repeating a write is safe.
        """
        first, later = _first_of_each_entry(writes)
        updates = [_merge(of_document) for of_document in first.values()]
        readers = [write for write in writes if write.read is not None]
        if len(updates) > 1:
            matched, _ = await asyncio.gather(self._write_documents(updates), self._read_params(readers))
        else:
            read: Fields | None = {} if readers else None
            matched = await self._update(*updates[0], read)
            _hand_out(readers, {_document_of(writes[0]): read or {}})
        return later if matched == len(updates) else range(len(writes))

    async def _write_documents(self, updates: Sequence[tuple[Fields, Update]]) -> int:
        """Write one update for each document. Return how many documents matched."""
        done = await self._collection.bulk_write([UpdateOne(*each) for each in updates], ordered=False)
        matched: int = done.matched_count
        return matched

    async def _read_params(self, readers: Sequence[_Write]) -> None:
        """Read the params of all tasks whose attempts need them, in one call beside the write."""
        ids = {write.entry.document["id"] for write in readers}
        if ids:
            found = self._undecoded.find({"id": {"$in": list(ids)}}, {**_PARAMS, "id": 1})
            params = {(("id", each["id"]),): StoredParams.of(each) async for each in found}
            _hand_out(readers, {document: {"params": each} for document, each in params.items()})


def _hand_out(readers: Iterable[_Write], stored: Mapping[tuple[tuple[str, Any], ...], Fields]) -> None:
    """Give each of these writes what was read from its document."""
    for write in readers:
        if write.read is not None:
            write.read.update(stored.get(_document_of(write), {}))


def _document_of(write: _Write) -> tuple[tuple[str, Any], ...]:
    return tuple(write.entry.document.items())


def _first_of_each_entry(writes: Sequence[_Write]) -> tuple[dict[Any, list[_Write]], list[int]]:
    """Return the first write of each entry, by document, and the indexes of the remaining writes."""
    first: dict[Any, list[_Write]] = {}
    later, seen = [], set()
    for index, write in enumerate(writes):
        document = _document_of(write)
        place = (document, write.entry.path)
        if place in seen:
            later.append(index)
        else:
            seen.add(place)
            first.setdefault(document, []).append(write)
    return first, later


def _merge(writes: Iterable[_Write]) -> tuple[Fields, Update]:
    """Return the combined filter and update of several writes to one document. Their paths do not overlap."""
    fence: Fields = {}
    update: Update = {}
    for write in writes:
        fence |= write.fence()
        for operator, fields in write.update.items():
            update.setdefault(operator, {}).update(fields)
    return fence, update


_EFFECT = "applied_generation"
_NUMBER = "vars_write"


class EntryWrite(Protocol):
    """What an update of variables adds for the attempt to which it belongs: the fence, and fields of the entry."""

    @property
    def fence(self) -> Fields:
        """Return the filter for documents in which the update may happen, and has not happened yet."""

    @property
    def sets(self) -> Fields:
        """Return the `$set` for the entry, which records that the update has happened."""

    @property
    def unsets(self) -> Fields:
        """Return the `$unset` for the entry."""

    async def settle(self, document: Fields, attempts: Attempts) -> bool:
        """Handle an update whose filter did not match `document`. Return True if it has happened, or must not happen.

        Raise the cause, such as Fenced, if the attempt is outdated.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedWrite:
    """The fields of an update of variables that a running attempt makes. Its entry keeps the number of the last one.

    The update happens at most once, and not after a later one of the same attempt, however often it is repeated.
    """

    attempt: AttemptInput
    run_id: str
    sequence: int
    """The number of the update within the attempt, from 1."""

    @property
    def entry(self) -> AttemptEntry:
        """Return the entry of the attempt."""
        return entry_of_node(self.attempt)

    @property
    def number(self) -> int:
        """Return the number of the update within the node: a later attempt has higher numbers."""
        return (self.attempt.epoch << 32) + self.sequence

    @property
    def fence(self) -> Fields:
        """Return the filter for documents in which the attempt runs and has made neither this nor a later update."""
        return self.entry.alive_filter(self.run_id) | _unmarked_filter(self.entry, _NUMBER, self.number)

    @property
    def sets(self) -> Fields:
        """Return the `$set` of the number."""
        return {self.entry.path_of(_NUMBER): self.number}

    @property
    def unsets(self) -> Fields:
        """Return no `$unset`."""
        return {}

    async def settle(self, document: Fields, attempts: Attempts) -> bool:
        """Return True if this update or a later one has happened. Raise Fenced unless the attempt still runs."""
        current = self.entry.read(document)
        if not _is_taken(current, self.attempt, self.run_id) or current["status"] not in _ALIVE:
            raise Fenced(
                f"attempt {self.attempt.epoch} of node {self.attempt.node_id!r} has ended or was "
                "replaced, so it can no "
                "longer change variables"
            )
        return _is_marked(current, _NUMBER, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalWrite:
    """The fields by which an attempt of a role finishes its node in the update that applies its increments.

    As with NodeWrite, the increments of one generation of the node count once. A node that is being cancelled stays as
    it is, and its increments do not count.
    """

    attempt: AttemptInput
    run_id: str
    at: float

    @property
    def entry(self) -> AttemptEntry:
        """Return the entry of the attempt."""
        return entry_of_node(self.attempt)

    @property
    def fence(self) -> Fields:
        """Return the filter for documents in which the attempt runs and the generation has had no effect yet."""
        return self.entry.running_filter(self.run_id) | _unmarked_filter(
            self.entry, _EFFECT, self.attempt.generation
        )

    @property
    def sets(self) -> Fields:
        """Return the `$set` that finishes the node and counts its effect."""
        return self.entry.finish_set(self.at) | {self.entry.path_of(_EFFECT): self.attempt.generation}

    @property
    def unsets(self) -> Fields:
        """Return no `$unset`."""
        return {}

    async def settle(self, document: Fields, attempts: Attempts) -> bool:
        """Finish the node of which an earlier attempt has had the effect. Raise Fenced if a newer attempt has it."""
        current = self.entry.read(document)
        if _is_taken(current, self.attempt, self.run_id) and current["status"] == NodeStatus.RUNNING:
            if not _is_marked(current, _EFFECT, self.attempt.generation):
                return False
            await attempts.finish(self.attempt, self.run_id, self.at)
        else:
            await attempts.check_fence(self.attempt, self.run_id)
        return True


def _unmarked_filter(entry: AttemptEntry, name: str, number: int) -> Fields:
    """Return the filter for documents whose entry has no such mark, or a lower one."""
    return {entry.path_of(name): {"$not": {"$gte": number}}}


def _is_marked(current: Fields, name: str, number: int) -> bool:
    marked = current.get(name)
    return isinstance(marked, int) and marked >= number


def _is_taken(current: Fields, attempt: AttemptInput, run_id: str) -> bool:
    return (current.get("attempt_epoch"), current.get("run_id")) == (attempt.epoch, run_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWrite:
    """The fields by which a coordinator function begins, takes effect exactly once and finishes in one update.

    The update that has the effect adds these fields to its own. It marks the entry with the node's generation, and its
    filter checks the mark. Retries and attempts after a crash or a reset therefore see the mark. A rerun has a new
    generation.
    """

    attempt: AttemptInput
    run_id: str
    lease: Fields = field(default_factory=dict)
    at: float = 0.0

    @property
    def entry(self) -> AttemptEntry:
        """Return the entry of the attempt."""
        return entry_of_node(self.attempt)

    @property
    def fence(self) -> Fields:
        """Return the filter for documents in which the attempt may begin and the generation has had no effect yet.

        It matches only documents that are neither closed nor flagged. `settle` begins the attempt in others.
        """
        entry = self.entry
        may_begin = entry.begin_at_once_filter(self.run_id)
        return may_begin | _unmarked_filter(entry, _EFFECT, self.attempt.generation)

    @property
    def sets(self) -> Fields:
        """Return the `$set` that begins and finishes the attempt and counts its effect."""
        entry = self.entry
        begun = entry.begin_set(self.run_id, self.lease, self.at)
        return begun | entry.finish_set(self.at) | {entry.path_of(_EFFECT): self.attempt.generation}

    @property
    def unsets(self) -> Fields:
        """Return the `$unset` for fields that an earlier end of the node has left."""
        entry = self.entry
        set_again = entry.path_of("finished_at")
        return {path: "" for path in entry.begin_unset() if path != set_again}

    async def settle(self, document: Fields, attempts: Attempts) -> bool:
        """Begin the attempt. If an earlier one has had the effect, finish the node and return True."""
        current = self.entry.read(document)
        applied = _is_marked(current, _EFFECT, self.attempt.generation)
        finished = _is_taken(current, self.attempt, self.run_id) and current["status"] == NodeStatus.FINISHED
        if not (applied and finished):
            await attempts.begin(self.attempt, self.run_id, self.lease, self.at)
            if applied:
                await attempts.finish(self.attempt, self.run_id, self.at)
        return applied
