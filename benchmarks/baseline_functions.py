"""The baseline for coordinator functions: a hand-written chain of local activities with the same writes.

Each activity increments a number and marks its node as finished in one update. Then it writes the complete marker.
"""

import os
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import uvloop
from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    from motor.motor_asyncio import AsyncIOMotorClient

    from benchmarks.baseline import Activities, connect, ended_at, insert_once, seen

QUEUE = "baseline-functions"


@workflow.defn
class BaselineFunctions:
    """Runs local activities one after another."""

    @workflow.run
    async def run(self, plan: dict[str, Any]) -> None:
        task, nodes, soon = workflow.info().workflow_id, plan["nodes"], timedelta(seconds=2)
        await workflow.execute_local_activity("open_run", args=[task, nodes], start_to_close_timeout=soon)
        for index in range(nodes):
            await workflow.execute_local_activity(
                "increment", args=[task, index], start_to_close_timeout=soon
            )
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))


class Functions(Activities):
    """Adds the activity for the two writes of a function."""

    KIND: ClassVar[dict[str, Any]] = {
        "type": "coordinator_fn",
        "io": {"fn": "vars.incr", "fn_args": {"key": "n"}},
    }

    @activity.defn
    async def increment(self, task: str, index: int) -> None:
        path, now = f"graph.nodes.{index}", datetime.now(UTC)
        ended = {**self.begun(path, now), f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        held = {"id": task, f"{path}.attempt_epoch": {"$lt": 1}}
        await self.db.tasks.update_one(held, {"$set": ended, "$inc": {"coordinator.vars.n": 1}})
        key = {"task_id": task, "node_id": f"n{index}"}
        await insert_once(self.db.artifacts, self.marker(key, datetime.now(UTC)))


async def main() -> None:
    """Run the worker until it receives a signal."""
    client = await connect()
    own = Functions(AsyncIOMotorClient(os.environ["MONGO_URL"])["baseline_functions"])
    await own.db.tasks.create_index("id", unique=True)
    await own.db.artifacts.create_index([("task_id", 1), ("node_id", 1), ("batch_uid", 1)], unique=True)
    calls: list[Any] = [own.open_run, own.close_run, own.increment]
    runner = UnsandboxedWorkflowRunner()
    await Worker(
        client, task_queue=QUEUE, workflows=[BaselineFunctions], activities=calls, workflow_runner=runner
    ).run()


if __name__ == "__main__":
    uvloop.run(main())
