"""TaskDetails of a running task: a live table, or lines if there is no terminal."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from code_index.rates import format_seconds, pluralize

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

LINE_EVERY_PERCENT, LINE_AFTER_SECONDS, LINE_AT_LEAST_SECONDS = 10, 3.0, 30.0
"""The distance between two lines of a node whose status does not change."""


class TaskDetails(Protocol):
    """Shows the progress of a task."""

    def show(self, progress: Progress) -> None:
        """Update the display."""

    def print_line(self, line: str) -> None:
        """Print a permanent line with the elapsed time."""


@contextmanager
def open_display(console: Console) -> Iterator[TaskDetails]:
    """Open a live table on a terminal that can move its cursor, and plain lines anywhere else."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield LineDisplay(console)
        console.print()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield TableDisplay(live)


class TableDisplay:
    """A table that updates in place; its last state remains when the task has ended."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._since = time.monotonic()

    def show(self, progress: Progress) -> None:
        """Draw the table again."""
        table = progress_table(progress, time.monotonic() - self._since)
        # A terminal prints `^C` on the empty line; on a full line it would move the table.
        self._live.update(Group(table, *notes(progress), ""), refresh=True)

    def print_line(self, line: str) -> None:
        """Print the line above the table."""
        text = with_time(line, time.monotonic() - self._since)
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class LastLine:
    """The last line printed for a node, and when."""

    node: NodeProgress
    at: float


def should_print(last: LastLine, node: NodeProgress, at: float) -> bool:
    """Return whether to print a line: the node has changed, progressed, or been silent for long. Pure."""
    if (node.status, node.runners) != (last.node.status, last.node.runners):
        return True
    if node.status != "running":
        return False
    gained = (node.percent or 0) - (last.node.percent or 0)
    waited = at - last.at
    return (gained >= LINE_EVERY_PERCENT and waited >= LINE_AFTER_SECONDS) or waited >= LINE_AT_LEAST_SECONDS


class LineDisplay:
    """Prints a line when the status of a node changes, and now and then for its progress."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._last: dict[str, LastLine] = {}

    def show(self, progress: Progress) -> None:
        """Print a line for each node that has changed."""
        at = time.monotonic() - self._since
        for node in progress.nodes:
            last = self._last.get(node.node)
            started = node.attempt > 0 or node.ended
            if started if last is None else should_print(last, node, at):
                repeated = last is not None and last.node.note == node.note
                self._last[node.node] = LastLine(node, at)
                self._print(progress_line(replace(node, note="") if repeated else node), at)

    def print_line(self, line: str) -> None:
        """Print the line."""
        self._print(line, time.monotonic() - self._since)

    def _print(self, line: str, at: float) -> None:
        self._console.print(with_time(line, at), markup=False, highlight=False, soft_wrap=True)


def with_time(line: str, seconds: float) -> str:
    """Return the line with the time since the start."""
    return f"{seconds:5.1f} s  {line}"


def progress_table(progress: Progress, seconds: float) -> Table:
    """Return a table with a row for each node; it fits 80 columns."""
    title = f"task {progress.status}, {seconds:.1f} s{_time_left(progress)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading, width in (("node", 7), ("status", 10), ("worker", 9)):
        table.add_column(heading, width=width, no_wrap=True)
    for heading, width in (
        ("try", 3),
        ("batches", 11),
        ("%", 3),
        ("batch/s", 7),
        ("files/s", 7),
        ("left", 6),
    ):
        table.add_column(heading, width=width, justify="right", no_wrap=True)
    for node in progress.nodes:
        table.add_row(*_cells(node))
        for shard in node.running_shards:
            done = f"{node.by_epoch.get(shard.epoch, 0):,}"
            table.add_row("", f"shard {shard.shard}", Text(shard.worker), str(shard.epoch), done, style="dim")
    return table


def _time_left(progress: Progress) -> str:
    """Return the time that the running node still needs, and the nodes after it, whose time is unknown."""
    for number, node in enumerate(progress.nodes):
        if node.seconds_left:
            then = ", ".join(later.node for later in progress.nodes[number + 1 :])
            return f"; about {format_seconds(node.seconds_left)} left for {node.node}" + (
                f", then {then}" if then else ""
            )
    return ""


def _cells(node: NodeProgress) -> Iterator[Text | str]:
    yield node.node
    yield Text(node.status, style=_STYLES.get(node.status, ""))
    yield Text(_workers(node) if node.shards else node.worker)
    yield "" if node.shards else str(node.attempt or "")
    yield _done(node) if node.attempt else ""
    yield str(node.percent) if node.attempt and node.percent is not None else ""
    yield _number(node.rate.batches) if node.rate else ""
    yield _number(node.rate.files) if node.rate else ""
    yield format_seconds(node.seconds_left) if node.seconds_left else ""


def _workers(node: NodeProgress) -> str:
    """Return how many workers run the shards of a node, or have run them."""
    return pluralize(len({shard.worker for shard in node.running_shards or node.shards}), "worker")


def _done(node: NodeProgress) -> str:
    return f"{node.batches:,}" if node.total is None else f"{node.batches:,}/{node.total:,}"


def _number(rate: float) -> str:
    """Return the rate with at most one decimal."""
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def notes(progress: Progress) -> Iterator[Text]:
    """Yield a line for each node with an error or a wait."""
    for node in progress.nodes:
        if node.note:
            yield Text(f"{node.node}: {node.note}", style="yellow")


def progress_line(node: NodeProgress) -> str:
    """Return the progress of one node as a line."""
    note = f" ({node.note})" if node.note else ""
    runners = f", {node.runners}" if node.runners else ""
    done = f", {'; '.join(_progress_parts(node))}" if node.attempt else ""
    return f"{node.node:8} {node.status}{runners}{done}{note}"


def _progress_parts(node: NodeProgress) -> Iterator[str]:
    share = f" = {node.percent} %" if node.percent is not None else ""
    yield f"{_done(node)} {'batch' if (node.total or node.batches) == 1 else 'batches'}{share}"
    if node.rate:
        yield f"{_number(node.rate.batches)} batches/s, {_number(node.rate.files)} files/s"
    if node.seconds_left:
        yield f"about {format_seconds(node.seconds_left)} left"
