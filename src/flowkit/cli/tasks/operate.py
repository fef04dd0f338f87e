"""`flowkit pause` and `resume`, which change a running task. They import their dependencies when they run."""

import asyncio
import getpass
import socket
from typing import Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.options import (
    DEFAULT_DATABASE,
    DEFAULT_MONGO_URL,
    AsJson,
    MongoDatabase,
    MongoUrl,
    TaskId,
    Verbose,
    Where,
)
from flowkit.cli.output import log_warnings
from flowkit.models.actions import PAUSE, RESUME, TASK_SCOPE

_SHOWN = 40
"""Maximum number of affected nodes in the table; --json has up to 1,000."""

_SCOPES = "node:ID, below:ID (all nodes that depend on the node) or role:NAME. Repeatable."

Reason = Annotated[str, typer.Option(help="Why, up to 500 characters; the task keeps it in its audit.")]
By = Annotated[
    str | None,
    typer.Option(help="Who requests the action. Default: your user name and host.", show_default=False),
]
IfRevision = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Reject the action if the task has another revision, because someone else acted meanwhile.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what the action would affect; change nothing.")]


def pause(
    task: TaskId,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE", help=f"Pause only a part of the task: {_SCOPES} Default: the whole task."
        ),
    ] = None,
    interrupt: Annotated[
        bool,
        typer.Option("--interrupt", help="Stop running attempts too. They run again later, using no retry."),
    ] = False,
    reason: Reason = "",
    by: By = None,
    if_revision: IfRevision = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    verbose: Verbose = False,
) -> None:
    """Start nothing new in a running task, or in a part of it, until `flowkit resume`. Running attempts finish."""
    log_warnings(verbose)
    given = {"scopes": scope or [TASK_SCOPE], "interrupt": interrupt}
    where = Where(mongo_url=mongo_url, database=database)
    _act(task, PAUSE, given | _common(reason, by, if_revision), where, dry_run=dry_run, as_json=as_json)


def resume(
    task: TaskId,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SCOPE",
            help="Resume only this scope, as `flowkit status` shows it. Repeatable. Default: all.",
        ),
    ] = None,
    reason: Reason = "",
    by: By = None,
    if_revision: IfRevision = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    verbose: Verbose = False,
) -> None:
    """Continue a paused task, or a part of it."""
    log_warnings(verbose)
    given = {"scopes": scope or []}
    where = Where(mongo_url=mongo_url, database=database)
    _act(task, RESUME, given | _common(reason, by, if_revision), where, dry_run=dry_run, as_json=as_json)


def _common(reason: str, by: str | None, if_revision: int | None) -> dict[str, Any]:
    return {"reason": reason, "by": _user() if by is None else by, "if_revision": if_revision}


def _user() -> str:
    """Return the user and the host of this process."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


def _act(task: str, name: str, given: dict[str, Any], where: Where, *, dry_run: bool, as_json: bool) -> None:
    result = asyncio.run(_send(task, name, given, where, dry_run=dry_run))
    if as_json:
        return output.document({"task_id": task, "action": name, "dry_run": dry_run, **result})
    done = (
        f"{name} would affect" if dry_run else f"{name} applied as revision {result['revision']}; it affects"
    )
    affected = result["affected"]
    output.echo(f"{done} {len(affected):,} node{'' if len(affected) == 1 else 's'} of task {task}")
    width = max((len(each["node_id"]) for each in affected[:_SHOWN]), default=0)
    for each in affected[:_SHOWN]:
        output.echo(f"  {each['node_id']:<{width}}  {each['from']} -> {each['to']}")
    if len(affected) > _SHOWN:
        output.echo(f"  … {len(affected) - _SHOWN:,} more; --json lists them")
    for note in result["notes"]:
        output.note(f"  {note}")
    return None


async def _send(
    task: str, name: str, given: dict[str, Any], where: Where, *, dry_run: bool
) -> dict[str, Any]:
    from flowkit.cli.servers import servers

    async with servers(where) as both:
        call = both.tasks.preview if dry_run else both.tasks.act
        return await call(task, name, given)
