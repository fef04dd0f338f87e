"""`python -m benchmarks`: alternates FlowKit with the hand-written baseline and prints the ratios."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console
from rich.table import Table

from benchmarks import (
    admission,
    baseline,
    external,
    flows,
    flows_by_hand,
    inline,
    shards,
    streaming,
    wide_by_hand,
)
from benchmarks.actions import Actions
from benchmarks.bare_bridge import DISPATCHES as BARE_DISPATCHES
from benchmarks.batches import BATCHES, bare_loop, one_node
from benchmarks.cases import CASES, Case, by_flowkit, by_hand, sample
from benchmarks.processes import OPTIMIZING, flowkit, machine, process
from benchmarks.shards import WideNodes
from benchmarks.streaming import Streaming
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Kafka, Stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping

ROUNDS = 7
"""Samples per side of a short case; a case may ask for fewer."""

QUEUE = "benchmark"
RAW_CHAIN_MS = 9.0
"""Milliseconds per node in a chain of raw activities without MongoDB writes, measured once on a quiet machine."""

DATABASES = (
    *("flowkit", "baseline", "baseline_functions", "bare_loop"),
    external.DATABASE,
    wide_by_hand.DATABASE,
    flows_by_hand.DATABASE,
)
COLLECTIONS = (
    *("tasks", "artifacts", "metrics_raw", "stream_progress", "node_shards", "worker_events"),
    *("dispatches", BARE_DISPATCHES),
    *("flows", "flow_messages", "flow_events"),
)

console = Console(width=120)


def main(
    rounds: Annotated[int, typer.Option(help="Samples per side; long cases take fewer.")] = ROUNDS,
    out: Annotated[Path, typer.Option(help="Print JSON in addition to the table.")] = Path(
        "benchmarks/results/latest.json"
    ),
    only: Annotated[str, typer.Option(help="Only cases with this text in their name.")] = "",
) -> None:
    """Run every case on both sides in turn and print the ratios; takes about eleven minutes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.environ.setdefault("_JAVA_OPTIONS", OPTIMIZING)
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), keeps_data=False) as stack,
        ExitStack() as processes,
    ):
        os.environ.update(stack.exports)
        results, latencies = [], []
        if not only.startswith(("flows", "admission")):
            brokers = _start_processes(processes, Path(folder))
            results = uvloop.run(_measure(rounds, only, _comparisons(brokers)))
            latencies = uvloop.run(_latencies(only))
        if any(only in name for name in flows.NAMES):
            results += uvloop.run(_measure(rounds, only, _flow_comparisons()))
        if any(only in name for name in admission.NAMES):
            results += uvloop.run(_measure(rounds, only, _admission_comparisons()))
    _print(
        results, "FlowKit compared with a hand-written workflow (streaming: with the same stages in sequence)"
    )
    _print_latencies(latencies)
    console.print(f"Measured on {machine()}.")
    console.print(
        f"For scale: a raw activity in a chain, without any MongoDB write, took {RAW_CHAIN_MS:.0f} ms a node on a "
        "quiet 2-core machine; the baseline adds five writes a node."
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([*results, *latencies], indent=2) + "\n")
    console.print(f"figures: {out}")


def _start_processes(processes: ExitStack, folder: Path) -> str:
    """Start Kafka and the processes of all cases but those of flows, and return the addresses of the brokers."""
    brokers = processes.enter_context(Kafka(folder)).bootstrap_servers
    for command in _commands():
        processes.enter_context(process(command))
    uvloop.run(external.provision(brokers))
    for command in external.commands():
        processes.enter_context(process(command, external.environment(brokers)))
    return brokers


def _commands() -> list[list[str]]:
    engine, worker = ["engine", "--queue", QUEUE], ["worker", "benchmarks.handler:OneBatch", "--queue", QUEUE]
    by_hand_ = [sys.executable, "-m", "benchmarks.baseline"]
    return [
        flowkit(*engine),
        flowkit(*inline.command()),
        flowkit(*worker, "--concurrency", "100"),
        *(flowkit(*command) for command in streaming.commands(QUEUE)),
        [*by_hand_, "workflows"],
        [*by_hand_, "activities"],
        [sys.executable, "-m", "benchmarks.baseline_functions"],
        *shards.commands(),
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the table: two sides that run alternately."""

    name: str
    unit: str
    target: str
    sides: Mapping[str, Callable[[], Awaitable[float]]]
    """Each function returns one sample, in `unit`."""
    clean: Callable[[], Awaitable[None]]
    """Called before each sample."""
    rounds: int = ROUNDS
    """Samples per side, unless the command asks for fewer."""
    warms_up: bool = True
    """Whether each side runs once before its first sample."""


async def _comparisons(brokers: str) -> AsyncIterator[Comparison]:
    by_hand_ = by_hand(await baseline.connect())
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    tasks = TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=QUEUE)
    sides = {"baseline": by_hand_, "flowkit": by_flowkit(tasks)}
    clean = partial(_delete_documents, mongo)
    for compared in _cases(CASES, sides, clean):
        yield compared
    hosted = TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=inline.QUEUE)
    for compared in _cases(inline.cases(), {"baseline": by_hand_, "flowkit": by_flowkit(hosted)}, clean):
        yield compared
    batches = {"baseline": bare_loop(mongo["bare_loop"]), "flowkit": one_node(tasks, mongo["flowkit"])}
    rates = {name: partial(_rate, run) for name, run in batches.items()}
    name = f"{BATCHES:,} batches of a node"
    yield Comparison(name=name, unit="batches/s", target=">= 0.85", sides=rates, clean=clean)
    stages = Streaming(tasks, mongo["flowkit"]).stages()
    yield Comparison(
        name=streaming.STAGES, unit="s", target="<= 0.5", sides=stages, clean=clean, rounds=2, warms_up=False
    )
    wide = WideNodes(
        TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=shards.QUEUE),
        await baseline.connect(),
        mongo,
    )
    yield Comparison(
        name=shards.BY_HAND,
        unit="s",
        target="<= 1.15",
        sides=wide.beside_hand_written(),
        clean=clean,
        rounds=3,
    )
    yield Comparison(
        name=shards.SPEED_UP,
        unit="s",
        target="<= 0.154",
        sides=wide.beside_one_slot(),
        clean=clean,
        rounds=1,
        warms_up=False,
    )
    async with external.sides(mongo, brokers) as chains:
        name = f"chain of {external.NODES} external nodes"
        yield Comparison(
            name=name, unit="ms/node", target="<= 1.50", sides=chains, clean=clean, rounds=external.ROUNDS
        )


async def _flow_comparisons() -> AsyncIterator[Comparison]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    clean = partial(_delete_documents, mongo)
    async with flows.running(mongo) as made:
        chain, at_once, status = made.chain(), made.at_once(), made.status()
        rows: Any = {"clean": clean, "rounds": flows.ROUNDS, "warms_up": False}
        yield Comparison(name=flows.CHAIN, unit="ms/job", target="<= 1.15", sides=chain, **rows)
        yield Comparison(name=flows.AT_ONCE, unit="flows/s", target=">= 0.90", sides=at_once, **rows)
        yield Comparison(
            name=flows.STATUS,
            unit="requests/s",
            target=">= 0.70",
            sides=status,
            **{**rows, "clean": made.show_another},
        )


async def _admission_comparisons() -> AsyncIterator[Comparison]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    client = await connect()
    tasks = TaskClient(client, TaskStore(mongo[admission.DATABASES[0]]), queue=admission.QUEUE)
    made = admission.Admissions(mongo, client, tasks)
    rows: Any = {"clean": made.clean, "rounds": 3, "warms_up": False}
    outside, blocked, starts = made.outside(), made.blocked(), made.starts()
    yield Comparison(name=admission.OUTSIDE, unit="requests/s", target=">= 0.60", sides=outside, **rows)
    yield Comparison(name=admission.BLOCKED, unit="ms/pop", target="<= 1.3", sides=blocked, **rows)
    yield Comparison(name=admission.STARTS, unit="s", target="<= 1.1", sides=starts, **rows)


def _cases(
    cases: Iterable[Case],
    sides: Mapping[str, Callable[[Case], Awaitable[None]]],
    clean: Callable[[], Awaitable[None]],
) -> Iterator[Comparison]:
    for case in cases:
        unit = "ms/node" if case.per_node else "nodes/s"
        samples = {name: partial(_sample, case, run_one) for name, run_one in sides.items()}
        yield Comparison(
            name=case.name, unit=unit, target=case.target, sides=samples, clean=clean, rounds=case.rounds
        )


async def _delete_documents(mongo: Any) -> None:
    """Delete the documents of earlier samples, because MongoDB's stand-in scans all documents at every update."""
    for database in DATABASES:
        for collection in COLLECTIONS:
            await mongo[database][collection].delete_many({})


async def _sample(case: Case, run_one: Callable[[Case], Awaitable[None]]) -> float:
    seconds = await sample(case, run_one)
    return seconds * 1000 if case.per_node else 1 / seconds


async def _rate(run: Callable[[int], Awaitable[float]]) -> float:
    return BATCHES / await run(BATCHES)


async def _measure(rounds: int, only: str, comparisons: AsyncIterator[Comparison]) -> list[dict[str, Any]]:
    results = []
    async for comparison in comparisons:
        if only in comparison.name:
            results.append(await _result(comparison, min(rounds, comparison.rounds)))
            _print(results[-1:])
    return results


async def _latencies(only: str) -> list[dict[str, Any]]:
    """Measure the cases of streaming and of actions that have no baseline."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    await _delete_documents(mongo)
    tasks = TaskClient(await connect(), TaskStore(mongo["flowkit"]), queue=QUEUE)
    kinds = (Streaming(tasks, mongo["flowkit"]), Actions(tasks, mongo["flowkit"]))
    return [latency.result for kind in kinds async for latency in kind.latencies(only)]


async def _result(comparison: Comparison, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {name: [] for name in comparison.sides}
    began = time.monotonic()
    for run in comparison.sides.values() if comparison.warms_up else ():
        await run()
    for round_ in range(rounds):
        for name in sorted(comparison.sides, reverse=bool(round_ % 2)):
            await comparison.clean()
            samples[name].append(await comparison.sides[name]())
    medians = {name: statistics.median(values) for name, values in samples.items()}
    rounds_ = zip(samples["flowkit"], samples["baseline"], strict=True)
    return {
        "case": comparison.name,
        "unit": comparison.unit,
        "median": medians,
        "samples": samples,
        "ratio": medians["flowkit"] / medians["baseline"],
        "ratios": [flowkit / baseline_ for flowkit, baseline_ in rounds_],
        "target": comparison.target,
        "took_sec": round(time.monotonic() - began, 1),
        "measured_at": time.time(),
    }


def _print(results: list[dict[str, Any]], title: str | None = None) -> None:
    table = Table(
        "case", "baseline", "FlowKit", "ratio (rounds)", "target", "took", title=title, show_edge=bool(title)
    )
    for result in results:
        sides = [_cell(result, name) for name in ("baseline", "flowkit")]
        table.add_row(result["case"], *sides, _ratio(result), result["target"], f"{result['took_sec']:.0f} s")
    console.print(table)


def _print_latencies(results: list[dict[str, Any]]) -> None:
    table = Table(
        "case",
        "p50",
        "p90",
        "range",
        "target",
        "took",
        "load",
        title="From a stored batch to the child's handler, and from an action to the first attempt",
    )
    for result in results:
        figures = [f"{result[name]:.0f} ms" for name in ("p50", "p90")]
        spread = f"{min(result['samples']):.0f}..{max(result['samples']):.0f} ms"
        took = f"{result['took_sec']:.0f} s"
        table.add_row(result["case"], *figures, spread, result["target"], took, f"{result['load']:.1f}")
    if results:
        console.print(table)


def _ratio(result: dict[str, Any]) -> str:
    """Return the ratio of the medians, with the smallest and largest ratio of a single round."""
    return f"{result['ratio']:.3f} ({min(result['ratios']):.2f}..{max(result['ratios']):.2f})"


def _cell(result: dict[str, Any], name: str) -> str:
    values = result["samples"][name]
    return f"{result['median'][name]:.1f} ({min(values):.1f}..{max(values):.1f}) {result['unit']}"


if __name__ == "__main__":
    typer.run(main)
