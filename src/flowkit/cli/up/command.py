"""The command `flowkit up`. It imports what it needs when it runs, so that other commands start fast."""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.options import (
    DEFAULT_DATABASE,
    Functions,
    HostedRoles,
    MongoDatabase,
    PortBase,
    Queue,
    Verbose,
)
from flowkit.cli.output import log_warnings
from flowkit.config import DEFAULT_QUEUE
from flowkit.products import is_ready


def up(
    handlers: Annotated[
        list[str] | None,
        typer.Argument(
            help="Handlers for the workers, as module:CLASS or module:object, or flows, as module:flow. Without "
            "handlers, no worker starts. The engine runs the functions and inline handlers of flows."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Start only these: temporal, mongo, engine, bridge, gateway, admission, page, worker. "
            "Separate with commas, or repeat."
        ),
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(
            help="Role that external workers serve through Kafka; starts a broker and a bridge. "
            "Separate with commas, or repeat."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that keeps data and logs. Without it, a temporary folder.")
    ] = None,
    port_base: PortBase = None,
    functions: Functions = None,
    roles: HostedRoles = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of worker processes.  [default: 1]")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent attempts for each role, in each worker.  [default: 1]"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="JSON or YAML file with CoordinatorConfig and WorkerConfig settings.")
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Restart engine and workers when their Python code or --config changes."
        ),
    ] = False,
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Start a gateway, which serves flows by JSON-RPC (docs/flows.md)."),
    ] = False,
    admission: Annotated[
        bool,
        typer.Option(
            "--admission",
            help="Start a process that starts requests of the admission queue (docs/admission.md).",
        ),
    ] = False,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Start the live page of tasks (docs/ui.md).  [default: if it is installed, and --only is not given]",
            show_default=False,
        ),
    ] = None,
    queue: Queue = None,
    database: MongoDatabase = DEFAULT_DATABASE,
    install: Annotated[bool, typer.Option("--install", help="Install the servers and exit.")] = False,
    verbose: Verbose = False,
) -> None:
    """Run Temporal with its Web UI, MongoDB, an engine and workers until Ctrl-C. For development."""
    log_warnings(verbose)
    from flowkit.cli.loading import check_file, check_names, find_flows, look_in_current_folder
    from flowkit.cli.up.plan import UpOptions, UpPart, make_plan, parse_external, parse_parts
    from flowkit.payload_converter import configured_converter

    wanted = {"gateway": gateway, "admission": admission, "page": _wants_page(page, only)}
    external_roles = parse_external(external or [])
    if install:
        return _install([*(parse_parts(only or []) or UpPart), *(["kafka"] if external_roles else [])])
    options = UpOptions(
        handlers=tuple(handlers or ()),
        only=tuple(only or ()),
        data=data,
        port_base=port_base,
        functions=tuple(functions or ()),
        roles=tuple(roles or ()),
        external=external_roles,
        workers=workers,
        concurrency=concurrency,
        queue=queue or DEFAULT_QUEUE,
        database=database,
        config=config,
        reload=reload,
        products=tuple(name for name, is_wanted in wanted.items() if is_wanted),
        verbose=verbose,
    )
    make_plan(
        options, os.environ
    )  # Options that contradict each other are an error before anything is imported.
    check_names([*options.handlers, *options.roles, *_list_targets(functions or [])])
    look_in_current_folder()
    flows = find_flows(handlers or [])
    served = tuple(name for name in options.handlers if name not in flows or flows[name].handlers)
    plan = make_plan(replace(options, handlers=served, flows=tuple(flows)), os.environ)
    if config is not None:
        check_file(config)
    configured_converter()
    from flowkit.cli.up.run import run

    return run(plan)


def _wants_page(page: bool | None, only: list[str] | None) -> bool:
    """Return whether the options ask for the page."""
    return (not only and is_ready("page")) if page is None else page


def _list_targets(functions: list[str]) -> list[str]:
    """Return the part after `NAME=` of each function. The engine reports a function that has no name."""
    return [target for _, separator, target in (text.partition("=") for text in functions) if separator]


def _install(parts: Collection[str]) -> None:
    from flowkit.local import Kafka, MongoServer, TemporalServer
    from flowkit.local.kafka import kafka_program
    from flowkit.local.mongo import mongo_program
    from flowkit.local.sources import allowed_sources
    from flowkit.local.temporal import temporal_program

    servers = ((TemporalServer, temporal_program), (MongoServer, mongo_program), (Kafka, kafka_program))
    for server, find_program in servers:
        if server.name in parts:
            server.install()
            found = find_program(allowed_sources())
            output.echo(f"{server.name}: {found.description} ({found.source})")
