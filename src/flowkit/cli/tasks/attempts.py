"""`flowkit attempts`, which shows the history of attempts. It imports its dependencies when it runs."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flowkit.cli import output
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    NodeId,
    TaskId,
    with_options,
)
from flowkit.reading.notes import format_seconds
from flowkit.text import one_line

if TYPE_CHECKING:
    from rich.table import Table

    from flowkit.reading.attempts import AttemptView


@with_options
def attempts(
    task: TaskId,
    node: NodeId = None,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show all attempts of a task, or of one of its nodes: their workers, durations and outcomes."""
    views, complete = asyncio.run(_read(task, node, where))
    now = datetime.now(UTC).timestamp()
    if as_json:
        rows = [_to_json(each, now) for each in views]
        return output.document({"task_id": task, "attempts": rows, "complete": complete})
    if views:
        console = output.console()
        console.print(attempts_table(views, now, wide=console.is_terminal))
    else:
        output.note("no attempts yet")
    if not complete:
        output.note(
            "Temporal no longer has the history of this task; attempts whose workers crashed, and attempts of "
            "functions, may be missing"
        )
    return None


async def _read(
    task_id: str, node_id: str | None, where: DeploymentOptions
) -> tuple[list[AttemptView], bool]:
    from flowkit.cli.servers import servers
    from flowkit.reading.attempts import read_attempts

    async with servers(where) as both:
        return await read_attempts(both, task_id, node_id)


def _to_json(attempt: AttemptView, now: float) -> dict[str, Any]:
    shown = asdict(attempt) | {"seconds": attempt.seconds(now)}
    for name in ("scheduled_at", "started_at", "accepted_at", "ended_at"):
        at = shown[name]
        shown[name] = None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
    return shown


def attempts_table(attempts: list[AttemptView], now: float, *, wide: bool) -> Table:
    """Return a table with a row for each attempt; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import add_names, add_times, format_time, plain_table

    table = plain_table(wide=wide)
    add_names(table, "node", [each.node_id for each in attempts])
    table.add_column("attempt", justify="right", no_wrap=True)
    add_names(table, "worker", [each.worker or "" for each in attempts])
    versions = any(each.version for each in attempts)
    if versions:
        table.add_column("version", no_wrap=True)
    add_times(table, "started")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("outcome", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for each in attempts:
        seconds = each.seconds(now)
        cells = [
            Text(each.node_id),
            Text(str(each.attempt)),
            Text(each.worker or ""),
            *([Text(each.version or "")] if versions else []),
            Text(format_time(each.began_at)),
            Text("" if seconds is None else format_seconds(seconds)),
            Text.assemble((each.outcome, _STYLES.get(each.outcome, "")), _format_error(each)),
        ]
        table.add_row(*cells)
    return table


_STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "cancelled": "red",
    "handed over": "yellow",
    "yielded": "yellow",
    "waiting": "dim",
    "replaced": "dim",
}


def _format_error(attempt: AttemptView) -> str:
    """Return the code and the text of a failure, to follow the outcome."""
    return "".join(f": {one_line(text)}" for text in (attempt.code, attempt.error) if text)
