"""Read the documents of a finished task, from `tasks` to `worker_events`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from code_index.flow import ANALYZE, ENRICH, INDEX
from code_index.packages import Package, from_dicts, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ACCEPTED = "TASK_ACCEPTED"
"""The kind of event that reports the start of an attempt."""

ENDS = ("TASK_DONE", "TASK_FAILED", "CANCELLED")
"""The kinds of event that report the end of an attempt; other kinds report its batches and heartbeats."""

LOST = "lost"
"""The status of an attempt whose worker was killed."""

FIRST_FENCE = 1
"""The fencing number of a batch that no other attempt has claimed before."""

EVENTS_TIMEOUT_SEC = 2.5
"""Workers write events about once a second. The events of a killed worker's last second are lost."""

_POLL_SEC = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """One batch of one node, as stored in `artifacts`."""

    node: str
    uid: str
    epoch: int
    worker: str
    files: int
    stored_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAttempt:
    """One attempt of a shard of a node, as stored in `node_shards`."""

    node: str
    shard: int
    """The number of the shard, from 1."""
    epoch: int
    worker: str
    status: str
    """`running`, `finished`, `failed`, or LOST."""
    started_at: datetime
    ended_at: datetime | None = None

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.node} in attempt {self.epoch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of one batch by a shard, as stored in `stream_progress`."""

    node: str
    uid: str
    epoch: int
    """The attempt that has the batch."""
    worker: str
    claimed_at: datetime
    fence: int = FIRST_FENCE
    """The fencing number, which each take-over raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """All documents of a finished task."""

    task: Mapping[str, Any]
    batches: list[StoredBatch]
    markers: dict[str, Mapping[str, Any]]
    """What `finalize` returned, by node."""
    paths_found: list[str]
    paths_analyzed: list[str]
    problems: list[tuple[str, str]]
    """Files that do not parse, each with its problem."""
    packages: list[Package]
    """All packages by name, added up from the partial sums of the last node."""
    metrics: dict[str, int]
    """Number of rows in `metrics_raw`, by node."""
    failed_metrics: dict[str, int]
    """Number of those rows for batches that failed and were not processed again."""
    shards: list[ShardAttempt]
    """The attempts of shards, in the order of their epochs."""
    claims: list[Claim]
    """The claims of shards."""
    events: list[Mapping[str, Any]]
    """Rows of `worker_events` in chronological order."""

    @property
    def epochs(self) -> dict[str, list[int]]:
        """The epochs of the attempts of each node, in the order of the graph."""
        return {node["node_id"]: _epochs(node, self.shards) for node in self.task["graph"]["nodes"]}


def _epochs(node: Mapping[str, Any], shards: Iterable[ShardAttempt]) -> list[int]:
    """Return the epochs of the attempts of a node. Those of shards that were never started have no attempt."""
    last = node["attempt_epoch"]
    of_shards = [shard.epoch for shard in shards if shard.node == node["node_id"]]
    return [*(of_shards or range(1, last)), last]


async def load_documents(db: Any, task_id: str) -> Documents:
    """Read the documents of the finished task `task_id`, and wait for events that workers have not written yet."""
    task = await db.tasks.find_one({"id": task_id})
    facts = await _facts(db, task_id)
    shards = await read_shards(db, task_id)
    return Documents(
        task=task,
        batches=await _batches(db, task_id),
        markers=await _markers(db, task_id),
        paths_found=[path for meta in await _metas(db, task_id, INDEX, "files") for path in meta["files"]],
        paths_analyzed=[fact["path"] for fact in facts],
        problems=sorted((fact["path"], fact["problem"]) for fact in facts if fact["problem"]),
        packages=await _packages(db, task_id),
        metrics=await _rows_by_node(db.metrics_raw, {"task_id": task_id}),
        failed_metrics=await _rows_by_node(db.metrics_raw, {"task_id": task_id, "failed": True}),
        shards=shards,
        claims=await read_claims(db, task_id),
        events=await _wait_for_events(db, task, shards),
    )


async def _batches(db: Any, task_id: str) -> list[StoredBatch]:
    fields = dict.fromkeys(
        ("node_id", "batch_uid", "attempt_epoch", "worker_id", "updated_at", "meta.file_count"), 1
    )
    rows = db.artifacts.find({"task_id": task_id, "status": "partial"}, {"_id": 0, **fields})
    return [
        StoredBatch(
            node=row["node_id"],
            uid=row["batch_uid"],
            epoch=row["attempt_epoch"],
            worker=row["worker_id"],
            files=row["meta"]["file_count"],
            stored_at=row["updated_at"],
        )
        async for row in rows
    ]


async def read_shards(db: Any, task_id: str) -> list[ShardAttempt]:
    """Return the attempts of shards, in the order of their epochs. One is lost if its lease has expired."""
    now = datetime.now(UTC)
    rows = db.node_shards.find({"task_id": task_id}).sort("attempt_epoch", 1)
    return [
        ShardAttempt(
            node=row["node_id"],
            shard=row["shard"],
            epoch=row["attempt_epoch"],
            worker=row["worker_id"],
            status=LOST if row["status"] == "running" and row["lease_until"] < now else row["status"],
            started_at=row["started_at"],
            ended_at=row.get("ended_at"),
        )
        async for row in rows
    ]


async def read_claims(db: Any, task_id: str, lowest_fence: int = FIRST_FENCE) -> list[Claim]:
    """Return the claims of shards with at least this fencing number; claims of other nodes have none."""
    wanted = {"task_id": task_id, "fence": {"$gte": lowest_fence}}
    rows = [row async for row in db.stream_progress.find(wanted).sort("batch_uid", 1)]
    workers = (
        {(shard.node, shard.epoch): shard.worker for shard in await read_shards(db, task_id)} if rows else {}
    )
    return [
        Claim(
            node=row["consumer_node"],
            uid=row["batch_uid"],
            epoch=row["attempt_epoch"],
            worker=workers[row["consumer_node"], row["attempt_epoch"]],
            claimed_at=row["claimed_at"],
            fence=row["fence"],
        )
        for row in rows
    ]


async def _markers(db: Any, task_id: str) -> dict[str, Mapping[str, Any]]:
    markers = db.artifacts.find({"task_id": task_id, "status": "complete"})
    return {marker["node_id"]: marker["meta"] async for marker in markers}


async def _metas(db: Any, task_id: str, node: str, *fields: str) -> list[Any]:
    """Return these fields of the result of each batch of a node."""
    query = {"task_id": task_id, "status": "partial", "node_id": node}
    projection = {f"meta.{field}": 1 for field in fields}
    return [row["meta"] async for row in db.artifacts.find(query, {"_id": 0, **projection})]


async def _facts(db: Any, task_id: str) -> list[dict[str, Any]]:
    metas = await _metas(db, task_id, ENRICH, "facts.path", "facts.problem")
    return [fact for meta in metas for fact in meta["facts"]]


async def _packages(db: Any, task_id: str) -> list[Package]:
    metas = await _metas(db, task_id, ANALYZE, "packages")
    return merged(part for meta in metas for part in from_dicts(meta["packages"]))


async def _rows_by_node(collection: Any, which: dict[str, Any]) -> dict[str, int]:
    counted = collection.aggregate([{"$match": which}, {"$group": {"_id": "$node_id", "rows": {"$sum": 1}}}])
    return {row["_id"]: row["rows"] async for row in counted}


async def _wait_for_events(
    db: Any, task: Mapping[str, Any], shards: list[ShardAttempt]
) -> list[Mapping[str, Any]]:
    """Return the events as soon as every attempt has an end event, or after EVENTS_TIMEOUT_SEC."""
    deadline = time.monotonic() + EVENTS_TIMEOUT_SEC
    while True:
        found = db.worker_events.find({"task_id": task["id"]}).sort([("ts_ms", 1), ("_id", 1)])
        events = [event async for event in found]
        if not attempts_without_end(task, shards, events) or time.monotonic() > deadline:
            return events
        await asyncio.sleep(_POLL_SEC)


def attempts_without_end(
    task: Mapping[str, Any], shards: Iterable[ShardAttempt], events: Iterable[Mapping[str, Any]]
) -> set[tuple[str, int]]:
    """Return the attempts whose end event is still to come, as (node, epoch). Pure.

    The last attempt of each node is not included, because the task document contains how it ended, and neither are
    shards whose workers were killed.
    """
    shards = [*shards]
    nodes = task["graph"]["nodes"]
    earlier = {(node["node_id"], epoch) for node in nodes for epoch in _epochs(node, shards)[:-1]}
    lost = {(shard.node, shard.epoch) for shard in shards if shard.status == LOST}
    ends = (event for event in events if event["payload"]["kind"] in ENDS)
    return earlier - lost - {(event["node_id"], event["attempt_epoch"]) for event in ends}
