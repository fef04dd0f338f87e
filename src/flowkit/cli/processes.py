"""`flowkit engine`, `flowkit bridge` and `flowkit worker`, which run until SIGINT or SIGTERM and then stop gracefully."""

import asyncio
import gc
import signal
from typing import Annotated, Any, Protocol

import typer

from flowkit.attempt.background import Health
from flowkit.cli import output
from flowkit.cli.health_endpoint import health_endpoint
from flowkit.cli.health_file import health_file
from flowkit.cli.loading import (
    chosen_roles,
    load_config,
    load_functions,
    load_handlers,
    load_worker_config,
)
from flowkit.cli.logs import log_processes
from flowkit.cli.options import (
    DEFAULT_DATABASE,
    DEFAULT_HEALTH_HOST,
    DEFAULT_MONGO_URL,
    Functions,
    HealthHost,
    HealthOptions,
    HealthPath,
    HealthPort,
    MongoDatabase,
    MongoUrl,
    Queue,
    Verbose,
    Where,
)
from flowkit.loops import run
from flowkit.ready_line import ready_line


class LongRunning(Protocol):
    """The common interface of `Coordinator`, `BridgeRunner` and `Worker`."""

    async def start(self) -> None:
        """Start polling."""

    async def stop(self) -> None:
        """Stop gracefully."""

    async def wait_stopped(self) -> None:
        """Wait until it stops on its own; raise its error."""

    def health(self) -> Health:
        """Return whether it runs, and how its background loops do."""


def engine(
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    config: Annotated[str | None, typer.Option(help="JSON file with CoordinatorConfig settings.")] = None,
    functions: Functions = None,
    health: HealthPath = None,
    health_port: HealthPort = None,
    health_host: HealthHost = DEFAULT_HEALTH_HOST,
    verbose: Verbose = False,
) -> None:
    """Run an engine, which schedules the nodes of tasks. Any number of engines can share a queue."""
    log_processes(verbose)
    settings = load_config(config, {"queue": queue} if queue else {})
    adapters = load_functions(functions or [])
    where = Where(mongo_url=mongo_url, database=database)
    reports = HealthOptions(file=health, port=health_port, host=health_host)

    async def run_engine() -> None:
        from flowkit.cli import servers
        from flowkit.coordinator import Coordinator

        async with servers.database(where) as db:
            client = await servers.temporal_client()
            process = Coordinator(
                db=db, cfg=settings, adapters=adapters, client=client, own_thread=bool(adapters)
            )
            await _run_until_stopped(process, f"engine polls queue {settings.queue}", reports)

    run(run_engine())


def bridge(
    roles: Annotated[
        list[str] | None,
        typer.Argument(
            help="Roles that external workers serve. Without them, those of worker_types.", metavar="ROLE…"
        ),
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(help="Addresses of Kafka, as host:port, separated by commas (KAFKA_BOOTSTRAP_SERVERS)."),
    ] = None,
    config: Annotated[str | None, typer.Option(help="JSON file with CoordinatorConfig settings.")] = None,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    health: HealthPath = None,
    health_port: HealthPort = None,
    health_host: HealthHost = DEFAULT_HEALTH_HOST,
    verbose: Verbose = False,
) -> None:
    """Run a bridge, which lets external workers run nodes through Kafka. Any number of bridges can serve a role."""
    log_processes(verbose)
    given: dict[str, Any] = {"queue": queue, "kafka_bootstrap": kafka, "worker_types": roles or None}
    settings = load_config(config, {name: value for name, value in given.items() if value is not None})
    where = Where(mongo_url=mongo_url, database=database)
    reports = HealthOptions(file=health, port=health_port, host=health_host)

    async def run_bridge() -> None:
        from flowkit.bridge_runner import BridgeRunner
        from flowkit.cli import servers

        async with servers.database(where) as db:
            process = BridgeRunner(db=db, cfg=settings, client=await servers.temporal_client())
            served = ", ".join(process.roles)
            summary = (
                f"bridge connects {served} on queue {settings.queue} to Kafka at {settings.kafka_bootstrap}"
            )
            await _run_until_stopped(process, summary, reports)

    run(run_bridge())


def worker(
    handlers: Annotated[list[str], typer.Argument(help="Handlers, as module:CLASS or module:object.")],
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", help="Run only this role of the handlers. Can be repeated."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent attempts for each role.  [default: 1]")
    ] = None,
    config: Annotated[str | None, typer.Option(help="JSON file with WorkerConfig settings.")] = None,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    health: HealthPath = None,
    health_port: HealthPort = None,
    health_host: HealthHost = DEFAULT_HEALTH_HOST,
    verbose: Verbose = False,
) -> None:
    """Run a worker for the roles of the given handlers."""
    log_processes(verbose)
    loaded = load_handlers(handlers)
    served = chosen_roles(loaded, roles or [])
    given: dict[str, Any] = {"roles": served, "queue": queue, "max_concurrent": concurrency}
    settings = load_worker_config(config, {name: value for name, value in given.items() if value is not None})
    where = Where(mongo_url=mongo_url, database=database)
    reports = HealthOptions(file=health, port=health_port, host=health_host)

    async def run_worker() -> None:
        from flowkit.cli import servers
        from flowkit.worker import Worker

        async with servers.database(where) as db:
            client = await servers.temporal_client()
            process = Worker(db=db, cfg=settings, handlers=loaded, client=client)
            summary = f"worker runs {', '.join(served)} on queue {settings.queue}"
            await _run_until_stopped(process, summary, reports)

    run(run_worker())


async def _run_until_stopped(process: LongRunning, summary: str, reports: HealthOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with health_endpoint(reports.host, reports.port, process.health):
        await process.start()
        _freeze_garbage_collector()
        output.note(ready_line(summary))
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(process.wait_stopped())]
        with health_file(reports.file, process.health):
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await process.stop()
    waits[0].cancel()
    if waits[1] in done:
        waits[1].result()


def _freeze_garbage_collector() -> None:
    """Exclude the objects of the startup from garbage collection: they live as long as the process."""
    gc.collect()
    gc.freeze()
