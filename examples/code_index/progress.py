"""The progress of a task: statuses from its workflow, batches and workers from MongoDB."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from code_index.documents import FIRST_FENCE, read_claims, read_shards
from code_index.flow import INDEX
from code_index.rates import Rate, RateMeter, Sample, percent, pluralize, seconds_left

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from temporalio.client import WorkflowHandle

    from code_index.documents import Claim, ShardAttempt

    Done = Mapping[str, Mapping[int, tuple[int, int]]]

QUERY_TIMEOUT = timedelta(seconds=5)

_ENDED = {"finished", "failed", "cancelled", "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """The progress of one node."""

    node: str
    status: str = "queued"
    attempt: int = 0
    worker: str = ""
    """The worker that holds the attempt; empty until a worker has taken it."""
    shards: tuple[ShardAttempt, ...] = ()
    """All attempts of its shards, in the order of their epochs."""
    batches: int = 0
    files: int = 0
    by_epoch: Mapping[int, int] = field(default_factory=dict)
    """Batches of each attempt."""
    total: int | None = None
    """Total number of batches, once it is known."""
    rate: Rate | None = None
    note: str = ""

    @property
    def running_shards(self) -> tuple[ShardAttempt, ...]:
        """The attempts of its shards that run; that of a killed worker, until its lease expires."""
        return tuple(shard for shard in self.shards if shard.status == "running" and not self.ended)

    @property
    def runners(self) -> str:
        """The attempt, or how many shards run on how many workers; empty for a node whose shards have ended."""
        if not self.shards:
            return f"attempt {self.attempt}" if self.attempt else ""
        workers = {shard.worker for shard in self.running_shards}
        shards = pluralize(len(self.running_shards), "shard")
        return f"{shards} on {pluralize(len(workers), 'worker')}" if workers else ""

    @property
    def ended(self) -> bool:
        """Whether the node has ended."""
        return self.status in _ENDED

    @property
    def percent(self) -> int | None:
        """Percentage of batches done."""
        return percent(self.batches, self.total)

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time; None if the node does not run, or without an estimate."""
        return seconds_left(self.batches, self.total, self.rate) if self.status == "running" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a task and its nodes, in the order of the graph."""

    task_id: str
    status: str
    nodes: tuple[NodeProgress, ...]
    taken_over: tuple[Claim, ...] = ()
    """The claims of batches that another attempt had claimed before, and left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgress:
    """What MongoDB contains of a node."""

    batches: int = 0
    files: int = 0
    by_epoch: Mapping[int, int] = field(default_factory=dict)
    epoch: int = 0
    worker: str = ""
    shards: tuple[ShardAttempt, ...] = ()


class ProgressReader:
    """Reads the progress of one task."""

    def __init__(self, handle: WorkflowHandle[Any, Any], db: Any) -> None:
        self._handle = handle
        self._db = db
        self._total: int | None = None
        self._meters: dict[str, RateMeter] = defaultdict(RateMeter)

    async def read(self) -> Progress:
        """Return the current progress."""
        view = await self._handle.query("status", rpc_timeout=QUERY_TIMEOUT)
        if self._total is None:
            self._total = await self._total_batches()
        now = task_progress(self._handle.id, view, await self._stored(), self._total, time.time())
        taken_over = await read_claims(self._db, self._handle.id, FIRST_FENCE + 1)
        return replace(now, nodes=tuple(map(self._with_rate, now.nodes)), taken_over=tuple(taken_over))

    def _with_rate(self, node: NodeProgress) -> NodeProgress:
        sample = Sample(at=time.monotonic(), batches=node.batches, files=node.files)
        rate = self._meters[node.node].update(sample, started=node.attempt > 0, ended=node.ended)
        return replace(node, rate=rate if node.status != "deferred" else None)

    async def _total_batches(self) -> int | None:
        """Return the total number of batches; None before the indexer has stored its first batch."""
        query = {"task_id": self._handle.id, "node_id": INDEX, "status": "partial"}
        first = await self._db.artifacts.find_one(query, {"_id": 0, "meta.total_batches": 1})
        return first["meta"]["total_batches"] if first else None

    async def _stored(self) -> dict[str, StoredProgress]:
        done = await self._done()
        task = await self._db.tasks.find_one({"id": self._handle.id}, {"_id": 0, "graph.nodes": 1})
        return stored_progress(task, done, await read_shards(self._db, self._handle.id))

    async def _done(self) -> Done:
        """Return the number of stored batches and files, by node and epoch."""
        match = {"$match": {"task_id": self._handle.id, "status": "partial"}}
        attempt = {"node": "$node_id", "epoch": "$attempt_epoch"}
        sums = {"_id": attempt, "batches": {"$sum": 1}, "files": {"$sum": "$meta.file_count"}}
        done: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        async for row in self._db.artifacts.aggregate([match, {"$group": sums}]):
            done[row["_id"]["node"]][row["_id"]["epoch"]] = row["batches"], row["files"]
        return done


def stored_progress(
    task: Mapping[str, Any] | None, done: Done, shards: Sequence[ShardAttempt] = ()
) -> dict[str, StoredProgress]:
    """Combine the task document with the counts of batches and the attempts of shards, by node. Pure."""
    stored = {}
    for node in task["graph"]["nodes"] if task else ():
        attempts = done.get(node["node_id"], {})
        stored[node["node_id"]] = StoredProgress(
            batches=sum(batches for batches, _ in attempts.values()),
            files=sum(files for _, files in attempts.values()),
            by_epoch={epoch: batches for epoch, (batches, _) in attempts.items()},
            epoch=node.get("attempt_epoch") or 0,
            worker=(node.get("lease") or {}).get("worker_id") or "",
            shards=tuple(shard for shard in shards if shard.node == node["node_id"]),
        )
    return stored


def task_progress(
    task_id: str, view: Mapping[str, Any], stored: Mapping[str, StoredProgress], total: int | None, now: float
) -> Progress:
    """Combine the response to the `status` query with the stored progress. Pure."""
    nodes = (
        _node_progress(node, stored.get(node["node_id"], StoredProgress()), total, now)
        for node in view["nodes"]
    )
    return Progress(task_id=task_id, status=view["status"], nodes=tuple(nodes))


def _node_progress(
    node: Mapping[str, Any], stored: StoredProgress, total: int | None, now: float
) -> NodeProgress:
    taken = stored.epoch == node["attempt_epoch"]
    return NodeProgress(
        node=node["node_id"],
        status=node["status"],
        attempt=node["attempt_epoch"],
        worker=stored.worker if taken else "",
        shards=stored.shards,
        batches=stored.batches,
        files=stored.files,
        by_epoch=stored.by_epoch,
        total=total,
        note=_note(node, now),
    )


def _note(node: Mapping[str, Any], now: float) -> str:
    error = node["last_error"] or ""
    if node["status"] == "deferred" and node["next_retry_at"]:
        return f"retry in {max(0.0, node['next_retry_at'] - now):.1f} s: {error}"
    if node["status"] == "running" and error:
        return f"after {error}"
    return error or node["skip_reason"] or ""
