"""Storage of artifacts and metrics (spec: artifacts, metrics path; protocol: MongoDB contract).

One rule applies to both: a write of a higher epoch replaces the row, and a write of a lower epoch is rejected.
A rejected write raises Fenced, which ends an outdated attempt that is still running.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo import ASCENDING, UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from flowkit.adapters.batch_uids import BadBatchUid, uid_filters, uid_text
from flowkit.adapters.claims import Claims, first_fence, sealed_fence
from flowkit.adapters.entries import (
    PAGE_BYTES,
    PROJECTION,
    SCANNED,
    Entry,
    Scan,
    as_scan,
    entries,
    entry_of,
    fitting,
    generation_filter,
    is_whole,
    scan_filter,
)
from flowkit.adapters.group_commit import GroupCommit
from flowkit.adapters.metrics import EMPTY_BYTES, storable
from flowkit.adapters.mongo import (
    CURSOR_DOCUMENTS,
    Database,
    aggregated,
    duplicate_indexes,
    durable,
    ensure_index,
    gather_writes,
    moment,
    translate_errors,
)
from flowkit.adapters.notifier import ArtifactNotifier
from flowkit.core.instruments import BATCHES, STORED_BYTES
from flowkit.errors import Fenced
from flowkit.models import NodeStatus
from flowkit.models.metas import WRAPPED, read_meta, row_fields
from flowkit.protocol.messages import FINAL_UID
from flowkit.text import describe_causes
from flowkit.validation.values import batch_uid_problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from flowkit.adapters.entries import Mark
    from flowkit.models import AttemptInput, NodeOutcome, NodeRecord

_NODE_BATCH = [("task_id", ASCENDING), ("node_id", ASCENDING), ("batch_uid", ASCENDING)]

_REPLACED_FIELDS = ("artifacts_ref", "error", "quarantined", WRAPPED)
"""Optional fields of an artifact that a new write of the same batch removes unless it sets them."""

_LARGE_BYTES = 256 * 1024
"""Rows with more than this many bytes are written by themselves, so that small rows do not wait for them."""

SET_ASIDE: dict[str, Any] = {"status": "failed", "quarantined": {"$exists": True}}
"""The filter for batches that a node has set aside."""

_SKIPPED: dict[str, Any] = {"quarantined.skipped": True}
_NOT_SKIPPED: dict[str, Any] = {"quarantined.skipped": {"$ne": True}}

_BY_CAUSE: dict[str, Any] = {
    "_id": {"node_id": "$node_id", "code": "$error"},
    "count": {"$sum": 1},
    "at": {"$max": "$updated_at"},
}

_MARKERS_AT_ONCE = 500
_GENERATIONS_AT_ONCE = 100
"""How many nodes' earlier generations one call deletes."""


def check_uid(uid: str) -> None:
    """Raise BadBatchUid if a uid cannot identify a batch. Indexes, claims and the ids of events contain it."""
    if problem := batch_uid_problem(uid):
        raise BadBatchUid(problem)


def replaceable_filter(epoch: int, fence: int) -> dict[str, Any]:
    """Return the filter for rows that an attempt may replace.

    Among the rows of shards, those with a lower or the same fencing number; among all others, those without a higher
    epoch.
    """
    by_epoch: dict[str, Any] = {"attempt_epoch": {"$not": {"$gt": epoch}}}
    if not fence:
        return by_epoch
    return {"$or": [{"fence": {"$lte": fence}}, {"fence": {"$exists": False}, **by_epoch}]}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Row:
    key: dict[str, Any]
    epoch: int
    fields: dict[str, Any]
    first: dict[str, Any]
    """Fields that are written only when the row is created."""
    forgotten: tuple[str, ...]
    """Fields of an earlier write that this write removes unless it sets them."""
    fence: int = 0
    """Fencing number of the batch of a shard; 0 for other rows, which only the epoch fences."""

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.key.items() if not isinstance(value, dict)}

    @property
    def document(self) -> dict[str, Any]:
        return {**self.values, **self.first, **self._written_fields}

    @property
    def _written_fields(self) -> dict[str, Any]:
        fence = {"fence": self.fence} if self.fence else {}
        return {**self.fields, "attempt_epoch": self.epoch, **fence}

    @property
    def replaceable_filter(self) -> dict[str, Any]:
        """The filter for a stored row that this one may replace."""
        return {**self.key, **replaceable_filter(self.epoch, self.fence)}

    @property
    def update(self) -> dict[str, Any]:
        fields = self._written_fields
        gone = {name: "" for name in self.forgotten if name not in fields}
        written = {"$set": fields}
        return {**written, "$unset": gone} if gone else written


class _FencedRows:
    """Writes fenced rows to one collection, grouping rows that arrive at the same time into one call."""

    def __init__(self, collection: Any, kind: str) -> None:
        """`kind` names the rows in metrics."""
        self._collection = collection
        self._kind = kind
        self._rows = GroupCommit[_Row](kind, alone=self._replace, together=self._insert)
        self._existing = GroupCommit[_Row](kind, alone=self._update, together=self._update_all)

    async def put(
        self,
        key: dict[str, Any],
        epoch: int,
        fields: dict[str, Any],
        first: dict[str, Any],
        *,
        size: int,
        forgotten: tuple[str, ...] = (),
        exists: bool = False,
        fence: int = 0,
    ) -> None:
        """Write the row with this `key`, which probably `exists`.

        Raise Fenced if `replaceable_filter` excludes the stored one.

        An existing row keeps its `first` fields and loses the `forgotten` fields that are not in `fields`. `size` is
        the size of the user's part of the row in bytes.
        """
        row = _Row(key=key, epoch=epoch, fields=fields, first=first, forgotten=forgotten, fence=fence)
        if size > _LARGE_BYTES:
            await (self._update(row) if exists else self._replace(row))
        else:
            await (self._existing if exists else self._rows).write(row)
        STORED_BYTES.add(self._kind, amount=size)

    async def _insert(self, rows: Sequence[_Row]) -> Collection[int]:
        """Insert the new rows. Return the indexes of those that could not be inserted."""
        try:
            await self._collection.insert_many([row.document for row in rows], ordered=False)
        except BulkWriteError as error:
            if error.details.get("writeConcernErrors"):
                raise
            return {problem["index"] for problem in error.details.get("writeErrors", [])}
        return ()

    async def _update(self, row: _Row) -> None:
        """Replace the row if it exists, otherwise insert it. Raise Fenced if the stored row is not replaceable."""
        replaced = await self._collection.update_one(row.replaceable_filter, row.update)
        if not replaced.matched_count:
            await self._replace(row)

    async def _update_all(self, rows: Sequence[_Row]) -> Collection[int]:
        """Replace the rows. Return all indexes if one of them could not be replaced, because it is not known which."""
        updates = [UpdateOne(row.replaceable_filter, row.update) for row in rows]
        done = await self._collection.bulk_write(updates, ordered=False)
        return () if done.matched_count == len(rows) else range(len(rows))

    async def _replace(self, row: _Row) -> None:
        """Insert the row, or replace it if its key exists. Raise Fenced if the stored row is not replaceable.

        The insert comes first because it is the fastest write and most rows are new.
        """
        try:
            await self._collection.insert_one(row.document)
        except DuplicateKeyError:
            replaced = await self._collection.update_one(row.replaceable_filter, row.update)
            if not replaced.matched_count:
                text = f"a newer attempt of node {row.key['node_id']!r} has already written {row.values}"
                raise Fenced(text) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedBatches:
    """The batches that a node has set aside in its present generation, without those that are skipped."""

    codes: Mapping[str, int]
    """Their numbers by reason code."""
    latest: str
    """The reason code of the latest one, with its error."""

    @property
    def count(self) -> int:
        """The number of all of them."""
        return sum(self.codes.values())

    @property
    def causes(self) -> str:
        """Why they have failed, in words."""
        return describe_causes(self.codes, self.latest)


async def read_set_aside(artifacts: Any, wanted: Mapping[str, Any]) -> dict[str, FailedBatches]:
    """Return what nodes have set aside of the batches that `wanted` finds, by node id. Nodes without any are absent."""
    chosen = {**wanted, **SET_ASIDE, **_NOT_SKIPPED}
    by_node: dict[str, list[dict[str, Any]]] = {}
    for row in await aggregated(artifacts, [{"$match": chosen}, {"$group": _BY_CAUSE}]):
        by_node.setdefault(row["_id"]["node_id"], []).append(row)
    found: dict[str, FailedBatches] = {}
    for node_id, rows in by_node.items():
        last = max(rows, key=lambda row: row["at"])
        code = str(last["_id"].get("code"))
        own = {**chosen, "node_id": node_id, "error": last["_id"].get("code"), "updated_at": last["at"]}
        batch = await artifacts.find_one(own, {"quarantined.error": 1}) or {}
        message = (batch.get("quarantined") or {}).get("error")
        codes = {str(row["_id"].get("code")): row["count"] for row in rows}
        found[node_id] = FailedBatches(codes=codes, latest=f"{code}: {message}" if message else code)
    return found


class ArtifactStore:
    """The collections `artifacts`, `metrics_raw` and `stream_progress` of one database."""

    def __init__(self, db: Database) -> None:
        stored = durable(db)
        self._artifacts = stored.artifacts
        self._metrics = stored.metrics_raw
        self._artifact_rows = _FencedRows(self._artifacts, "artifacts")
        self._metrics_rows = _FencedRows(self._metrics, "metrics")
        self.claims = Claims(db)
        self.notifier = ArtifactNotifier()
        """Notifies pulling nodes in this process when another node in this process stores a batch."""

    @translate_errors
    async def prepare(self) -> None:
        """Create the indexes, under the names that external workers also use."""
        await ensure_index(self._artifacts, _NODE_BATCH[:2], "ix_artifacts_task_node")
        await ensure_index(self._artifacts, _NODE_BATCH, "uniq_artifact_batch_uid", unique=True, sparse=True)
        await ensure_index(self._metrics, _NODE_BATCH, "uniq_metrics_batch", unique=True)
        await self.claims.prepare()

    async def store_batch(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        metrics: dict[str, Any],
        worker_id: str,
        at: float,
        *,
        artifacts_ref: dict[str, Any] | None = None,
        fence: int = 0,
    ) -> None:
        """Store the result of a batch: write its metrics row and its artifact concurrently.

        `fence` is the fencing number of the batch in a shard.

        Raise BadMetrics, BatchTooLarge or BadBatchUid before the first write.
        """
        check_uid(batch_uid)
        meta, size = storable(f"metrics of batch {batch_uid!r}", metrics)
        more = _reference(f"artifacts_ref of batch {batch_uid!r}", artifacts_ref)
        await gather_writes(
            self._store_metrics(attempt, batch_uid, at, {"metrics": dict(meta)}, size, fence)
            if meta
            else self._delete_failed_row(attempt, batch_uid, fence),
            self._store_partial(attempt, batch_uid, meta, worker_id, at, size, more, fence),
        )
        BATCHES.add(attempt.role, "stored")

    @translate_errors
    async def _delete_failed_row(self, attempt: AttemptInput, batch_uid: str, fence: int) -> None:
        own = (
            replaceable_filter(attempt.epoch, fence) if fence else {"attempt_epoch": {"$lte": attempt.epoch}}
        )
        await self._metrics.delete_one({**_key(attempt, batch_uid), "failed": True, **own})

    async def store_failed_batch(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        reason: str,
        at: float,
        *,
        worker_id: str = "",
        fence: int = 0,
        quarantined: dict[str, Any] | None = None,
    ) -> None:
        """Record in the metrics row and in the artifact that a batch failed. A later success replaces both.

        `quarantined` says why the batch is set aside: `error` and `tries`. Raise BadBatchUid before the first write.
        """
        check_uid(batch_uid)
        row = {"metrics": {}, "failed": True, "reason": reason}
        fields = {
            "status": "failed",
            "error": reason,
            "meta": {},
            "size": EMPTY_BYTES,
            "worker_id": worker_id,
            **({"quarantined": quarantined} if quarantined is not None else {}),
        }
        await gather_writes(
            self._store_metrics(attempt, batch_uid, at, row, size=0, fence=fence),
            self._store_artifact(attempt, batch_uid, fields, at, size=0, fence=fence),
        )
        BATCHES.add(attempt.role, "failed" if quarantined is None else "set_aside")

    @translate_errors
    async def restore_batch(self, attempt: AttemptInput, batch_uid: str) -> None:
        """Write the artifact of a batch again that an outdated external worker has overwritten, from its metrics row.

        Workers write artifacts, but no metrics rows. The one of FINAL_UID is the complete marker. Do
        nothing unless a later attempt than this one has stored the batch.
        """
        key = _key(attempt, batch_uid)
        later = {**key, "attempt_epoch": {"$gt": attempt.epoch}, "failed": False}
        row = await self._metrics.find_one(later, {"metrics": 1, "attempt_epoch": 1})
        if row is not None:
            marker = {"batch_uid": {"$exists": False}} if batch_uid == FINAL_UID else {}
            own = {**key, **marker, "attempt_epoch": row["attempt_epoch"]}
            await self._artifacts.update_one(own, {"$set": {"meta": row["metrics"]}})

    @translate_errors
    async def seal(self, attempt: AttemptInput) -> None:
        """Protect the results that shards of the node have stored: no shard can replace them any more, such as one
        that was lost and returns.

        A failed batch that is not set aside stays replaceable, because shards that run later in this
        generation try it again.
        """
        own = {"task_id": attempt.task_id, "node_id": attempt.node_id}
        first, sealed = first_fence(attempt), sealed_fence(attempt)
        stored: dict[str, Any] = {**own, "fence": {"$gte": first, "$lt": sealed}}
        kinds: list[tuple[Any, dict[str, Any]]] = [
            (self._artifacts, {"status": "partial"}),
            (self._metrics, {"failed": False}),
        ]
        for rows, succeeded in kinds:
            kind = succeeded if attempt.quarantine is None else {}
            await rows.update_many(stored | kind, {"$set": {"fence": sealed}})

    async def store_final(self, attempt: AttemptInput, metrics: dict[str, Any], at: float) -> None:
        """Store a node's final metrics."""
        meta, size = storable("metrics of finalize", metrics)
        await self._store_metrics(attempt, FINAL_UID, at, {"metrics": dict(meta), "final": True}, size)

    async def upsert_partial(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        meta: dict[str, Any],
        worker_id: str,
        at: float,
        *,
        fence: int = 0,
    ) -> None:
        """Write the artifact of one batch. Raise BadMetrics, BatchTooLarge or BadBatchUid before the write."""
        check_uid(batch_uid)
        stored, size = storable(f"meta of batch {batch_uid!r}", meta)
        await self._store_partial(attempt, batch_uid, stored, worker_id, at, size, {}, fence)

    async def _store_partial(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        meta: dict[str, Any],
        worker_id: str,
        at: float,
        size: int,
        more: dict[str, Any],
        fence: int = 0,
    ) -> None:
        fields = {"status": "partial", **row_fields(meta), "size": size, "worker_id": worker_id, **more}
        await self._store_artifact(attempt, batch_uid, fields, at, size, fence)
        self.notifier.notify(attempt.task_id, attempt.node_id, Entry(batch_uid, size))

    @translate_errors
    async def _store_artifact(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        fields: dict[str, Any],
        at: float,
        size: int,
        fence: int = 0,
    ) -> None:
        await self._artifact_rows.put(
            _key(attempt, batch_uid),
            attempt.epoch,
            {**fields, "updated_at": moment(at)},
            {"payload": None, "created_at": moment(at)},
            size=size,
            forgotten=_REPLACED_FIELDS,
            fence=fence,
        )

    @translate_errors
    async def _store_metrics(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        at: float,
        fields: dict[str, Any],
        size: int,
        fence: int = 0,
    ) -> None:
        row = {"failed": False, "reason": None, **fields, "ts_ms": int(at * 1000)}
        first = {"created_at": moment(at)}
        key = _key(attempt, batch_uid)
        await self._metrics_rows.put(key, attempt.epoch, row, first, size=size, fence=fence)

    @translate_errors
    async def mark_complete(
        self,
        task_id: str,
        node_id: str,
        epoch: int,
        meta: dict[str, Any],
        at: float,
        *,
        worker_id: str = "",
        artifacts_ref: dict[str, Any] | None = None,
        confirmed: bool = True,
        exists: bool = False,
    ) -> None:
        """Write a node's complete marker, so that the nodes that pull from it can finish.

        A marker that is not `confirmed` counts only once the node has ended: its attempt may store more batches. The
        marker has no `batch_uid`, as external workers expect. If it `exists` probably, because an external worker has
        written it, the write is one call instead of two.
        """
        stored, size = storable("meta of the complete marker", meta)
        more = _reference("artifacts_ref of the complete marker", artifacts_ref)
        fields = {
            "status": "complete",
            **row_fields(stored),
            "confirmed": confirmed,
            "updated_at": moment(at),
            **more,
        }
        key = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$exists": False}}
        first = {"worker_id": worker_id, "created_at": moment(at)}
        await self._artifact_rows.put(
            key, epoch, fields, first, size=size, exists=exists, forgotten=(WRAPPED,)
        )
        self.notifier.notify(task_id, node_id)

    @translate_errors
    async def complete_meta(self, attempt: AttemptInput) -> dict[str, Any] | None:
        """Return the `meta` of the confirmed complete marker of an attempt; None if there is none."""
        key = {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": {"$exists": False}}
        own = {"attempt_epoch": attempt.epoch, "confirmed": True}
        marker = await self._artifacts.find_one({**key, **own}, {"meta": 1})
        return None if marker is None else dict(marker.get("meta") or {})

    @translate_errors
    async def drop_marker(self, attempt: AttemptInput) -> None:
        """Remove the complete marker of an earlier attempt before a new attempt starts."""
        await self._artifacts.delete_one(
            {
                "task_id": attempt.task_id,
                "node_id": attempt.node_id,
                "batch_uid": {"$exists": False},
                "attempt_epoch": {"$not": {"$gte": attempt.epoch}},
            }
        )

    @translate_errors
    async def delete_earlier_generations(
        self, task_id: str, first_epochs: Mapping[str, int], before: float
    ) -> None:
        """Delete what earlier generations of these nodes have stored: batches, complete markers, metrics and claims.

        No reader of FlowKit counts these rows any more, but external workers read all that there are. External workers
        write no epochs; of their rows, delete those that are older than `before` (Unix time), at which no attempt of
        the new generation had begun. A process that was frozen may delete them late.
        """
        await self.delete_earlier_rows(task_id, first_epochs, before)
        nodes = [*first_epochs.items()]
        for start in range(0, len(nodes), _GENERATIONS_AT_ONCE):
            some = nodes[start : start + _GENERATIONS_AT_ONCE]
            claims = [{"consumer_node": node_id, **_earlier_filter(epoch, before)} for node_id, epoch in some]
            await self.claims.delete(task_id, claims)

    @translate_errors
    async def delete_earlier_rows(
        self, task_id: str, first_epochs: Mapping[str, int], before: float | None = None
    ) -> None:
        """Delete the batches, complete markers and metrics of earlier generations of these nodes.

        Keep rows without an epoch, unless they are older than `before`: a bridge has not confirmed them yet.
        """
        nodes = [*first_epochs.items()]
        for start in range(0, len(nodes), _GENERATIONS_AT_ONCE):
            some = nodes[start : start + _GENERATIONS_AT_ONCE]
            rows = {
                "task_id": task_id,
                "$or": [{"node_id": node_id, **_earlier_filter(epoch, before)} for node_id, epoch in some],
            }
            await gather_writes(self._artifacts.delete_many(rows), self._metrics.delete_many(rows))

    @translate_errors
    async def delete_other_nodes(self, task_id: str, node_ids: Sequence[str]) -> None:
        """Delete what nodes have stored that the graph of a task no longer has."""
        rows = {"task_id": task_id, "node_id": {"$nin": [*node_ids]}}
        await gather_writes(self._artifacts.delete_many(rows), self._metrics.delete_many(rows))
        await self.claims.delete(task_id, [{"consumer_node": {"$nin": [*node_ids]}}])

    def check_outcome(self, outcome: NodeOutcome) -> None:
        """Raise BadMetrics, BatchTooLarge or BadBatchUid if MongoDB cannot store the results of a node."""
        storable("metrics", outcome.metrics)
        _reference("artifacts_ref", outcome.artifacts_ref)
        for batch in outcome.batches:
            uid = batch["batch_uid"]
            check_uid(uid)
            storable(f"metrics of batch {uid!r}", batch.get("metrics") or {})
            _reference(f"artifacts_ref of batch {uid!r}", batch.get("artifacts_ref"))

    async def store_outcome(self, attempt: AttemptInput, outcome: NodeOutcome, at: float) -> None:
        """Store the results with which an operator completes a node: batches, final metrics and complete marker."""
        for batch in outcome.batches:
            uid, metrics, ref = batch["batch_uid"], batch.get("metrics") or {}, batch.get("artifacts_ref")
            await self.store_batch(attempt, uid, metrics, "", at, artifacts_ref=ref)
        if outcome.metrics:
            await self.store_final(attempt, outcome.metrics, at)
        await self.mark_complete(
            attempt.task_id,
            attempt.node_id,
            attempt.epoch,
            outcome.metrics,
            at,
            artifacts_ref=outcome.artifacts_ref,
        )

    async def mark_ended(self, task_id: str, nodes: Sequence[NodeRecord], at: float) -> None:
        """Write a complete marker for each of `nodes` that has ended without one and from which another node pulls.

        A task may need thousands of markers at once. Up-to-date markers are not written again, so a retry continues
        where the interrupted write stopped.
        """
        needed = [node for node in nodes if _needs_marker(node)]
        for start in range(0, len(needed), _MARKERS_AT_ONCE):
            some = needed[start : start + _MARKERS_AT_ONCE]
            for node in await self._put_markers(task_id, some, at):
                self.notifier.notify(task_id, node.node_id)

    @translate_errors
    async def _put_markers(
        self, task_id: str, nodes: Sequence[NodeRecord], at: float
    ) -> Sequence[NodeRecord]:
        """Insert markers, replace older ones, and return the nodes whose markers were written.

        The insert comes first because it is the fastest write.
        """
        try:
            await self._artifacts.insert_many(
                [_marker_row(task_id, node, at) for node in nodes], ordered=False
            )
        except BulkWriteError as error:
            taken = duplicate_indexes(error)
            older = await self._outdated_markers(task_id, [nodes[index] for index in sorted(taken)])
            if older:
                replacements = [_marker_update(task_id, node, at) for node in older]
                await self._artifacts.bulk_write(replacements, ordered=False)
            return [node for index, node in enumerate(nodes) if index not in taken] + older
        return nodes

    async def _outdated_markers(self, task_id: str, nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
        """Return the nodes whose stored marker is missing or outdated."""
        cursor = self._artifacts.find(
            {**_markers_filter(task_id), "node_id": {"$in": [node.node_id for node in nodes]}},
            {"_id": 0, "node_id": 1, "attempt_epoch": 1, "meta.ended": 1},
        )
        stored = {row["node_id"]: row async for row in cursor}
        return [node for node in nodes if _is_newer(node, stored.get(node.node_id))]

    @translate_errors
    async def scan(
        self,
        task_id: str,
        sources: Sequence[str],
        since: Mapping[str, Mark] | None = None,
        first_epochs: Mapping[str, int] = MappingProxyType({}),
    ) -> Scan:
        """Return the batches and complete markers of several nodes, without metas. Uses a single query.

        Omit the batches of the sources in `since` that were stored before the source's mark, and what earlier
        generations of the sources have stored, whose epochs are below `first_epochs`.
        """
        cursor = self._artifacts.find(scan_filter(task_id, sources, since or {}, first_epochs), SCANNED)
        return as_scan(sources, [artifact async for artifact in cursor])

    @translate_errors
    async def count_batches(self, attempt: AttemptInput) -> int:
        """Return the number of batches that an attempt has stored."""
        stored = {"task_id": attempt.task_id, "node_id": attempt.node_id, "attempt_epoch": attempt.epoch}
        return int(await self._artifacts.count_documents({**stored, "status": "partial"}))

    @translate_errors
    async def count_stored(self, attempt: AttemptInput) -> int:
        """Return the number of batches that the node of an attempt has stored, in its present generation."""
        stored = {"task_id": attempt.task_id, "node_id": attempt.node_id, "status": "partial"}
        return int(await self._artifacts.count_documents(stored | generation_filter(attempt.first_epoch)))

    @translate_errors
    async def count_settled(self, attempt: AttemptInput) -> int:
        """Return the number of batches that the node of an attempt has stored or set aside, in its present generation.

        It grows only with batches that the generation had neither stored nor set aside before.
        """
        settled = {"$or": [{"status": "partial"}, SET_ASIDE]}
        return int(await self._artifacts.count_documents(_node_filter(attempt) | settled))

    @translate_errors
    async def batch_uids(self, task_id: str, node_id: str, first_epoch: int = 0) -> set[str]:
        """Return the uids of a node's batches whose artifact and metrics row, if any, are both stored.

        Here and below, batches of earlier generations of the node, whose epochs are below `first_epoch`, do not count.
        """
        own = (task_id, node_id, first_epoch)
        stored, rows = await asyncio.gather(self._entries(*own), self._rows(*own))
        return {uid for uid, entry in stored.items() if is_whole(entry, rows.get(uid))}

    @translate_errors
    async def _entries(self, task_id: str, node_id: str, first_epoch: int) -> dict[str, Entry]:
        """Return a node's stored batches in any order. Needs less memory than `_partials`."""
        own = {"task_id": task_id, "node_id": node_id, "status": "partial", **generation_filter(first_epoch)}
        wanted = {"_id": 0, "batch_uid": 1, "size": 1}
        found: dict[str, Entry] = {}
        async for partial in self._artifacts.find(own, wanted).batch_size(CURSOR_DOCUMENTS):
            if "batch_uid" in partial:
                found[uid_text(partial["batch_uid"])] = entry_of(partial)
        return found

    @translate_errors
    async def quarantined(self, attempt: AttemptInput) -> set[str]:
        """Return the uids of the batches that the node of an attempt has set aside, in its present generation.

        Omit those whose metrics row does not say so: the worker that wrote the artifact may have died before.
        """
        failed = _node_filter(attempt) | {"failed": True}
        found = [
            rows.find(condition, {"_id": 0, "batch_uid": 1}).batch_size(CURSOR_DOCUMENTS)
            for rows, condition in ((self._artifacts, _set_aside_filter(attempt)), (self._metrics, failed))
        ]
        artifacts, rows = [{uid_text(row["batch_uid"]) async for row in cursor} for cursor in found]
        return artifacts & rows

    @translate_errors
    async def count_quarantined(self, attempt: AttemptInput) -> int:
        """Return the number of these batches, without those that are skipped."""
        return int(await self._artifacts.count_documents(_set_aside_filter(attempt) | _NOT_SKIPPED))

    @translate_errors
    async def why_quarantined(self, attempt: AttemptInput) -> str:
        """Return why these batches have failed, in words; empty if there are none."""
        found = await read_set_aside(self._artifacts, _node_filter(attempt))
        return found[attempt.node_id].causes if attempt.node_id in found else ""

    @translate_errors
    async def find_set_aside(self, attempt: AttemptInput, batch_uids: Sequence[str]) -> set[str]:
        """Return those of these uids whose batches the node has set aside, up to this attempt, also if they
        are skipped.
        """
        named = _set_aside_until_filter(attempt) | {"batch_uid": {"$in": [*batch_uids]}}
        return {uid_text(row["batch_uid"]) async for row in self._artifacts.find(named, {"batch_uid": 1})}

    @translate_errors
    async def skipped(self, attempt: AttemptInput) -> set[str]:
        """Return the uids of those of these batches that are skipped."""
        cursor = self._artifacts.find(_set_aside_filter(attempt) | _SKIPPED, {"_id": 0, "batch_uid": 1})
        return {uid_text(row["batch_uid"]) async for row in cursor}

    @translate_errors
    async def skip_quarantined(self, attempt: AttemptInput, batch_uids: Sequence[str] | None) -> None:
        """Skip batches that the node has set aside, up to this attempt: these, or all.

        They no longer count as failed.
        """
        chosen = _set_aside_until_filter(attempt) | (
            {} if batch_uids is None else {"batch_uid": {"$in": [*batch_uids]}}
        )
        await self._artifacts.update_many(chosen, {"$set": {"quarantined.skipped": True}})

    @translate_errors
    async def choose_quarantined(self, attempt: AttemptInput, batch_uids: Sequence[str] | None) -> list[str]:
        """Return the batches that the node has set aside, up to this attempt: of these, or all that are not skipped."""
        chosen = _NOT_SKIPPED if batch_uids is None else {"batch_uid": {"$in": [*batch_uids]}}
        cursor = self._artifacts.find(_set_aside_until_filter(attempt) | chosen, {"_id": 0, "batch_uid": 1})
        return [row["batch_uid"] async for row in cursor.batch_size(CURSOR_DOCUMENTS)]

    @translate_errors
    async def forget_quarantined(self, attempt: AttemptInput, batch_uids: Sequence[str]) -> None:
        """Forget batches that the node has set aside, up to this attempt, so that another attempt tries them again.

        Their artifacts go last, so that a repetition after a crash still chooses them.
        """
        await self.claims.release(attempt, batch_uids)
        for some in uid_filters(batch_uids):
            own = {"task_id": attempt.task_id, "node_id": attempt.node_id, "failed": True}
            await self._metrics.delete_many({**own, "attempt_epoch": {"$lte": attempt.epoch}, **some})
            await self._artifacts.delete_many(_set_aside_until_filter(attempt) | some)

    @translate_errors
    async def _partials(self, task_id: str, node_id: str, first_epoch: int) -> dict[str, Entry]:
        """Return a node's stored batches, oldest first."""
        own = {"task_id": task_id, "node_id": node_id, "status": "partial", **generation_filter(first_epoch)}
        cursor = self._artifacts.find(own, PROJECTION)
        return entries([partial async for partial in cursor])

    @translate_errors
    async def has_batches(self, task_id: str, node_id: str, first_epoch: int = 0) -> bool:
        """Return whether a node has stored a batch."""
        batch = {"task_id": task_id, "node_id": node_id, "status": "partial", "batch_uid": {"$exists": True}}
        return await self._artifacts.find_one(batch | generation_filter(first_epoch), {"_id": 1}) is not None

    async def stored_uids(self, task_id: str, node_id: str, first_epoch: int = 0) -> set[str]:
        """Return the uids of a node's stored batches."""
        return set(await self._entries(task_id, node_id, first_epoch))

    async def _rows(self, task_id: str, node_id: str, first_epoch: int) -> dict[str, bool]:
        """Return whether a batch failed, for each batch that has a metrics row."""
        own = {"task_id": task_id, "node_id": node_id, **generation_filter(first_epoch)}
        cursor = self._metrics.find(own, {"_id": 0, "batch_uid": 1, "failed": 1}).batch_size(CURSOR_DOCUMENTS)
        return {uid_text(row.get("batch_uid")): bool(row.get("failed")) async for row in cursor}

    async def pages(
        self, task_id: str, node_id: str, skip: Collection[str] = (), first_epoch: int = 0
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield `batch_uid` and `meta` of a node's stored batches in pages, oldest first, except those in `skip`.

        Reading one page at a time bounds the memory of this process and the sort on the server.
        """
        stored = await self._partials(task_id, node_id, first_epoch)
        left = [entry for uid, entry in stored.items() if uid not in skip]
        while left:
            page = left[: fitting(left, PAGE_BYTES)]
            yield await self.metas(task_id, node_id, page, first_epoch)
            left = left[len(page) :]

    @translate_errors
    async def metas(
        self, task_id: str, node_id: str, page: Sequence[Entry], first_epoch: int = 0
    ) -> list[dict[str, Any]]:
        """Return `batch_uid` and `meta` of these batches, in the given order.

        Omit batches that were removed or became larger than the largest size in `page`.
        """
        batches = {"batch_uid": {"$in": [entry.uid for entry in page]}, "status": "partial"}
        known = [entry.size for entry in page if entry.size is not None]
        grown = {"size": {"$not": {"$gt": max(known)}}} if known else {}
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, **batches, **grown, **generation_filter(first_epoch)},
            {"_id": 0, "batch_uid": 1, "meta": 1, WRAPPED: 1},
        )
        found = {uid_text(partial.get("batch_uid")): _read_partial(partial) async for partial in cursor}
        return [found[uid] for uid in map(uid_text, (entry.uid for entry in page)) if uid in found]


def _node_filter(attempt: AttemptInput) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "node_id": attempt.node_id, **generation_filter(attempt.first_epoch)}


def _read_partial(row: dict[str, Any]) -> dict[str, Any]:
    """Return `batch_uid` and `meta` of a row, as its writer knew it."""
    return {"batch_uid": row.get("batch_uid"), "meta": read_meta(row)}


def _set_aside_filter(attempt: AttemptInput) -> dict[str, Any]:
    return {**_node_filter(attempt), **SET_ASIDE}


def _set_aside_until_filter(attempt: AttemptInput) -> dict[str, Any]:
    """Return the filter for the batches that the node has set aside in its present generation, up to an attempt."""
    epochs = {"$gte": attempt.first_epoch, "$lte": attempt.epoch}
    return {**_set_aside_filter(attempt), "attempt_epoch": epochs}


def _reference(what: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the field that holds a handler's reference, or `{}` if there is no reference."""
    return {} if given is None else {"artifacts_ref": storable(what, given)[0]}


def _earlier_filter(first_epoch: int, before: float | None) -> dict[str, Any]:
    by_epoch = {"attempt_epoch": {"$lt": first_epoch}}
    if before is None:
        return by_epoch
    oldest_kept = ObjectId.from_datetime(moment(before))
    return {"$or": [by_epoch, {"attempt_epoch": None, "_id": {"$lt": oldest_kept}}]}


def _key(attempt: AttemptInput, batch_uid: str) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": batch_uid}


def _needs_marker(node: NodeRecord) -> bool:
    """Return whether the end of a node needs a marker: its attempt writes one only if it finishes the node."""
    by_attempt = node.status is NodeStatus.FINISHED and not node.decided
    return node.marker and node.status.ended and not by_attempt


def _is_newer(node: NodeRecord, stored: dict[str, Any] | None) -> bool:
    """Return whether the marker of this end must replace the stored one.

    It must not replace the result with which this attempt, or an operator, has finished the node.
    """
    if stored is None:
        return True
    epoch, ended = stored.get("attempt_epoch") or 0, (stored.get("meta") or {}).get("ended")
    if epoch != node.epoch:
        return bool(epoch < node.epoch)
    return bool(ended != node.status.value) and not (ended is None and node.status is NodeStatus.FINISHED)


def _markers_filter(task_id: str) -> dict[str, Any]:
    """Return the filter for the markers of a task. A marker is an artifact without a `batch_uid`."""
    return {"task_id": task_id, "batch_uid": {"$exists": False}}


def _marker_fields(node: NodeRecord, at: float) -> dict[str, Any]:
    ended = {"ended": node.status.value}
    marker = {"status": "complete", "meta": ended, "confirmed": True}
    return {**marker, "updated_at": moment(at), "attempt_epoch": node.epoch}


def _marker_row(task_id: str, node: NodeRecord, at: float) -> dict[str, Any]:
    first = {"task_id": task_id, "node_id": node.node_id, "worker_id": "", "created_at": moment(at)}
    return {**first, **_marker_fields(node, at)}


def _marker_update(task_id: str, node: NodeRecord, at: float) -> UpdateOne:
    older = {**_markers_filter(task_id), "node_id": node.node_id, "attempt_epoch": {"$lte": node.epoch}}
    return UpdateOne(older, {"$set": _marker_fields(node, at)})
