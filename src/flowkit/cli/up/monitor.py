"""Showing the processes of `flowkit up` until a signal arrives or a process exits unexpectedly."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from flowkit.cli import output
from flowkit.cli.options import DEFAULT_MONGO_URL, Where
from flowkit.cli.servers import database
from flowkit.cli.up.exports import terminal_exports
from flowkit.cli.up.panel import UpInfo, screen
from flowkit.cli.up.status import ProcessRow, StatusPoller
from flowkit.connection import temporal_address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flowkit.cli.up.panel import Screen
    from flowkit.cli.up.plan import Plan
    from flowkit.cli.up.processes import Processes
    from flowkit.local.process import FlowkitProcess, LocalServer, ServerProcess

_REFRESH_SEC = 1.0

MonitoredRow = tuple[ProcessRow, "ServerProcess | None"]


def monitor(plan: Plan, processes: Processes, folder: Path) -> None:
    """Show the processes until SIGINT or SIGTERM. Raises ServerEnded if a process exits unexpectedly."""
    info = UpInfo(
        folder=str(folder),
        kept=plan.options.data is not None,
        runs_tasks=bool(processes.flowkit),
        runs_workers=bool(processes.workers),
        exports=tuple(terminal_exports(plan, os.environ, processes.exports)),
    )
    os.environ.update(processes.exports)
    where = Where(
        mongo_url=processes.exports.get("MONGO_URL", DEFAULT_MONGO_URL), database=plan.options.database
    )
    with screen(output.console(), output.console(stderr=True), info) as shown:
        asyncio.run(_monitor(create_rows(plan, processes), where, processes.all, shown))


async def _monitor(
    rows: list[MonitoredRow], where: Where, processes: Sequence[ServerProcess], shown: Screen
) -> None:
    async with database(where) as db:
        await _refresh_until_signal(StatusPoller(rows, db), processes, shown)


async def _refresh_until_signal(
    poller: StatusPoller, processes: Sequence[ServerProcess], shown: Screen
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    while not stopped.done():
        shown.show(await poller.poll())
        for process in processes:
            if not process.running:
                raise process.exit_error()
        await asyncio.wait([stopped], timeout=_REFRESH_SEC)


def create_rows(plan: Plan, processes: Processes) -> list[MonitoredRow]:
    """Return a row for each server and process, with the local process behind it, if any."""
    rows: list[MonitoredRow] = []
    if plan.uses_temporal:
        rows.append(_server_row("temporal", temporal_address()[0], processes.temporal))
    if processes.temporal is not None:
        rows.append((ProcessRow(name="Web UI", address=processes.temporal.ui_url), processes.temporal))
    if plan.uses_mongo:
        rows.append(_server_row("mongo", processes.exports["MONGO_URL"], processes.mongo))
    if plan.uses_kafka:
        rows.append(_server_row("kafka", processes.exports["KAFKA_BOOTSTRAP_SERVERS"], processes.kafka))
    return rows + [(ProcessRow(name=each.name, detail=_summary(each)), each) for each in processes.flowkit]


def _summary(process: FlowkitProcess) -> str:
    """Return what the process runs, without its leading `engine`, `bridge` or `worker`."""
    return process.summary.partition(" ")[2]


def _server_row(name: str, address: str, server: LocalServer | None) -> MonitoredRow:
    detail = f"{server.program.source}: {server.program.description}" if server else "external server"
    return ProcessRow(name=name, address=address, detail=detail), server
