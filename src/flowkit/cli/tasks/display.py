"""The display of tasks: the nodes of one as a table, a live table or lines; a list of tasks; the nodes of a graph."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.text import Text

from flowkit.cli.screen import add_names, open_screen, plain_table
from flowkit.graph.description import group_rows
from flowkit.models import NodeStatus
from flowkit.pictures.styles import style_of
from flowkit.reading.notes import format_note, format_seconds
from flowkit.text import format_duration, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

    from flowkit.cli.screen import Screen
    from flowkit.client import TaskSummary
    from flowkit.graph.description import NodeDescription, Row
    from flowkit.reading.state import NodeRow, TaskView

_DISPLAY_ORDER = ("failed", "cancelling", "deferred", "running", "cancelled", "skipped", "queued", "finished")
"""Order of the rows when they do not all fit."""

_ACTIVE = (NodeStatus.RUNNING, NodeStatus.CANCELLING)

_PROGRESS_SEC = 10.0
"""Seconds between two rounds of lines about progress."""
_PROGRESS_NODES = 5
"""Largest number of nodes in such a round."""

_OTHER_LINES = 8
"""Lines of a live display that show no node."""

_ID_CHARS = 36
_TIME_CHARS = len("9 h 59 min")
_MINUTE = len("2026-01-31 12:00")

MOST_ROWS = 40
"""Rows of the table of a graph. A larger graph has one row for each series of equal nodes."""


@contextmanager
def open_task_screen(console: Console) -> Iterator[Screen[[TaskView, Sequence[str]]]]:
    """Yield a live table of a task if the terminal can move its cursor; otherwise plain lines."""
    with open_screen(console, draw_task, partial(TaskLines, console)) as shown:
        yield shown


def draw_task(height: int, seconds: float, view: TaskView, hints: Sequence[str]) -> list[RenderableType]:
    """Return the parts of the live display of a task, in `height` lines if possible."""
    rows = max(3, height - _OTHER_LINES - len(hints))
    title = f"task {view.task_id}: {view.status} (watched for {format_duration(round(seconds))})"
    return [
        task_table(view, title, rows=rows),
        *(Text(f"! {hint}", style="yellow") for hint in hints),
    ]


_State = tuple[str, int, bool, str, str, bool, bool, bool]
_NEW: _State = (NodeStatus.QUEUED.value, 0, False, "", "", False, False, False)


def _state_of(node: NodeRow) -> _State:
    """Return the parts of a node's state whose change deserves a line."""
    overdue = node.heard_at is not None
    shown = (node.waiting, node.waits_for, node.worker, node.silent, overdue, node.lost)
    return (node.status, node.attempt, *shown)


def _progress_of(node: NodeRow) -> tuple[int, int, str]:
    """Return how far a running node is: its batches, those that are set aside, and how many shards run."""
    return node.batches, node.failed_batches, node.shards.partition(",")[0]


class TaskLines:
    """Prints one line for each change of state, and every ten seconds how far nodes are that have made progress."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._since = self._round_at = clock()
        self._nodes: dict[str, _State] = {}
        self._progress: dict[str, tuple[int, int, str]] = {}
        self._printed_hints: set[str] = set()

    def show(self, view: TaskView, hints: Sequence[str]) -> None:
        """Print the changes since the last call; print each hint only once."""
        for hint in hints:
            if hint not in self._printed_hints:
                self._printed_hints.add(hint)
                self._print(f"! {hint}")
        for node in view.nodes:
            state = _state_of(node)
            if self._nodes.get(node.node_id, _NEW) != state:
                self._nodes[node.node_id] = state
                self._print_node(node)
        self._show_progress(view)

    def _show_progress(self, view: TaskView) -> None:
        if self._clock() - self._round_at < _PROGRESS_SEC:
            return
        self._round_at = self._clock()
        moved = [
            node
            for node in view.nodes
            if node.status in _ACTIVE and self._progress.get(node.node_id) != _progress_of(node)
        ]
        for node in moved[:_PROGRESS_NODES]:
            self._print_node(node)

    def _print_node(self, node: NodeRow) -> None:
        self._progress[node.node_id] = _progress_of(node)
        self._print(format_line(node))

    def _print(self, text: str) -> None:
        self._console.print(f"{self._clock() - self._since:6.1f} s  {text}")


def task_table(
    view: TaskView, title: str | None = None, *, rows: int | None = None, wide: bool = True
) -> Table:
    """Return a table with a row for each node, or the most relevant nodes in at most `rows` lines.

    `wide` fills the width of the terminal.
    """
    wrap = wide and rows is None
    table = plain_table(title, wide=wide)
    shown = _select_relevant(view.nodes, rows)
    add_names(table, "node", [node.node_id for node in shown])
    add_names(table, "role", [node.role for node in shown])
    table.add_column("status", width=10, no_wrap=True)
    for heading in ("attempt", "batches"):
        table.add_column(heading, width=len(heading), justify="right", no_wrap=True)
    table.add_column("time", min_width=0 if rows is None else _TIME_CHARS, justify="right", no_wrap=True)
    table.add_column(
        "note", ratio=1 if wide else None, no_wrap=not wrap, overflow="fold" if wrap else "ellipsis"
    )
    for node in shown:
        table.add_row(*_format_cells(node))
    if hidden := len(view.nodes) - len(shown):
        table.add_row(Text(f"… {hidden:,} more", style="dim"))
    return table


def _select_relevant(nodes: Sequence[NodeRow], rows: int | None) -> Sequence[NodeRow]:
    if rows is None or len(nodes) <= rows:
        return nodes
    return sorted(nodes, key=_rank)[: rows - 1]


def _rank(node: NodeRow) -> int:
    """Return the place of a node's row: nodes that wait for a person are first."""
    return -1 if node.awaits_decision else _DISPLAY_ORDER.index(node.status)


def _format_cells(node: NodeRow) -> Iterator[Text]:
    yield Text(node.node_id)
    yield Text(node.role)
    yield status_text(node.status)
    yield Text(str(node.attempt or ""))
    yield Text(f"{node.batches:,}" if node.batches else "")
    yield Text("" if node.seconds is None else format_seconds(node.seconds))
    yield Text(format_note(node), style="yellow" if node.awaits_decision else "")


def status_text(status: str) -> Text:
    """Return the status of a node in its color."""
    return Text(status, style=style_of(status).terminal)


def format_line(node: NodeRow) -> str:
    """Return a line that describes a node."""
    attempt = f", attempt {node.attempt}" if node.attempt else ""
    stored = f", {node.batches:,} batch{'' if node.batches == 1 else 'es'}" if node.batches else ""
    took = f", {format_seconds(node.seconds)}" if node.seconds is not None and _ended(node) else ""
    note = format_note(node)
    return f"{node.node_id}  {node.status}{attempt}{stored}{took}" + (f" ({note})" if note else "")


def _ended(node: NodeRow) -> bool:
    return NodeStatus(node.status).ended


def tasks_table(tasks: list[TaskSummary], *, wide: bool, reasons: bool = False) -> Table:
    """Return a table with a row for each task; `wide` fills the width of the terminal."""
    table = plain_table(wide=wide)
    add_names(table, "task", [task.task_id for task in tasks], most=_ID_CHARS)
    table.add_column("status", width=9, no_wrap=True)
    table.add_column("created (UTC)", width=_MINUTE, no_wrap=True)
    add_names(table, "name", [task.name or "" for task in tasks])
    if reasons:
        table.add_column("reason", no_wrap=True, ratio=1 if wide else None)
    for task in tasks:
        created = (task.started_at or "")[:_MINUTE].replace("T", " ")
        cells = (task.task_id, task.status.value, created, task.name or "", one_line(task.reason or ""))
        table.add_row(*map(Text, cells[: len(table.columns)]))
    return table


def graph_table(nodes: Sequence[NodeDescription], *, wide: bool) -> Table:
    """Return a table with a row for each node: when it starts, and how it differs from the defaults.

    `wide` fills the width of the terminal. The last row counts the nodes that do not fit.
    """
    every = group_rows(nodes, MOST_ROWS)
    shown = every[:MOST_ROWS]
    table = plain_table(wide=wide)
    add_names(table, "node", [_format_row_name(row) for row in shown])
    add_names(table, "role", [_format_row_role(row.node) for row in shown])
    table.add_column("starts", overflow="fold")
    if any(row.node.differs for row in shown):
        table.add_column("options", overflow="fold")
    for row in shown:
        cells = (_format_row_name(row), _format_row_role(row.node), row.node.starts, row.node.differs)
        table.add_row(*(Text(one_line(cell)) for cell in cells[: len(table.columns)]))
    if hidden := sum(1 + row.others for row in every[MOST_ROWS:]):
        table.add_row(Text(f"… {hidden:,} more", style="dim"))
    return table


def _format_row_name(row: Row) -> str:
    return f"{row.node.node_id} and {row.others:,} more" if row.others else row.node.node_id


def _format_row_role(node: NodeDescription) -> str:
    return f"{node.role}()" if node.is_function else node.role
