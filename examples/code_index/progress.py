"""How far a task has come: statuses from its workflow, batches and who holds a node from MongoDB."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from code_index.graph import INDEX
from code_index.pace import Pace, Rate, Sample, percent, seconds_left

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from temporalio.client import WorkflowHandle

ANSWER_WITHIN = timedelta(seconds=5)

_ENDED = {"finished", "failed", "cancelled", "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """One node, as a person wants to see it."""

    node: str
    status: str = "queued"
    attempt: int = 0
    worker: str = ""
    """Who holds the attempt; empty while nobody has taken it."""
    began: datetime | None = None
    """When its worker has taken it."""
    batches: int = 0
    files: int = 0
    total: int | None = None
    """Batches that it will be in all, once that is known."""
    rate: Rate | None = None
    note: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to the node."""
        return self.status in _ENDED

    @property
    def percent(self) -> int | None:
        """How much of the batches is done."""
        return percent(self.batches, self.total)

    @property
    def seconds_left(self) -> float | None:
        """How long it will still take; None when it does not run, or when nobody can tell."""
        return seconds_left(self.batches, self.total, self.rate) if self.status == "running" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A task and its nodes, in the order of the graph."""

    task_id: str
    status: str
    nodes: tuple[NodeProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What MongoDB knows of a node."""

    batches: int = 0
    files: int = 0
    epoch: int = 0
    worker: str = ""
    began: datetime | None = None


class Follower:
    """Asks how far one task has come."""

    def __init__(self, handle: WorkflowHandle[Any, Any], db: Any) -> None:
        self._handle = handle
        self._db = db
        self._total: int | None = None
        self._paces: dict[str, Pace] = defaultdict(Pace)

    async def progress(self) -> Progress:
        """Where the task is now."""
        view = await self._handle.query("status", rpc_timeout=ANSWER_WITHIN)
        if self._total is None:
            self._total = await self._batches_in_all()
        now = progress_of(self._handle.id, view, await self._stored(), self._total, time.time())
        return replace(now, nodes=tuple(map(self._with_rate, now.nodes)))

    def _with_rate(self, node: NodeProgress) -> NodeProgress:
        sample = Sample(at=time.monotonic(), batches=node.batches, files=node.files)
        rate = self._paces[node.node].seen(sample, begun=node.attempt > 0, ended=node.ended)
        return replace(node, rate=rate if node.status != "deferred" else None)

    async def _batches_in_all(self) -> int | None:
        """Any batch of the listing tells it."""
        listing = {"task_id": self._handle.id, "node_id": INDEX, "status": "partial"}
        first = await self._db.artifacts.find_one(listing, {"_id": 0, "meta.of": 1})
        return first["meta"]["of"] if first else None

    async def _stored(self) -> dict[str, Stored]:
        done = await self._done()
        task = await self._db.tasks.find_one({"id": self._handle.id}, {"_id": 0, "graph.nodes": 1})
        return stored_of(task, done)

    async def _done(self) -> dict[str, tuple[int, int]]:
        """Stored batches of each node, and their files."""
        mine = {"$match": {"task_id": self._handle.id, "status": "partial"}}
        sums = {"_id": "$node_id", "batches": {"$sum": 1}, "files": {"$sum": "$meta.file_count"}}
        counted = self._db.artifacts.aggregate([mine, {"$group": sums}])
        return {row["_id"]: (row["batches"], row["files"]) async for row in counted}


def stored_of(task: Mapping[str, Any] | None, done: Mapping[str, tuple[int, int]]) -> dict[str, Stored]:
    """What the task's document and the counts of batches say of each node. Pure."""
    stored = {}
    for node in task["graph"]["nodes"] if task else ():
        batches, files = done.get(node["node_id"], (0, 0))
        stored[node["node_id"]] = Stored(
            batches=batches,
            files=files,
            epoch=node.get("attempt_epoch") or 0,
            worker=(node.get("lease") or {}).get("worker_id") or "",
            began=node.get("started_at"),
        )
    return stored


def progress_of(
    task_id: str, view: Mapping[str, Any], stored: Mapping[str, Stored], total: int | None, now: float
) -> Progress:
    """What the answer of the `status` query and the documents say together. Pure."""
    nodes = (
        _node_progress(node, stored.get(node["node_id"], Stored()), total, now) for node in view["nodes"]
    )
    return Progress(task_id=task_id, status=view["status"], nodes=tuple(nodes))


def _node_progress(node: Mapping[str, Any], stored: Stored, total: int | None, now: float) -> NodeProgress:
    taken = stored.epoch == node["attempt_epoch"]
    return NodeProgress(
        node=node["node_id"],
        status=node["status"],
        attempt=node["attempt_epoch"],
        worker=stored.worker if taken else "",
        began=stored.began if taken else None,
        batches=stored.batches,
        files=stored.files,
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
