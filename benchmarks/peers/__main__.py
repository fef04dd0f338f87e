"""`python -m benchmarks.peers`: measure DBOS and Prefect in turns with FlowKit, and print what each has used."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient

from benchmarks import inline, report
from benchmarks.cases import by_flowkit
from benchmarks.nodes import QUEUE, ordinary_programs
from benchmarks.peers import compare
from benchmarks.peers.engines import ENGINES, missing
from benchmarks.processes import counted_stack
from benchmarks.rows import emptied
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect

if TYPE_CHECKING:
    from benchmarks.figures import Result
    from benchmarks.processes import Processes


def main(
    rounds: Annotated[int, typer.Option(help="Samples per side; some cases take fewer.")] = compare.ROUNDS,
    out: Annotated[Path, typer.Option(help="Write the samples to this file as JSON.")] = Path(
        "benchmarks/results/peers.json"
    ),
    only: Annotated[str, typer.Option(help="Only cases with this text in their name.")] = "",
    engine: Annotated[str, typer.Option(help="Only engines with this text in their name.")] = "",
) -> None:
    """Run the cases of roles in DBOS and Prefect, in turns with FlowKit, and print the ratios."""
    if problem := missing():
        report.console.print(problem, soft_wrap=True)
        raise typer.Exit(2)
    with counted_stack() as (processes, folder), processes.running(*ordinary_programs(), inline.program()):
        results = uvloop.run(_measure(processes, folder, engine, only, rounds))
    for each in results:
        report.console.print(report.processes(each))
    report.publish(results, out, "FlowKit compared with other engines that make the same writes per node")


async def _measure(processes: Processes, folder: Path, engine: str, only: str, rounds: int) -> list[Result]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    client, store = await connect(), TaskStore(mongo[compare.FLOWKIT])
    databases = [compare.FLOWKIT, *(engine.database for engine in ENGINES)]
    sides = [by_flowkit(TaskClient(client, store, queue=queue)) for queue in (QUEUE, inline.QUEUE)]
    setting = compare.Setting(
        processes=processes,
        ordinary=sides[0],
        inline=sides[1],
        clean=partial(emptied, mongo, databases),
        count=partial(compare.count, mongo),
        folder=folder,
        say=partial(report.console.print, soft_wrap=True),
    )
    return await compare.measure_all(setting, engine, only, rounds)


if __name__ == "__main__":
    typer.run(main)
