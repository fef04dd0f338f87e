"""Running `flowkit up`: start the processes of the plan, show them, stop them."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.up.plan import script_exports
from flowkit.cli.up.processes import create_processes, write_config
from flowkit.local.data_folder import data_folder
from flowkit.local.errors import DevServerError
from flowkit.local.process import start_all, stop_all
from flowkit.text import shell_word

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.cli.up.plan import UpPlan
    from flowkit.cli.up.processes import Processes
    from flowkit.local.process import ServerProcess


def run(plan: UpPlan) -> None:
    """Start all processes, show them until a signal arrives, and stop them.

    Raises a DevServerError if a process does not start or exits unexpectedly.
    """
    _interrupt_on_sigterm()
    try:
        with data_folder(plan.options.data) as folder:
            _run_in(plan, folder)
    except DevServerError as error:
        if error.keeps_data:
            output.note(
                f"data and logs kept in {folder}; `flowkit up --data {shell_word(str(folder))}` continues with them"
            )
        raise
    except KeyboardInterrupt:
        output.note("interrupted during startup; all started processes are stopped")
        raise
    outcome = f"kept in {folder}" if plan.options.data else "removed"
    output.note(f"all processes stopped; data and logs {outcome}")


def _run_in(plan: UpPlan, folder: Path) -> None:
    for note in plan.notes:
        output.note(note)
    write_config(plan, folder)
    processes = create_processes(plan, folder)
    try:
        _start(processes)
        _print_exports(plan, processes)
        _monitor(plan, processes, folder)
    except DevServerError as error:
        if error.keeps_data:
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


def _print_exports(plan: UpPlan, processes: Processes) -> None:
    """Print the addresses for a program that reads stdout; on a terminal, the panel shows them."""
    if not output.console().is_terminal:
        for line in script_exports(plan, os.environ, processes.exports):
            output.echo(line)
        sys.stdout.flush()


def _monitor(plan: UpPlan, processes: Processes, folder: Path) -> None:
    from flowkit.cli.up.monitor import monitor  # imported late, so that the servers start sooner

    monitor(plan, processes, folder)


def _stop(processes: Processes) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_immediately)
    names = [process.name for process in reversed(processes.all) if process.running]
    if names:
        output.note(f"stopping {', '.join(names)}")
    stop_all(processes.workers)
    stop_all([*([processes.bridge] if processes.bridge else []), *processes.products])
    stop_all([processes.engine] if processes.engine else [])
    stop_all(processes.servers)


def _exit_immediately(*_: object) -> NoReturn:
    """Exit on a second signal. This closes the pipes to the supervisors, which then stop the processes."""
    output.note("interrupted again; remaining processes exit within 15 seconds")
    os._exit(Exit.INTERRUPTED)
