"""What is measured: three shapes of work, run by either side."""

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
    """`tasks` tasks of `nodes` nodes, all at once, repeated `repeats` times a sample."""

    name: str
    nodes: int
    wide: bool = False
    tasks: int = 1
    repeats: int = 1
    per_node: bool = True
    """Judged by milliseconds a node; else by nodes a second."""
    functions: bool = False
    """Nodes are built-in coordinator functions, not attempts of a role."""
    target: str = "<= 1.10"
    rounds: int = 7
    """Samples per side."""


CASES = (
    # The longest case comes first: it warms up the servers' compilers, which would otherwise favour one side by chance.
    Case(name="100 tasks x 10 nodes", nodes=10, tasks=100, per_node=False, target=">= 0.90", rounds=3),
    Case(name="chain of 30", nodes=30, repeats=3),
    Case(name="fan-out of 500", nodes=500, wide=True, rounds=5),
    Case(name="20 functions in a row", nodes=20, repeats=5, functions=True, target="<= 1.30"),
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
        comparison: Any = baseline.Baseline.run
        queue = baseline.QUEUE
        if case.functions:
            comparison, queue = baseline_functions.BaselineFunctions.run, baseline_functions.QUEUE
        plan = {"nodes": case.nodes, "wide": case.wide}
        await client.execute_workflow(comparison, plan, id=f"baseline-{uuid.uuid4()}", task_queue=queue)

    return run_one


def by_flowkit(tasks: TaskClient) -> Callable[[Case], Awaitable[None]]:
    """Runs one task of a case on FlowKit."""

    async def run_one(case: Case) -> None:
        task_id = await tasks.create_task(params={}, graph=graph_of(case))
        await tasks.handle(task_id).result()

    return run_one


_BATCH = {"type": "bench"}
_INCREMENT = {"type": "coordinator_fn", "io": {"fn": "vars.incr", "fn_args": {"key": "n"}}}


def graph_of(case: Case) -> dict[str, Any]:
    """The case as a graph."""

    def node(index: int) -> dict[str, Any]:
        parents = [] if case.wide or index == 0 else [f"n{index - 1}"]
        return {"node_id": f"n{index}", "depends_on": parents, **(_INCREMENT if case.functions else _BATCH)}

    return {"nodes": [node(index) for index in range(case.nodes)]}
