"""Showing what `flowkit up` has started, until a signal comes or one of its processes ends by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

from flowkit.cli import output
from flowkit.cli.options import DEFAULT_MONGO_URL, Where
from flowkit.cli.servers import database, temporal_place
from flowkit.cli.up.exports import told_to_people
from flowkit.cli.up.panel import About, screen
from flowkit.cli.up.status import Row, Watcher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flowkit.cli.up.panel import Screen
    from flowkit.cli.up.plan import Plan
    from flowkit.cli.up.processes import Processes
    from flowkit.local.flowkit_process import FlowkitProcess
    from flowkit.local.process import ServerProcess
    from flowkit.local.server import LocalServer

_LOOK_EVERY_SEC = 1.0

Shown = tuple[Row, "ServerProcess | None"]


def follow(plan: Plan, started: Processes, folder: Path) -> None:
    """Show it until SIGINT or SIGTERM. ServerEnded when one of the processes ends by itself."""
    about = About(
        folder=str(folder),
        kept=plan.wanted.data is not None,
        runs_tasks=bool(started.flowkit),
        runs_workers=bool(started.workers),
        exports=tuple(told_to_people(os.environ, started.exports)),
    )
    os.environ.update(started.exports)
    where = Where(
        mongo_url=started.exports.get("MONGO_URL", DEFAULT_MONGO_URL), database=plan.wanted.database
    )
    with screen(output.console(), output.console(stderr=True), about) as shown:
        asyncio.run(_follow(rows(plan, started), where, started.all, shown))


async def _follow(found: list[Shown], where: Where, started: Sequence[ServerProcess], shown: Screen) -> None:
    async with database(where) as db:
        await _watch(Watcher(found, db), started, shown)


async def _watch(watcher: Watcher, started: Sequence[ServerProcess], shown: Screen) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    while not stopped.done():
        shown.show(await watcher.look())
        for process in started:
            if not process.running:
                raise process.ended()
        await asyncio.wait([stopped], timeout=_LOOK_EVERY_SEC)


def rows(plan: Plan, started: Processes) -> list[Shown]:
    """What is to be shown, and the processes behind it."""
    found: list[Shown] = []
    if plan.uses_temporal:
        found.append(_server_row("temporal", temporal_place()[0], started.temporal))
    if started.temporal is not None:
        found.append((Row(name="Web UI", address=started.temporal.ui_url), started.temporal))
    if plan.uses_mongo:
        found.append(_server_row("mongo", started.exports["MONGO_URL"], started.mongo))
    return found + [(Row(name=each.name, about=_doing(each)), each) for each in started.flowkit]


def _doing(process: FlowkitProcess) -> str:
    """What it says it does, without the word for itself."""
    return process.doing.partition(" ")[2]


def _server_row(name: str, address: str, server: LocalServer | None) -> Shown:
    about = f"{server.program.source}: {server.program.where}" if server else "not started here"
    return Row(name=name, address=address, about=about), server
