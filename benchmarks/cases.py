"""What is measured: three shapes of work, run by either side."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import baseline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import Client

    from flowkit.client import TaskClient


@dataclass(frozen=True, kw_only=True)
class Case:
    """`tasks` tasks of `nodes` nodes, all at once, repeated `repeats` times a sample."""

    name: str
    nodes: int
    wide: bool = False
    tasks: int = 1
    repeats: int = 1
    per_node: bool = True
    """Judged by milliseconds a node; else by nodes a second."""


CASES = (
    Case(name="chain of 30", nodes=30, repeats=3),
    Case(name="100 tasks x 10 nodes", nodes=10, tasks=100, per_node=False),
    Case(name="fan-out of 500", nodes=500, wide=True),
)


async def sample(case: Case, run_one: Callable[[Case], Awaitable[None]]) -> float:
    """Seconds that a node of `case` took."""
    began = time.perf_counter()
    for _ in range(case.repeats):
        await asyncio.gather(*(run_one(case) for _ in range(case.tasks)))
    return (time.perf_counter() - began) / (case.nodes * case.tasks * case.repeats)


def by_hand(client: Client) -> Callable[[Case], Awaitable[None]]:
    """Runs one task of a case on the hand-written workflow."""

    async def run_one(case: Case) -> None:
        plan = {"nodes": case.nodes, "wide": case.wide}
        await client.execute_workflow(
            baseline.Baseline.run, plan, id=f"baseline-{uuid.uuid4()}", task_queue=baseline.QUEUE
        )

    return run_one


def by_flowkit(tasks: TaskClient) -> Callable[[Case], Awaitable[None]]:
    """Runs one task of a case on FlowKit."""

    async def run_one(case: Case) -> None:
        task_id = await tasks.create_task(params={}, graph=graph_of(case))
        await tasks.handle(task_id).result()

    return run_one


def graph_of(case: Case) -> dict[str, Any]:
    """The case as a graph."""

    def node(index: int) -> dict[str, Any]:
        parents = [] if case.wide or index == 0 else [f"n{index - 1}"]
        return {"node_id": f"n{index}", "type": "bench", "depends_on": parents}

    return {"nodes": [node(index) for index in range(case.nodes)]}
