"""The baseline: what an expert would write on plain Temporal, without any FlowKit code.

It makes the same activity calls (a local activity to open, one activity per node, one to close). For each node it makes
the same MongoDB writes into documents of the documented structure, and writes independent rows concurrently. Like
FlowKit, it runs on uvloop and does not compress calls to a server on the same machine.
Run: `python -m benchmarks.baseline workflows|activities`.
"""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import uvloop
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.service import GrpcCompression
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    from motor.motor_asyncio import AsyncIOMotorClient

QUEUE, SLOTS, WINDOW = "baseline", 100, 100


@workflow.defn
class Baseline:
    """Runs nodes one after another, or concurrently for a wide plan."""

    @workflow.run
    async def run(self, plan: dict[str, Any]) -> None:
        task, nodes = workflow.info().workflow_id, range(plan["nodes"])
        await workflow.execute_local_activity(
            "open_run", args=[task, plan["nodes"]], start_to_close_timeout=timedelta(seconds=2)
        )
        if plan["wide"]:
            gate = asyncio.Semaphore(WINDOW)
            await asyncio.gather(*(self.node(task, i, gate) for i in nodes))
        else:
            for i in nodes:
                await self.node(task, i, asyncio.Semaphore(1))
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))

    async def node(self, task: str, index: int, gate: asyncio.Semaphore) -> None:
        """Run one node as an activity."""
        lease, longest = timedelta(seconds=45), timedelta(hours=1)
        times: Any = {"start_to_close_timeout": longest, "heartbeat_timeout": lease}
        async with gate:
            await workflow.execute_activity("node", args=[task, index], task_queue=f"{QUEUE}.node", **times)


class Activities:
    """The activities: insert the run's document, mark it as finished, and make the five writes of a one-batch node."""

    def __init__(self, db: Any) -> None:
        self.db = db

    @activity.defn
    async def open_run(self, task: str, nodes: int) -> None:
        node = {"type": "node", "depends_on": [], "fan_in": "all", "stats": {}, "lease": {}}
        fresh = {**node, "status": "queued", "attempt_epoch": 0}
        graph = {"nodes": [{"node_id": f"n{i}", **fresh} for i in range(nodes)]}
        await self.db.tasks.insert_one({"id": task, "status": "running", "graph": graph})

    @activity.defn
    async def close_run(self, task: str) -> None:
        await self.db.tasks.update_one({"id": task}, {"$set": {"status": "finished"}})

    @activity.defn
    async def node(self, task: str, index: int) -> None:
        path, key = f"graph.nodes.{index}", {"task_id": task, "node_id": f"n{index}"}
        held, now = {"id": task, f"{path}.attempt_epoch": {"$lt": 1}}, datetime.now(UTC)
        lease = {"worker_id": "w-12345678", "lease_id": str(uuid4()), "deadline_ts_ms": 1}
        began = {f"{path}.status": "running", f"{path}.attempt_epoch": 1, f"{path}.started_at": now}
        running = {**began, f"{path}.lease": lease, "updated_at": now}
        await self.db.tasks.update_one(held, {"$set": running})
        partial = {"batch_uid": "b0", "status": "partial", "meta": {"n": 1}}
        await asyncio.gather(
            self.db.metrics_raw.insert_one({**key, "batch_uid": "b0", "metrics": {"n": 1}}),
            self.db.artifacts.insert_one({**key, **partial}),
        )
        ended = {f"{path}.status": "finished", f"{path}.finished_at": datetime.now(UTC)}
        await asyncio.gather(
            self.db.artifacts.insert_one({**key, "status": "complete"}),
            self.db.tasks.update_one({"id": task, f"{path}.attempt_epoch": 1}, {"$set": ended}),
        )


async def create_indexes(db: Any) -> None:
    """Create the indexes that the writes of a node need, as FlowKit does."""
    await db.tasks.create_index("id", unique=True)
    for name in ("artifacts", "metrics_raw"):
        await db[name].create_index([("task_id", 1), ("node_id", 1), ("batch_uid", 1)], unique=True)


async def connect() -> Client:
    """Connect without compression, which only costs time when the server is on the same machine."""
    return await Client.connect(os.environ["TEMPORAL_ADDRESS"], grpc_compression=GrpcCompression.NONE)


async def main(part: str) -> None:
    """Run one of the two worker processes until it receives a signal."""
    client = await connect()
    own = Activities(AsyncIOMotorClient(os.environ["MONGO_URL"])["baseline"])
    if part == "workflows":
        await create_indexes(own.db)
        calls: list[Any] = [own.open_run, own.close_run]
        rest: Any = {"activities": calls, "workflow_runner": UnsandboxedWorkflowRunner()}
        await Worker(client, task_queue=QUEUE, workflows=[Baseline], **rest).run()
    queue = f"{QUEUE}.node"
    await Worker(client, task_queue=queue, activities=[own.node], max_concurrent_activities=SLOTS).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
