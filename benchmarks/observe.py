"""`python -m benchmarks.observe`: what metrics and kept lines cost, in processor time of FlowKit's own processes.

Engines with a worker each run the same tasks in turn, whose handler logs one line. One pair keeps the lines, measures
itself and is read as Prometheus would; one does so without the metrics of Temporal's SDK; one only keeps the lines; and
one has no health port, measures nothing and keeps no lines. A round has one sample of each, in alternating order. Its
figures are the ratios to the processor time for a node of the last pair.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks.cases import CASES, Case, by_flowkit, sample
from benchmarks.processes import Program, counted_stack, flowkit
from benchmarks.rows import SETTLE_SEC, emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from benchmarks.processes import Processes

ON, OWN, LINES, OFF = "metrics and lines", "without the SDK's metrics", "lines only", "off"
_ENVIRONMENTS: Final[dict[str, dict[str, str]]] = {
    ON: {},
    OWN: {"FLOWKIT_SDK_METRICS": "0"},
    LINES: {},
    OFF: {},
}
_KEEPS_NO_LINES = Path(__file__).with_name("no_lines.json")
TARGET = 1.03
"""The largest ratio to aim at."""
DATABASE = "flowkit"
MEASURED = ("chain of 30", "fan-out of 500")
_WARM_UPS = 2


def programs(side: str, ports: Sequence[int]) -> list[Program]:
    """Return engine and worker of a side, which measure themselves if they have ports."""
    health = [["--health-port", str(port)] for port in ports] or [[], []]
    queue = ("--queue", queue_of(side))
    keeps = () if side != OFF else ("--config", os.fspath(_KEEPS_NO_LINES))
    worker = ("worker", "benchmarks.handler:OneLine", *queue, *keeps, "--concurrency", "100", *health[1])
    found = [
        flowkit("engine", "engine", *queue, *keeps, *health[0], side=side),
        flowkit("worker", *worker, side=side),
    ]
    return [replace(each, environment=_ENVIRONMENTS[side]) for each in found]


def queue_of(side: str) -> str:
    """Return the task queue of a side."""
    return f"benchmark-{[*_ENVIRONMENTS].index(side)}"


@contextmanager
def read_regularly(ports: Sequence[int], seconds: float) -> Iterator[None]:
    """Read the metrics of these ports at this interval during the block."""

    async def read() -> None:
        while True:
            await asyncio.sleep(seconds)
            for port in ports:
                await asyncio.to_thread(_read, port)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        reading.cancel()


def _read(port: int) -> int:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as text:
        return len(text.read())
    return 0


async def milliseconds(
    case: Case, run_one: Callable[[Case], Awaitable[None]], processes: Processes, side: str
) -> float:
    """Return the processor time of the processes of a side for each node of a sample, in milliseconds."""
    before = processes.usage()
    await sample(case, run_one)
    await asyncio.sleep(SETTLE_SEC)
    used = processes.usage()
    seconds = sum(used[place].seconds - before[place].seconds for place in used if place[0] == side)
    return seconds * 1000 / (case.nodes * case.tasks * case.repeats)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that contains the median of the distribution with at least 95%, from the ranks of the values.

    With fewer than six values there is none, and it is that of all values.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0.0
    while rank < count // 2 and below + math.comb(count, rank) / 2**count <= 0.025:
        below += math.comb(count, rank) / 2**count
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[count - 1 - first]


async def _measure(processes: Processes, rounds: int, scrape_sec: float) -> None:
    ports = {side: [free_port(), free_port()] for side in (ON, OWN)}
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    client, store = await connect(), TaskStore(mongo[DATABASE])
    run = {side: by_flowkit(TaskClient(client, store, queue=queue_of(side))) for side in _ENVIRONMENTS}
    started = [each for side in run for each in programs(side, ports.get(side, ()))]
    served = [port for each in ports.values() for port in each]
    with processes.running(*started), read_regularly(served, scrape_sec):
        for case in (replace(each, repeats=4) if not each.wide else each for each in CASES):
            if case.name not in MEASURED:
                continue
            taken: dict[str, list[float]] = {side: [] for side in run}
            for number in range(-_WARM_UPS, rounds):
                for side in sorted(taken, reverse=bool(number % 2)):
                    await emptied(mongo, [DATABASE])
                    found = await milliseconds(case, run[side], processes, side)
                    taken[side] += [found] if number >= 0 else []
            _show(case, taken)
        if not all([await asyncio.to_thread(_read, port) for port in served]):
            raise RuntimeError("the processes have served no metrics")


def _show(case: Case, taken: dict[str, list[float]]) -> None:
    off = taken[OFF]
    typer.echo(f"{case.name}: {statistics.median(off):.2f} ms a node without both, {len(off)} rounds")
    for side in (ON, OWN, LINES):
        ratios = [with_metrics / without for with_metrics, without in zip(taken[side], off, strict=True)]
        low, high = interval(ratios)
        ratio = statistics.median(ratios)
        verdict = "within" if ratio <= TARGET else "ABOVE"
        typer.echo(f"  {side}: {ratio:.3f} ({low:.3f} to {high:.3f}), {verdict} {TARGET}")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 15,
    scrape_sec: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two reads of the metrics.")
    ] = 5.0,
) -> None:
    """Compare engines and workers with and without metrics and kept lines."""
    with counted_stack() as (processes, _):
        uvloop.run(_measure(processes, rounds, scrape_sec))


if __name__ == "__main__":
    typer.run(main)
