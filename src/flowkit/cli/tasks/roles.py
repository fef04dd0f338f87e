"""`flowkit roles`, which shows the roles, their versions and their types. It imports its dependencies when it runs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.options import AsJson, DeploymentOptions, with_options
from flowkit.errors import ConfigError
from flowkit.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from flowkit.reading.roles import RoleTypes, RoleView


@with_options
def roles(
    role: Annotated[
        str | None, typer.Argument(metavar="ROLE", help="Show only this role, with its JSON Schemas.")
    ] = None,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Print the JSON Schemas of the input and output of each role.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Also show roles without a worker online.")] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Show the roles that workers serve: their versions, where they run, and the types of their input and output."""
    every = asyncio.run(_read(where))
    shown = _choose(every, role) if role else [each for each in every if show_all or each.online]
    with_schemas = schemas or role is not None
    if as_json:
        return output.document({"roles": [as_fields(each, schemas=with_schemas) for each in shown]})
    if shown:
        console = output.console()
        console.print(roles_table(shown, wide=console.is_terminal))
    else:
        output.note("no workers are online; start one with `flowkit worker module:Handler`")
    for each in shown if with_schemas else ():
        _print_schemas(each)
    if not role and (hidden := len(every) - len(shown)):
        output.note(f"{hidden} {'has' if hidden == 1 else 'have'} no worker online; `--all` shows them")
    return None


async def _read(where: DeploymentOptions) -> list[RoleView]:
    from flowkit.cli.servers import database
    from flowkit.reading.roles import read_roles

    async with database(where) as db:
        return await read_roles(db, where.queue)


def _choose(every: Sequence[RoleView], role: str) -> list[RoleView]:
    found = [each for each in every if each.role == role]
    if found:
        return found
    known = [each.role for each in every]
    otherwise = f"the roles are {', '.join(dict.fromkeys(known))}" if known else "start a worker first"
    raise add_remedy(
        ConfigError(f"no worker of role {role!r} has ever registered"),
        did_you_mean(role, known, otherwise=otherwise),
    )


def as_fields(view: RoleView, *, schemas: bool) -> dict[str, Any]:
    """Return a role for programs; with `schemas`, with the types of each version."""
    fields = {
        "role": view.role,
        "queue": view.queue,
        "runs_in": view.runs_in,
        "online": view.online,
        "versions": view.versions,
        "input": view.input or None,
        "output": view.output or None,
    }
    types = [{"versions": each.versions, "input": each.input, "output": each.output} for each in view.types]
    return fields | ({"types": types} if schemas else {})


def roles_table(shown: Sequence[RoleView], *, wide: bool) -> Table:
    """Return a table with a row for each role; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import add_names, plain_table

    table = plain_table(wide=wide)
    add_names(table, "role", [view.role for view in shown])
    queues = len({view.queue for view in shown if view.queue}) > 1
    if queues:
        table.add_column("queue", overflow="fold", no_wrap=not wide)
    table.add_column("runs in", no_wrap=True)
    table.add_column("online", justify="right", no_wrap=True)
    for heading in ("version", "types"):
        table.add_column(heading, overflow="fold", no_wrap=not wide)
    for view in shown:
        queue = [view.queue] if queues else []
        cells = (*queue, ", ".join(view.runs_in), str(view.online), format_versions(view), format_types(view))
        table.add_row(Text(view.role), *map(Text, cells))
    return table


def format_versions(view: RoleView) -> str:
    """Return the version of a role or, if there are several, each with the number of its workers."""
    if len(view.versions) == 1:
        return next(iter(view.versions))
    return ", ".join(f"{version or 'none'} ({count})" for version, count in view.versions.items())


def format_types(view: RoleView) -> str:
    """Return the names of the types of a role: `Page → Words`. Empty for a role without types."""
    return f"{view.input or 'any'} → {view.output or 'any'}" if view.types else ""


def _print_schemas(view: RoleView) -> None:
    if not view.types:
        output.note(f"role {view.role} announces no types")
    for each in view.types:
        for what, schema in (("input", each.input), ("output", each.output)):
            if schema is not None:
                output.echo(f"\n{what} of role {view.role}{_of_versions(view, each)}:")
                output.echo(json.dumps(schema, indent=2, ensure_ascii=False))


def _of_versions(view: RoleView, types: RoleTypes) -> str:
    return f", version {', '.join(types.versions)}" if len(view.versions) > 1 else ""
