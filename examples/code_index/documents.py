"""What a task has left in MongoDB, read once: `tasks`, `artifacts`, `metrics_raw`, `worker_events`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_index.graph import ANALYZE, ENRICH, INDEX
from code_index.packages import Package, from_dicts, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

ACCEPTED = "TASK_ACCEPTED"
"""The kind of event that says that an attempt has started."""

ENDS = ("TASK_DONE", "TASK_FAILED", "CANCELLED")
"""The kinds of event that say how an attempt has ended; others are about its batches and heartbeats."""

EVENTS_WITHIN_SEC = 2.5
"""Workers write events about once a second; a killed one takes those of its last second along."""

_LOOK_EVERY_SEC = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """One batch of one node, as `artifacts` has it."""

    node: str
    uid: str
    epoch: int
    worker: str
    files: int
    stored_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Everything that a finished task has left."""

    task: Mapping[str, Any]
    batches: list[StoredBatch]
    markers: dict[str, Mapping[str, Any]]
    """What `finalize` returned, by node."""
    paths_found: list[str]
    paths_analysed: list[str]
    problems: list[tuple[str, str]]
    """Files that do not parse, each with what is wrong."""
    packages: list[Package]
    """All of them, by name: the partial sums of the last node, added up once more."""
    metrics: dict[str, int]
    """Rows of `metrics_raw` by node."""
    failed_metrics: dict[str, int]
    """Those of batches that failed and were not done again."""
    events: list[Mapping[str, Any]]
    """Rows of `worker_events`, in the order in which things happened."""


async def documents_of(db: Any, task_id: str, lost: frozenset[tuple[str, int]] = frozenset()) -> Documents:
    """Read what the finished task `task_id` has left, waiting a moment for events that are on their way.

    Of the attempts in `lost`, as (node, epoch), no end is waited for: their workers were killed.
    """
    task = await db.tasks.find_one({"id": task_id})
    facts = await _facts(db, task_id)
    return Documents(
        task=task,
        batches=await _batches(db, task_id),
        markers=await _markers(db, task_id),
        paths_found=[path for meta in await _metas(db, task_id, INDEX, "files") for path in meta["files"]],
        paths_analysed=[fact["path"] for fact in facts],
        problems=sorted((fact["path"], fact["problem"]) for fact in facts if fact["problem"]),
        packages=await _packages(db, task_id),
        metrics=await _rows_by_node(db.metrics_raw, {"task_id": task_id}),
        failed_metrics=await _rows_by_node(db.metrics_raw, {"task_id": task_id, "failed": True}),
        events=await _settled_events(db, task, lost),
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


async def _markers(db: Any, task_id: str) -> dict[str, Mapping[str, Any]]:
    markers = db.artifacts.find({"task_id": task_id, "status": "complete"})
    return {marker["node_id"]: marker["meta"] async for marker in markers}


async def _metas(db: Any, task_id: str, node: str, *fields: str) -> list[Any]:
    """These fields of what each batch of a node has returned."""
    mine = {"task_id": task_id, "status": "partial", "node_id": node}
    wanted = {f"meta.{field}": 1 for field in fields}
    return [row["meta"] async for row in db.artifacts.find(mine, {"_id": 0, **wanted})]


async def _facts(db: Any, task_id: str) -> list[dict[str, Any]]:
    metas = await _metas(db, task_id, ENRICH, "facts.path", "facts.problem")
    return [fact for meta in metas for fact in meta["facts"]]


async def _packages(db: Any, task_id: str) -> list[Package]:
    metas = await _metas(db, task_id, ANALYZE, "packages")
    return merged(part for meta in metas for part in from_dicts(meta["packages"]))


async def _rows_by_node(collection: Any, which: dict[str, Any]) -> dict[str, int]:
    counted = collection.aggregate([{"$match": which}, {"$group": {"_id": "$node_id", "rows": {"$sum": 1}}}])
    return {row["_id"]: row["rows"] async for row in counted}


async def _settled_events(
    db: Any, task: Mapping[str, Any], lost: frozenset[tuple[str, int]]
) -> list[Mapping[str, Any]]:
    """The events, once they tell how every attempt has ended, or the patience is at its end."""
    deadline = time.monotonic() + EVENTS_WITHIN_SEC
    while True:
        found = db.worker_events.find({"task_id": task["id"]}).sort([("ts_ms", 1), ("_id", 1)])
        events = [event async for event in found]
        if untold_ends(task, events) <= lost or time.monotonic() > deadline:
            return events
        await asyncio.sleep(_LOOK_EVERY_SEC)


def untold_ends(task: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """Attempts, as (node, epoch), whose end no event tells of. Pure.

    The last one of each node is not among them: how it ended stands in the task's document.
    """
    nodes = task["graph"]["nodes"]
    earlier = {(node["node_id"], epoch) for node in nodes for epoch in range(1, node["attempt_epoch"])}
    ends = (event for event in events if event["payload"]["kind"] in ENDS)
    return earlier - {(event["node_id"], event["attempt_epoch"]) for event in ends}
