"""What a person sees while a task runs: a table that changes, or lines when there is no terminal."""

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

from code_index.pace import told_seconds

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
"""Between two lines of a node whose status stays the same."""


class Screen(Protocol):
    """Shows progress."""

    def show(self, progress: Progress) -> None:
        """Bring what is shown up to date."""

    def tell(self, news: str) -> None:
        """Say something that stays, with the time."""


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
        self._live.update(Group(table, *notes(progress), ""), refresh=True)

    def tell(self, news: str) -> None:
        """Say it above the table."""
        line = timed(news, time.monotonic() - self._since)
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the last line of a node said, and when."""

    node: NodeProgress
    at: float


def worth_a_line(last: Shown, node: NodeProgress, at: float) -> bool:
    """Whether a reader wants to know how the node stands now. Pure."""
    if (node.status, node.attempt) != (last.node.status, last.node.attempt):
        return True
    if node.status != "running":
        return False
    gained = (node.percent or 0) - (last.node.percent or 0)
    waited = at - last.at
    return (gained >= LINE_EVERY_PERCENT and waited >= LINE_AFTER_SECONDS) or waited >= LINE_AT_LEAST_SECONDS


class Lines:
    """A line whenever a node's status changes, and now and then one that says how far it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._shown: dict[str, Shown] = {}

    def show(self, progress: Progress) -> None:
        """Print the nodes that have news."""
        at = time.monotonic() - self._since
        for node in progress.nodes:
            last = self._shown.get(node.node)
            begun = node.attempt > 0 or node.ended
            if begun if last is None else worth_a_line(last, node, at):
                repeated = last is not None and last.node.note == node.note
                self._shown[node.node] = Shown(node, at)
                self._print(progress_line(replace(node, note="") if repeated else node), at)

    def tell(self, news: str) -> None:
        """Print a line."""
        self._print(news, time.monotonic() - self._since)

    def _print(self, line: str, at: float) -> None:
        self._console.print(timed(line, at), markup=False, highlight=False, soft_wrap=True)


def timed(line: str, seconds: float) -> str:
    """A line with the time since the start."""
    return f"{seconds:5.1f} s  {line}"


def progress_table(progress: Progress, seconds: float) -> Table:
    """A row for each node; fits 80 columns."""
    title = f"task {progress.status}, {seconds:.1f} s{_forecast(progress)}"
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
    return table


def _forecast(progress: Progress) -> str:
    """How long what runs will still take, and what comes then; nobody knows how long that takes."""
    for number, node in enumerate(progress.nodes):
        if node.seconds_left:
            then = ", ".join(later.node for later in progress.nodes[number + 1 :])
            return f"; about {told_seconds(node.seconds_left)} left for {node.node}" + (
                f", then {then}" if then else ""
            )
    return ""


def _cells(node: NodeProgress) -> Iterator[Text | str]:
    yield node.node
    yield Text(node.status, style=_STYLES.get(node.status, ""))
    yield Text(node.worker)
    yield str(node.attempt or "")
    yield _done(node) if node.attempt else ""
    yield str(node.percent) if node.attempt and node.percent is not None else ""
    yield _number(node.rate.batches) if node.rate else ""
    yield _number(node.rate.files) if node.rate else ""
    yield told_seconds(node.seconds_left) if node.seconds_left else ""


def _done(node: NodeProgress) -> str:
    return f"{node.batches:,}" if node.total is None else f"{node.batches:,}/{node.total:,}"


def _number(rate: float) -> str:
    """Three digits that say enough."""
    return f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def notes(progress: Progress) -> Iterator[Text]:
    """What nodes wait for or have suffered, a line each."""
    for node in progress.nodes:
        if node.note:
            yield Text(f"{node.node}: {node.note}", style="yellow")


def progress_line(node: NodeProgress) -> str:
    """One node on one line."""
    note = f" ({node.note})" if node.note else ""
    done = f", attempt {node.attempt}, {'; '.join(_told(node))}" if node.attempt else ""
    return f"{node.node:8} {node.status}{done}{note}"


def _told(node: NodeProgress) -> Iterator[str]:
    share = f" = {node.percent} %" if node.percent is not None else ""
    yield f"{_done(node)} batch{'es' if (node.total or node.batches) != 1 else ''}{share}"
    if node.rate:
        yield f"{_number(node.rate.batches)} batches/s, {_number(node.rate.files)} files/s"
    if node.seconds_left:
        yield f"about {told_seconds(node.seconds_left)} left"
