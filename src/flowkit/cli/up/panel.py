"""How `flowkit up` looks: a panel that stays in its place, or a line for every change."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.live import Live
from rich.text import Text

from flowkit.cli.asking import tasks_table
from flowkit.cli.screen import plain_table
from flowkit.cli.up.status import RUNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from flowkit.cli.up.status import Row, Tasks, View

_FEWEST_TASKS, _MOST_TASKS = 3, 10


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What does not change while it runs."""

    folder: str
    kept: bool
    """Whether the folder stays when `flowkit up` ends."""
    runs_tasks: bool
    runs_workers: bool = True
    exports: tuple[str, ...] = ()
    """What another terminal needs first."""


class Screen(Protocol):
    """Shows how things are."""

    def show(self, view: View) -> None:
        """Bring what is shown up to date."""


@contextmanager
def screen(console: Console, notes: Console, about: About) -> Iterator[Screen]:
    """A live panel on a terminal that can move its cursor; elsewhere plain lines, on `notes`."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(notes, about)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LivePanel(live, about)


class LivePanel:
    """A panel that stays in its place."""

    def __init__(self, live: Live, about: About) -> None:
        self._live = live
        self._about = about
        self._since = time.monotonic()

    def show(self, view: View) -> None:
        """Draw it anew."""
        parts = panel(view, self._about, self._live.console.height, time.monotonic() - self._since)
        # The empty line takes the `^C` of a terminal, which would break a full line and so move the panel.
        self._live.update(Group(*parts, ""), refresh=True)


class Lines:
    """One line whenever something changes."""

    def __init__(self, console: Console, about: About) -> None:
        self._console = console
        self._states: dict[str, str] = {}
        self._tasks: dict[str, str] | None = None
        for line in first_lines(about):
            self._print(line)

    def show(self, view: View) -> None:
        """Print what has changed. What is there at the first look is not told as a change."""
        for row in view.rows:
            if self._states.setdefault(row.name, RUNS) != row.state:
                self._states[row.name] = row.state
                self._print(f"{row.name} {row.state}")
        if view.tasks is not None:
            self._show_tasks(view.tasks)

    def _show_tasks(self, tasks: Tasks) -> None:
        now = {task.task_id: task.status.value for task in reversed(tasks.newest)}
        known, self._tasks = self._tasks, {**(self._tasks or {}), **now}
        for task_id, status in now.items():
            if known is not None and known.get(task_id) != status:
                self._print(f"task {task_id} {status}")

    def _print(self, text: str) -> None:
        self._console.print(text)


def first_lines(about: About) -> list[str]:
    """What a log shows first. The `export` lines stand on stdout, before this."""
    return [f"{name}: {text}" for name, text in _facts(about, "the lines on stdout")]


def panel(view: View, about: About, height: int, seconds: float) -> list[RenderableType]:
    """Everything, from top to bottom, in `height` lines if that can be."""
    facts = _facts(about, "these lines")
    beside = len(view.rows) + len(facts) + len(about.exports) + 10
    rows = min(_MOST_TASKS, max(_FEWEST_TASKS, height - beside))
    parts: list[RenderableType] = [_processes(view.rows, f"FlowKit is up for {_clock(seconds)}"), ""]
    if about.runs_tasks:
        parts += [*_tasks(view.tasks, rows), ""]
    parts += [Text.assemble((f"{name:<6}", "bold"), text) for name, text in facts]
    parts += [Text(f"      {line}") for line in about.exports]
    parts.append(Text("Ctrl-C stops it all", style="dim"))
    return parts


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _processes(rows: tuple[Row, ...], title: str) -> RenderableType:
    table = plain_table(title)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="fold")
    table.add_column("", ratio=1, no_wrap=True)
    table.show_header = False
    for row in rows:
        style = "green" if row.state == RUNS else "red"
        state = Text(row.state, style=style)
        table.add_row(Text(row.name), state, Text(row.address, style="bold"), Text(row.about, style="dim"))
    return table


def _tasks(tasks: Tasks | None, rows: int) -> list[RenderableType]:
    if tasks is None:
        return [Text("tasks: MongoDB does not answer", style="red")]
    title = Text(tasks_line(tasks))
    return [title, tasks_table(list(tasks.newest[:rows]), wide=True)] if tasks.newest else [title]


def tasks_line(tasks: Tasks) -> str:
    """How many tasks there are that have not ended."""
    if not tasks.newest:
        return "no tasks yet"
    each = ", ".join(f"{count} {status}" for status, count in sorted(tasks.open.items()))
    total = sum(tasks.open.values())
    return f"{total} open task{'' if total == 1 else 's'}" + (f": {each}" if each else "")


def _facts(about: About, lines: str) -> list[tuple[str, str]]:
    """`lines` names the lines that another terminal needs first."""
    kept = "kept" if about.kept else "temporary, removed at the end; --data DIR keeps it"
    facts = [("logs", f"{about.folder}/*.log"), ("data", f"{about.folder} ({kept})")]
    if about.runs_tasks:
        first = f", in another terminal after {lines}" if about.exports else ""
        begun = "" if about.runs_workers else "flowkit worker module:CLASS …, then "
        facts.append(("next", f"{begun}flowkit run graph.json --watch{first}"))
    elif about.exports:
        facts.append(("next", f"other programs find it after {lines}"))
    return facts
