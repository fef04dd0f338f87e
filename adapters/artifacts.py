"""Storage of artifacts, metrics and claims (spec: artifacts, metrics path; protocol: MongoDB contract).

One rule applies to all three: a write of a higher epoch replaces the row, and a write of a lower epoch is rejected.
A rejected write raises Fenced, which ends an outdated attempt that is still running. Claims have a module of their own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pymongo import ASCENDING

from flowkit.adapters.batch_uids import check_uid, uid_text
from flowkit.adapters.claims import Claims
from flowkit.adapters.concurrent_writes import together
from flowkit.adapters.durability import durable
from flowkit.adapters.entries import (
    PAGE_BYTES,
    PROJECTION,
    Entry,
    entries,
    fitting,
    is_whole,
)
from flowkit.adapters.fenced_rows import FencedRows
from flowkit.adapters.metrics import EMPTY_BYTES, storable
from flowkit.adapters.mongo import Database, ensure_index, moment, translate_errors
from flowkit.adapters.notifications import ArtifactNotifier
from flowkit.adapters.scans import SCANNED, Scan, as_scan, scan_filter
from flowkit.protocol.messages import FINAL_UID

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping, Sequence

    from flowkit.adapters.scans import Mark
    from flowkit.models import AttemptInput

_NODE_BATCH = [("task_id", ASCENDING), ("node_id", ASCENDING), ("batch_uid", ASCENDING)]

_REPLACED_FIELDS = ("artifacts_ref", "error")
"""Optional fields of an artifact that a new write of the same batch removes unless it sets them."""


class ArtifactStore:
    """The collections `artifacts`, `metrics_raw` and `stream_progress` of one database."""

    def __init__(self, db: Database) -> None:
        stored = durable(db)
        self._artifacts = stored.artifacts
        self._metrics = stored.metrics_raw
        self._artifact_rows = FencedRows(self._artifacts)
        self._metrics_rows = FencedRows(self._metrics)
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
    ) -> None:
        """Store the result of a batch: write its metrics row and its artifact concurrently.

        Raise BadMetrics, BatchTooLarge or BadBatchUid before the first write.
        """
        check_uid(batch_uid)
        meta, size = storable(f"metrics of batch {batch_uid!r}", metrics)
        more = _reference(f"artifacts_ref of batch {batch_uid!r}", artifacts_ref)
        await together(
            self._store_metrics(attempt, batch_uid, at, {"metrics": meta}, size)
            if meta
            else self._delete_failed_row(attempt, batch_uid),
            self._store_partial(attempt, batch_uid, meta, worker_id, at, size, more),
        )

    @translate_errors
    async def _delete_failed_row(self, attempt: AttemptInput, batch_uid: str) -> None:
        row = {**_key(attempt, batch_uid), "failed": True, "attempt_epoch": {"$lte": attempt.epoch}}
        await self._metrics.delete_one(row)

    async def store_failed_batch(
        self, attempt: AttemptInput, batch_uid: str, reason: str, at: float, *, worker_id: str = ""
    ) -> None:
        """Record in the metrics row and in the artifact that a batch failed. A later success replaces both.

        Raise BadBatchUid before the first write.
        """
        check_uid(batch_uid)
        row = {"metrics": {}, "failed": True, "reason": reason}
        fields = {
            "status": "failed",
            "error": reason,
            "meta": {},
            "size": EMPTY_BYTES,
            "worker_id": worker_id,
        }
        await together(
            self._store_metrics(attempt, batch_uid, at, row, size=0),
            self._store_artifact(attempt, batch_uid, fields, at, size=0),
        )

    async def store_final(self, attempt: AttemptInput, metrics: dict[str, Any], at: float) -> None:
        """Store a node's final metrics."""
        meta, size = storable("metrics of finalize", metrics)
        await self._store_metrics(attempt, FINAL_UID, at, {"metrics": meta, "final": True}, size)

    async def upsert_partial(
        self, attempt: AttemptInput, batch_uid: str, meta: dict[str, Any], worker_id: str, at: float
    ) -> None:
        """Write the artifact of one batch. Raise BadMetrics, BatchTooLarge or BadBatchUid before the write."""
        check_uid(batch_uid)
        stored, size = storable(f"meta of batch {batch_uid!r}", meta)
        await self._store_partial(attempt, batch_uid, stored, worker_id, at, size, {})

    async def _store_partial(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        meta: dict[str, Any],
        worker_id: str,
        at: float,
        size: int,
        more: dict[str, Any],
    ) -> None:
        fields = {"status": "partial", "meta": meta, "size": size, "worker_id": worker_id, **more}
        await self._store_artifact(attempt, batch_uid, fields, at, size)
        self.notifier.notify(attempt.task_id, attempt.node_id, Entry(batch_uid, size))

    @translate_errors
    async def _store_artifact(
        self, attempt: AttemptInput, batch_uid: str, fields: dict[str, Any], at: float, size: int
    ) -> None:
        await self._artifact_rows.put(
            _key(attempt, batch_uid),
            attempt.epoch,
            {**fields, "updated_at": moment(at)},
            {"payload": None, "created_at": moment(at)},
            size=size,
            forgotten=_REPLACED_FIELDS,
        )

    @translate_errors
    async def _store_metrics(
        self, attempt: AttemptInput, batch_uid: str, at: float, fields: dict[str, Any], size: int
    ) -> None:
        row = {"failed": False, "reason": None, **fields, "ts_ms": int(at * 1000)}
        first = {"created_at": moment(at)}
        await self._metrics_rows.put(_key(attempt, batch_uid), attempt.epoch, row, first, size=size)

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
            "meta": stored,
            "confirmed": confirmed,
            "updated_at": moment(at),
            **more,
        }
        key = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$exists": False}}
        first = {"worker_id": worker_id, "created_at": moment(at)}
        await self._artifact_rows.put(key, epoch, fields, first, size=size, exists=exists)
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
    async def scan(
        self, task_id: str, sources: Sequence[str], since: Mapping[str, Mark] | None = None
    ) -> Scan:
        """Return the batches and complete markers of several nodes, without metas. Uses a single query.

        Omit the batches of the sources in `since` that were stored before the source's mark.
        """
        cursor = self._artifacts.find(scan_filter(task_id, sources, since or {}), SCANNED)
        return as_scan(sources, [artifact async for artifact in cursor])

    @translate_errors
    async def count_batches(self, attempt: AttemptInput) -> int:
        """Return the number of batches that an attempt has stored."""
        stored = {"task_id": attempt.task_id, "node_id": attempt.node_id, "attempt_epoch": attempt.epoch}
        return int(await self._artifacts.count_documents({**stored, "status": "partial"}))

    @translate_errors
    async def batch_uids(self, task_id: str, node_id: str) -> set[str]:
        """Return the uids of a node's batches whose artifact and metrics row, if any, are both stored."""
        partials, rows = await asyncio.gather(self._partials(task_id, node_id), self._rows(task_id, node_id))
        return {uid for uid, entry in partials.items() if is_whole(entry, rows.get(uid))}

    @translate_errors
    async def _partials(self, task_id: str, node_id: str) -> dict[str, Entry]:
        """Return a node's stored batches, oldest first."""
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, "status": "partial"}, PROJECTION
        )
        return entries([partial async for partial in cursor])

    @translate_errors
    async def has_batches(self, task_id: str, node_id: str) -> bool:
        """Return whether a node has stored a batch."""
        batch = {"task_id": task_id, "node_id": node_id, "status": "partial", "batch_uid": {"$exists": True}}
        return await self._artifacts.find_one(batch, {"_id": 1}) is not None

    async def stored_uids(self, task_id: str, node_id: str) -> set[str]:
        """Return the uids of a node's stored batches."""
        return set(await self._partials(task_id, node_id))

    async def _rows(self, task_id: str, node_id: str) -> dict[str, bool]:
        """Return whether a batch failed, for each batch that has a metrics row."""
        cursor = self._metrics.find(
            {"task_id": task_id, "node_id": node_id}, {"_id": 0, "batch_uid": 1, "failed": 1}
        )
        return {uid_text(row.get("batch_uid")): bool(row.get("failed")) async for row in cursor}

    async def pages(
        self, task_id: str, node_id: str, skip: Collection[str] = ()
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield `batch_uid` and `meta` of a node's stored batches in pages, oldest first, except those in `skip`.

        Reading one page at a time bounds the memory of this process and the sort on the server.
        """
        stored = await self._partials(task_id, node_id)
        left = [entry for uid, entry in stored.items() if uid not in skip]
        while left:
            page = left[: fitting(left, PAGE_BYTES)]
            yield await self.metas(task_id, node_id, page)
            left = left[len(page) :]

    @translate_errors
    async def metas(self, task_id: str, node_id: str, page: Sequence[Entry]) -> list[dict[str, Any]]:
        """Return `batch_uid` and `meta` of these batches, in the given order.

        Omit batches that were removed or became larger than the largest size in `page`.
        """
        batches = {"batch_uid": {"$in": [entry.uid for entry in page]}, "status": "partial"}
        known = [entry.size for entry in page if entry.size is not None]
        grown = {"size": {"$not": {"$gt": max(known)}}} if known else {}
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, **batches, **grown},
            {"_id": 0, "batch_uid": 1, "meta": 1},
        )
        found = {uid_text(partial.get("batch_uid")): partial async for partial in cursor}
        return [found[uid] for uid in map(uid_text, (entry.uid for entry in page)) if uid in found]

    async def claim(
        self, attempt: AttemptInput, from_node: str, batch_uids: Sequence[Any], at: float
    ) -> None:
        """Record that this node received batches of `from_node` (see Claims.make)."""
        await self.claims.make(attempt, from_node, batch_uids, at)


def _reference(what: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the field that holds a handler's reference, or `{}` if there is no reference."""
    return {} if given is None else {"artifacts_ref": storable(what, given)[0]}


def _key(attempt: AttemptInput, batch_uid: str) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": batch_uid}
