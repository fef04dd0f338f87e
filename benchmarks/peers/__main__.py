"""`python -m benchmarks.peers`: measure DBOS and Prefect in turns with FlowKit, and print one table."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from rich.console import Console

from benchmarks import inline
from benchmarks.cases import by_flowkit
from benchmarks.peers import compare
from benchmarks.peers.engines import ENGINES, missing
from benchmarks.processes import OPTIMIZING, flowkit, machine, process
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import connect
from flowkit.local import Stack

QUEUE = "benchmark"
WORKER = ("worker", "benchmarks.handler:OneBatch", "--queue", QUEUE, "--concurrency", "100")
COLLECTIONS = ("tasks", "artifacts", "metrics_raw", "stream_progress", "worker_events")

console = Console(width=160)


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
        console.print(problem, soft_wrap=True)
        raise typer.Exit(2)
    os.environ.setdefault("_JAVA_OPTIONS", OPTIMIZING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), keeps_data=False) as stack:
        os.environ.update(stack.exports)
        with ExitStack() as processes:
            for arguments in (["engine", "--queue", QUEUE], inline.command(), list(WORKER)):
                processes.enter_context(process(flowkit(*arguments)))
            results = uvloop.run(_measure(Path(folder), engine, only, rounds))
    console.print(compare.table(results))
    console.print(f"Measured on {machine()}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"figures: {out}")


async def _measure(folder: Path, engine: str, only: str, rounds: int) -> list[dict[str, Any]]:
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"])
    client, store = await connect(), TaskStore(mongo[compare.FLOWKIT])
    sides = [by_flowkit(TaskClient(client, store, queue=queue)) for queue in (QUEUE, inline.QUEUE)]
    setting = compare.Setting(
        ordinary=sides[0],
        inline=sides[1],
        clean=partial(_clean, mongo),
        count=partial(compare.count, mongo),
        folder=folder,
        say=partial(console.print, soft_wrap=True),
    )
    return await compare.measure(setting, engine, only, rounds)


async def _clean(mongo: Any) -> None:
    """Delete the documents of earlier samples, because MongoDB's stand-in scans all documents at every update."""
    for database in (compare.FLOWKIT, *(engine.database for engine in ENGINES)):
        for collection in COLLECTIONS:
            await mongo[database][collection].delete_many({})


if __name__ == "__main__":
    typer.run(main)
