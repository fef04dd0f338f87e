"""`flowkit schedule`, which starts tasks at nominal times. Each command imports its dependencies when it runs."""

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from flowkit.cli import output
from flowkit.cli.errors import EPILOG
from flowkit.cli.options import AsJson, DeploymentOptions, with_options
from flowkit.cli.tasks.validate import GraphFile
from flowkit.text import shell_command

if TYPE_CHECKING:
    from flowkit.schedules import ScheduleOptions

schedule = typer.Typer(
    help="Start tasks at nominal times: by cron or at an interval. Each schedule is one of Temporal.",
    no_args_is_help=True,
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the schedule. The ids of its tasks begin with it.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """When a schedule starts its tasks. A group of options; None leaves what the schedule has."""

    cron: Annotated[
        list[str] | None,
        typer.Option(
            "--cron",
            help="Cron expression of five fields: minute, hour, day, month, weekday, such as '0 2 * * *'. "
            "Can be repeated.",
        ),
    ] = None
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Interval, instead of --cron: 30s, 15m, 2h or 1d."),
    ] = None
    timezone: Annotated[
        str | None,
        typer.Option("--timezone", help="Time zone of --cron, such as Europe/Berlin. Default: UTC."),
    ] = None
    overlap: Annotated[
        str | None,
        typer.Option(
            "--overlap",
            help="What happens while an earlier task still runs: skip (default), buffer-one, buffer-all, cancel "
            "(the earlier task) or allow.",
        ),
    ] = None
    catchup: Annotated[
        str | None,
        typer.Option(
            "--catchup",
            metavar="DURATION",
            help="How late a task may start after an outage of Temporal. Default: 365d.",
        ),
    ] = None
    jitter: Annotated[
        str | None,
        typer.Option("--jitter", metavar="DURATION", help="Longest random delay of a start. Default: none."),
    ] = None
    pause_on_failure: Annotated[
        bool | None,
        typer.Option(
            "--pause-on-failure/--no-pause-on-failure",
            help="Pause the schedule when one of its tasks fails. Not with --overlap allow.",
        ),
    ] = None

    def options(self) -> "ScheduleOptions":
        """Return the arguments of `Schedules.create` and `Schedules.update`."""
        given: Any = {**asdict(self), "cron": self.cron or None}
        return cast("ScheduleOptions", given)


Params = Annotated[
    str | None,
    typer.Option(
        help='Params as JSON or YAML, or @FILE. A value {"$cel": "task.scheduled_at"} becomes the nominal '
        "time of each task."
    ),
]
Param = Annotated[
    list[str] | None,
    typer.Option(help="One param as key=value, JSON if it parses as JSON, else text. Repeatable."),
]
Note = Annotated[str, typer.Option(help="Why, for those who read `flowkit schedule show`.")]


@schedule.command("create", epilog=EPILOG)
@with_options
def create(
    name: Name,
    graph: GraphFile,
    params: Params = None,
    param: Param = None,
    as_json: AsJson = False,
    *,
    timing: Timing,
    where: DeploymentOptions,
) -> None:
    """Create a schedule, and show its next three times. Its tasks start also while no engine runs, and wait for one."""
    from flowkit.cli.schedules.operations import create_schedule, print_next, read_scheduled

    task = read_scheduled(graph, params, param or ())
    view = asyncio.run(create_schedule(where, name, task, timing.options()))
    if as_json:
        return output.document(view.as_json())
    output.echo(f"created schedule {name}: {view.times.text}")
    print_next(view)
    output.note(f"  see its tasks  {shell_command('flowkit schedule show', name)}")
    return None


@schedule.command("update", epilog=EPILOG)
@with_options
def update(
    name: Name,
    graph: Annotated[
        str | None, typer.Argument(metavar="[GRAPH]", help="The new graph, as for create; it stays without.")
    ] = None,
    params: Params = None,
    param: Param = None,
    if_revision: Annotated[
        int | None,
        typer.Option(
            "--if-revision",
            min=0,
            help="Refuse the update if the schedule has another revision than `flowkit schedule show` has shown, "
            "because someone else has changed it meanwhile.",
        ),
    ] = None,
    as_json: AsJson = False,
    *,
    timing: Timing,
    where: DeploymentOptions,
) -> None:
    """Change what is given, and nothing else. --params replaces all params, and a new GRAPH brings its own.

    Tasks that have started keep their graph and params.
    """
    from flowkit.cli.schedules.operations import print_next, read_scheduled, update_schedule

    task = None if graph is None else read_scheduled(graph, params, param or ())
    view = asyncio.run(update_schedule(where, name, task, params, param or (), timing.options(), if_revision))
    if as_json:
        return output.document(view.as_json())
    output.echo(f"updated schedule {name}: {view.times.text}")
    print_next(view)
    return None


@schedule.command("list", epilog=EPILOG)
@with_options
def list_all(as_json: AsJson = False, *, where: DeploymentOptions) -> None:
    """List the schedules of this deployment."""
    from flowkit.cli.schedules.operations import list_schedules, print_schedules

    views = asyncio.run(list_schedules(where))
    if as_json:
        return output.document({"schedules": [each.as_json() for each in views]})
    if not views:
        return output.note("no schedules; `flowkit schedule create` creates one")
    return print_schedules(views)


@schedule.command("show", epilog=EPILOG)
@with_options
def show(name: Name, as_json: AsJson = False, *, where: DeploymentOptions) -> None:
    """Show when a schedule starts its next tasks, and what has become of the latest ones."""
    from flowkit.cli.schedules.operations import print_schedule, show_schedule

    view = asyncio.run(show_schedule(where, name))
    if as_json:
        return output.document(view.details_as_json())
    return print_schedule(view)


@schedule.command("pause", epilog=EPILOG)
@with_options
def pause(name: Name, note: Note = "", *, where: DeploymentOptions) -> None:
    """Start no more tasks, until `flowkit schedule resume`. Times that pass meanwhile start none."""
    from flowkit.cli.schedules.operations import change

    asyncio.run(change(where, lambda schedules: schedules.pause(name, note=note)))
    output.echo(f"paused schedule {name}")


@schedule.command("resume", epilog=EPILOG)
@with_options
def resume(name: Name, note: Note = "", *, where: DeploymentOptions) -> None:
    """Start tasks again, from the next nominal time on."""
    from flowkit.cli.schedules.operations import change

    asyncio.run(change(where, lambda schedules: schedules.resume(name, note=note)))
    output.echo(f"resumed schedule {name}")


@schedule.command("trigger", epilog=EPILOG)
@with_options
def trigger(name: Name, as_json: AsJson = False, *, where: DeploymentOptions) -> None:
    """Start a task of the schedule now, also while it is paused. Its nominal time is the present one."""
    from flowkit.cli.schedules.operations import change

    task_id: str | None = asyncio.run(change(where, lambda schedules: schedules.trigger(name)))
    if as_json:
        return output.document({"name": name, "task_id": task_id})
    if task_id is None:
        return output.warn(
            f"no task has started, because an earlier one of {name} runs; --overlap of the schedule says what happens"
        )
    output.echo(f"started task {task_id}")
    output.note(f"  see it  {shell_command('flowkit status', task_id, options=['--watch'])}")
    return None


@schedule.command("delete", epilog=EPILOG)
@with_options
def delete(name: Name, *, where: DeploymentOptions) -> None:
    """Delete a schedule. Its tasks stay as they are, also those that run."""
    from flowkit.cli.schedules.operations import change

    asyncio.run(change(where, lambda schedules: schedules.delete(name)))
    output.echo(f"deleted schedule {name}; its tasks stay as they are")


@schedule.command("apply", epilog=EPILOG)
@with_options
def apply(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="YAML or JSON file with the schedules, by name.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete the schedules of this deployment that FILE does not name.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Create and update schedules so that they are as in a file. A second call changes nothing."""
    from flowkit.cli.schedules.operations import apply_all, print_changes, read_definitions

    wanted = read_definitions(file)
    changes = asyncio.run(apply_all(where, wanted, dry_run=dry_run, prune=prune))
    if as_json:
        shown: list[Any] = [each.as_json() for each in changes]
        return output.document({"dry_run": dry_run, "schedules": shown})
    return print_changes(changes, dry_run=dry_run)
