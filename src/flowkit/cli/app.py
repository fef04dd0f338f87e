"""`flowkit engine` and `flowkit worker`: long-running processes that stop gently on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console

from flowkit import version
from flowkit.cli.loading import load_config, load_functions, load_handlers
from flowkit.config import DEFAULT_QUEUE, WorkerConfig
from flowkit.coordinator import Coordinator
from flowkit.errors import ConfigError, FlowKitError
from flowkit.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Coroutine

app = typer.Typer(
    name="flowkit",
    help="Run FlowKit's processes. TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and MONGO_URL say where the servers are.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_console = Console(stderr=True, highlight=False)

EXIT_ERROR = 1
"""Something that the message names went wrong."""

MongoUrl = Annotated[str, typer.Option(envvar="MONGO_URL", help="MongoDB's address.")]
MongoDatabase = Annotated[str, typer.Option("--database", envvar="MONGO_DATABASE", help="Its database.")]
Queue = Annotated[
    str | None, typer.Option(envvar="FLOWKIT_QUEUE", help="Task queue of the engine; workers use it too.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]


class Process(Protocol):
    """What both kinds of process offer."""

    async def start(self) -> None:
        """Start polling."""

    async def stop(self) -> None:
        """Stop gently."""

    async def wait_stopped(self) -> None:
        """Wait until it ends by itself."""


def main() -> None:
    """Run the command line; errors of ours are one line and exit code 1."""
    try:
        app()
    except FlowKitError as error:
        _console.print(f"[red]flowkit:[/red] {error}", soft_wrap=True)
        sys.exit(EXIT_ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        Console().print(f"flowkit {version.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def engine(
    mongo_url: MongoUrl = "mongodb://localhost:27017",
    database: MongoDatabase = "flowkit",
    queue: Queue = None,
    config: Annotated[str | None, typer.Option(help="JSON file with CoordinatorConfig settings.")] = None,
    functions: Annotated[
        list[str] | None, typer.Option("--function", help="Coordinator function, as NAME=module:function.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run an engine: it walks the graphs of tasks. Any number may run side by side."""
    _log(verbose)

    async def serve() -> None:
        cfg = load_config(config, {"queue": queue} if queue else {})
        db = _database(mongo_url, database)
        await _until_stopped(Coordinator(db=db, cfg=cfg, adapters=load_functions(functions or [])))

    _run(serve())


@app.command()
def worker(
    handlers: Annotated[list[str], typer.Argument(help="Handlers, as module:CLASS or module:object.")],
    mongo_url: MongoUrl = "mongodb://localhost:27017",
    database: MongoDatabase = "flowkit",
    queue: Queue = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Attempts of each role at once.")] = 1,
    verbose: Verbose = False,
) -> None:
    """Run a worker for the roles of the given handlers."""
    _log(verbose)

    async def serve() -> None:
        loaded = load_handlers(handlers)
        cfg = WorkerConfig(roles=list(loaded), queue=queue or DEFAULT_QUEUE, max_concurrent=concurrency)
        await _until_stopped(Worker(db=_database(mongo_url, database), cfg=cfg, handlers=loaded))

    _run(serve())


def _run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(work)


async def _until_stopped(process: Process) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await process.start()
    _console.print("[green]running[/green]; Ctrl-C stops gently")
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(process.wait_stopped())]
    done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await process.stop()
    waits[0].cancel()
    if waits[1] in done:
        waits[1].result()


def _database(url: str, name: str) -> object:
    from motor.motor_asyncio import AsyncIOMotorClient
    from pymongo.errors import PyMongoError

    try:
        client: AsyncIOMotorClient[dict[str, object]] = AsyncIOMotorClient(
            url, tz_aware=True, serverSelectionTimeoutMS=5_000
        )
        return client[name]
    except PyMongoError as error:
        raise ConfigError(f"MongoDB's address {url!r} or database {name!r} cannot be used: {error}") from None


def _log(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
