"""`flowkit engine`, `flowkit bridge` and `flowkit worker`, which run until SIGINT or SIGTERM and then stop
gracefully."""

from typing import Annotated, Any

import typer

from flowkit.cli.health import measure
from flowkit.cli.loading import (
    load_config,
)
from flowkit.cli.options import (
    After,
    Check,
    DeploymentOptions,
    Functions,
    HealthOptions,
    HostedRoles,
    Processes,
    Verbose,
    with_options,
)
from flowkit.cli.output import log_processes
from flowkit.cli.replicas import run_processes
from flowkit.cli.running import EngineCommand, WorkerCommand, run_until_stopped
from flowkit.core.loops import run


@with_options
def engine(
    flows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FLOW]...",
            help="Flows, as module:flow. The engine runs their functions, and hosts their inline handlers.",
        ),
    ] = None,
    *,
    where: DeploymentOptions,
    config: Annotated[
        str | None, typer.Option(help="JSON or YAML file with CoordinatorConfig settings.")
    ] = None,
    page_url: Annotated[
        str | None,
        typer.Option(
            help="Address of the page, to which the details of tasks in Temporal's Web UI link. (FLOWKIT_PAGE_URL)"
        ),
    ] = None,
    functions: Functions = None,
    roles: HostedRoles = None,
    processes: Processes = 1,
    reports: HealthOptions,
    check: Check = False,
    after: After = None,
    verbose: Verbose = False,
) -> int:
    """Run an engine, which schedules the nodes of tasks. Any number of engines can share a queue."""
    command = EngineCommand(
        where=where,
        config=config,
        page_url=page_url,
        functions=functions or [],
        handlers=roles or [],
        flows=flows or [],
        after=after,
        verbose=verbose,
    )
    if check:
        command.load()
        return 0
    return run_processes(processes, command, reports)


@with_options
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
    config: Annotated[
        str | None, typer.Option(help="JSON or YAML file with CoordinatorConfig settings.")
    ] = None,
    *,
    where: DeploymentOptions,
    reports: HealthOptions,
    verbose: Verbose = False,
) -> None:
    """Run a bridge, which lets external workers run nodes through Kafka. Any number of bridges can serve a role."""
    log_processes(verbose)
    given: dict[str, Any] = {"queue": where.queue, "kafka_bootstrap": kafka, "worker_types": roles or None}
    settings = load_config(config, {name: value for name, value in given.items() if value is not None})

    async def run_bridge() -> None:
        from flowkit.bridge_runner import BridgeRunner
        from flowkit.cli import servers

        metrics = measure(reports, "bridge", settings.queue)
        async with servers.database(where) as db:
            process = BridgeRunner(db=db, cfg=settings, client=await servers.connect_temporal(metrics))
            served = ", ".join(process.roles)
            summary = (
                f"bridge connects {served} on queue {settings.queue} to Kafka at {settings.kafka_bootstrap}"
            )
            await run_until_stopped(process, summary, reports, metrics)

    run(run_bridge())


@with_options
def worker(
    handlers: Annotated[
        list[str],
        typer.Argument(help="Handlers, as module:CLASS or module:object, or flows, as module:flow."),
    ],
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", help="Run only this role of the handlers. Can be repeated."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent attempts for each role, in each process.  [default: 1]"),
    ] = None,
    processes: Processes = 1,
    config: Annotated[str | None, typer.Option(help="JSON or YAML file with WorkerConfig settings.")] = None,
    *,
    where: DeploymentOptions,
    reports: HealthOptions,
    check: Check = False,
    after: After = None,
    verbose: Verbose = False,
) -> int:
    """Run a worker for the roles of the given handlers, and of the handlers of the given flows."""
    command = WorkerCommand(
        where=where,
        config=config,
        handlers=handlers,
        roles=roles or [],
        concurrency=concurrency,
        after=after,
        verbose=verbose,
    )
    if check:
        command.load()
        return 0
    return run_processes(processes, command, reports)
