"""What an expert would write on plain Temporal to process many batches on several workers, without any FlowKit code.

A workflow fans blocks of batches out to activities. For each batch an activity makes the writes that a FlowKit node
makes for its result; it needs no claims, because its block belongs to nobody else. Run:
`python -m benchmarks.wide_by_hand workflows|activities`.
"""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import uvloop
from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks.baseline import Collections, connect, milliseconds

with workflow.unsafe.imports_passed_through():
    from motor.motor_asyncio import AsyncIOMotorClient

QUEUE, DATABASE = "wide-by-hand", "wide_by_hand"
SLOTS = 2
"""Batches that a worker processes at once."""
BLOCK = 25
"""Batches of an activity: few enough that the slots end together, and enough that the calls cost little."""


@workflow.defn
class Wide:
    """Runs the blocks of one step, as many at once as the workers have slots."""

    @workflow.run
    async def run(self, plan: dict[str, Any]) -> None:
        blocks = range(0, plan["batches"], BLOCK)
        longest, lease = timedelta(hours=1), timedelta(seconds=45)
        times: Any = {
            "start_to_close_timeout": longest,
            "heartbeat_timeout": lease,
            "task_queue": f"{QUEUE}.block",
        }
        task = workflow.info().workflow_id
        await workflow.execute_activity("begin", task, **times)
        await asyncio.gather(
            *(
                workflow.execute_activity("block", args=[task, plan["wait_sec"], first], **times)
                for first in blocks
            )
        )
        await workflow.execute_activity("end", task, **times)


class Activities:
    """The activities: show the step as running, process a block of batches, and mark the step as finished."""

    def __init__(self, db: Any) -> None:
        self.db = Collections(db)
        self.worker = {"worker_id": f"w-{os.getpid()}"}

    @activity.defn
    async def begin(self, task: str) -> None:
        now = datetime.now(UTC)
        begun = {"status": "running", "started_at": now, **self.worker}
        await self.db.tasks.update_one({"id": task}, {"$set": begun}, upsert=True)

    @activity.defn
    async def block(self, task: str, wait_sec: float, first: int) -> None:
        own = {"task_id": task, "batch_uid": {"$in": [f"b{n}" for n in range(first, first + BLOCK)]}}
        batches = [row async for row in self.db.artifacts.find({**own, "node_id": "n0"})]
        for done, row in enumerate(batches):
            await asyncio.sleep(wait_sec)
            await self.store(task, row["batch_uid"])
            activity.heartbeat(done)

    async def store(self, task: str, batch_uid: str) -> None:
        """Write the metrics and the artifact of a batch."""
        key, now = {"task_id": task, "node_id": "wide", "batch_uid": batch_uid}, datetime.now(UTC)
        row = {"metrics": {"n": 1}, "failed": False, "reason": None, "attempt_epoch": 1, "created_at": now}
        partial = {"status": "partial", "meta": {"n": 1}, "size": 12, "payload": None, "attempt_epoch": 1}
        await asyncio.gather(
            self.db.metrics_raw.insert_one({**key, **row, "ts_ms": milliseconds(now)}),
            self.db.artifacts.insert_one(
                {**key, **partial, **self.worker, "created_at": now, "updated_at": now}
            ),
        )

    @activity.defn
    async def end(self, task: str) -> None:
        now = datetime.now(UTC)
        marker = {"task_id": task, "node_id": "wide", "status": "complete", "meta": {}, "created_at": now}
        ended = {"status": "finished", "finished_at": now}
        await asyncio.gather(
            self.db.artifacts.insert_one(marker), self.db.tasks.update_one({"id": task}, {"$set": ended})
        )


async def main(part: str) -> None:
    """Run one of the worker processes until it receives a signal."""
    client = await connect()
    if part == "workflows":
        runner = UnsandboxedWorkflowRunner()
        await Worker(client, task_queue=QUEUE, workflows=[Wide], workflow_runner=runner).run()
    own = Activities(AsyncIOMotorClient(os.environ["MONGO_URL"])[DATABASE])
    calls: list[Any] = [own.begin, own.block, own.end]
    await Worker(client, task_queue=f"{QUEUE}.block", activities=calls, max_concurrent_activities=SLOTS).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
