"""`flowkit purge`, which deletes old tasks, and `flowkit close-orphaned`, which closes tasks of a lost namespace."""

import asyncio
from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    with_options,
)
from flowkit.errors import ConfigError
from flowkit.models import TaskStatus

_ENDED = [status.value for status in TaskStatus if status.closed]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what the command would do, without doing it.")]


@with_options
def purge(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", metavar="DURATION", help="Minimum time since the task ended: 30d, 12h, 90m."
        ),
    ],
    statuses: Annotated[
        list[str] | None,
        typer.Option(
            "--status", help="Only tasks with this status: finished, failed or cancelled. Can be repeated."
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Delete tasks that ended long ago, with their artifacts, metrics, claims and events.

    Without --status, also delete backfills that ended so long ago. Their tasks count by their own ends.
    """
    seconds = read_duration(older_than)
    for status in statuses or []:
        if status not in _ENDED:
            problem = ConfigError(f"--status {status!r} is not the status of an ended task")
            raise add_remedy(problem, f"choose from {', '.join(_ENDED)}")
    from flowkit.cli.retention.purging import PurgeOptions, purge_tasks

    options = PurgeOptions(older_than_sec=seconds, statuses=tuple(statuses or _ENDED), dry_run=dry_run)
    purged = asyncio.run(purge_tasks(where, options, quiet=as_json))
    if as_json:
        return output.document(purged.as_json())
    for line in purged.lines():
        output.echo(line)
    return None


@with_options
def close_orphaned(
    namespace_id: Annotated[
        str | None,
        typer.Option("--namespace-id", metavar="ID", help="Id of the namespace that no longer exists."),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Close the open tasks of a Temporal namespace that no longer exists.

    Without --namespace-id, only count open tasks.
    """
    from flowkit.cli.retention.orphans import close_orphans, count_open

    if namespace_id is None:
        counts = asyncio.run(count_open(where))
        if as_json:
            return output.document(counts.as_json())
        for line in counts.lines():
            output.echo(line)
        return None
    closed = asyncio.run(close_orphans(where, namespace_id, dry_run=dry_run))
    if as_json:
        return output.document({"namespace_id": namespace_id, "dry_run": dry_run, "tasks": closed})
    output.echo(f"{'would close' if dry_run else 'closed'} {closed:,} open tasks of namespace {namespace_id}")
    return None


_SECONDS = {"m": 60, "h": 3_600, "d": 86_400}
_LONGEST_DAYS = 36_500


def read_duration(text: str, option: str = "--older-than") -> float:
    """Return the seconds of a duration such as `30d`. Raise ConfigError, which names the option, if it is invalid."""
    number, unit = text[:-1], text[-1:].lower()
    seconds = int(number) * _SECONDS.get(unit, 0) if number.isascii() and number.isdigit() else 0
    if not 0 < seconds <= _LONGEST_DAYS * _SECONDS["d"]:
        problem = ConfigError(f"{option} {text!r} is not a duration")
        raise add_remedy(problem, "write a whole number and m, h or d, for example 90m, 12h or 30d")
    return float(seconds)
