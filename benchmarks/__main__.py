"""`python -m benchmarks`: takes turns between FlowKit and hand-written programs, and prints what each has used."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks import (
    actions,
    admission,
    batches,
    external,
    floors,
    flows,
    large,
    nodes,
    report,
    shards,
    streaming,
)
from benchmarks.figures import Result, result
from benchmarks.latencies import Latency
from benchmarks.processes import Processes, counted_stack
from benchmarks.rows import ROUNDS, Group, Opened, Row, Setting, Sides, measure

_MODULES = (nodes, batches, streaming, external, flows, actions, shards, admission, large)
GROUPS: tuple[Group, ...] = (*(module.GROUP for module in _MODULES), *floors.GROUPS)


def main(
    rounds: Annotated[int, typer.Option(help="Samples per side; long rows take fewer.")] = ROUNDS,
    out: Annotated[Path, typer.Option(help="Write every sample to this file as JSON.")] = Path(
        "benchmarks/results/latest.json"
    ),
    only: Annotated[str, typer.Option(help="Only rows with this text in their name.")] = "",
    rows: Annotated[str, typer.Option(help="`all` for all rows, otherwise those that have a target.")] = "",
) -> None:
    """Measure both sides of every row in turn, and print their ratios; takes about six minutes."""
    groups = [replace(group, rows=_chosen(group, only, with_all=rows == "all")) for group in GROUPS]
    with counted_stack() as (processes, folder):
        results = uvloop.run(_measure([each for each in groups if each.rows], processes, folder, rounds))
    report.publish(results, out, "FlowKit compared with hand-written programs: medians of paired rounds")


def _chosen(group: Group, only: str, *, with_all: bool) -> tuple[Row | Latency, ...]:
    """Return the rows of a group that are measured: those with a target, all, or those with a text in their name."""
    return tuple(row for row in group.rows if only in row.name and (row.always or with_all or only))


async def _measure(groups: list[Group], processes: Processes, folder: Path, rounds: int) -> list[Result]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    setting, results = Setting(mongo=mongo, processes=processes, folder=folder), []
    for group in groups:
        async with group.opened(setting) as opened:
            for row in group.rows:
                results.append(await _result(row, opened[row.name], processes, rounds))
                report.show(results[-1])
    return results


async def _result(row: Row | Latency, opened: Opened, processes: Processes, rounds: int) -> Result:
    if isinstance(opened, Sides):
        assert isinstance(row, Row)
        return result(await measure(row, opened, processes, min(rounds, row.rounds)))
    assert isinstance(row, Latency)
    began = time.monotonic()
    return row.result(await opened(), time.monotonic() - began)


if __name__ == "__main__":
    typer.run(main)
