"""Ordinary nodes, inline nodes and built-in functions, compared with hand-written workflows."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import baseline, inline
from benchmarks.cases import CASES, Case, by_flowkit, by_workflow, sample
from benchmarks.processes import Program, by_hand, flowkit
from benchmarks.rows import Group, Row, Setting, Side, Sides, Target, emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    RunOne = Callable[[Case], Awaitable[None]]

QUEUE = "benchmark"
DATABASES = ("flowkit", "baseline", "baseline_functions")
WARM_UP = Case(name="warm-up", nodes=10, tasks=20)
TARGETS = {
    "100 tasks x 10 nodes": {"flowkit": Target(ratio=">= 1.05"), inline.SIDE: Target(ratio=">= 1.60")},
    "chain of 30": {
        "flowkit": Target(ratio="<= 1.05", processor="<= 1.15"),
        inline.SIDE: Target(ratio="<= 0.40"),
    },
    "fan-out of 500": {"flowkit": Target(ratio="<= 0.60", processor="<= 1.15")},
    "20 functions in a row": {"flowkit": Target(ratio="<= 1.20")},
}


def ordinary_programs() -> list[Program]:
    """Return FlowKit's engine and worker."""
    worker = ("worker", "benchmarks.handler:OneBatch", "--queue", QUEUE, "--concurrency", "100")
    return [flowkit("engine", "engine", "--queue", QUEUE), flowkit("worker", *worker)]


def written_programs() -> list[Program]:
    """Return the hand-written programs, which are an engine and a worker too."""
    return [
        by_hand("engine", "benchmarks.baseline", "workflows"),
        by_hand("worker", "benchmarks.baseline", "activities"),
        by_hand("engine", "benchmarks.baseline_functions", side="functions"),
    ]


def row(case: Case) -> Row:
    """Return the row of a case."""
    return Row(
        name=case.name,
        unit="ms/node" if case.per_node else "nodes/s",
        items=case.nodes * case.tasks * case.repeats,
        targets=TARGETS[case.name],
        rounds=case.rounds,
    )


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Mapping[str, Sides]]:
    """Start the programs of all sides, and yield how each row takes its samples."""
    client, store = await connect(), TaskStore(setting.mongo["flowkit"])
    ordinary, hosted = (by_flowkit(TaskClient(client, store, queue=queue)) for queue in (QUEUE, inline.QUEUE))
    written = by_workflow(await baseline.connect())
    clean = partial(emptied, setting.mongo, DATABASES)
    with setting.processes.running(*ordinary_programs(), inline.program(), *written_programs()):
        # The servers' compilers would otherwise favour one side by chance.
        for run_one in (written, ordinary, hosted):
            await sample(WARM_UP, run_one)
        yield {case.name: Sides(sides=_sides(case, ordinary, hosted, written), clean=clean) for case in CASES}


def _sides(case: Case, ordinary: RunOne, hosted: RunOne, written: RunOne) -> dict[str, Side]:
    """Return the sides of a case."""
    functions = "functions" if case.functions else "baseline"
    sides = {"baseline": _side(case, written, functions), "flowkit": _side(case, ordinary, "flowkit")}
    if inline.SIDE in TARGETS[case.name]:
        sides[inline.SIDE] = _side(case, hosted, inline.SIDE)
    return sides


def _side(case: Case, run_one: RunOne, programs: str) -> Side:
    async def run(case: Case) -> float:
        seconds = await sample(case, run_one)
        return seconds * 1000 if case.per_node else 1 / seconds

    few = replace(case, tasks=min(case.tasks, 10), repeats=1)
    return Side(run=partial(run, case), programs=programs, warm_up=partial(run, few))


GROUP = Group(rows=tuple(map(row, CASES)), opened=opened)
