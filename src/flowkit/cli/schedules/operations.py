"""What the commands of schedules do on the servers, and how they print it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table
from rich.text import Text

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.json_files import GivenTask, read_change, read_pairs, read_params, read_task
from flowkit.cli.loading import is_flow_name
from flowkit.cli.servers import servers
from flowkit.errors import ConfigError, GraphError
from flowkit.graph.scheduled import evaluate_params, format_nominal
from flowkit.schedules import ScheduleDefinition, Schedules, ScheduleTimes
from flowkit.schedules.plan import ScheduleStep
from flowkit.schedules.times import OPTIONS, show_times
from flowkit.text import count_of, did_you_mean, one_line, printed, truncate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from flowkit.cli.options import DeploymentOptions
    from flowkit.schedules import ScheduleChange, ScheduledRun, ScheduleOptions, ScheduleView

T = TypeVar("T")

_NEXT = 3
_REASON_CHARS = 100
_KEYS = ("graph", "params", *OPTIONS)
_EXAMPLE = "a schedule of the file is, for example, {graph: report.yaml, cron: '0 2 * * *'}"
_STYLES = {"finished": "green", "failed": "red", "cancelled": "yellow", "running": "cyan"}


@asynccontextmanager
async def _schedules(where: DeploymentOptions) -> AsyncIterator[Schedules]:
    async with servers(where) as both:
        yield Schedules(both.temporal, both.tasks, queue=where.engine_queue)


async def change(where: DeploymentOptions, call: Callable[[Schedules], Awaitable[T]]) -> T:
    """Call a method of the schedules, and return its result."""
    async with _schedules(where) as schedules:
        return await call(schedules)


def read_scheduled(path: str, params: str | None, single: Sequence[str]) -> GivenTask:
    """Return the task of a schedule. Raise GraphError, with the lines of the nodes, if graph or params are invalid."""
    task = read_task(path, params, single, scheduled=True)
    _check(task)
    return task


def _check(task: GivenTask) -> None:
    replace(task, params=evaluate_params(task.params, format_nominal(datetime.now(UTC)))).checked()


async def create_schedule(
    where: DeploymentOptions, name: str, task: GivenTask, options: ScheduleOptions
) -> ScheduleView:
    """Create a schedule, and return it."""
    async with _schedules(where) as schedules:
        return await schedules.create(name, graph=task.graph, params=task.params, **options)


async def update_schedule(
    where: DeploymentOptions,
    name: str,
    task: GivenTask | None,
    params: str | None,
    single: Sequence[str],
    options: ScheduleOptions,
    if_revision: int | None,
) -> ScheduleView:
    """Change a schedule, and return it."""
    pairs = read_pairs(single, "--param", "day=2026-01-31")
    given = None if params is None else read_params(params)
    async with _schedules(where) as schedules:
        if task is not None:
            return await schedules.update(
                name, graph=task.graph, params=task.params, if_revision=if_revision, **options
            )
        return await schedules.update(
            name, params=given, single_params=pairs, if_revision=if_revision, **options
        )


async def list_schedules(where: DeploymentOptions) -> list[ScheduleView]:
    """Return the schedules by name."""
    async with _schedules(where) as schedules:
        return await schedules.list_schedules()


async def show_schedule(where: DeploymentOptions, name: str) -> ScheduleView:
    """Return a schedule with its latest tasks."""
    async with _schedules(where) as schedules:
        return await schedules.show(name)


async def apply_all(
    where: DeploymentOptions, wanted: Mapping[str, ScheduleDefinition], *, dry_run: bool, prune: bool
) -> list[ScheduleChange]:
    """Apply these schedules, or return what would change."""
    async with _schedules(where) as schedules:
        if not dry_run:
            return await schedules.apply(wanted, prune=prune)
        await schedules.first_times(wanted)
        return await schedules.plan(wanted, prune=prune)


def read_definitions(path: str) -> dict[str, ScheduleDefinition]:
    """Return the schedules in a file, `{schedules: {NAME: {graph, params, cron, …}}}`.

    The path of a graph is relative to the file. Raise ConfigError, which names the schedule and the key.
    """
    document = read_change(path)
    given = document.get("schedules")
    if not isinstance(given, dict) or len(document) > 1:
        problem = ConfigError(f"{path} must have the single key schedules, an object with schedules by name")
        raise add_remedy(problem, _EXAMPLE)
    folder = Path(path).parent if path != "-" else Path()
    return {name: _read_definition(name, each, folder) for name, each in given.items()}


def _read_definition(name: str, given: Any, folder: Path) -> ScheduleDefinition:
    if not isinstance(given, dict):
        raise add_remedy(ConfigError(f"schedule {name!r} is {printed(given)}, not an object"), _EXAMPLE)
    for key in given:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS, otherwise=f"the keys are {', '.join(_KEYS)}")
            raise ConfigError(f"schedule {name!r} has the unknown key {printed(key)}; {hint}")
    options: Any = {key: given[key] for key in OPTIONS if key in given}
    try:
        times = ScheduleTimes.read(options)
    except ConfigError as error:
        raise ConfigError(f"schedule {name!r}: {one_line(error)}") from None
    try:
        task = _read_task(given, folder)
        _check(task)
    except (ConfigError, GraphError) as error:
        add_remedy(error, f"this is schedule {name!r}")
        raise
    return ScheduleDefinition(graph=task.graph, params=task.params, times=times)


def _read_task(given: Mapping[str, Any], folder: Path) -> GivenTask:
    """Return the graph and params of a schedule in a file."""
    graph, params = given.get("graph"), given.get("params")
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise ConfigError(f"params is {printed(params)}; it must be an object")
    if isinstance(graph, dict):
        return GivenTask(graph=graph, params=params)
    if not isinstance(graph, str):
        problem = f"graph is {printed(graph)}; it must be a file, module:flow or a graph"
        raise add_remedy(ConfigError(problem), _EXAMPLE)
    source = graph if is_flow_name(graph) else str(folder / graph)
    return read_task(source, json.dumps(params), scheduled=True)


def print_next(view: ScheduleView) -> None:
    """Print the next three times of a schedule."""
    if view.paused:
        return output.note("  it is paused; `flowkit schedule resume` starts tasks again")
    return output.note(f"  next times     {show_times(view.next_times[:_NEXT], view.times.timezone)}")


def print_schedules(views: Sequence[ScheduleView]) -> None:
    """Print a table of schedules."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "WHEN", "NEXT", "LATEST TASK"):
        table.add_column(title, no_wrap=True)
    for view in views:
        due = "paused" if view.paused else show_times(view.next_times[:1], view.times.timezone)
        table.add_row(view.name, view.times.text, due, view.last_task or "-")
    output.console().print(table)


def print_schedule(view: ScheduleView) -> None:
    """Print a schedule with its next times and its latest tasks."""
    times = view.times
    output.echo(f"{view.name}: {times.text}{', paused' if view.paused else ''}")
    if view.paused and view.note:
        output.echo(f"  note     {view.note}")
    others = {
        key: value for key, value in times.as_json().items() if key not in {"cron", "every", "timezone"}
    }
    if others:
        output.echo(f"  options  {', '.join(f'{key} {value}' for key, value in others.items())}")
    if not view.paused:
        output.echo(f"  next     {show_times(view.next_times[:_NEXT], times.timezone)}")
    output.echo(f"  tasks    {view.started:,} started{_losses(view)}")
    output.echo(f"  revision {view.revision}")
    for each in view.taken:
        output.warn(str(each.reason))
    if view.problem:
        output.warn(
            f"the engine refuses the tasks of {view.name}: {truncate(view.problem, 4 * _REASON_CHARS)}; correct the "
            "schedule with `flowkit schedule update`"
        )
    if view.runs:
        output.console().print(_runs_table(view.runs))


def _losses(view: ScheduleView) -> str:
    missed = f"; {count_of(view.missed, 'time')} missed during outages" if view.missed else ""
    skipped = (
        f"; {count_of(view.skipped, 'time')} skipped, because an earlier task ran" if view.skipped else ""
    )
    return missed + skipped


def _runs_table(runs: Sequence[ScheduledRun]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("TASK", "NOMINAL TIME", "STATUS", "REASON"):
        table.add_column(title, no_wrap=True)
    for run in runs:
        status = Text(run.status, style=_STYLES.get(run.status, ""))
        reason = truncate(one_line(run.reason), _REASON_CHARS) if run.reason else ""
        table.add_row(run.task_id, format_nominal(run.scheduled_at), status, reason)
    return table


_WORDS = {
    ScheduleStep.CREATE: ("created", "would create"),
    ScheduleStep.UPDATE: ("updated", "would update"),
    ScheduleStep.DELETE: ("deleted", "would delete"),
    ScheduleStep.KEEP: ("unchanged", "unchanged"),
    ScheduleStep.UNLISTED: ("not in the file", "not in the file"),
}


def print_changes(changes: Sequence[ScheduleChange], *, dry_run: bool) -> None:
    """Print what `apply` has changed, or would change."""
    if not changes:
        output.note("no schedules")
    for each in changes:
        output.echo(f"{_WORDS[each.step][dry_run]}  {each.name}")
        for line in each.differences:
            output.echo(f"  {line}")
    if any(each.step is ScheduleStep.UNLISTED for each in changes):
        output.note("--prune deletes the schedules that are not in the file")
