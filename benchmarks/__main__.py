"""`python -m benchmarks`: alternates FlowKit with the hand-written baseline and prints the ratios."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console
from rich.table import Table
from temporalio.client import Client

from benchmarks.batches import BATCHES, bare_loop, one_node
from benchmarks.cases import CASES, Case, by_flowkit, by_hand, sample
from flowkit.adapters.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit_dev import Stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    RunBatches = Callable[[int], Awaitable[float]]

ROUNDS = 7
QUEUE = "benchmark"
RAW_CHAIN_MS = 9.0
"""Chain node of a raw activity without any MongoDB write, as measured once on a quiet machine of this size."""

console = Console(width=110)


def main(
    rounds: Annotated[int, typer.Option(help="Samples of each side.")] = ROUNDS,
    out: Annotated[Path, typer.Option(help="JSON beside the table.")] = Path(
        "benchmarks/results/latest.json"
    ),
) -> None:
    """Measure; takes about three minutes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack, ExitStack() as processes:
        os.environ.update(stack.exports)
        for command in _commands():
            processes.enter_context(_process(command))
        results = asyncio.run(_measure(rounds))
    _print(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"figures: {out}")


def _commands() -> list[list[str]]:
    flowkit = [str(Path(sys.executable).parent / "flowkit")]
    engine, worker = ["engine", "--queue", QUEUE], ["worker", "benchmarks.handler:OneBatch", "--queue", QUEUE]
    by_hand_ = [sys.executable, "benchmarks/baseline.py"]
    return [
        [*flowkit, *engine],
        [*flowkit, *worker, "--concurrency", "100"],
        [*by_hand_, "workflows"],
        [*by_hand_, "activities"],
    ]


@contextmanager
def _process(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=_with_bytecode())
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def _with_bytecode() -> dict[str, str]:
    """Both sides keep compiled modules, as installed programs do; a sandboxed workflow is imported for every run."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def _measure(rounds: int) -> list[dict[str, Any]]:
    sides = {"baseline": by_hand(await Client.connect(os.environ["TEMPORAL_ADDRESS"]))}
    client = await connect()
    db: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])["flowkit"]
    tasks = TaskClient(client, TaskStore(db), queue=QUEUE)
    sides["flowkit"] = by_flowkit(tasks)
    results = []
    for case in CASES:
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for run_one in sides.values():
            await run_one(case)
        for round_ in range(rounds):
            order = list(sides.items()) if round_ % 2 else list(sides.items())[::-1]
            for name, run_one in order:
                samples[name].append(await sample(case, run_one))
        results.append(_result(case, samples))
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    results.append(await _batches(rounds, bare_loop(mongo["baseline"]), one_node(tasks, db)))
    return results


async def _batches(rounds: int, bare: RunBatches, flowkit: RunBatches) -> dict[str, Any]:
    sides = {"baseline": bare, "flowkit": flowkit}
    for run in sides.values():
        await run(BATCHES // 2)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in sorted(sides, reverse=bool(round_ % 2)):
            taken[name].append(BATCHES / await sides[name](BATCHES))
    medians = {name: statistics.median(rates) for name, rates in taken.items()}
    return {
        "case": f"{BATCHES:,} batches of a node",
        "unit": "batches/s",
        "median": medians,
        "samples": taken,
        "ratio": medians["flowkit"] / medians["baseline"],
        "target": ">= 0.85",
        "measured_at": time.time(),
    }


def _result(case: Case, samples: dict[str, list[float]]) -> dict[str, Any]:
    def unit(seconds: float) -> float:
        return seconds * 1000 if case.per_node else 1 / seconds

    values = {name: [unit(seconds) for seconds in taken] for name, taken in samples.items()}
    medians = {name: statistics.median(taken) for name, taken in values.items()}
    return {
        "case": case.name,
        "unit": "ms/node" if case.per_node else "nodes/s",
        "median": medians,
        "samples": values,
        "ratio": medians["flowkit"] / medians["baseline"],
        "target": "<= 1.10" if case.per_node else ">= 0.90",
        "measured_at": time.time(),
    }


def _print(results: list[dict[str, Any]]) -> None:
    table = Table(
        "case", "baseline", "FlowKit", "ratio", "target", title="FlowKit beside a hand-written workflow"
    )
    for result in results:
        sides = [_cell(result, name) for name in ("baseline", "flowkit")]
        table.add_row(result["case"], *sides, f"{result['ratio']:.3f}", result["target"])
    console.print(table)
    console.print(
        f"For scale: a raw activity in a chain, without any MongoDB write, took {RAW_CHAIN_MS:.0f} ms a node on a "
        "quiet 2-core machine; the baseline adds five writes a node."
    )


def _cell(result: dict[str, Any], name: str) -> str:
    values = result["samples"][name]
    return f"{result['median'][name]:.1f} ({min(values):.1f}..{max(values):.1f}) {result['unit']}"


if __name__ == "__main__":
    typer.run(main)
