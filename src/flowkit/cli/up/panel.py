"""The display of `flowkit up`: a live panel on a terminal, or one line for each change."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.live import Live
from rich.text import Text

from flowkit.cli.output import Visible
from flowkit.cli.screen import plain_table
from flowkit.cli.tasks.show import tasks_table
from flowkit.cli.up.status import RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from flowkit.cli.up.status import ProcessRow, Snapshot, TaskOverview

_MIN_TASKS, _MAX_TASKS = 3, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class UpInfo:
    """Facts that do not change while `flowkit up` runs."""

    folder: str
    kept: bool
    """Whether the folder remains when `flowkit up` exits."""
    runs_tasks: bool
    runs_workers: bool = True
    exports: tuple[str, ...] = ()
    """`export` lines that another terminal needs first."""


class Screen(Protocol):
    """Displays the current state."""

    def show(self, snapshot: Snapshot) -> None:
        """Update the display."""


@contextmanager
def screen(console: Console, notes: Console, info: UpInfo) -> Iterator[Screen]:
    """Yield a live panel if the terminal can move its cursor; otherwise plain lines on `notes`."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(notes, info)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LivePanel(live, info)


class LivePanel:
    """A panel that updates in place."""

    def __init__(self, live: Live, info: UpInfo) -> None:
        self._live = live
        self._info = info
        self._since = time.monotonic()

    def show(self, snapshot: Snapshot) -> None:
        """Redraw the panel."""
        parts = render_panel(snapshot, self._info, self._live.console.height, time.monotonic() - self._since)
        # The terminal prints `^C` on the empty line. On a full line, it would wrap and move the panel.
        self._live.update(Visible(Group(*parts, "")), refresh=True)


class Lines:
    """Prints one line for each change."""

    def __init__(self, console: Console, info: UpInfo) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._tasks: dict[str, str] | None = None
        for line in header_lines(info):
            self._print(line)

    def show(self, snapshot: Snapshot) -> None:
        """Print the changes since the last call. The first call prints no tasks."""
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


def header_lines(info: UpInfo) -> list[str]:
    """Return the first lines of a log. The `export` lines are on stdout."""
    return [f"{name}: {text}" for name, text in _info_rows(info, "the lines on stdout")]


def render_panel(snapshot: Snapshot, info: UpInfo, height: int, seconds: float) -> list[RenderableType]:
    """Return the parts of the panel from top to bottom, in `height` lines if possible."""
    info_rows = _info_rows(info, "these lines")
    other_lines = len(snapshot.rows) + len(info_rows) + len(info.exports) + 10
    rows = min(_MAX_TASKS, max(_MIN_TASKS, height - other_lines))
    parts: list[RenderableType] = [
        _processes(snapshot.rows, f"FlowKit has been up for {_format_duration(seconds)}"),
        "",
    ]
    if info.runs_tasks:
        parts += [*_tasks(snapshot.tasks, rows), ""]
    parts += [Text.assemble((f"{name:<6}", "bold"), text) for name, text in info_rows]
    parts += [Text(f"      {line}") for line in info.exports]
    parts.append(Text("Press Ctrl-C to stop everything", style="dim"))
    return parts


def _format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _processes(rows: tuple[ProcessRow, ...], title: str) -> RenderableType:
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="fold")
    table.add_column("", ratio=1, no_wrap=True)
    table.show_header = False
    for row in rows:
        style = "green" if row.state == RUNNING else "red"
        state = Text(row.state, style=style)
        table.add_row(Text(row.name), state, Text(row.address, style="bold"), Text(row.detail, style="dim"))
    return table


def _tasks(tasks: TaskOverview | None, rows: int) -> list[RenderableType]:
    if tasks is None:
        return [Text("tasks: MongoDB is not responding", style="red")]
    title = Text(tasks_summary(tasks))
    return [title, tasks_table(list(tasks.newest[:rows]), wide=True)] if tasks.newest else [title]


def tasks_summary(tasks: TaskOverview) -> str:
    """Return how many tasks are open, by status."""
    if not tasks.newest:
        return "no tasks yet"
    each = ", ".join(f"{count} {status}" for status, count in sorted(tasks.open.items()))
    total = sum(tasks.open.values())
    return f"{total} open task{'' if total == 1 else 's'}" + (f": {each}" if each else "")


def _info_rows(info: UpInfo, lines: str) -> list[tuple[str, str]]:
    """Return name and text of each fact; `lines` says where the `export` lines are."""
    kept = "kept" if info.kept else "temporary, removed on exit; use --data DIR to keep it"
    info_rows = [("logs", f"{info.folder}/*.log"), ("data", f"{info.folder} ({kept})")]
    if info.runs_tasks:
        suffix = f" (in another terminal, after {lines})" if info.exports else ""
        prefix = "" if info.runs_workers else "flowkit worker module:CLASS …, then "
        info_rows.append(("next", f"{prefix}flowkit run graph.json --watch{suffix}"))
    elif info.exports:
        info_rows.append(("next", f"run {lines} to connect other programs"))
    return info_rows
