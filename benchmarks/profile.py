"""`python -m benchmarks.profile`: how the processor time of a node divides between layers, on both sides.

The layers are FlowKit, Temporal's SDK, MongoDB's driver and more. Needs Linux, and py-spy from `pip install --group
profile`.

Each side runs twice: once without the profiler, which takes the processor time of every thread, and once with it, which
takes the shares.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console
from rich.table import Table

from benchmarks import batches, external, nodes, streaming
from benchmarks.processes import Processes, counted_stack, machine
from benchmarks.rows import Group, Row, Setting, Side, Sides
from benchmarks.stacks import LAYERS, by_layer, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

GROUPS: tuple[Group, ...] = tuple(module.GROUP for module in (nodes, batches, streaming, external))
RATE = 200
"""Samples in a second of each thread."""
ATTACH_SEC = 1.5
"""How long py-spy takes to read the symbols of a process."""

console = Console(width=120)


def main(
    only: Annotated[str, typer.Option(help="Only rows with this text in their name.")] = "",
    repeats: Annotated[int, typer.Option(help="Samples of each side, with and without the profiler.")] = 3,
) -> None:
    """Profile both sides of the rows of nodes and batches; takes about a minute for each row."""
    with counted_stack() as (processes, folder):
        uvloop.run(_profile(only, processes, folder, repeats))
    console.print(f"Profiled on {machine()}.")


async def _profile(only: str, processes: Processes, folder: Path, repeats: int) -> None:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    setting = Setting(mongo=mongo, processes=processes, folder=folder)
    for group in GROUPS:
        rows = tuple(row for row in group.rows if isinstance(row, Row) and only in row.name)
        if rows:
            async with replace(group, rows=rows).opened(setting) as opened:
                for row in rows:
                    if isinstance(sides := opened[row.name], Sides):
                        _show(row, await _profile_row(row, sides, processes, folder, repeats))


async def _profile_row(
    row: Row, compared: Sides, processes: Processes, folder: Path, repeats: int
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each layer for an item, by side."""
    used = {}
    for name, side in compared.sides.items():
        await (side.warm_up or side.run)()
        pids = processes.pids(side.programs)
        before = _thread_seconds(pids)
        await _run(side, compared, repeats)
        after = _thread_seconds(pids)
        with _sampled(pids, folder) as files:
            await asyncio.sleep(ATTACH_SEC)
            await _run(side, compared, repeats)
        seconds = {thread: spent - before.get(thread, 0.0) for thread, spent in after.items()}
        sampled = {thread: found for file in files for thread, found in parse(file.read_text()).items()}
        items = (side.items or row.items) * repeats
        used[name] = {layer: 1000 * spent / items for layer, spent in by_layer(seconds, sampled).items()}
    return used


async def _run(side: Side, compared: Sides, repeats: int) -> None:
    for _ in range(repeats):
        await compared.clean()
        if side.prepare is not None:
            await side.prepare()
        await side.run()


def _thread_seconds(pids: Iterable[int]) -> dict[int, float]:
    """Return the processor time of each thread of these processes, by its id."""
    seconds = {}
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                seconds[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
            except FileNotFoundError:  # It has ended.
                continue
    return seconds


@contextmanager
def _sampled(pids: Sequence[int], folder: Path) -> Iterator[list[Path]]:
    """Sample the stacks of these processes during the block, into the files."""
    files = [folder / f"{pid}.stacks" for pid in pids]
    program = [str(Path(sys.executable).parent / "py-spy"), "record", "--threads", "--format", "raw"]
    running = [
        subprocess.Popen(
            [*program, "--rate", str(RATE), "--output", str(file), "--pid", str(pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pid, file in zip(pids, files, strict=True)
    ]
    try:
        yield files
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait(60)


def _show(row: Row, used: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(f"{row.name}: milliseconds of processor time for each {row.item}", *used)
    for layer in LAYERS:
        table.add_row(layer, *(f"{side[layer]:.2f}" for side in used.values()))
    totals = Counter({name: sum(side.values()) for name, side in used.items()})
    table.add_row("together", *(f"{totals[name]:.2f}" for name in used))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
