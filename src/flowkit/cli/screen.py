"""How a task looks: a table, a table that changes in its place, or a line for every change."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flowkit.models import NodeStatus
from flowkit.workflows.waiting import span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from flowkit.cli.looking import NodeView, TaskView

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
"""Order of the rows when not all of them fit."""

_ACTIVE = (NodeStatus.RUNNING, NodeStatus.CANCELLING)
"""Statuses in which a node's last error is that of an earlier attempt."""

_MAX_NAME_CHARS = 24
"""Widest column of names."""

_OTHER_LINES = 8
"""Lines of a terminal that hold no node."""


class Screen(Protocol):
    """Shows where a task is."""

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Bring what is shown up to date."""


@contextmanager
def screen(console: Console) -> Iterator[Screen]:
    """A live table on a terminal that can move its cursor; plain lines anywhere else."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield LiveTable(live)


class LiveTable:
    """A table that stays in its place; its last state remains."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._since = time.monotonic()

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Draw it anew."""
        rows = max(3, self._live.console.height - _OTHER_LINES - len(hints))
        watched = span(round(time.monotonic() - self._since))
        title = f"task {view.task_id}: {view.status} (watched for {watched})"
        parts: list[RenderableType] = [task_table(view, title, rows=rows)]
        parts += [Text(f"! {hint}", style="yellow") for hint in hints]
        # The empty line takes the `^C` of a terminal, which would break a full line and so move the table.
        self._live.update(Group(*parts, ""), refresh=True)


class Lines:
    """One line whenever something changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since = time.monotonic()
        self._nodes: dict[str, tuple[str, int, bool]] = {}
        self._printed_hints: set[str] = set()

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Print what has changed; a hint once."""
        for hint in hints:
            if hint not in self._printed_hints:
                self._printed_hints.add(hint)
                self._print(f"! {hint}")
        for node in view.nodes:
            state = (node.status, node.attempt, node.waiting)
            if self._nodes.get(node.node_id, (NodeStatus.QUEUED.value, 0, False)) != state:
                self._nodes[node.node_id] = state
                self._print(node_line(node))

    def _print(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._since:6.1f} s  {text}")


def task_table(
    view: TaskView, title: str | None = None, *, rows: int | None = None, wide: bool = True
) -> Table:
    """A row for each node; the most telling `rows` of them, a line each, when there are more.

    `wide` fills a terminal's width.
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
    """An empty table; ruled and as wide as a terminal, or bare for files and pipes."""
    box = SIMPLE_HEAD if wide else None
    text = Text(title, overflow="ellipsis") if title else None
    padding = (0, 2, 0, 0)
    return Table(title=text, title_justify="left", box=box, show_edge=False, padding=padding, expand=wide)


def add_names(table: Table, heading: str, names: Sequence[str], most: int = _MAX_NAME_CHARS) -> None:
    """A column that shows its names whole, up to `most` characters on a terminal."""
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
    """What the node waits for, and what is to be told of it."""
    if node.next_retry_at is not None:
        wait = span(max(0, round(node.next_retry_at - time.time())))
        return f"retry in {wait}" + (f": {node.note}" if node.note else "")
    if node.status not in _ACTIVE:
        return node.note
    waits = ["no worker has taken it yet"] if node.waiting else []
    before = [f"last attempt: {node.note}"] if node.note else []
    return "; ".join([*waits, *before])


def node_line(node: NodeView) -> str:
    """One node on one line."""
    attempt = f", attempt {node.attempt}" if node.attempt else ""
    stored = f", {node.batches:,} batch{'' if node.batches == 1 else 'es'}" if node.batches else ""
    note = node_note(node)
    return f"{node.node_id}  {node.status}{attempt}{stored}" + (f" ({note})" if note else "")
