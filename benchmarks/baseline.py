"""The baseline: what an expert would write on plain Temporal, without any FlowKit code.

It makes the same activity calls (a local activity to open, one activity per node, one to close). For each node it makes
the same MongoDB writes with the same fields, and writes independent rows concurrently. Like FlowKit, it runs on uvloop
and does not compress calls to a server on the same machine.
Run: `python -m benchmarks.baseline workflows|activities`.
"""

import asyncio
import os
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import uuid4

import uvloop
from pymongo import WriteConcern
from pymongo.errors import DuplicateKeyError
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.service import GrpcCompression
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    from motor.motor_asyncio import AsyncIOMotorClient

QUEUE, SLOTS, WINDOW = "baseline", 100, 100
DURABLE = WriteConcern("majority", j=True)
"""The write concern of FlowKit's writes."""


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
        queue = f"{workflow.info().task_queue}.node"
        async with gate:
            await workflow.execute_activity("node", args=[task, index], task_queue=queue, **times)


class Collections:
    """The collections of a database, by name. Motor makes a new collection at each access; this keeps them."""

    def __init__(self, db: Any) -> None:
        self._db = db.with_options(write_concern=DURABLE)

    def __getattr__(self, name: str) -> Any:
        collection = self._db[name]
        setattr(self, name, collection)
        return collection

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Activities:
    """The activities: insert the run's document, mark it as finished, and make the five writes of a one-batch node."""

    KIND: ClassVar[dict[str, Any]] = {"type": "node"}
    """The part of a node's entry that describes its work."""

    def __init__(self, db: Any) -> None:
        self.db = Collections(db)
        self.ids = {"worker_id": "w-12345678", "run_id": str(uuid4())}

    @activity.defn
    async def open_run(self, task: str, nodes: int) -> None:
        now = datetime.now(UTC)
        node = {**self.KIND, "depends_on": [], "fan_in": "all", "stats": {}, "lease": {}}
        fresh = {**node, "status": "queued", "attempt_epoch": 0}
        graph = {"nodes": [{"node_id": f"n{i}", **fresh} for i in range(nodes)], "edges": [], "edges_ex": []}
        began = {"from": None, "to": "running", "at": now.isoformat()}
        unset = dict.fromkeys(("result", "reason", "next_retry_at_ms", "finished_at"))
        run = {"id": task, "pipeline_id": task, "status": "running", "params": {}, "graph": graph, **unset}
        shown = {"status_history": [began], "coordinator": {"liveness": {"state": "ok"}}, "run_seq": 1}
        times = {"started_at": now.isoformat(), **seen(now)}
        await insert_once(self.db.tasks, {**run, **shown, **times, "run_id": self.ids["run_id"]})

    @activity.defn
    async def close_run(self, task: str) -> None:
        now = datetime.now(UTC)
        ended = {"status": "finished", "finished_at": now, "updated_at": now}
        await self.db.tasks.update_one({"id": task}, {"$set": ended})

    @activity.defn
    async def node(self, task: str, index: int) -> None:
        await self.run_node(task, index, 1)

    async def run_node(self, task: str, index: int, epoch: int) -> None:
        """Make the five writes of an attempt."""
        path, key = f"graph.nodes.{index}", {"task_id": task, "node_id": f"n{index}"}
        held, now = {"id": task, f"{path}.attempt_epoch": {"$lt": epoch}}, datetime.now(UTC)
        begun = {**self.begun(path, now), f"{path}.attempt_epoch": epoch}
        await self.db.tasks.update_one(held, {"$set": {**begun, **seen(now)}})
        await self.store_batch(key, epoch)
        now = datetime.now(UTC)
        ended = {f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        await asyncio.gather(
            insert_once(self.db.artifacts, {**self.marker(key, now), "attempt_epoch": epoch}),
            self.db.tasks.update_one({"id": task, f"{path}.attempt_epoch": epoch}, {"$set": ended}),
        )

    async def store_batch(self, key: dict[str, Any], epoch: int, uid: str = "b0") -> None:
        """Insert the two rows of a batch."""
        now, meta = datetime.now(UTC), {"n": 1}
        row = {"batch_uid": uid, "attempt_epoch": epoch, "created_at": now}
        metrics = {"metrics": meta, "failed": False, "reason": None, "ts_ms": milliseconds(now)}
        partial = {"status": "partial", "meta": meta, "size": 12, "payload": None, "updated_at": now}
        worker = {"worker_id": self.ids["worker_id"]}
        await asyncio.gather(
            insert_once(self.db.metrics_raw, {**key, **row, **metrics}),
            insert_once(self.db.artifacts, {**key, **row, **partial, **worker}),
        )

    def begun(self, path: str, now: datetime) -> dict[str, Any]:
        """Return the fields of a node that begins."""
        lease = {"worker_id": self.ids["worker_id"], "lease_id": str(uuid4()), "deadline_ts_ms": 1}
        taken = {f"{path}.status": "running", f"{path}.attempt_epoch": 1, f"{path}.started_at": now}
        return {**taken, f"{path}.run_id": self.ids["run_id"], f"{path}.lease": lease}

    def marker(self, key: dict[str, Any], now: datetime) -> dict[str, Any]:
        """Return the complete marker of a node."""
        complete = {"status": "complete", "meta": {}, "confirmed": True, "attempt_epoch": 1}
        return {**key, **complete, "worker_id": self.ids["worker_id"], "created_at": now, "updated_at": now}


async def insert_once(collection: Any, row: dict[str, Any]) -> None:
    """Insert a row, unless it exists: on a busy machine, Temporal may start an activity again that takes too long."""
    with suppress(DuplicateKeyError):
        await collection.insert_one(row)


def seen(now: datetime) -> dict[str, Any]:
    """Return the fields of a run that change with each event."""
    return {"last_event_recv_ms": milliseconds(now), "updated_at": now}


def ended_at(path: str, now: datetime) -> dict[str, Any]:
    """Return the times of a node that ends."""
    return {f"{path}.finished_at": now, f"{path}.last_event_recv_ms": milliseconds(now)}


def milliseconds(now: datetime) -> int:
    """Return the time in milliseconds since the Unix epoch."""
    return int(now.timestamp() * 1000)


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
