"""Artifacts, metrics and claims: what batches leave behind (spec: artifacts, metrics path; protocol: MongoDB contract).

One rule for all: a higher epoch replaces, a lower one is refused. A refused write raises Fenced, which ends a zombie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import bson
from pymongo import ASCENDING
from pymongo.errors import BulkWriteError

from flowkit.adapters.fenced_rows import FencedRows
from flowkit.adapters.mongo import Database, ensure_index, moment, shortened
from flowkit.adapters.news import Newsroom
from flowkit.errors import Fenced, FlowKitError
from flowkit.limits import BATCH_META_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from flowkit.models import AttemptInput

FINAL_UID = "__final__"
"""`batch_uid` under which a node's final metrics are stored."""

_METAS_OF_ONE_PAGE = 20

_NODE_BATCH = [("task_id", ASCENDING), ("node_id", ASCENDING), ("batch_uid", ASCENDING)]

_CLAIM = [(name, ASCENDING) for name in ("task_id", "consumer_node", "from_node", "batch_uid")]


class BatchTooLarge(FlowKitError, ValueError):
    """A batch's metrics are too large to be stored as an artifact's meta."""

    code = "batch_too_large"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What the sources of a pulling node have left behind so far."""

    uids: dict[str, list[str]]
    """Batches by source, oldest first."""
    markers: dict[str, int]
    """Epoch of the complete marker of each source that has one."""


class ArtifactStore:
    """`artifacts`, `metrics_raw` and `stream_progress` of one database."""

    def __init__(self, db: Database) -> None:
        self._artifacts = db.artifacts
        self._metrics = db.metrics_raw
        self._artifact_rows = FencedRows(self._artifacts)
        self._metrics_rows = FencedRows(self._metrics)
        self._claims = db.stream_progress
        self.news = Newsroom()
        """Tells pulling nodes of this process what others in it have written."""

    @shortened
    async def prepare(self) -> None:
        """Create the indexes under the names that external workers use."""
        await ensure_index(self._artifacts, _NODE_BATCH[:2], "ix_artifacts_task_node")
        await ensure_index(self._artifacts, _NODE_BATCH, "uniq_artifact_batch_uid", unique=True, sparse=True)
        await ensure_index(self._metrics, _NODE_BATCH, "uniq_metrics_batch", unique=True)
        await ensure_index(self._claims, _CLAIM, "uniq_stream_claim_batch", unique=True)

    async def store_batch(
        self, attempt: AttemptInput, batch_uid: str, metrics: dict[str, Any], worker_id: str, at: float
    ) -> None:
        """Store a batch's result: its metrics first, then the artifact, which says that the batch is done."""
        size = check_size(batch_uid, metrics)
        if metrics:
            await self._store_metrics(attempt, batch_uid, at, {"metrics": metrics}, size)
        else:
            await self._forget_failure(attempt, batch_uid)
        await self._store_partial(attempt, batch_uid, metrics, worker_id, at, size)

    @shortened
    async def _forget_failure(self, attempt: AttemptInput, batch_uid: str) -> None:
        row = {**_key(attempt, batch_uid), "failed": True, "attempt_epoch": {"$lte": attempt.epoch}}
        await self._metrics.delete_one(row)

    async def store_failed_batch(self, attempt: AttemptInput, batch_uid: str, reason: str, at: float) -> None:
        """Store that a batch failed; its later success replaces the row."""
        await self._store_metrics(
            attempt, batch_uid, at, {"metrics": {}, "failed": True, "reason": reason}, size=0
        )

    async def store_final(self, attempt: AttemptInput, metrics: dict[str, Any], at: float) -> None:
        """Store a node's final metrics."""
        size = check_size(FINAL_UID, metrics)
        await self._store_metrics(attempt, FINAL_UID, at, {"metrics": metrics, "final": True}, size)

    @shortened
    async def upsert_partial(
        self, attempt: AttemptInput, batch_uid: str, meta: dict[str, Any], worker_id: str, at: float
    ) -> None:
        """Write the artifact of one batch."""
        await self._store_partial(attempt, batch_uid, meta, worker_id, at, len(bson.encode(meta)))

    @shortened
    async def _store_partial(
        self,
        attempt: AttemptInput,
        batch_uid: str,
        meta: dict[str, Any],
        worker_id: str,
        at: float,
        size: int,
    ) -> None:
        await self._artifact_rows.put(
            _key(attempt, batch_uid),
            attempt.epoch,
            {"status": "partial", "meta": meta, "worker_id": worker_id, "updated_at": moment(at)},
            {"payload": None, "created_at": moment(at)},
            size=size,
        )
        self.news.tell(attempt.task_id, attempt.node_id)

    @shortened
    async def _store_metrics(
        self, attempt: AttemptInput, batch_uid: str, at: float, fields: dict[str, Any], size: int
    ) -> None:
        row = {"failed": False, "reason": None, **fields, "ts_ms": int(at * 1000)}
        first = {"created_at": moment(at)}
        await self._metrics_rows.put(_key(attempt, batch_uid), attempt.epoch, row, first, size=size)

    @shortened
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
    ) -> None:
        """Write a node's complete marker: its pullers may end. It holds no `batch_uid`, as workers expect."""
        fields: dict[str, Any] = {"status": "complete", "meta": meta, "updated_at": moment(at)}
        if artifacts_ref is not None:
            fields["artifacts_ref"] = artifacts_ref
        key = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$exists": False}}
        first = {"worker_id": worker_id, "created_at": moment(at)}
        await self._artifact_rows.put(key, epoch, fields, first, size=len(bson.encode(meta)))
        self.news.tell(task_id, node_id)

    @shortened
    async def drop_marker(self, attempt: AttemptInput) -> None:
        """Remove the marker of an earlier attempt before a new one begins."""
        await self._artifacts.delete_one(
            {
                "task_id": attempt.task_id,
                "node_id": attempt.node_id,
                "batch_uid": {"$exists": False},
                "attempt_epoch": {"$lt": attempt.epoch},
            }
        )

    @shortened
    async def scan(self, task_id: str, sources: Sequence[str]) -> Scan:
        """Batches and markers of several nodes, in one read and without their metas."""
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": {"$in": list(sources)}},
            {"node_id": 1, "batch_uid": 1, "status": 1, "attempt_epoch": 1, "created_at": 1},
        )
        partials: dict[str, list[tuple[Any, str]]] = {source: [] for source in sources}
        markers: dict[str, int] = {}
        async for found in cursor:
            if found["status"] == "complete":
                markers[found["node_id"]] = found.get("attempt_epoch", 0)
            elif "batch_uid" in found:
                partials[found["node_id"]].append((_age(found), found["batch_uid"]))
        return Scan(
            uids={source: [uid for _, uid in sorted(found)] for source, found in partials.items()},
            markers=markers,
        )

    @shortened
    async def batch_uids(self, task_id: str, node_id: str) -> set[str]:
        """Batches of a node that have a stored result."""
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, "status": "partial"}, {"_id": 0, "batch_uid": 1}
        )
        return {partial["batch_uid"] async for partial in cursor}

    async def pages(
        self, task_id: str, node_id: str, skip: Collection[str] = ()
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """`batch_uid` and `meta` of a node's stored batches, oldest first, without those in `skip`.

        Metas are read a page at a time, so that memory and the server's sorting stay bounded.
        """
        uids = [uid for uid in await self._uids_by_age(task_id, node_id) if uid not in skip]
        for start in range(0, len(uids), _METAS_OF_ONE_PAGE):
            yield await self.metas(task_id, node_id, uids[start : start + _METAS_OF_ONE_PAGE])

    @shortened
    async def _uids_by_age(self, task_id: str, node_id: str) -> list[str]:
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, "status": "partial"},
            {"_id": 1, "batch_uid": 1, "created_at": 1},
        )
        found = [(partial["created_at"], partial["_id"], partial["batch_uid"]) async for partial in cursor]
        return [uid for _, _, uid in sorted(found)]

    @shortened
    async def metas(self, task_id: str, node_id: str, uids: list[str]) -> list[dict[str, Any]]:
        """`batch_uid` and `meta` of these batches, in this order; those that are gone are left out."""
        cursor = self._artifacts.find(
            {"task_id": task_id, "node_id": node_id, "batch_uid": {"$in": uids}, "status": "partial"},
            {"_id": 0, "batch_uid": 1, "meta": 1},
        )
        found = {partial["batch_uid"]: partial async for partial in cursor}
        return [found[uid] for uid in uids if uid in found]

    @shortened
    async def claim(self, attempt: AttemptInput, from_node: str, batch_uids: list[str], at: float) -> None:
        """Note that batches of `from_node` were delivered to this node; a repeated claim is taken over."""
        if not batch_uids:
            return
        claims = [
            {
                "task_id": attempt.task_id,
                "consumer_node": attempt.node_id,
                "from_node": from_node,
                "batch_uid": batch_uid,
                "attempt_epoch": attempt.epoch,
                "claimed_at": moment(at),
            }
            for batch_uid in batch_uids
        ]
        try:
            await self._claims.insert_many(claims, ordered=False)
        except BulkWriteError as error:
            await self._claim_again(attempt, from_node, _refused_uids(error, claims), at)

    async def _claim_again(self, attempt: AttemptInput, from_node: str, uids: list[str], at: float) -> None:
        """Take over claims of earlier attempts; those of external workers hold no epoch."""
        not_newer = [{"attempt_epoch": {"$lte": attempt.epoch}}, {"attempt_epoch": {"$exists": False}}]
        taken = await self._claims.update_many(
            {
                "task_id": attempt.task_id,
                "consumer_node": attempt.node_id,
                "from_node": from_node,
                "batch_uid": {"$in": uids},
                "$or": not_newer,
            },
            {"$set": {"attempt_epoch": attempt.epoch, "claimed_at": moment(at)}},
        )
        if taken.matched_count < len(uids):
            raise Fenced(f"a newer attempt of node {attempt.node_id!r} has claimed batches of {from_node!r}")


def _age(partial: dict[str, Any]) -> tuple[Any, ...]:
    """What sorts batches by age; those of a foreign worker that does not tell theirs come first."""
    made = partial.get("created_at")
    return (made is not None, made or 0, str(partial["_id"]))


_DUPLICATE = 11000


def _refused_uids(error: BulkWriteError, claims: list[dict[str, Any]]) -> list[str]:
    problems = error.details.get("writeErrors", [])
    if any(problem.get("code") != _DUPLICATE for problem in problems):
        raise error
    return [claims[problem["index"]]["batch_uid"] for problem in problems]


def check_size(batch_uid: str, meta: dict[str, Any]) -> int:
    """Bytes of a batch's metrics. BatchTooLarge when they would not fit an artifact."""
    size = len(bson.encode(meta))
    if size > BATCH_META_BYTES:
        raise BatchTooLarge(
            f"metrics of batch {batch_uid!r} are {size:,} bytes, more than {BATCH_META_BYTES:,}: "
            "make smaller batches, or store the data and return a reference"
        )
    return size


def _key(attempt: AttemptInput, batch_uid: str) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "node_id": attempt.node_id, "batch_uid": batch_uid}
