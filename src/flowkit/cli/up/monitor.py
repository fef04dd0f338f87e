"""The display of `flowkit up`: the health of its servers and processes, and the newest tasks, until a
signal arrives."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.text import Text
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError

from flowkit.cli import output
from flowkit.cli.options import DEFAULT_MONGO_URL, DeploymentOptions
from flowkit.cli.screen import open_screen, plain_table
from flowkit.cli.servers import accepts_connections, database
from flowkit.cli.tasks.display import tasks_table
from flowkit.cli.up.keeper import Keeper
from flowkit.cli.up.plan import terminal_exports
from flowkit.client import TaskCatalog
from flowkit.connection import TemporalUnavailable, connect, temporal_address
from flowkit.errors import FlowKitError
from flowkit.text import shell_word, shown_address

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType
    from temporalio.client import Client

    from flowkit.cli.screen import Screen
    from flowkit.cli.up.plan import UpPlan
    from flowkit.cli.up.processes import Processes
    from flowkit.client import TaskSummary
    from flowkit.local.process import FlowkitProcess, LocalServer, ServerProcess


RUNNING, UNRESPONSIVE, EXITED, STARTING = "running", "not responding", "exited", "starting"

_STYLES = {RUNNING: "green", STARTING: "yellow"}

MAX_TASKS = 20
TIMEOUT_SEC = 3.0

_GRAPH = "graph.json"
"""Stands for the user's file where no flow is known."""
_REFRESH_SEC = 1.0
_MIN_TASKS, _MAX_TASKS = 3, 10
_MAX_NOTICES = 4


def monitor(plan: UpPlan, processes: Processes, folder: Path) -> None:
    """Show the processes, and keep them running, until SIGINT or SIGTERM.

    Raises the error of a server that exits, of another process that exits too often, or of a configuration error.
    """
    info = UpInfo(
        folder=str(folder),
        kept=plan.options.data is not None,
        runs_tasks=bool(processes.flowkit),
        runs_workers=bool(processes.workers),
        graph=next(iter(plan.options.flows), _GRAPH),
        exports=tuple(terminal_exports(plan, os.environ, processes.exports)),
        addresses=_list_addresses(plan),
    )
    os.environ.update(processes.exports)
    where = DeploymentOptions(
        mongo_url=processes.exports.get("MONGO_URL", DEFAULT_MONGO_URL), database=plan.options.database
    )
    lines = partial(ProcessLines, output.console(stderr=True), info)
    output.forward_core_log()
    with open_screen(output.console(), partial(render_panel, info), lines) as shown:
        asyncio.run(
            _monitor(create_rows(plan, processes), where, partial(Keeper, plan, processes, folder), shown)
        )


async def _monitor(
    rows: list[tuple[ProcessRow, ServerProcess | None]],
    where: DeploymentOptions,
    create_keeper: Callable[[], Keeper],
    shown: Screen[[Snapshot]],
) -> None:
    keeper = create_keeper()
    async with database(where) as db:
        try:
            await _refresh_until_signal(StatusPoller(rows, db, keeper), keeper, shown)
        finally:
            await keeper.close()


async def _refresh_until_signal(poller: StatusPoller, keeper: Keeper, shown: Screen[[Snapshot]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    while not stopped.done():
        shown.show(await poller.poll())
        keeper.check()
        await asyncio.wait([stopped], timeout=_REFRESH_SEC)


def create_rows(plan: UpPlan, processes: Processes) -> list[tuple[ProcessRow, ServerProcess | None]]:
    """Return a row for each server and process, with the local process behind it, if any."""
    rows: list[tuple[ProcessRow, ServerProcess | None]] = []
    if plan.uses_temporal:
        rows.append(_create_row("temporal", temporal_address()[0], processes.temporal))
    if processes.temporal is not None:
        rows.append((ProcessRow(name="Web UI", address=processes.temporal.ui_url), processes.temporal))
    if plan.uses_mongo:
        rows.append(_create_row("mongo", processes.exports["MONGO_URL"], processes.mongo))
    if plan.uses_kafka:
        rows.append(_create_row("kafka", processes.exports["KAFKA_BOOTSTRAP_SERVERS"], processes.kafka))
    addresses = {each.name: f"http://127.0.0.1:{each.health_port}/metrics" for each in processes.flowkit}
    addresses |= _list_addresses(plan)
    return rows + [
        (
            ProcessRow(name=each.name, address=addresses.get(each.name, ""), detail=_shorten_summary(each)),
            each,
        )
        for each in processes.flowkit
    ]


def _list_addresses(plan: UpPlan) -> dict[str, str]:
    """Return the addresses of products that a person opens in a browser."""
    found = {name: each.address(plan.ports.products[name]) for name, each in plan.products.items()}
    return {name: address for name, address in found.items() if address}


def _shorten_summary(process: FlowkitProcess) -> str:
    """Return what the process runs, without its leading `engine`, `bridge` or `worker`."""
    return process.summary.partition(" ")[2]


def _create_row(
    name: str, address: str, server: LocalServer | None
) -> tuple[ProcessRow, ServerProcess | None]:
    detail = f"{server.program.source}: {server.program.description}" if server else "external server"
    return ProcessRow(name=name, address=address, detail=detail), server


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """One process or server, for display."""

    name: str
    state: str = RUNNING
    address: str = ""
    detail: str = ""
    """Where its program comes from, or what it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOverview:
    """Counts of open tasks, and the newest tasks."""

    open: dict[str, int]
    """Number of open tasks by status."""
    newest: tuple[TaskSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state at one moment."""

    rows: tuple[ProcessRow, ...]
    tasks: TaskOverview | None = None
    """None while MongoDB does not respond, or if no part uses it."""
    notices: tuple[str, ...] = ()
    """What has happened to the processes, oldest first."""


class StatusPoller:
    """Polls the servers and processes of one `flowkit up`."""

    def __init__(
        self, rows: Sequence[tuple[ProcessRow, ServerProcess | None]], db: Any, keeper: Keeper
    ) -> None:
        self._rows = rows
        self._keeper = keeper
        self._catalog = TaskCatalog(db)
        self._client: Client | None = None

    async def poll(self) -> Snapshot:
        """Return the current state."""
        temporal, tasks, kafka = await asyncio.gather(
            self._temporal_responds(), self._tasks(), self._kafka_responds()
        )
        responds = {"temporal": temporal, "mongo": tasks is not None, "kafka": kafka}
        rows = [self._with_state(row, process, responds.get(row.name, True)) for row, process in self._rows]
        return Snapshot(rows=tuple(rows), tasks=tasks, notices=tuple(self._keeper.notices))

    def _with_state(self, row: ProcessRow, process: ServerProcess | None, responds: bool) -> ProcessRow:
        if process is not None and self._keeper.is_starting(process.name):
            return replace(row, state=STARTING, address=shown_address(row.address))
        return _add_state(row, process, responds)

    async def _temporal_responds(self) -> bool:
        if not self._has_row("temporal"):
            return False
        with suppress(TemporalUnavailable, RPCError, RuntimeError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_SEC):
                self._client = client = self._client or await connect()
                request = DescribeNamespaceRequest(namespace=client.namespace)
                timeout = timedelta(seconds=TIMEOUT_SEC)
                await client.workflow_service.describe_namespace(request, timeout=timeout)
                return True
        return False

    async def _kafka_responds(self) -> bool:
        address = next((row.address for row, _ in self._rows if row.name == "kafka"), None)
        return address is not None and await accepts_connections(address, TIMEOUT_SEC)

    async def _tasks(self) -> TaskOverview | None:
        if not self._has_row("mongo"):
            return None
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_SEC):
                counts, newest = await asyncio.gather(
                    self._catalog.open_counts(), self._catalog.list_tasks(limit=MAX_TASKS)
                )
            return TaskOverview(open=counts, newest=tuple(newest))
        return None

    def _has_row(self, name: str) -> bool:
        return any(row.name == name for row, _ in self._rows)


def _add_state(row: ProcessRow, process: ServerProcess | None, responds: bool) -> ProcessRow:
    exited = process is not None and not process.running
    state = EXITED if exited else RUNNING if responds else UNRESPONSIVE
    return ProcessRow(name=row.name, state=state, address=shown_address(row.address), detail=row.detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpInfo:
    """Facts that do not change while `flowkit up` runs."""

    folder: str
    kept: bool
    """Whether the folder remains when `flowkit up` exits."""
    runs_tasks: bool
    runs_workers: bool = True
    graph: str = _GRAPH
    """The graph of the command that starts a task: a flow that the workers run, or an example."""
    exports: tuple[str, ...] = ()
    """`export` lines that another terminal needs first."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """What to open in a browser, by name."""


class ProcessLines:
    """Prints one line for each change."""

    def __init__(self, console: Console, info: UpInfo) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._tasks: dict[str, str] | None = None
        self._notices: tuple[str, ...] = ()
        for line in format_header(info):
            self._print(line)

    def show(self, snapshot: Snapshot) -> None:
        """Print the changes since the last call. The first call prints no tasks."""
        for notice in list_new(snapshot.notices, self._notices):
            self._print(notice)
        self._notices = snapshot.notices
        for row in snapshot.rows:
            if self._states.setdefault(row.name, RUNNING) != row.state:
                self._states[row.name] = row.state
                self._print(f"{row.name}: {row.state}")
        if snapshot.tasks is not None:
            self._show_tasks(snapshot.tasks)

    def _show_tasks(self, tasks: TaskOverview) -> None:
        now = {task.task_id: task.status.value for task in reversed(tasks.newest)}
        known, self._tasks = self._tasks, {**(self._tasks or {}), **now}
        for task_id, status in now.items():
            if known is not None and known.get(task_id) != status:
                self._print(f"task {task_id}: {status}")

    def _print(self, text: str) -> None:
        self._console.print(text)


def list_new(notices: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the notices that follow the known ones. The oldest notices may be gone."""
    for kept in range(len(known), 0, -1):
        if known[-kept:] == notices[:kept]:
            return notices[kept:]
    return notices


def format_header(info: UpInfo) -> list[str]:
    """Return the first lines of a log. The `export` lines are on stdout."""
    facts = [*_list_facts(info, "the lines on stdout"), *info.addresses.items()]
    return [f"{name}: {text}" for name, text in facts]


def render_panel(info: UpInfo, height: int, seconds: float, snapshot: Snapshot) -> list[RenderableType]:
    """Return the parts of the panel from top to bottom, in `height` lines if possible."""
    info_rows = _list_facts(info, "these lines")
    notices = snapshot.notices[-_MAX_NOTICES:]
    other_lines = len(snapshot.rows) + len(info_rows) + len(info.exports) + len(notices) + 10
    rows = min(_MAX_TASKS, max(_MIN_TASKS, height - other_lines))
    parts: list[RenderableType] = [
        _draw_processes(snapshot.rows, f"FlowKit has been up for {_format_duration(seconds)}"),
        "",
    ]
    if notices:
        parts += [*(Text(f"! {notice}", style="yellow", overflow="fold") for notice in notices), ""]
    if info.runs_tasks:
        parts += [*_draw_tasks(snapshot.tasks, rows), ""]
    parts += [Text.assemble((f"{name:<6}", "bold"), text) for name, text in info_rows]
    parts += [Text(f"      {line}") for line in info.exports]
    parts.append(Text("Press Ctrl-C to stop everything", style="dim"))
    return parts


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _draw_processes(rows: tuple[ProcessRow, ...], title: str) -> RenderableType:
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="fold")
    table.add_column("", ratio=1, no_wrap=True)
    table.show_header = False
    for row in rows:
        style = _STYLES.get(row.state, "red")
        state = Text(row.state, style=style)
        table.add_row(Text(row.name), state, Text(row.address, style="bold"), Text(row.detail, style="dim"))
    return table


def _draw_tasks(tasks: TaskOverview | None, rows: int) -> list[RenderableType]:
    if tasks is None:
        return [Text("tasks: MongoDB is not responding", style="red")]
    title = Text(summarize_tasks(tasks))
    return [title, tasks_table(list(tasks.newest[:rows]), wide=True)] if tasks.newest else [title]


def summarize_tasks(tasks: TaskOverview) -> str:
    """Return how many tasks are open, by status."""
    if not tasks.newest:
        return "no tasks yet"
    each = ", ".join(f"{count} {status}" for status, count in sorted(tasks.open.items()))
    total = sum(tasks.open.values())
    return f"{total} open task{'' if total == 1 else 's'}" + (f": {each}" if each else "")


def _list_facts(info: UpInfo, lines: str) -> list[tuple[str, str]]:
    """Return name and text of each fact; `lines` says where the `export` lines are."""
    kept = "kept" if info.kept else "temporary, removed on exit; use --data DIR to keep it"
    info_rows = [("logs", f"{info.folder}/*.log"), ("data", f"{info.folder} ({kept})")]
    if info.runs_tasks:
        suffix = f" (in another terminal, after {lines})" if info.exports else ""
        prefix = "" if info.runs_workers else "flowkit worker module:CLASS …, then "
        info_rows.append(("next", f"{prefix}flowkit run {shell_word(info.graph)} --watch{suffix}"))
    elif info.exports:
        info_rows.append(("next", f"run {lines} to connect other programs"))
    return info_rows
