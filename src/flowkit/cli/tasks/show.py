"""Show, list and cancel tasks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from flowkit.cli import output
from flowkit.cli.errors import remedied
from flowkit.cli.screen import add_names, plain_table, task_table
from flowkit.cli.servers import database, servers
from flowkit.cli.tasks.view import TaskReader
from flowkit.cli.tasks.watch import outcome
from flowkit.client import TaskCatalog, UnknownTask, cancel_reason
from flowkit.errors import ConfigError
from flowkit.text import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from flowkit.cli.options import Where
    from flowkit.cli.tasks.view import TaskView
    from flowkit.client import TaskSummary

_ID_CHARS = 36
_WIDE = 110
"""Minimum width of a terminal, in columns, for the reasons in a list; `status` always shows them."""
_MINUTE = len("2026-01-31 12:00")


async def show(task_id: str, where: Where, *, as_json: bool) -> None:
    """Print the state of a task. Raise UnknownTask if it does not exist."""
    async with servers(where) as both:
        reader = await TaskReader.at(both, task_id)
        view = await reader.view()
        hints = await reader.hints(view)
    if as_json:
        return output.document({**asdict(view), "hints": hints})
    _print_task(view)
    for hint in hints:
        output.warn(hint)
    return None


def _print_task(view: TaskView) -> None:
    source = "" if view.source == "workflow" or view.status.closed else " (from its document)"
    output.echo(f"{outcome(view)}{source}")
    if view.nodes:
        console = output.console()
        console.print(task_table(view, wide=console.is_terminal))


async def cancel(task_id: str, reason: str, where: Where) -> str:
    """Request the cancellation of a task and return the reason as it is stored.

    Raise UnknownTask if Temporal has no workflow for the task, and ConfigError if it has ended.
    """
    kept = cancel_reason(reason)
    async with servers(where) as both:
        reader = await TaskReader.at(both, task_id)
        _refuse_ended(await reader.view())
        if not await both.tasks.cancel_task(task_id, reason=kept):
            _refuse_ended(await reader.view())
            raise _without_workflow(task_id)
    return kept


def _without_workflow(task_id: str) -> UnknownTask:
    message = f"Temporal has no workflow for task {task_id!r}; only its document exists in MongoDB"
    return remedied(UnknownTask(task_id, message), "a running engine soon closes the document")


def _refuse_ended(view: TaskView) -> None:
    if view.status.closed:
        raise remedied(
            ConfigError(f"task {view.task_id} is already {view.status}"), "there is nothing to cancel"
        )


async def newest(status: str | None, limit: int, where: Where) -> tuple[list[TaskSummary], bool]:
    """Return the newest tasks, and whether there are more. Raise ConfigError for an unknown status."""
    async with database(where) as db:
        found = await TaskCatalog(db).list_tasks(status, limit + 1)
    return found[:limit], len(found) > limit


def print_tasks(tasks: list[TaskSummary]) -> None:
    """Print a table with a row for each task."""
    console = output.console()
    console.print(tasks_table(tasks, wide=console.is_terminal, reasons=console.width >= _WIDE))


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
