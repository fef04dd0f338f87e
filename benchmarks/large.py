"""The processor time of a node in a task of 20,000 nodes, compared with that in tasks of 1,000."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.processes import flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

QUEUE, DATABASE = "benchmark-large", "flowkit"
SMALL, LARGE, WIDTH = 1_000, 20_000, 100
SMALL_TASKS = 3
PARENTS = 3
ROW = Row(
    name=f"large: a task of {LARGE:,} nodes beside tasks of {SMALL:,}",
    unit="ms/node",
    items=LARGE,
    targets={"flowkit": Target(processor="<= 1.20")},
    rounds=1,
    always=False,
)


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start an engine and a worker, and yield how they take samples."""
    tasks = TaskClient(await connect(), TaskStore(setting.mongo[DATABASE]), queue=QUEUE)
    few = partial(_run, tasks, SMALL, 1)
    small = Side(
        run=partial(_run, tasks, SMALL, SMALL_TASKS),
        programs="flowkit",
        warm_up=few,
        items=SMALL * SMALL_TASKS,
    )
    large = Side(run=partial(_run, tasks, LARGE, 1), programs="flowkit", warm_up=few)
    worker = ("worker", "benchmarks.handler:OneBatch", "--queue", QUEUE, "--concurrency", "100")
    with setting.processes.running(flowkit("engine", "engine", "--queue", QUEUE), flowkit("worker", *worker)):
        clean = partial(emptied, setting.mongo, [DATABASE])
        yield {ROW.name: Sides(sides={"baseline": small, "flowkit": large}, clean=clean)}


async def _run(tasks: TaskClient, nodes: int, count: int) -> float:
    """Run tasks one after another, and return their milliseconds per node."""
    began = time.perf_counter()
    for _ in range(count):
        task_id = await tasks.create_task(params={}, graph={"nodes": _layers(nodes)})
        await tasks.handle(task_id).result()
    return (time.perf_counter() - began) * 1000 / (nodes * count)


def _layers(nodes: int) -> list[dict[str, Any]]:
    """Return layers of nodes, each with some parents in the layer above."""
    return [
        {
            "node_id": f"n{index}",
            "type": "bench",
            "depends_on": [_above(index, step) for step in range(PARENTS)] if index >= WIDTH else [],
        }
        for index in range(nodes)
    ]


def _above(index: int, step: int) -> str:
    layer, place = divmod(index, WIDTH)
    return f"n{(layer - 1) * WIDTH + (place + step) % WIDTH}"


GROUP = Group(rows=(ROW,), opened=opened)
