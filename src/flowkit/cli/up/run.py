"""`flowkit up` at work: starts and stops what the plan says. What shows it is imported once that runs."""

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
from flowkit.cli.up.plan import Part, exported, told_to_programs
from flowkit.local import flowkit_process
from flowkit.local.data_folder import state_folder
from flowkit.local.errors import ServerEnded
from flowkit.local.lifecycle import start_together, stop_together
from flowkit.local.mongo import MongoServer
from flowkit.local.temporal import TemporalServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flowkit.cli.up.plan import Plan
    from flowkit.local.flowkit_process import FlowkitProcess
    from flowkit.local.process import ServerProcess
    from flowkit.local.server import LocalServer


@dataclass(kw_only=True)
class Processes:
    """What one `flowkit up` starts."""

    temporal: TemporalServer | None
    mongo: MongoServer | None
    exports: Mapping[str, str]
    """The environment in which other programs find them."""
    engine: FlowkitProcess | None = None
    workers: list[FlowkitProcess] = field(default_factory=list)

    @property
    def servers(self) -> list[LocalServer]:
        """Those that all else needs."""
        return [server for server in (self.temporal, self.mongo) if server is not None]

    @property
    def flowkit(self) -> list[FlowkitProcess]:
        """FlowKit's own."""
        return [*([self.engine] if self.engine else []), *self.workers]

    @property
    def all(self) -> list[ServerProcess]:
        """All, in the order of their start."""
        return [*self.servers, *self.flowkit]


def processes(plan: Plan, folder: Path) -> Processes:
    """What is to be started, with data and logs in a folder; nothing is started yet."""
    ports, wanted = plan.ports, plan.wanted
    temporal = mongo = None
    if plan.starts_temporal:
        temporal = TemporalServer(
            folder, port=ports.temporal, ui_port=ports.ui, http_port=ports.temporal_http
        )
    if plan.starts_mongo:
        mongo = MongoServer(folder, port=ports.mongo)
    address = temporal.address if temporal else os.environ.get("TEMPORAL_ADDRESS")
    url = mongo.url if mongo else os.environ.get("MONGO_URL") or DEFAULT_MONGO_URL
    made = Processes(temporal=temporal, mongo=mongo, exports=exported(plan, address, url))
    options = ["--verbose"] if wanted.verbose else []
    if Part.ENGINE in plan.parts:
        made.engine = flowkit_process.engine(
            folder, functions=wanted.functions, options=options, environment=made.exports
        )
    if Part.WORKER in plan.parts:
        slots = ["--concurrency", str(wanted.concurrency)] if wanted.concurrency else []
        made.workers = flowkit_process.workers(
            folder,
            wanted.handlers,
            count=wanted.workers or 1,
            options=[*options, *slots],
            environment=made.exports,
        )
    return made


def up(plan: Plan) -> None:
    """Start everything, show it until a signal, stop it. A DevServerError tells what did not start, or has ended."""
    _let_sigterm_interrupt()
    try:
        with state_folder(plan.wanted.data) as folder:
            _run(plan, folder)
    except KeyboardInterrupt:
        output.note("interrupted before everything ran; what was started is stopped")
        raise
    kept = f"kept in {folder}" if plan.wanted.data else "removed"
    output.note(f"all stopped; data and logs were {kept}")


def _run(plan: Plan, folder: Path) -> None:
    started = processes(plan, folder)
    try:
        _start(started)
        _announce(started)
        _follow(plan, started, folder)
    except ServerEnded as ended:
        output.note(ended.headline.partition(";")[0])
        raise
    finally:
        _stop(started)


def _let_sigterm_interrupt() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _start(started: Processes) -> None:
    begun = time.monotonic()
    for server in started.servers:
        server.program.get()  # one after the other, because each shows its progress

    def told(process: ServerProcess) -> None:
        output.note(f"{process.name} runs after {time.monotonic() - begun:.1f} s; log: {process.log}")

    start_together(started.servers, told)
    start_together(started.flowkit, told)


def _announce(started: Processes) -> None:
    """Tell the addresses to a program that reads our output; a person sees them on the panel."""
    if not output.console().is_terminal:
        for line in told_to_programs(os.environ, started.exports):
            output.say(line)
        sys.stdout.flush()


def _follow(plan: Plan, started: Processes, folder: Path) -> None:
    from flowkit.cli.up.monitor import follow

    follow(plan, started, folder)


def _stop(started: Processes) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_at_once)
    running = [process.name for process in reversed(started.all) if process.running]
    if running:
        output.note(f"stopping {', '.join(running)}")
    stop_together(started.workers)
    stop_together([started.engine] if started.engine else [])
    stop_together(started.servers)


def _leave_at_once(*_: object) -> NoReturn:
    """A second signal: nobody waits for the processes any more, each of which is told by the end of a pipe."""
    output.note("interrupted again; what still runs ends by itself within 15 seconds")
    os._exit(Exit.INTERRUPTED)
