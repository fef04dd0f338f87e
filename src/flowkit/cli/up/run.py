"""Running `flowkit up`: start the processes of the plan, show them, stop them."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.options import DEFAULT_MONGO_URL
from flowkit.cli.up.plan import Part, make_exports, script_exports
from flowkit.local import process as flowkit_process
from flowkit.local.data_folder import data_folder
from flowkit.local.errors import ServerEnded
from flowkit.local.kafka import Kafka
from flowkit.local.mongo import MongoServer
from flowkit.local.process import start_all, stop_all
from flowkit.local.temporal import TemporalServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flowkit.cli.up.plan import Plan
    from flowkit.local.process import FlowkitProcess, LocalServer, ServerProcess


def run(plan: Plan) -> None:
    """Start all processes, show them until a signal arrives, and stop them.

    Raises a DevServerError if a process does not start or exits unexpectedly.
    """
    _interrupt_on_sigterm()
    try:
        with data_folder(plan.options.data) as folder:
            _run_in(plan, folder)
    except KeyboardInterrupt:
        output.note("interrupted during startup; all started processes are stopped")
        raise
    outcome = f"kept in {folder}" if plan.options.data else "removed"
    output.note(f"all processes stopped; data and logs {outcome}")


def _run_in(plan: Plan, folder: Path) -> None:
    processes = create_processes(plan, folder)
    try:
        _start(processes)
        _print_exports(plan, processes)
        _monitor(plan, processes, folder)
    except ServerEnded as error:
        output.note(error.headline.partition(";")[0])
        raise
    finally:
        _stop(processes)


def _interrupt_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _start(processes: Processes) -> None:
    start_time = time.monotonic()
    for server in processes.servers:
        server.program.install()  # in sequence, because each shows its progress

    def report_started(process: ServerProcess) -> None:
        output.note(
            f"{process.name} is ready after {time.monotonic() - start_time:.1f} s; log: {process.log}"
        )

    start_all(processes.servers, report_started)
    start_all(processes.flowkit, report_started)


def _print_exports(plan: Plan, processes: Processes) -> None:
    """Print the addresses for a program that reads stdout; on a terminal, the panel shows them."""
    if not output.console().is_terminal:
        for line in script_exports(plan, os.environ, processes.exports):
            output.echo(line)
        sys.stdout.flush()


def _monitor(plan: Plan, processes: Processes, folder: Path) -> None:
    from flowkit.cli.up.monitor import monitor  # imported late, so that the servers start sooner

    monitor(plan, processes, folder)


def _stop(processes: Processes) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_immediately)
    names = [process.name for process in reversed(processes.all) if process.running]
    if names:
        output.note(f"stopping {', '.join(names)}")
    stop_all(processes.workers)
    stop_all([processes.bridge] if processes.bridge else [])
    stop_all([processes.engine] if processes.engine else [])
    stop_all(processes.servers)


def _exit_immediately(*_: object) -> NoReturn:
    """Exit on a second signal. This closes the pipes to the supervisors, which then stop the processes."""
    output.note("interrupted again; remaining processes exit within 15 seconds")
    os._exit(Exit.INTERRUPTED)


@dataclass(kw_only=True)
class Processes:
    """The processes that one `flowkit up` starts."""

    temporal: TemporalServer | None
    mongo: MongoServer | None
    kafka: Kafka | None = None
    exports: Mapping[str, str]
    """Environment variables with which other programs reach them."""
    engine: FlowkitProcess | None = None
    bridge: FlowkitProcess | None = None
    """Connects the engine to external workers."""
    workers: list[FlowkitProcess] = field(default_factory=list)

    @property
    def servers(self) -> list[LocalServer]:
        """The servers, which all other processes need."""
        return [server for server in (self.temporal, self.mongo, self.kafka) if server is not None]

    @property
    def flowkit(self) -> list[FlowkitProcess]:
        """The engine, the bridge and the workers."""
        return [*(each for each in (self.engine, self.bridge) if each is not None), *self.workers]

    @property
    def all(self) -> list[ServerProcess]:
        """All processes, in start order."""
        return [*self.servers, *self.flowkit]


def create_processes(plan: Plan, folder: Path) -> Processes:
    """Create the processes of a plan, with data and logs in a folder. Starts nothing."""
    processes = _create_servers(plan, folder)
    options, verbose = plan.options, ["--verbose"] if plan.options.verbose else []
    if Part.ENGINE in plan.parts:
        processes.engine = flowkit_process.engine_process(
            folder,
            functions=options.functions,
            roles=options.roles,
            options=verbose,
            environment=processes.exports,
        )
    if plan.starts_bridge:
        processes.bridge = flowkit_process.bridge_process(
            folder, options.external, options=verbose, environment=processes.exports
        )
    if Part.WORKER in plan.parts:
        slots = ["--concurrency", str(options.concurrency)] if options.concurrency else []
        processes.workers = flowkit_process.worker_processes(
            folder,
            options.handlers,
            count=options.workers or 1,
            options=[*verbose, *slots],
            environment=processes.exports,
        )
    return processes


def _create_servers(plan: Plan, folder: Path) -> Processes:
    ports = plan.ports
    temporal = mongo = kafka = None
    if plan.starts_temporal:
        temporal = TemporalServer(
            folder, port=ports.temporal, ui_port=ports.ui, http_port=ports.temporal_http
        )
    if plan.starts_mongo:
        mongo = MongoServer(folder, port=ports.mongo)
    if plan.starts_kafka:
        kafka = Kafka(folder, port=ports.kafka)
    address = temporal.address if temporal else os.environ.get("TEMPORAL_ADDRESS")
    url = mongo.url if mongo else os.environ.get("MONGO_URL") or DEFAULT_MONGO_URL
    brokers = kafka.bootstrap_servers if kafka else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    exports = make_exports(plan, address, url, brokers)
    return Processes(temporal=temporal, mongo=mongo, kafka=kafka, exports=exports)
