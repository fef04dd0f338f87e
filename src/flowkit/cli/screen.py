"""The display of a task: a table, a live table, or one line for each change."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowkit.cli.output import Visible
from flowkit.models import NodeStatus
from flowkit.text import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from flowkit.cli.tasks.view import NodeView, TaskView

_STYLES = {
    "running": "cyan",
    "deferred": "yellow",
    "cancelling": "yellow",
    "finished": "green",
    "failed": "red",
    "cancelled": "red",
    "queued": "dim",
    "skipped": "dim",
}
_DISPLAY_ORDER = ("failed", "cancelling", "deferred", "running", "cancelled", "skipped", "queued", "finished")
"""Order of the rows when they do not all fit."""

_ACTIVE = (NodeStatus.RUNNING, NodeStatus.CANCELLING)
"""Statuses in which the last error of a node is from an earlier attempt."""

_MAX_NAME_CHARS = 24
"""Maximum width of a name column."""

_OTHER_LINES = 8
"""Lines of the live table that show no node."""


class Screen(Protocol):
    """Displays the state of a task."""

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Update the display."""


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """Yield a live table if the terminal can move its cursor; otherwise plain lines."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveTable(live)


class LiveTable:
    """A table that updates in place; its last state remains on the terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._since = time.monotonic()

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Redraw the table."""
        rows = max(3, self._live.console.height - _OTHER_LINES - len(hints))
        watched = format_duration(round(time.monotonic() - self._since))
        title = f"task {view.task_id}: {view.status} (watched for {watched})"
        parts: list[RenderableType] = [task_table(view, title, rows=rows)]
        parts += [Text(f"! {hint}", style="yellow") for hint in hints]
        # The terminal prints `^C` on the empty line. On a full line, it would wrap and move the table.
        self._live.update(Visible(Group(*parts, "")), refresh=True)


class Lines:
    """Prints one line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._nodes: dict[str, tuple[str, int, bool, str, str, bool]] = {}
        self._printed_hints: set[str] = set()

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Print the changes since the last call; print each hint only once."""
        for hint in hints:
            if hint not in self._printed_hints:
                self._printed_hints.add(hint)
                self._print(f"! {hint}")
        for node in view.nodes:
            state = (node.status, node.attempt, node.waiting, node.waits_for, node.worker, node.silent)
            if self._nodes.get(node.node_id, (NodeStatus.QUEUED.value, 0, False, "", "", False)) != state:
                self._nodes[node.node_id] = state
                self._print(node_line(node))

    def _print(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._since:6.1f} s  {text}")


def task_table(
    view: TaskView, title: str | None = None, *, rows: int | None = None, wide: bool = True
) -> Table:
    """Return a table with a row for each node, or the most relevant nodes in at most `rows` lines.

    `wide` fills the width of the terminal.
    """
    wrap = wide and rows is None
    table = plain_table(title, wide=wide)
    shown = _most_relevant(view.nodes, rows)
    add_names(table, "node", [node.node_id for node in shown])
    add_names(table, "role", [node.role for node in shown])
    table.add_column("status", width=10, no_wrap=True)
    for heading in ("attempt", "batches"):
        table.add_column(heading, width=len(heading), justify="right", no_wrap=True)
    table.add_column(
        "note", ratio=1 if wide else None, no_wrap=not wrap, overflow="fold" if wrap else "ellipsis"
    )
    for node in shown:
        table.add_row(*_cells(node))
    if hidden := len(view.nodes) - len(shown):
        table.add_row(Text(f"… {hidden:,} more", style="dim"))
    return table


def plain_table(title: str | None = None, *, wide: bool = True) -> Table:
    """Return an empty table: ruled and as wide as the terminal, or plain for files and pipes."""
    box = SIMPLE_HEAD if wide else None
    text = Text(title, overflow="ellipsis") if title else None
    padding = (0, 2, 0, 0)
    return Table(title=text, title_justify="left", box=box, show_edge=False, padding=padding, expand=wide)


def add_names(table: Table, heading: str, names: Sequence[str], most: int = _MAX_NAME_CHARS) -> None:
    """Add a column wide enough for its names, at most `most` characters on a terminal."""
    longest = max(map(len, [heading, *names]))
    table.add_column(heading, width=min(most, longest) if table.expand else longest, no_wrap=True)


def _most_relevant(nodes: Sequence[NodeView], rows: int | None) -> Sequence[NodeView]:
    if rows is None or len(nodes) <= rows:
        return nodes
    return sorted(nodes, key=lambda node: _DISPLAY_ORDER.index(node.status))[: rows - 1]


def _cells(node: NodeView) -> Iterator[Text]:
    yield Text(node.node_id)
    yield Text(node.role)
    yield Text(node.status, style=_STYLES.get(node.status, ""))
    yield Text(str(node.attempt or ""))
    yield Text(f"{node.batches:,}" if node.batches else "")
    yield Text(node_note(node))


def node_note(node: NodeView) -> str:
    """Return what the node waits for, and its last error."""
    if node.next_retry_at is not None:
        wait = format_duration(max(0, round(node.next_retry_at - time.time())))
        return f"retry in {wait}" + (f": {node.note}" if node.note else "")
    if node.status not in _ACTIVE and not node.waits_for:
        return node.note
    waits = ["no worker has started it yet"] if node.waiting else []
    external = [f"waits for {node.waits_for}"] if node.waits_for else []
    silent = ["sends no heartbeats"] if node.silent else []
    worker = [f"external worker {node.worker}"] if node.worker else []
    before = [f"last attempt: {node.note}"] if node.note else []
    return "; ".join([*waits, *silent, *external, *worker, *before])


def node_line(node: NodeView) -> str:
    """Return a line that describes a node."""
    attempt = f", attempt {node.attempt}" if node.attempt else ""
    stored = f", {node.batches:,} batch{'' if node.batches == 1 else 'es'}" if node.batches else ""
    note = node_note(node)
    return f"{node.node_id}  {node.status}{attempt}{stored}" + (f" ({note})" if note else "")
