"""Wide nodes: a node with `parallel`, compared with the same node on one slot and with a hand-written fan-out."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import baseline, wide_by_hand
from benchmarks.processes import Program, by_hand, flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from benchmarks.wide_by_hand import SLOTS
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.worker import Batch, BatchResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from temporalio.client import Client

    from flowkit.worker.context import RunContext

QUEUE = "benchmark-wide"
BATCHES, WAIT_SEC = 1_000, 0.02
PROCESSES = 4
SHARDS = PROCESSES * SLOTS

BY_HAND = Row(
    name=f"wide node: {BATCHES:,} batches on {SHARDS} slots of {PROCESSES} workers",
    unit="s",
    items=BATCHES,
    item="batch",
    targets={"flowkit": Target(ratio="<= 1.15")},
    rounds=3,
    always=False,
)
SPEED_UP = Row(
    name=f"wide node: `parallel: {SHARDS}` and `parallel: 1`",
    unit="s",
    items=BATCHES,
    item="batch",
    targets={"flowkit": Target(ratio="<= 0.154", decided_by_wall=True)},
    rounds=1,
    always=False,
)


class Waits(RoleHandler):
    """Waits 20 ms in each batch, as a call to a service does."""

    role = "waits"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then return metrics."""
        await asyncio.sleep(WAIT_SEC)
        return BatchResult(success=True, metrics={"n": 1})


def programs() -> list[Program]:
    """Return the programs of both sides."""
    worker = ("worker", "benchmarks.shards:Waits", "--queue", QUEUE, "--concurrency", str(SLOTS))
    return [
        flowkit("engine", "engine", "--queue", QUEUE),
        flowkit("worker of the parent", "worker", "benchmarks.handler:OneBatch", "--queue", QUEUE),
        by_hand("engine", "benchmarks.wide_by_hand", "workflows"),
        *(flowkit("workers", *worker) for _ in range(PROCESSES)),
        *(by_hand("workers", "benchmarks.wide_by_hand", "activities") for _ in range(PROCESSES)),
    ]


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of both sides, and yield how the rows take samples."""
    mongo, store = setting.mongo, TaskStore(setting.mongo["flowkit"])
    wide = WideNodes(TaskClient(await connect(), store, queue=QUEUE), await baseline.connect(), mongo)
    all_slots = Side(run=partial(wide.by_flowkit, SHARDS), programs="flowkit")
    one_slot = Side(run=partial(wide.by_flowkit, 1), programs="flowkit", warm_up=_nothing)
    written = Side(run=wide.by_hand, programs="baseline")
    clean = partial(emptied, mongo, ["flowkit", wide_by_hand.DATABASE])
    with setting.processes.running(*programs()):
        yield {
            BY_HAND.name: Sides(sides={"baseline": written, "flowkit": all_slots}, clean=clean),
            SPEED_UP.name: Sides(sides={"baseline": one_slot, "flowkit": all_slots}, clean=clean),
        }


async def _nothing() -> None:
    """Warm nothing up."""


class WideNodes:
    """Runs one wide node, on either side. Its parent has stored the batches before."""

    def __init__(self, tasks: TaskClient, client: Client, mongo: Any) -> None:
        self._tasks = tasks
        self._client = client
        self._mongo = mongo

    async def by_flowkit(self, parallel: int) -> float:
        """Return the time from the end of the parent to the end of the wide node."""
        pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["n0"]}}
        wide = {"node_id": "wide", "type": "waits", "depends_on": ["n0"], "io": {"input_inline": pull}}
        first = {"node_id": "n0", "type": "bench", "io": {"input_inline": {"batches": BATCHES}}}
        nodes = [first, wide | ({"parallel": parallel} if parallel > 1 else {})]
        task_id = await self._tasks.create_task(params={}, graph={"nodes": nodes})
        await self._tasks.handle(task_id).result()
        db = self._mongo["flowkit"]
        parent, node = (await db.tasks.find_one({"id": task_id}))["graph"]["nodes"]
        await _check(db, task_id)
        return float((node["finished_at"] - parent["finished_at"]).total_seconds())

    async def by_hand(self) -> float:
        """Return the time of the hand-written fan-out."""
        db, task_id = self._mongo[wide_by_hand.DATABASE], str(uuid.uuid4())
        for name in ("artifacts", "metrics_raw"):
            index = [("task_id", 1), ("node_id", 1), ("batch_uid", 1)]
            await db[name].create_index(index, unique=True, sparse=True)
        row = {"task_id": task_id, "node_id": "n0", "status": "partial", "meta": {"n": 1}}
        await db.artifacts.insert_many([{**row, "batch_uid": f"b{n}"} for n in range(BATCHES)])
        plan, began = {"batches": BATCHES, "wait_sec": WAIT_SEC}, time.perf_counter()
        await self._client.execute_workflow(
            wide_by_hand.Wide.run, plan, id=task_id, task_queue=wide_by_hand.QUEUE
        )
        took = time.perf_counter() - began
        await _check(db, task_id)
        return took


async def _check(db: Any, task_id: str) -> None:
    """Raise RuntimeError unless the node has stored a result for each batch."""
    stored = await db.metrics_raw.count_documents({"task_id": task_id, "node_id": "wide"})
    if stored != BATCHES:
        raise RuntimeError(f"the wide node has stored {stored:,} of {BATCHES:,} results")


GROUP = Group(rows=(BY_HAND, SPEED_UP), opened=opened)
