"""What the commands of backfills do on the servers, and how they print it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypedDict

from rich.table import Table
from rich.text import Text

from flowkit.backfills import BackfillPlan, Backfills, BackfillState, BackfillView
from flowkit.cli import output
from flowkit.cli.errors import Exit
from flowkit.cli.servers import servers
from flowkit.graph.scheduled import format_nominal
from flowkit.schedules import Schedules
from flowkit.text import count_of, format_duration, one_line, shell_command, truncate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from flowkit.cli.options import DeploymentOptions
    from flowkit.models.admission import Admission
    from flowkit.models.backfills import BackfillRun

_LOOK_SEC = 1.0
_ROWS = 10
"""Rows of a table of nominal times; `--json` has more of them."""
_REASON_CHARS = 100
_STYLES = {"finished": "green", "running": "cyan", "cancelling": "yellow", "cancelled": "yellow"}


class BackfillOptions(TypedDict):
    """The options of a new backfill."""

    start: str
    end: str
    order: str
    max_active: int
    existing: str
    admission: Admission | None
    backfill_id: str | None


@asynccontextmanager
async def _backfills(where: DeploymentOptions) -> AsyncIterator[Backfills]:
    async with servers(where) as both:
        schedules = Schedules(both.temporal, both.tasks, queue=where.engine_queue)
        yield Backfills(both.temporal, both.tasks, schedules, queue=where.engine_queue)


async def plan_backfill(where: DeploymentOptions, name: str, options: BackfillOptions) -> BackfillPlan:
    """Return what would be created."""
    async with _backfills(where) as backfills:
        return await backfills.plan(name, **options)


async def create_backfill(where: DeploymentOptions, name: str, options: BackfillOptions) -> BackfillView:
    """Create a backfill, and return it."""
    async with _backfills(where) as backfills:
        return await backfills.create(name, **options)


async def list_backfills(where: DeploymentOptions, schedule: str | None) -> list[BackfillView]:
    """Return the newest backfills."""
    async with _backfills(where) as backfills:
        return await backfills.list_backfills(schedule)


async def show_backfill(where: DeploymentOptions, backfill_id: str) -> BackfillView:
    """Return a backfill with what runs, and what has failed."""
    async with _backfills(where) as backfills:
        return await backfills.status(backfill_id)


async def cancel_backfill(where: DeploymentOptions, backfill_id: str, *, running: bool) -> BackfillView:
    """Cancel a backfill, and return it."""
    async with _backfills(where) as backfills:
        return await backfills.cancel(backfill_id, running=running)


async def retry_backfill(where: DeploymentOptions, backfill_id: str) -> tuple[BackfillView, int]:
    """Start the failed tasks of a backfill again. Return the backfill, and their number."""
    async with _backfills(where) as backfills:
        return await backfills.retry_failed(backfill_id)


async def follow_backfill(where: DeploymentOptions, backfill_id: str) -> Exit:
    """Print a line for each change of a backfill until it ends, and how it has ended."""
    shown = ""
    async with _backfills(where) as backfills:
        while True:
            view = await backfills.status(backfill_id)
            if (line := _progress(view)) != shown and not view.backfill.state.ended:
                output.echo(line)
                shown = line
            if view.backfill.state.ended:
                print_backfill(view)
                break
            await asyncio.sleep(_LOOK_SEC)
    if view.backfill.state is BackfillState.CANCELLED:
        return Exit.TASK_CANCELLED
    return Exit.TASK_FAILED if view.counts.failed else Exit.OK


def print_plan(planned: BackfillPlan) -> None:
    """Print the nominal times of a backfill that is not created."""
    backfill, runs = planned.backfill, planned.runs
    output.echo(f"would start {count_of(backfill.total, 'task')} of {backfill.schedule}")
    first = [*runs[:_ROWS], *runs[-1:]] if len(runs) > _ROWS else runs
    for number, run in enumerate(first):
        if number == _ROWS and len(runs) > _ROWS + 1:
            output.echo("  …")
        output.echo(f"  {run.task_id}")


def print_backfills(views: Sequence[BackfillView]) -> None:
    """Print a table of backfills."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ID", "SCHEDULE", "STATE", "FROM", "TO", "DONE", "COUNTS"):
        table.add_column(title, no_wrap=True)
    for view in views:
        backfill = view.backfill
        table.add_row(
            backfill.backfill_id,
            backfill.schedule,
            _state(view),
            format_nominal(backfill.start),
            format_nominal(backfill.end),
            f"{view.percent} %",
            view.counts.text,
        )
    output.console().print(table)


def _state(view: BackfillView) -> Text:
    state = view.backfill.state.value
    return Text(state, style=_STYLES.get(state, ""))


def print_backfill(view: BackfillView) -> None:
    """Print how far a backfill is, what runs, and what has failed."""
    backfill = view.backfill
    output.echo(_progress(view))
    output.echo(
        f"  schedule  {backfill.schedule}, {format_nominal(backfill.start)} to before {format_nominal(backfill.end)}, "
        f"{backfill.order.value} first, {backfill.max_active} at once, existing {backfill.existing.value}"
    )
    if view.left_sec is not None:
        output.echo(
            f"  left      about {format_duration(round(view.left_sec))}, if tasks last as long as the latest ones"
        )
    if backfill.state is BackfillState.CREATING:
        output.warn(
            "its nominal times are being stored; if its creator was killed, an engine completes it, or "
            "`flowkit backfill create` with the same arguments and --id"
        )
    elif not view.is_driven:
        output.warn(
            "its workflow does not run, so nothing starts; "
            f"`{shell_command('flowkit backfill retry-failed', backfill.backfill_id)}` starts it again, "
            "and `flowkit backfill cancel` ends the backfill"
        )
    elif not view.has_engine:
        output.warn(
            f"no engine polls queue {backfill.queue!r}, so nothing starts; start one with `flowkit engine`"
        )
    for title, runs, count in (
        ("RUNNING", view.running, view.counts.running),
        ("FAILED", view.failed, view.counts.failed),
        ("SKIPPED", view.skipped, view.counts.skipped),
    ):
        if runs:
            output.console().print(_runs_table(title, runs))
        if count > _ROWS:
            output.note(f"  … and {count - _ROWS:,} more; --json has {min(count, len(runs)):,} of them")


def _progress(view: BackfillView) -> str:
    backfill = view.backfill
    return (
        f"{backfill.backfill_id}: {backfill.state.value}, {view.percent} % of "
        f"{count_of(backfill.total, 'nominal time')}: {view.counts.text}"
    )


def _runs_table(title: str, runs: Sequence[BackfillRun]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (title, "REASON"):
        table.add_column(name, no_wrap=True)
    for run in runs[:_ROWS]:
        table.add_row(run.task_id, truncate(one_line(run.reason), _REASON_CHARS) if run.reason else "")
    return table


def print_cancelled(view: BackfillView, *, running: bool) -> None:
    """Print what a cancel has left."""
    output.echo(f"{_progress(view)}; none of the pending ones will start")
    if view.counts.running:
        how = "are asked to stop" if running else "continue; --running stops them, too"
        output.note(f"  {count_of(view.counts.running, 'task')} {how}")
