"""What a person sees while a task runs: a table that changes, or lines when there is no terminal."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from code_index.progress import NodeProgress, Progress

_STYLES = {
    "queued": "dim",
    "running": "cyan",
    "deferred": "yellow",
    "cancelling": "yellow",
    "finished": "green",
    "failed": "red",
    "cancelled": "red",
    "skipped": "dim",
}


class Screen(Protocol):
    """Shows progress."""

    def show(self, progress: Progress) -> None:
        """Bring what is shown up to date."""


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """A live table on a terminal that can move its cursor; plain lines anywhere else."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console)
        console.print()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveTable(live)


class LiveTable:
    """A table that stays in its place; its last state remains when the task has ended."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._since = time.monotonic()

    def show(self, progress: Progress) -> None:
        """Draw the table anew."""
        table = progress_table(progress, time.monotonic() - self._since)
        # The empty line takes the `^C` of a terminal, which would break a full line and so move the table.
        self._live.update(Group(table, ""), refresh=True)


class Lines:
    """One line whenever a node's status changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._shown: dict[str, tuple[str, int]] = {}

    def show(self, progress: Progress) -> None:
        """Print the nodes that have changed."""
        for node in progress.nodes:
            state = (node.status, node.attempt)
            if self._shown.get(node.node, ("queued", 0)) != state:
                self._shown[node.node] = state
                line = progress_line(node, time.monotonic() - self._since)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_table(progress: Progress, seconds: float) -> Table:
    """A row for each node; fits 80 columns."""
    title = f"task {progress.status}, {seconds:.1f} s"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0, expand=True)
    for heading, width in (("node", 7), ("role", 8), ("status", 10)):
        table.add_column(heading, width=width, no_wrap=True)
    for heading in ("attempt", "batches"):
        table.add_column(heading, width=len(heading), justify="right", no_wrap=True)
    table.add_column("note", ratio=1, no_wrap=True)
    for node in progress.nodes:
        table.add_row(*_cells(node))
    return table


def _cells(node: NodeProgress) -> Iterator[Text | str]:
    yield node.node
    yield node.role
    yield Text(node.status, style=_STYLES.get(node.status, ""))
    yield str(node.attempt or "")
    yield f"{node.batches:,}" if node.attempt else ""
    yield Text(node.note)


def progress_line(node: NodeProgress, seconds: float) -> str:
    """One node on one line."""
    note = f" ({node.note})" if node.note else ""
    batches = f"{node.batches:,} batch{'' if node.batches == 1 else 'es'}"
    done = f", attempt {node.attempt}, {batches}" if node.attempt else ""
    return f"{seconds:5.1f} s  {node.node:8} {node.status}{done}{note}"
