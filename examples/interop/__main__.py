"""`python -m interop`: run external workers of any environment, unchanged, through tasks with known results."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flowkit.local import Kafka, Stack
from interop.checks import Checks
from interop.deployment import Deployment
from interop.errors import InteropError
from interop.process import worker_command

KEEP_LINES = 30
"""How much of a worker's log to show after a failure."""

console = Console()


def main(
    python: Annotated[
        str,
        typer.Option(
            envvar="WORKER_PYTHON", help="Python of the worker's environment. Default: FlowKit's own worker."
        ),
    ] = "",
    command: Annotated[
        str, typer.Option(envvar="WORKER_COMMAND", help="Command of the worker, instead of public_worker.py.")
    ] = "",
) -> None:
    """Start servers, an engine with a bridge, and external workers; run all checks; print one line for each."""
    workers = worker_command(python, command)
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack(Path(folder), keeps_data=False) as stack,
        Kafka(Path(folder)) as kafka,
    ):
        console.print(f"worker: {' '.join(workers)}", soft_wrap=True)
        try:
            asyncio.run(_check(Path(folder), workers, stack, kafka.bootstrap_servers))
        except InteropError as error:
            console.print(f"[red]failed[/red] {error}", soft_wrap=True)
            console.print("\n".join(_last_lines(Path(folder))), markup=False, soft_wrap=True)
            raise typer.Exit(1) from None
    console.print("all checks passed")


async def _check(folder: Path, workers: list[str], stack: Stack, bootstrap: str) -> None:
    async with Deployment(folder, workers, stack, bootstrap) as deployment:
        await Checks(deployment, console.print).run()


def _last_lines(folder: Path) -> list[str]:
    """Return the end of the logs of the workers."""
    return [
        line
        for log in sorted(folder.glob("worker-*.log"))
        for line in [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-KEEP_LINES:]]
    ]


if __name__ == "__main__":
    typer.run(main)
