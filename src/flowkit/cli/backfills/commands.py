"""`flowkit backfill`, which starts tasks of a schedule for past times. Commands import what they need when they run."""

import asyncio
from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.errors import EPILOG, add_remedy
from flowkit.cli.options import AsJson, DeploymentOptions, with_options
from flowkit.errors import ConfigError
from flowkit.models.admission import DEFAULT_TENANT, Admission, Priority
from flowkit.models.backfills import Existing, Order
from flowkit.text import count_of, shell_command

backfill = typer.Typer(
    help="Start the tasks of a schedule for past nominal times: a lost week, or each hour of last month.",
    no_args_is_help=True,
)

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the backfill, which `create` and `list` show.")]


@backfill.command("create", epilog=EPILOG)
@with_options
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule. It may be paused.")],
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Where the range begins, inclusive: a date such as 2026-11-01, which begins at midnight in the time "
            "zone of the schedule, or a time with its offset, such as 2026-11-01T02:00:00Z.",
        ),
    ],
    end: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TIME",
            help="Where the range ends, exclusive, in the same form. Times that have not come yet are left out.",
        ),
    ],
    order: Annotated[Order, typer.Option(help="Which nominal times start first.")] = Order.OLDEST,
    max_active: Annotated[int, typer.Option(help="How many tasks run at once: 1 to 100.")] = 4,
    existing: Annotated[
        Existing,
        typer.Option(
            help="Which times start again that have a task: none, those whose task has failed or was cancelled, or all "
            "whose task has ended."
        ),
    ] = Existing.NONE,
    admission: Annotated[
        str | None,
        typer.Option(metavar="USER", help="Submit the tasks to the admission queue for this user."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="With --admission: tenant of the user.")] = DEFAULT_TENANT,
    priority: Annotated[
        Priority, typer.Option(help="With --admission: band in which the tasks wait.")
    ] = Priority.NORMAL,
    backfill_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="Id of the backfill: a second call with it creates no second one. Default: a new one.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the nominal times, and start nothing.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Start the tasks of a schedule for its nominal times from --from to before --to, some at once.

    They have the present graph and params of the schedule. Each nominal time has one task, whose id shows it.
    """
    from flowkit.cli.backfills.operations import (
        BackfillOptions,
        create_backfill,
        plan_backfill,
        print_plan,
    )

    who = None if admission is None else Admission(user_id=admission, tenant=tenant, priority=priority)
    options: BackfillOptions = {
        "start": start,
        "end": end,
        "order": order.value,
        "max_active": max_active,
        "existing": existing.value,
        "admission": who,
        "backfill_id": backfill_id,
    }
    if dry_run:
        planned = asyncio.run(plan_backfill(where, name, options))
        if as_json:
            return output.document(planned.as_json())
        return print_plan(planned)
    view = asyncio.run(create_backfill(where, name, options))
    if as_json:
        return output.document(view.as_json())
    backfill_, times = view.backfill, f"{view.backfill.total:,} nominal times of {name}"
    if view.is_new and not view.backfill.state.ended:
        output.echo(f"created backfill {backfill_.backfill_id}: {times}")
    else:
        output.echo(f"backfill {backfill_.backfill_id} exists, with {times}: it is {backfill_.state.value}")
    _hint_at_following(view.backfill.backfill_id)
    return None


def _hint_at_following(backfill_id: str) -> None:
    output.note(f"  follow it  {shell_command('flowkit backfill status', backfill_id, options=['--follow'])}")


@backfill.command("list", epilog=EPILOG)
@with_options
def list_all(
    schedule: Annotated[str | None, typer.Option(help="Only the backfills of this schedule.")] = None,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """List the newest backfills, at most 100."""
    from flowkit.cli.backfills.operations import list_backfills, print_backfills

    views = asyncio.run(list_backfills(where, schedule))
    if as_json:
        return output.document({"backfills": [each.as_json() for each in views]})
    if not views:
        return output.note("no backfills; `flowkit backfill create` creates one")
    return print_backfills(views)


@backfill.command("status", epilog=EPILOG)
@with_options
def status(
    backfill_id: Id,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Print a line for each change until the end. Exit with 1 if a task has failed, 5 after a cancel.",
        ),
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Show how far a backfill is, what runs, and what has failed and why."""
    from flowkit.cli.backfills.operations import follow_backfill, print_backfill, show_backfill

    if follow and as_json:
        raise add_remedy(ConfigError("--follow prints lines, so it has no JSON document"), "omit --json")
    if follow:
        raise typer.Exit(asyncio.run(follow_backfill(where, backfill_id)))
    view = asyncio.run(show_backfill(where, backfill_id))
    if as_json:
        return output.document(view.details_as_json())
    return print_backfill(view)


@backfill.command("cancel", epilog=EPILOG)
@with_options
def cancel(
    backfill_id: Id,
    running: Annotated[
        bool, typer.Option("--running", help="Also request that the tasks that run stop.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Start no more tasks of a backfill. When the command returns, no pending one will start."""
    from flowkit.cli.backfills.operations import cancel_backfill, print_cancelled

    view = asyncio.run(cancel_backfill(where, backfill_id, running=running))
    if as_json:
        return output.document(view.details_as_json())
    return print_cancelled(view, running=running)


@backfill.command("retry-failed", epilog=EPILOG)
@with_options
def retry_failed(backfill_id: Id, as_json: AsJson = False, *, where: DeploymentOptions) -> None:
    """Start the failed tasks of a backfill again, as a whole, with the present graph and params of the schedule."""
    from flowkit.cli.backfills.operations import retry_backfill

    view, count = asyncio.run(retry_backfill(where, backfill_id))
    if as_json:
        return output.document({**view.as_json(), "started_again": count})
    if count:
        times = count_of(count, "failed nominal time")
        output.echo(f"{times} of backfill {backfill_id} {'starts' if count == 1 else 'start'} again")
        _hint_at_following(backfill_id)
    else:
        output.echo(f"backfill {backfill_id} continues")
    return None
