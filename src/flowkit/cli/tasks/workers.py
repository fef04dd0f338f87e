"""`flowkit workers`, which shows the workers and what they run. It imports its dependencies when it runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flowkit.cli import output
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    with_options,
)
from flowkit.reading.notes import format_seconds
from flowkit.text import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.table import Table
    from temporalio.client import Client

    from flowkit.adapters.tasks.queries import RunningAttempt
    from flowkit.adapters.worker_registry import MixedVersions, RegisteredWorker

_SHOWN_ATTEMPTS = 3
_OVERDUE_SEC = 5.0
"""Seconds after a missed announcement after which a worker counts as silent."""


class ProcessKind(StrEnum):
    """What a process is."""

    WORKER = "worker"
    EXTERNAL = "external"
    ENGINE = "engine"
    BRIDGE = "bridge"


class ProcessState(StrEnum):
    """Whether a process runs, as far as it is known."""

    ONLINE = "online"
    SILENT = "silent"
    """It counts as online, but its last sign of life is overdue."""
    OFFLINE = "offline"


_STYLES = {ProcessState.ONLINE: "green", ProcessState.SILENT: "yellow", ProcessState.OFFLINE: "dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """An attempt that a process runs."""

    task_id: str
    node_id: str
    attempt: int
    seconds: float | None
    """How long it has been running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessView:
    """A worker, an engine or a bridge as the command displays it."""

    worker_id: str
    kind: ProcessKind
    state: ProcessState
    roles: tuple[str, ...] = ()
    version: str = ""
    """The version of the process itself, which it announces."""
    handlers: Mapping[str, str] = field(default_factory=dict)
    """The versions of its handlers by role."""
    slots: int | None = None
    """How many attempts it can run at once; None if unknown."""
    seen_sec: float | None = None
    """Seconds since its last sign of life."""
    busy: tuple[Busy, ...] = field(default=())
    """What it runs, oldest first."""


@with_options
def workers(
    show_all: Annotated[bool, typer.Option("--all", help="Also show workers that are offline.")] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Show workers, engines and bridges: their roles, versions and slots, what they run, and when they were
    last seen.
    """
    every, mixed = asyncio.run(_read(where))
    shown = [each for each in every if show_all or each.busy or each.state is not ProcessState.OFFLINE]
    if as_json:
        return output.document(
            {"workers": [asdict(each) for each in shown], "mixed_versions": [asdict(each) for each in mixed]}
        )
    if shown:
        console = output.console()
        console.print(workers_table(shown, wide=console.is_terminal))
    else:
        output.note("no workers are online; start one with `flowkit worker module:Handler`")
    if hidden := len(every) - len(shown):
        output.note(f"{hidden} {'is' if hidden == 1 else 'are'} offline; `--all` shows them")
    for each in mixed:
        output.warn(str(each))
    return None


async def _read(where: DeploymentOptions) -> tuple[list[ProcessView], list[MixedVersions]]:
    """Return the processes of a database and of an engine queue, and the roles of which they run different versions."""
    from flowkit.adapters.worker_registry import WorkerRegistry, find_mixed_versions
    from flowkit.cli.servers import servers

    async with servers(where) as both:
        rows = await WorkerRegistry(both.db).list_workers()
        running = await both.catalog.running_attempts()
        external = {role for row in rows if row.external and row.online for role in row.roles}
        polled = await _read_pollers(both.temporal, where.engine_queue, external)
    return make_views(rows, polled, running, time.time()), find_mixed_versions(rows)


async def _read_pollers(
    client: Client, queue: str, external: Iterable[str]
) -> dict[tuple[ProcessKind, str], tuple[float, tuple[str, ...]]]:
    """Return when engines polled their queue, and bridges the queues of external roles, with these roles."""
    from flowkit.adapters.worker_registry import BRIDGE_PREFIX
    from flowkit.attempt.pollers import poll_times
    from flowkit.models.temporal_names import process_of, role_queue

    engines = await poll_times(client, queue, workflows=True)
    pollers: dict[tuple[ProcessKind, str], tuple[float, tuple[str, ...]]] = {
        (ProcessKind.ENGINE, process_of(identity)): (at, ()) for identity, at in engines.items()
    }
    for role in sorted(external):
        for identity, at in (await poll_times(client, role_queue(queue, role))).items():
            if identity.startswith(BRIDGE_PREFIX):
                known_at, roles = pollers.get((ProcessKind.BRIDGE, identity), (0.0, ()))
                pollers[ProcessKind.BRIDGE, identity] = max(known_at, at), (*roles, role)
    return pollers


def make_views(
    rows: Sequence[RegisteredWorker],
    polled: Mapping[tuple[ProcessKind, str], tuple[float, tuple[str, ...]]],
    running: Sequence[RunningAttempt],
    now: float,
) -> list[ProcessView]:
    """Return engines and bridges that poll, then all registered workers. Those that run an attempt name it.

    `polled` has the time of the last poll and the roles of each engine and bridge. An engine that hosts inline
    handlers has a row, too.
    """
    views = {
        identity: ProcessView(
            worker_id=identity, kind=kind, state=ProcessState.ONLINE, roles=roles, seen_sec=max(0.0, now - at)
        )
        for (kind, identity), (at, roles) in polled.items()
    }
    for row in rows:
        view = _view_row(row, now)
        views[row.worker_id] = (
            replace(view, kind=ProcessKind.ENGINE, state=ProcessState.ONLINE)
            if row.worker_id in views
            else view
        )
    busy: dict[str, list[Busy]] = {}
    for each in running:
        busy.setdefault(each.worker, []).append(_make_busy(each, now))
    shown = [replace(view, busy=tuple(busy.get(view.worker_id, ()))) for view in views.values()]
    order = (ProcessKind.ENGINE, ProcessKind.BRIDGE, ProcessKind.WORKER, ProcessKind.EXTERNAL)
    return sorted(shown, key=lambda view: (order.index(view.kind), view.worker_id))


def _view_row(row: RegisteredWorker, now: float) -> ProcessView:
    seen_sec = None if row.last_seen is None else max(0.0, now - row.last_seen.timestamp())
    state = ProcessState.OFFLINE
    if row.online:
        overdue = seen_sec is not None and seen_sec > row.announce_interval_sec + _OVERDUE_SEC
        state = ProcessState.SILENT if overdue else ProcessState.ONLINE
    worker = ProcessKind.EXTERNAL if row.external else ProcessKind.WORKER
    return ProcessView(
        worker_id=row.worker_id,
        kind=ProcessKind.ENGINE if row.in_engine else worker,
        state=state,
        roles=row.roles,
        version=row.version,
        handlers=row.handlers,
        slots=row.slots,
        seen_sec=seen_sec,
    )


def _make_busy(running: RunningAttempt, now: float) -> Busy:
    from flowkit.adapters.tasks.fields import elapsed

    seconds = None if running.started_at is None else elapsed(running.started_at, now)
    return Busy(task_id=running.task_id, node_id=running.node_id, attempt=running.epoch, seconds=seconds)


def workers_table(shown: Sequence[ProcessView], *, wide: bool) -> Table:
    """Return a table with a row for each process; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import add_names, plain_table

    table = plain_table(wide=wide)
    add_names(table, "worker", [view.worker_id for view in shown])
    table.add_column("kind", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("roles", "version"):
        table.add_column(heading, overflow="fold", no_wrap=not wide)
    table.add_column("slots", justify="right", no_wrap=True)
    table.add_column("last seen", justify="right", no_wrap=True)
    table.add_column("runs", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for view in shown:
        seen = "" if view.seen_sec is None else f"{format_duration(round(view.seen_sec))} ago"
        cells = (
            ", ".join(view.roles),
            format_versions(view),
            _format_slots(view),
            seen,
            format_busy(view.busy),
        )
        state = Text(view.state, style=_STYLES[view.state])
        table.add_row(Text(view.worker_id), Text(view.kind), state, *map(Text, cells))
    return table


def format_versions(view: ProcessView) -> str:
    """Return the version of the handlers of a process or, if they differ, that of each role."""
    versions = {*view.handlers.values()}
    if len(versions) > 1:
        return ", ".join(f"{role} {version}" for role, version in view.handlers.items())
    return versions.pop() if versions else view.version


def _format_slots(view: ProcessView) -> str:
    return "" if view.slots is None else f"{len(view.busy)}/{view.slots}"


def format_busy(busy: Sequence[Busy]) -> str:
    """Return the first attempts that a process runs, and the number of the others."""
    shown = [_format_attempt(each) for each in busy[:_SHOWN_ATTEMPTS]]
    others = len(busy) - len(shown)
    return ", ".join([*shown, *([f"and {others} more"] if others else [])])


def _format_attempt(busy: Busy) -> str:
    lasted = "" if busy.seconds is None else f" for {format_seconds(busy.seconds)}"
    attempt = f" (attempt {busy.attempt})" if busy.attempt > 1 else ""
    return f"{busy.node_id} of {busy.task_id}{attempt}{lasted}"
