"""Throughput of batches: a FlowKit worker compared with a bare loop that makes the same two MongoDB writes.

`python -m benchmarks.batches` runs the bare loop on request, in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks.baseline import Collections
from benchmarks.processes import by_hand, flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from benchmarks.served import Served, serve
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

BATCHES = 1_000
QUEUE = "benchmark-batches"
DATABASES = ("flowkit", "bare_loop")
ROW = Row(
    name=f"{BATCHES:,} batches of a node",
    unit="batches/s",
    items=BATCHES,
    item="batch",
    targets={"flowkit": Target(ratio=">= 0.95")},
    rounds=5,
)


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start an engine, a worker and the bare loop, and yield how they take samples."""
    tasks = TaskClient(await connect(), TaskStore(setting.mongo["flowkit"]), queue=QUEUE)
    loop = by_hand("loop", "benchmarks.batches", on_request=True)
    engine = flowkit("engine", "engine", "--queue", QUEUE)
    worker = flowkit("worker", "worker", "benchmarks.handler:OneBatch", "--queue", QUEUE)
    with setting.processes.running(loop, engine, worker) as (process, *_):
        bare = Served(process)

        async def batches_by_hand() -> float:
            return BATCHES / await bare.ask({"batches": BATCHES})

        async def batches_by_flowkit() -> float:
            return BATCHES / await _one_node(tasks, setting.mongo["flowkit"])

        sides = {
            "baseline": Side(run=batches_by_hand, programs="baseline"),
            "flowkit": Side(run=batches_by_flowkit, programs="flowkit"),
        }
        yield {ROW.name: Sides(sides=sides, clean=partial(emptied, setting.mongo, DATABASES))}


async def _one_node(tasks: TaskClient, db: Any) -> float:
    """Run a node with many batches, and return its seconds."""
    inline = {"input_inline": {"batches": BATCHES}}
    graph = {"nodes": [{"node_id": "n0", "type": "bench", "io": inline}]}
    task_id = await tasks.create_task(params={}, graph=graph)
    await tasks.handle(task_id).result()
    return await seconds_of(db, task_id)


async def seconds_of(db: Any, task_id: str) -> float:
    """Return the time between `started_at` and `finished_at` of the only node of a task, in seconds."""
    [node] = (await db.tasks.find_one({"id": task_id}))["graph"]["nodes"]
    return float((node["finished_at"] - node["started_at"]).total_seconds())


GROUP = Group(rows=(ROW,), opened=opened)


# --- the bare loop


async def _bare_loop(db: Any, count: int) -> float:
    """Write batches one after another, and return the seconds that it took."""
    task = str(uuid.uuid4())
    for name in ("artifacts", "metrics_raw"):
        index = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
        await db[name].create_index(index, unique=True, sparse=True)
    began = time.perf_counter()
    for number in range(count):
        await _two_writes(db, {"task_id": task, "node_id": "n0", "batch_uid": f"b{number}"})
    return time.perf_counter() - began


async def _two_writes(db: Any, key: dict[str, Any]) -> None:
    now = datetime.now(UTC)
    row = {"metrics": {"n": 1}, "failed": False, "reason": None, "attempt_epoch": 1, "created_at": now}
    partial = {"status": "partial", "meta": {"n": 1}, "payload": None, "attempt_epoch": 1}
    await asyncio.gather(
        db.metrics_raw.insert_one({**key, **row, "ts_ms": int(now.timestamp() * 1000)}),
        db.artifacts.insert_one({**key, **partial, "worker_id": "w", "created_at": now, "updated_at": now}),
    )


async def main() -> None:
    """Run the loop on request."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    db = Collections(mongo[DATABASES[1]])
    await serve(lambda request: _bare_loop(db, request["batches"]))


if __name__ == "__main__":
    uvloop.run(main())
