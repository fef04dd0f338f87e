"""Throughput of batches: a FlowKit worker compared with a bare loop that makes the same two MongoDB writes."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pymongo import WriteConcern

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.client import TaskClient

BATCHES = 1_000


def bare_loop(db: Any) -> Callable[[int], Awaitable[float]]:
    """Return a function that writes `count` batches in a bare loop and returns the seconds it took."""
    db = db.with_options(write_concern=WriteConcern("majority", j=True))

    async def run(count: int) -> float:
        task = str(uuid.uuid4())
        for name in ("artifacts", "metrics_raw"):
            index = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
            await db[name].create_index(index, unique=True, sparse=True)
        began = time.perf_counter()
        for number in range(count):
            await _two_writes(db, {"task_id": task, "node_id": "n0", "batch_uid": f"b{number}"})
        return time.perf_counter() - began

    return run


async def _two_writes(db: Any, key: dict[str, Any]) -> None:
    now = datetime.now(UTC)
    row = {"metrics": {"n": 1}, "failed": False, "reason": None, "attempt_epoch": 1, "created_at": now}
    partial = {"status": "partial", "meta": {"n": 1}, "payload": None, "attempt_epoch": 1}
    await asyncio.gather(
        db.metrics_raw.insert_one({**key, **row, "ts_ms": int(now.timestamp() * 1000)}),
        db.artifacts.insert_one({**key, **partial, "worker_id": "w", "created_at": now, "updated_at": now}),
    )


def one_node(tasks: TaskClient, db: Any) -> Callable[[int], Awaitable[float]]:
    """Return a function that runs a node with `count` batches and returns its duration in seconds.

    The duration is the difference between `finished_at` and `started_at` in the task document.
    """

    async def run(count: int) -> float:
        inline = {"input_inline": {"batches": count}}
        graph = {"nodes": [{"node_id": "n0", "type": "bench", "io": inline}]}
        task_id = await tasks.create_task(params={}, graph=graph)
        await tasks.handle(task_id).result()
        [node] = (await db.tasks.find_one({"id": task_id}))["graph"]["nodes"]
        return float((node["finished_at"] - node["started_at"]).total_seconds())

    return run
