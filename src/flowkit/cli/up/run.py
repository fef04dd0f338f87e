"""`flowkit up` at work: starts and stops what the plan says. What shows it is imported once that runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.up.exports import told_to_programs
from flowkit.cli.up.processes import processes
from flowkit.local.data_folder import state_folder
from flowkit.local.errors import ServerEnded
from flowkit.local.lifecycle import start_together, stop_together

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.cli.up.plan import Plan
    from flowkit.cli.up.processes import Processes
    from flowkit.local.process import ServerProcess


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
