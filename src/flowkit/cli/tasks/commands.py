"""`flowkit run`, `status`, `cancel` and `list`. Each command imports its dependencies when it runs, to start fast."""

import asyncio
import time
from dataclasses import asdict
from typing import Annotated

import typer

from flowkit import reason_codes
from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.json_files import read_task
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    NewTaskId,
    TaskId,
    Timeout,
    with_options,
)
from flowkit.cli.tasks.validate import GraphFile
from flowkit.errors import ConfigError
from flowkit.limits import LIST_TASKS
from flowkit.text import shell_command

_MOST = LIST_TASKS - 1
"""The query asks for one more task, to find out whether there are more."""

WatchIt = Annotated[bool, typer.Option("--watch", "-w", help="Show the nodes until the task ends.")]


@with_options
def run(
    graph: GraphFile,
    params: Annotated[
        str | None,
        typer.Option(help="Params as JSON or YAML, or @FILE; they override those of GRAPH key by key."),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            help="One param as key=value, JSON if it parses as JSON, else text; overrides --params. Repeatable."
        ),
    ] = None,
    task_id: NewTaskId = None,
    watch: WatchIt = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Start a task. With --watch, show it until it ends. An engine and workers must be running."""
    _require_watch(timeout, watch)
    task = read_task(graph, params, param or ())
    task.checked()
    from flowkit.cli.tasks.operations import Watch, start

    how = Watch(timeout=timeout, as_json=as_json) if watch else None
    raise typer.Exit(asyncio.run(start(task, task_id, where, how, as_json=as_json)))


@with_options
def status(
    task: TaskId,
    watch: WatchIt = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show a task and its nodes. With --watch, show them until the task ends and exit with its outcome."""
    _require_watch(timeout, watch)
    from flowkit.cli.tasks.operations import Watch, show, watch_existing

    if watch:
        raise typer.Exit(asyncio.run(watch_existing(task, where, Watch(timeout=timeout, as_json=as_json))))
    asyncio.run(show(task, where, as_json=as_json))


@with_options
def cancel(
    task: TaskId,
    reason: Annotated[
        str, typer.Option(help="The reason, up to 1,000 characters; stored in the task document.")
    ] = reason_codes.USER_REQUEST,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Request the cancellation of a task, without waiting for its end."""
    from flowkit.cli.tasks.operations import cancel as request_cancel

    kept = asyncio.run(request_cancel(task, reason, where))
    if as_json:
        return output.document({"task_id": task, "cancel_requested": True, "reason": kept})
    output.echo(f"requested the cancellation of task {task}")
    output.note(f"  see it end  {shell_command('flowkit status', task, options=['--watch'])}")
    return None


@with_options
def list_tasks(
    status: Annotated[str | None, typer.Option(help="Only tasks with this status.")] = None,
    waits: Annotated[
        str | None,
        typer.Option(
            metavar="decision|event",
            help="Only tasks with a node that waits for a person's decision, about a held failure or an approval, or "
            "for prerequisites.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only tasks whose pipeline has this name.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Only tasks that have started within this time: 90m, 12h, 30d."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Maximum number of tasks.")] = 50,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """List tasks, newest first, from their documents in MongoDB."""
    from flowkit.cli.retention.commands import read_duration
    from flowkit.cli.tasks.operations import list_newest, print_tasks

    started = None if since is None else time.time() - read_duration(since, "--since")
    tasks, more = asyncio.run(list_newest(status, limit, where, waits=waits, name=name, since=started))
    if as_json:
        return output.document({"tasks": [asdict(task) for task in tasks], "more": more})
    if tasks:
        print_tasks(tasks)
    else:
        kind = (
            "tasks"
            if waits is None
            else f"tasks with a node that waits for {'an' if waits[0] in 'aeiou' else 'a'} {waits}"
        )
        output.note(f"no {kind}" if status is None else f"no {kind} are {status}")
    if more:
        more_of_them = (
            f"`--limit {min(limit * 2, _MOST)}` shows more" if limit < _MOST else "query MongoDB to see all"
        )
        output.note(f"there are more than {limit}; {more_of_them}")
    return None


def _require_watch(timeout: float | None, watch: bool) -> None:
    if timeout is not None and not watch:
        raise add_remedy(ConfigError("--timeout requires --watch"), "add --watch")
