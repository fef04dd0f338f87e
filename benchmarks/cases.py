"""The cases of the benchmark, and how each side runs them."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import baseline, baseline_functions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import Client

    from flowkit.client import TaskClient


@dataclass(frozen=True, kw_only=True)
class Case:
    """A sample starts `tasks` tasks of `nodes` nodes concurrently, `repeats` times in a row."""

    name: str
    nodes: int
    wide: bool = False
    tasks: int = 1
    repeats: int = 1
    per_node: bool = True
    """Whether the unit is milliseconds per node; otherwise it is nodes per second."""
    functions: bool = False
    """Whether the nodes are built-in coordinator functions instead of nodes of a role."""
    rounds: int = 7
    """Samples per side."""


CASES = (
    Case(name="100 tasks x 10 nodes", nodes=10, tasks=100, per_node=False, rounds=2),
    Case(name="chain of 30", nodes=30, repeats=2, rounds=5),
    Case(name="fan-out of 500", nodes=500, wide=True, rounds=3),
    Case(name="20 functions in a row", nodes=20, repeats=5, functions=True, rounds=5),
)


async def sample(case: Case, run_one: Callable[[Case], Awaitable[None]]) -> float:
    """Run one sample and return the seconds per node."""
    began = time.perf_counter()
    for _ in range(case.repeats):
        await asyncio.gather(*(run_one(case) for _ in range(case.tasks)))
    return (time.perf_counter() - began) / (case.nodes * case.tasks * case.repeats)


def by_workflow(client: Client, prefix: str = "") -> Callable[[Case], Awaitable[None]]:
    """Return a function that runs one task of a case on the hand-written workflow.

    `prefix` names other programs that run it: those of `benchmarks.floors`.
    """

    async def run_one(case: Case) -> None:
        comparison: Any = baseline.Baseline.run
        queue = baseline.QUEUE
        if case.functions:
            comparison, queue = baseline_functions.BaselineFunctions.run, baseline_functions.QUEUE
        plan = {"nodes": case.nodes, "wide": case.wide}
        await client.execute_workflow(
            comparison, plan, id=f"{prefix}baseline-{uuid.uuid4()}", task_queue=prefix + queue
        )

    return run_one


def by_flowkit(tasks: TaskClient) -> Callable[[Case], Awaitable[None]]:
    """Return a function that runs one task of a case on FlowKit."""

    async def run_one(case: Case) -> None:
        task_id = await tasks.create_task(params={}, graph=graph_of(case))
        await tasks.handle(task_id).result()

    return run_one


_BATCH = {"type": "bench"}
_INCREMENT = {"type": "coordinator_fn", "io": {"fn": "vars.incr", "fn_args": {"key": "n"}}}


def graph_of(case: Case) -> dict[str, Any]:
    """Return the graph of a case."""

    def node(index: int) -> dict[str, Any]:
        parents = [] if case.wide or index == 0 else [f"n{index - 1}"]
        return {"node_id": f"n{index}", "depends_on": parents, **(_INCREMENT if case.functions else _BATCH)}

    return {"nodes": [node(index) for index in range(case.nodes)]}
