"""Streaming: the time from a parent's stored batch to the child's handler, and stages that overlap."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.latencies import Latency
from benchmarks.processes import Program, flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from benchmarks.rows import Opened

QUEUE = "benchmark-streaming"
POLL_MS = 300
STAGE_BATCHES = 500
TASKS = 11
"""Tasks whose first batch is measured."""
LATER = 40
"""Batches of the task whose later batches are measured."""
GAP_SEC = 0.1
"""The time between two of these batches, which is less than `POLL_MS`."""

STAGES = Row(
    name=f"streaming: 3 stages of {STAGE_BATCHES:,} batches",
    unit="s",
    items=3 * STAGE_BATCHES,
    item="batch",
    # The baseline is FlowKit without streaming, which takes as much processor time.
    targets={"flowkit": Target(ratio="<= 0.45", decided_by_wall=True)},
    rounds=2,
)
FIRST = Latency(name="streaming: first batch", target_ms=100.0)
FAR = Latency(name=f"streaming: later batches, other process (poll_ms {POLL_MS})", target_ms=POLL_MS + 50.0)
NEAR = Latency(name="streaming: later batches, same process", target_ms=20.0)


def programs() -> list[Program]:
    """Return the engine and two workers."""
    served = (("Ticker", "Near", "Stage", "LastStage"), ("Far", "FarStage"))
    return [
        flowkit("engine", "engine", "--queue", QUEUE),
        *(
            flowkit(
                "worker",
                "worker",
                *(f"benchmarks.streaming_handlers:{name}" for name in names),
                "--queue",
                QUEUE,
            )
            for names in served
        ),
    ]


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Opened]]:
    """Start the programs, and yield how the rows take samples."""
    db = setting.mongo["flowkit"]
    runs = Streaming(TaskClient(await connect(), TaskStore(db), queue=QUEUE), db)
    few = partial(runs.three_stages, 100, streams=True)
    sides = {
        name: Side(run=partial(runs.stages, streams=streams), programs="flowkit", warm_up=few)
        for name, streams in (("baseline", False), ("flowkit", True))
    }
    with setting.processes.running(*programs()):
        yield {
            STAGES.name: Sides(sides=sides, clean=partial(emptied, setting.mongo, ["flowkit"])),
            FIRST.name: runs.first_batches,
            FAR.name: partial(runs.later_batches, "far"),
            NEAR.name: partial(runs.later_batches, "near"),
        }


class Streaming:
    """Runs the tasks of the streaming cases."""

    def __init__(self, tasks: TaskClient, db: Any) -> None:
        self._tasks = tasks
        self._db = db

    async def first_batches(self) -> list[float]:
        """Measure the first batch of each task, after one task that warms up the servers. The parent runs on."""
        tasks = [await self._delays("far", batches=1, gap_sec=0.5) for _ in range(TASKS + 1)]
        return [delays[0] for delays in tasks[1:]]

    async def later_batches(self, role: str) -> list[float]:
        """Measure the batches of one task, without those that are stored before the child runs."""
        return (await self._delays(role, batches=LATER, gap_sec=GAP_SEC))[5:]

    async def _delays(self, role: str, **inline: Any) -> list[float]:
        parent = {"node_id": "parent", "type": "ticker", "io": {"input_inline": inline}}
        task_id = await self._run([parent, _pulling("child", role, "parent", streams=True)])
        stored = {
            row["batch_uid"]: row["created_at"].timestamp() * 1000
            async for row in self._db.artifacts.find(
                {"task_id": task_id, "node_id": "parent", "status": "partial"}
            )
        }
        called = {
            row["batch_uid"]: row["metrics"]["called_ms"]
            async for row in self._db.metrics_raw.find({"task_id": task_id, "node_id": "child"})
        }
        return [called[uid] - stored[uid] for uid in sorted(stored, key=lambda uid: int(uid[1:]))]

    async def _run(self, nodes: list[dict[str, Any]]) -> str:
        task_id = await self._tasks.create_task(params={}, graph={"nodes": nodes})
        await self._tasks.handle(task_id).result()
        return task_id

    async def stages(self, *, streams: bool) -> float:
        """Run three stages, in sequence or streaming, and return the seconds.

        The batches pass from one process to the other and back. Each stage has a role of its own, because two stages of
        one role would share the role's only slot in a worker, and run one after the other.
        """
        began = time.perf_counter()
        await self.three_stages(STAGE_BATCHES, streams=streams)
        return time.perf_counter() - began

    async def three_stages(self, batches: int, *, streams: bool) -> None:
        """Run a task of three stages."""
        first = {"node_id": "n0", "type": "stage", "io": {"input_inline": {"batches": batches}}}
        roles = enumerate(("far_stage", "last_stage"), 1)
        later = [_pulling(f"n{n}", role, f"n{n - 1}", streams=streams) for n, role in roles]
        await self._run([first, *later])


def _pulling(node_id: str, role: str, parent: str, *, streams: bool) -> dict[str, Any]:
    inline = {"input_adapter": "pull.from_artifacts", "input_args": {"poll_ms": POLL_MS}}
    start = {"start_when": "first_batch"} if streams else {}
    return {
        "node_id": node_id,
        "type": role,
        "depends_on": [parent],
        "io": {"input_inline": inline, **start},
    }


GROUP = Group(rows=(STAGES, FIRST, FAR, NEAR), opened=opened)
