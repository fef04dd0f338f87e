"""Actions on a running task: the time from the request to the first attempt that follows.

`retry_node` is compared with what an expert would write on plain Temporal: a workflow with an update that runs one
activity with the same writes, and then the node again. `python -m benchmarks.actions` runs that workflow.
"""

import asyncio
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from temporalio import activity, workflow
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks.baseline import Activities, connect, create_indexes
from benchmarks.latencies import Latency
from benchmarks.processes import by_hand, flowkit
from benchmarks.rows import Group, Opened, Row, Setting, Side, Sides, Target, emptied

with workflow.unsafe.imports_passed_through():
    from motor.motor_asyncio import AsyncIOMotorClient

    from benchmarks.handler import OneBatch
    from flowkit.actions.records import DECIDE, PAUSE, RESUME, RETRY_NODE
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.client import TaskClient
    from flowkit.connection import connect as connect_flowkit
    from flowkit.errors import ActionRejected

if TYPE_CHECKING:
    from temporalio.client import Client

QUEUE, DATABASE = "benchmark-actions", "flowkit"
BY_HAND = "actions-by-hand"
"""The queue and the database of the hand-written workflow."""
RETRIES = 15
"""Actions of a sample."""
PAUSE_SEC = 0.05
"""After the end of an attempt, the workflow hears of it within this time. Otherwise it rejects the action."""
LOOK_SEC = 0.1
"""How often the benchmark looks whether an attempt has ended. The task document says when it began."""
SAMPLES = 15
"""Measured actions of a latency, after one that warms up the servers."""

RETRY = Row(
    name="actions: retry_node",
    unit="ms/action",
    items=RETRIES,
    item="action and the attempt that follows",
    targets={"flowkit": Target(ratio="<= 1.50")},
    rounds=3,
)
RESUMED = Latency(name="actions: resume", target_ms=100.0)


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Opened]]:
    """Start the programs of both sides, and yield how the rows take samples."""
    db = setting.mongo[DATABASE]
    actions = Actions(TaskClient(await connect_flowkit(), TaskStore(db), queue=QUEUE), db)
    written = ByHand(await connect(), setting.mongo[BY_HAND])
    programs = (
        flowkit("engine", "engine", "--queue", QUEUE),
        flowkit("worker", "worker", "benchmarks.handler:OneBatch", "--queue", QUEUE),
        by_hand("engine", "benchmarks.actions", "workflows"),
        by_hand("worker", "benchmarks.actions", "activities"),
    )
    sides = {
        "baseline": Side(run=written.retries, programs="baseline"),
        "flowkit": Side(run=actions.retries, programs="flowkit"),
    }
    clean = partial(emptied, setting.mongo, [DATABASE, BY_HAND])
    with setting.processes.running(*programs):
        yield {RETRY.name: Sides(sides=sides, clean=clean), RESUMED.name: actions.resumes}


GROUP = Group(rows=(RETRY, RESUMED), opened=opened)


class Actions:
    """Acts on a task of one node, which an approval keeps open."""

    def __init__(self, tasks: TaskClient, db: Any) -> None:
        self._tasks = tasks
        self._db = db

    async def retries(self) -> float:
        """Retry the node again and again. Return the mean time until its next attempt begins, in milliseconds."""
        return sum(await self._measured(RETRIES, self._retry)) / RETRIES

    async def resumes(self) -> list[float]:
        """Retry the paused node, and return the milliseconds from each `resume` until the next attempt begins."""
        return (await self._measured(SAMPLES + 1, self._resume))[1:]

    async def _measured(self, count: int, act: Callable[[str], Awaitable[float]]) -> list[float]:
        nodes = [
            {"node_id": "a", "type": OneBatch.role, "io": {"input_inline": {"batches": 1}}},
            {"node_id": "open", "type": "approval"},
        ]
        task_id = await self._tasks.create_task(params={}, graph={"nodes": nodes})
        await _begun(self._db, task_id, 0.0)
        samples = []
        for _ in range(count):
            await asyncio.sleep(PAUSE_SEC)
            sent = await act(task_id)
            samples.append((await _begun(self._db, task_id, sent) - sent) * 1000)
        await self._tasks.steering.act(task_id, DECIDE, {"node_id": "open", "decision": "approve"})
        await self._tasks.handle(task_id).result()
        return samples

    async def _retry(self, task_id: str) -> float:
        """Retry the node, and return when the request was sent. Send it again while the node is not known to end."""
        while True:
            sent = time.time()
            try:
                await self._tasks.steering.act(task_id, RETRY_NODE, {"node_id": "a"})
            except ActionRejected:
                await asyncio.sleep(PAUSE_SEC)
            else:
                return sent

    async def _resume(self, task_id: str) -> float:
        """Resume the node after a retry that waits for nothing else, and return when the request was sent."""
        await self._tasks.steering.act(task_id, PAUSE, {"scopes": ["task"]})
        await self._retry(task_id)
        await asyncio.sleep(0.2)  # The reset ends meanwhile.
        sent = time.time()
        await self._tasks.steering.act(task_id, RESUME, {})
        return sent


async def _begun(db: Any, task_id: str, after: float) -> float:
    """Wait until an attempt has finished that began at this time or later. Return when it began."""
    while True:
        await asyncio.sleep(LOOK_SEC)
        found = await db.tasks.find_one({"id": task_id}, {"graph.nodes": 1})
        node = found["graph"]["nodes"][0] if found else {}
        # MongoDB keeps milliseconds.
        if node.get("status") == "finished" and node["started_at"].timestamp() >= after - 0.001:
            began: float = node["started_at"].timestamp()
            return began


# --- the hand-written workflow


class ByHand:
    """Updates the hand-written workflow."""

    def __init__(self, client: "Client", db: Any, run: Any = None, queue: str = BY_HAND) -> None:
        self._client = client
        self._db = db
        self._run = run or Retried.run
        self._queue = queue

    async def retries(self) -> float:
        """Retry the node again and again. Return the mean time until its next attempt begins, in milliseconds."""
        task_id = f"by-hand-{uuid.uuid4()}"
        handle = await self._client.start_workflow(self._run, id=task_id, task_queue=self._queue)
        await _begun(self._db, task_id, 0.0)
        waited = 0.0
        for _ in range(RETRIES):
            await asyncio.sleep(PAUSE_SEC)
            sent = time.time()
            await handle.execute_update("retry")
            waited += await _begun(self._db, task_id, sent) - sent
        await handle.signal("end")
        await handle.result()
        return waited / RETRIES * 1000


@workflow.defn
class Retried:
    """Runs its only node, and again after each update, until a signal ends it."""

    def __init__(self) -> None:
        self._due = deque([1])
        self._last = 1
        self._ends = False

    @workflow.run
    async def run(self) -> None:
        task, soon = workflow.info().workflow_id, timedelta(seconds=2)
        await workflow.execute_local_activity("open_run", args=[task, 2], start_to_close_timeout=soon)
        while not self._ends or self._due:
            await workflow.wait_condition(lambda: bool(self._due) or self._ends)
            if self._due:
                await self._node(task, self._due.popleft())
        await workflow.execute_activity("close_run", task, start_to_close_timeout=timedelta(seconds=60))

    async def _node(self, task: str, epoch: int) -> None:
        times: Any = {
            "start_to_close_timeout": timedelta(hours=1),
            "heartbeat_timeout": timedelta(seconds=45),
        }
        await workflow.execute_activity(
            "attempt", args=[task, epoch], task_queue=f"{workflow.info().task_queue}.node", **times
        )

    @workflow.update
    async def retry(self) -> None:
        self._last += 1
        await workflow.execute_activity(
            "reset",
            args=[workflow.info().workflow_id, self._last],
            start_to_close_timeout=timedelta(seconds=60),
        )
        self._due.append(self._last)

    @workflow.signal
    def end(self) -> None:
        self._ends = True


class RetriedActivities(Activities):
    """The activities: those of the baseline, with epochs, and the one that starts a node again."""

    @activity.defn
    async def reset(self, task: str, epoch: int) -> None:
        """Reserve an epoch of the node, then delete what its earlier attempts have stored."""
        path, fence = "graph.nodes.0", {"id": task, "finished_at": None}
        shown = {"_id": 0, "graph.nodes.node_id": 1, "graph.nodes.attempt_epoch": 1}
        found = await self.db.tasks.find_one(fence, shown)
        before = found["graph"]["nodes"][0]["attempt_epoch"]
        fresh = {
            "status": "queued",
            "generation": epoch,
            "reset_by": f"{epoch}",
            "lease": {},
            "last_error": None,
        }
        left_over = dict.fromkeys((f"{path}.finished_at", f"{path}.started_at", f"{path}.run_id"), "")
        change = {"$set": {f"{path}.{name}": value for name, value in fresh.items()}, "$unset": left_over}
        await self.db.tasks.update_one({**fence, f"{path}.attempt_epoch": before}, change)
        rows = {"task_id": task, "$or": [{"node_id": "n0", "attempt_epoch": {"$lt": epoch}}]}
        await asyncio.gather(self.db.artifacts.delete_many(rows), self.db.metrics_raw.delete_many(rows))
        await self.db.stream_progress.delete_many({"task_id": task, "$or": [{"consumer_node": "n0"}]})

    @activity.defn
    async def attempt(self, task: str, epoch: int) -> None:
        """Make the five writes of a node."""
        await self.run_node(task, 0, epoch)


async def main(part: str) -> None:
    """Run one of the two worker processes until it receives a signal."""
    client = await connect()
    own = RetriedActivities(AsyncIOMotorClient(os.environ["MONGO_URL"])[BY_HAND])
    if part == "workflows":
        await create_indexes(own.db)
        calls: list[Any] = [own.open_run, own.close_run, own.reset]
        rest: Any = {"activities": calls, "workflow_runner": UnsandboxedWorkflowRunner()}
        await Worker(client, task_queue=BY_HAND, workflows=[Retried], **rest).run()
    await Worker(client, task_queue=f"{BY_HAND}.node", activities=[own.attempt]).run()


if __name__ == "__main__":
    import sys

    uvloop.run(main(sys.argv[1]))
