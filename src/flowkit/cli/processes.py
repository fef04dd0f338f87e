"""`flowkit engine`, `flowkit bridge` and `flowkit worker`, which run until SIGINT or SIGTERM and then stop
gracefully."""

from typing import Annotated, Any

import typer

from flowkit.cli.loading import (
    load_config,
)
from flowkit.cli.options import (
    DEFAULT_DATABASE,
    DEFAULT_HEALTH_HOST,
    DEFAULT_MONGO_URL,
    Check,
    Functions,
    HealthHost,
    HealthOptions,
    HealthPath,
    HealthPort,
    HostedRoles,
    MongoDatabase,
    MongoUrl,
    Processes,
    Queue,
    Verbose,
    Where,
)
from flowkit.cli.output import log_processes
from flowkit.cli.replicas import run_processes
from flowkit.cli.running import EngineCommand, WorkerCommand, run_until_stopped
from flowkit.core.loops import run


def engine(
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    config: Annotated[str | None, typer.Option(help="JSON file with CoordinatorConfig settings.")] = None,
    functions: Functions = None,
    roles: HostedRoles = None,
    processes: Processes = 1,
    health: HealthPath = None,
    health_port: HealthPort = None,
    health_host: HealthHost = DEFAULT_HEALTH_HOST,
    check: Check = False,
    verbose: Verbose = False,
) -> int:
    """Run an engine, which schedules the nodes of tasks. Any number of engines can share a queue."""
    command = EngineCommand(
        where=Where(mongo_url=mongo_url, database=database, queue=queue),
        config=config,
        functions=functions or [],
        handlers=roles or [],
        verbose=verbose,
    )
    if check:
        command.load()
        return 0
    return run_processes(processes, command, HealthOptions(file=health, port=health_port, host=health_host))


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
            process = BridgeRunner(db=db, cfg=settings, client=await servers.connect_temporal())
            served = ", ".join(process.roles)
            summary = (
                f"bridge connects {served} on queue {settings.queue} to Kafka at {settings.kafka_bootstrap}"
            )
            await run_until_stopped(process, summary, reports)

    run(run_bridge())


def worker(
    handlers: Annotated[list[str], typer.Argument(help="Handlers, as module:CLASS or module:object.")],
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", help="Run only this role of the handlers. Can be repeated."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent attempts for each role, in each process.  [default: 1]"),
    ] = None,
    processes: Processes = 1,
    config: Annotated[str | None, typer.Option(help="JSON file with WorkerConfig settings.")] = None,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    health: HealthPath = None,
    health_port: HealthPort = None,
    health_host: HealthHost = DEFAULT_HEALTH_HOST,
    check: Check = False,
    verbose: Verbose = False,
) -> int:
    """Run a worker for the roles of the given handlers."""
    command = WorkerCommand(
        where=Where(mongo_url=mongo_url, database=database, queue=queue),
        config=config,
        handlers=handlers,
        roles=roles or [],
        concurrency=concurrency,
        verbose=verbose,
    )
    if check:
        command.load()
        return 0
    return run_processes(processes, command, HealthOptions(file=health, port=health_port, host=health_host))
