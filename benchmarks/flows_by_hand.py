"""What an expert would write on plain Temporal to run jobs at a supervisor, without any FlowKit code.

A workflow runs the jobs of a flow level by level. For each job, an activity calls `job.run` over pooled
connections, and makes the MongoDB writes that FlowKit makes for such a node: five for the node and its
result, and two for the record of the dispatch. Run: `python -m benchmarks.flows_by_hand
workflows|activities`.
"""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import uvloop
from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks import baseline
from benchmarks.baseline import connect, create_indexes, ended_at, insert_once, milliseconds, seen

with workflow.unsafe.imports_passed_through():
    import aiohttp
    from motor.motor_asyncio import AsyncIOMotorClient

QUEUE, DATABASE, SLOTS = "flows-by-hand", "flows_by_hand", 200
CONTEXT, CALLER, TIMEOUT_SEC = 1, 11, 30.0


@workflow.defn
class FlowByHand:
    """Runs the jobs of a flow. The plan has its levels: jobs that depend on all jobs of the level before."""

    @workflow.run
    async def run(self, plan: dict[str, Any]) -> None:
        task, levels = workflow.info().workflow_id, plan["levels"]
        jobs = [job for level in levels for job in level]
        await workflow.execute_local_activity(
            "open_run", args=[task, len(jobs)], start_to_close_timeout=timedelta(seconds=2)
        )
        for level in levels:
            await asyncio.gather(*(self.job(task, jobs.index(job), job, plan) for job in level))
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))

    async def job(self, task: str, index: int, job: int, plan: dict[str, Any]) -> None:
        """Run one job as an activity."""
        lease, longest = timedelta(seconds=45), timedelta(seconds=TIMEOUT_SEC + 60)
        times: Any = {"start_to_close_timeout": longest, "heartbeat_timeout": lease}
        given = [task, index, job, plan["payload"], plan["supervisor"]]
        queue = f"{workflow.info().task_queue}.job"
        await workflow.execute_activity("job", args=given, task_queue=queue, **times)


class Activities(baseline.Activities):
    """The activities: those that open and close a run, and one that runs a job at a supervisor."""

    KIND: ClassVar[dict[str, Any]] = {"type": "job"}

    def __init__(self, db: Any, session: Any) -> None:
        super().__init__(db)
        self.session = session

    @activity.defn
    async def job(self, task: str, index: int, job: int, payload: str, supervisor: str) -> None:
        path, key = f"graph.nodes.{index}", {"task_id": task, "node_id": f"n{index}"}
        held, now = {"id": task, f"{path}.attempt_epoch": {"$lt": 1}}, datetime.now(UTC)
        await self.db.tasks.update_one(held, {"$set": {**self.begun(path, now), **seen(now)}})
        dispatch, id = f"{task}:{job}:0.0", f"{CONTEXT}:{CALLER}:{job}@{task}"
        await self.open_dispatch(dispatch, id, task, job)
        outcome = await self.call(supervisor, id, payload)
        await self.store(key, {"result": outcome["success"], "logs": outcome["logs"]})
        await self.close_dispatch(dispatch, outcome["logs"])
        now = datetime.now(UTC)
        ended = {f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        await asyncio.gather(
            insert_once(self.db.artifacts, self.marker(key, now)),
            self.db.tasks.update_one({"id": task, f"{path}.attempt_epoch": 1}, {"$set": ended}),
        )

    async def open_dispatch(self, dispatch: str, transport_id: str, task: str, job: int) -> None:
        """Create the record of a dispatch, before the supervisor receives the job."""
        now = datetime.now(UTC).timestamp()
        node = {"id": job, "depends": [], "prerequisites": [], "supervisor_url": ""}
        ids = {"context_id": CONTEXT, "caller_id": CALLER, "flow_id": 1, "task_id": task, "job_id": job}
        attempt = {"generation": 0, "retry": 0, "transport_id": transport_id, "runner_id": 1}
        status = {"state": "Ready", "outcome": None, "status": "Created", "transport_status": "Queued"}
        fields = {"id": dispatch, **ids, "nodes": [node], "message_type": "job", **attempt, **status}
        latest = {"epoch": 1, "open_until": now + TIMEOUT_SEC + 60.0, "updated_at": int(now)}
        new = {"$setOnInsert": {**fields, "created_at": int(now)}, "$set": latest}
        await self.db.flow_messages.find_one_and_update({"_id": dispatch}, new, upsert=True)

    async def call(self, supervisor: str, id: str, payload: str) -> dict[str, Any]:
        """Run a job at the supervisor, and return its outcome."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        job = {"id": id, "caller_id": str(CALLER), "context_id": str(CONTEXT), "payload": payload}
        kind = {"executor": "echo", "runner": "echo", "timeout": TIMEOUT_SEC, "env_vars": {}}
        params = {"secret": "", "job": {**job, **kind, "created_at": now, "updated_at": now}}
        request = {"jsonrpc": "2.0", "id": id, "method": "job.run", "params": [params]}
        async with self.session.post(supervisor, json=request) as response:
            outcome: dict[str, Any] = (await response.json())["result"]
        return outcome

    async def store(self, key: dict[str, Any], meta: dict[str, Any]) -> None:
        """Store the result and the log of a job."""
        now = datetime.now(UTC)
        row = {"batch_uid": "result", "attempt_epoch": 1, "created_at": now}
        metrics = {"metrics": meta, "failed": False, "reason": None, "ts_ms": milliseconds(now)}
        partial = {"status": "partial", "meta": meta, "size": 12, "payload": None, "updated_at": now}
        worker = {"worker_id": self.ids["worker_id"]}
        await asyncio.gather(
            insert_once(self.db.metrics_raw, {**key, **row, **metrics}),
            insert_once(self.db.artifacts, {**key, **row, **partial, **worker}),
        )

    async def close_dispatch(self, dispatch: str, logs: str) -> None:
        """Note the outcome and the log of a job with the record of its dispatch."""
        status = {"state": "Running", "status": "Acknowledged", "transport_status": "Delivered"}
        done = {"outcome": "completed", **status, "open_until": None, "logs": logs}
        now = int(datetime.now(UTC).timestamp())
        own = {"_id": dispatch, "outcome": None}
        await self.db.flow_messages.update_one(own, {"$set": {**done, "updated_at": now}})


async def create_message_indexes(db: Any) -> None:
    """Create the indexes of the records of dispatches, as FlowKit does."""
    for keys in (
        [("task_id", 1)],
        [("context_id", 1), ("created_at", -1)],
        [("context_id", 1), ("open_until", 1)],
    ):
        await db.flow_messages.create_index(keys)


async def main(part: str) -> None:
    """Run one of the two worker processes until it receives a signal."""
    client = await connect()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        own = Activities(AsyncIOMotorClient(os.environ["MONGO_URL"])[DATABASE], session)
        if part == "workflows":
            await create_indexes(own.db)
            await create_message_indexes(own.db)
            calls: list[Any] = [own.open_run, own.close_run]
            rest: Any = {"activities": calls, "workflow_runner": UnsandboxedWorkflowRunner()}
            await Worker(client, task_queue=QUEUE, workflows=[FlowByHand], **rest).run()
        queue = f"{QUEUE}.job"
        await Worker(client, task_queue=queue, activities=[own.job], max_concurrent_activities=SLOTS).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
