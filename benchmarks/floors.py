"""Floors: hand-written programs that promise what FlowKit promises, without any FlowKit code.

The baselines make the same writes, but promise less. A floor adds what the promises need: filters that fence late
attempts, tasks that are closed or cancelled, and variables of another type; the fields of a lease; a record of each
attempt; and, for a role, a thread of its own for Temporal, so that a handler that blocks does not stop heartbeats.
The difference between a baseline and its floor is the price of the promises, and that between a floor and FlowKit is
the price of FlowKit's code. `python -m benchmarks.floors workflows|activities|functions` runs one of the programs.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from temporalio import activity
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from benchmarks import baseline, baseline_functions
from benchmarks.baseline import Activities, connect, create_indexes, ended_at, insert_once, milliseconds, seen
from benchmarks.baseline_functions import Functions
from benchmarks.cases import CASES, Case, by_workflow, sample
from benchmarks.processes import by_hand
from benchmarks.rows import Group, Row, Setting, Side, Sides, emptied

PREFIX, SIDE = "floor-", "floor"
FLUSH_SEC = 1.0
"""How often the records of attempts are written, as a FlowKit worker does."""
UNSET = ("finished_at", "skip_reason", "waits_for", "paused", "coordinator", "cancel_requested_at")
"""What an earlier attempt may have left in a node."""
OPEN = {"closed_run_id": {"$exists": False}, "coordinator.cancelled": {"$ne": True}}
"""Matches a task that is neither closed nor cancelled."""
FLOORED = tuple(case for case in CASES if case.name in {"chain of 30", "20 functions in a row"})


class Records:
    """Writes a record of each attempt, in groups and off its way."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._rows: list[dict[str, Any]] = []
        self._writing: asyncio.Future[None] | None = None

    def add(self, key: Mapping[str, Any], now: datetime) -> None:
        """Write the record of an attempt later."""
        payload = {"kind": "TASK_DONE", "worker_id": "w-12345678", "artifacts_ref": {**key}}
        row = {
            **key,
            "step_type": "bench",
            "event_hash": uuid4().hex,
            "payload": payload,
            "ts_ms": milliseconds(now),
        }
        self._rows.append({**row, "attempt_epoch": 1, "created_at": now, "metrics_applied": False})
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(FLUSH_SEC)
        rows, self._rows = self._rows, []
        await self._db.worker_events.insert_many(rows, ordered=False)


class FencedNodes(Activities):
    """The activities of a role, with FlowKit's promises. The node runs on the loop of the process's main thread."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self._records = Records(self.db)
        self._loop = asyncio.get_running_loop()

    @activity.defn
    async def node(self, task: str, index: int) -> None:
        running = asyncio.run_coroutine_threadsafe(self.run_node(task, index, 1), self._loop)
        await asyncio.wrap_future(running)

    async def run_node(self, task: str, index: int, epoch: int) -> None:
        """Make the five writes of an attempt, fenced as FlowKit's are."""
        path, key = f"graph.nodes.{index}", {"task_id": task, "node_id": f"n{index}"}
        own, now = {"id": task, f"{path}.node_id": key["node_id"]}, datetime.now(UTC)
        begun = self.begun(path, now)
        lease = begun[f"{path}.lease"]["lease_id"]
        begun[f"{path}.lease"]["version"] = "e8aa8f981646"
        mine = {f"{path}.attempt_epoch": epoch, f"{path}.lease.lease_id": lease}
        free = {"$or": [{f"{path}.attempt_epoch": {"$lt": epoch}}, mine]}
        unset = {f"{path}.{name}": "" for name in UNSET}
        await self.db.tasks.update_one(
            {**own, **OPEN, **free},
            {"$set": {**begun, **seen(now)}, "$unset": unset},
        )
        await self.store_batch(key, epoch)
        now = datetime.now(UTC)
        held = {
            f"{path}.attempt_epoch": epoch,
            f"{path}.run_id": self.ids["run_id"],
            f"{path}.status": "running",
        }
        ended = {f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        await asyncio.gather(
            insert_once(self.db.artifacts, {**self.marker(key, now), "attempt_epoch": epoch}),
            self.db.tasks.update_one({**own, **held}, {"$set": ended}),
        )
        self._records.add(key, now)


class FencedFunctions(Functions):
    """The activities of functions, with FlowKit's promises: a variable of another type, or too many, change nothing."""

    @activity.defn
    async def increment(self, task: str, index: int) -> None:
        path, now, run = f"graph.nodes.{index}", datetime.now(UTC), self.ids["run_id"]
        begun = {**self.begun(path, now), f"{path}.applied_generation": 0}
        ended = {**begun, f"{path}.status": "finished", **ended_at(path, now), **seen(now)}
        live = {"$in": ["queued", "running", "deferred", "cancelling"]}
        mine = {f"{path}.attempt_epoch": 1, f"{path}.run_id": run, f"{path}.status": live}
        held = {"id": task, f"{path}.node_id": f"n{index}", **OPEN}
        free = {"$or": [{f"{path}.attempt_epoch": {"$lt": 1}}, mine]}
        once = {f"{path}.applied_generation": {"$not": {"$gte": 0}}}
        await self.db.tasks.update_one(
            {**held, **free, **once, "$and": [_is("coordinator.vars", "object"), *_FITS]},
            {
                "$set": ended,
                "$inc": {"coordinator.vars.n": 1},
                "$unset": {f"{path}.{name}": "" for name in UNSET[1:]},
            },
        )
        key = {"task_id": task, "node_id": f"n{index}"}
        await insert_once(self.db.artifacts, self.marker(key, datetime.now(UTC)))


def _is(field: str, kind: str) -> dict[str, Any]:
    """Match documents in which a field is missing or has a type, and is not an array of that type."""
    return {
        "$or": [{field: {"$exists": False}}, {field: {"$type": kind}}],
        field: {"$not": {"$type": "array"}},
    }


_FITS: list[dict[str, Any]] = [
    _is("coordinator.vars.n", "number"),
    {
        "$or": [
            {"coordinator.vars.n": {"$exists": False}},
            *({"coordinator.vars.n": {"$type": kind}} for kind in ("double", "decimal")),
            {"coordinator.vars.n": {"$lte": 2**63 - 2}},
        ]
    },
    {
        "$or": [
            {"coordinator.vars_bytes": {"$lte": 999_984}},
            {"coordinator.vars_bytes": {"$exists": False}, "coordinator.vars": {"$exists": False}},
        ]
    },
]
"""Matches tasks whose variables can be incremented, and stay below their limit."""


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of both sides, and yield how the rows take samples."""
    client, names = await connect(), ["baseline", "baseline_functions", "floors"]
    clean = partial(emptied, setting.mongo, names)

    def side(case: Case, programs: str, prefix: str) -> Side:
        run_one = by_workflow(client, prefix)

        async def run() -> float:
            return await sample(case, run_one) * 1000

        few = replace(case, repeats=1)
        return Side(run=run, programs=programs, warm_up=lambda: sample(few, run_one))

    def sides(case: Case) -> Sides:
        own = "functions" if case.functions else "baseline"
        floor = f"{SIDE} of functions" if case.functions else SIDE
        return Sides(sides={"baseline": side(case, own, ""), SIDE: side(case, floor, PREFIX)}, clean=clean)

    with setting.processes.running(*_programs()):
        yield {f"floor: {case.name}": sides(case) for case in FLOORED}


def _programs() -> list[Any]:
    return [
        by_hand("engine", "benchmarks.baseline", "workflows"),
        by_hand("worker", "benchmarks.baseline", "activities"),
        by_hand("engine", "benchmarks.baseline_functions", side="functions"),
        by_hand("engine", "benchmarks.floors", "workflows", side=SIDE),
        by_hand("worker", "benchmarks.floors", "activities", side=SIDE),
        by_hand("engine", "benchmarks.floors", "functions", side=f"{SIDE} of functions"),
    ]


GROUP = Group(
    rows=tuple(
        Row(
            name=f"floor: {case.name}",
            unit="ms/node",
            items=case.nodes * case.repeats,
            rounds=case.rounds,
            always=False,
        )
        for case in FLOORED
    ),
    opened=opened,
)


# --- the programs


async def main(part: str) -> None:
    """Run one of the programs until it receives a signal."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    db = mongo["floors"]
    await create_indexes(db)
    if part == "activities":
        # The main thread keeps its loop for nodes, as a FlowKit worker does for handlers.
        await asyncio.to_thread(uvloop.run, _serve_nodes(FencedNodes(db)))
    elif part == "workflows":
        nodes = FencedNodes(db)
        await _serve(PREFIX + baseline.QUEUE, baseline.Baseline, [nodes.open_run, nodes.close_run])
    else:
        functions = FencedFunctions(db)
        calls = [functions.open_run, functions.close_run, functions.increment]
        await _serve(PREFIX + baseline_functions.QUEUE, baseline_functions.BaselineFunctions, calls)


async def _serve(queue: str, workflow: type, calls: list[Any]) -> None:
    runner = UnsandboxedWorkflowRunner()
    await Worker(
        await connect(), task_queue=queue, workflows=[workflow], activities=calls, workflow_runner=runner
    ).run()


async def _serve_nodes(own: Any) -> None:
    queue = f"{PREFIX}{baseline.QUEUE}.node"
    await Worker(
        await connect(), task_queue=queue, activities=[own.node], max_concurrent_activities=baseline.SLOTS
    ).run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
