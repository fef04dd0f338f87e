"""`flowkit admission limits`, which shows the limits of an admission queue, and changes and stores them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from flowkit.admission.fields import (
    MAX_HELD,
    MAX_QUEUE,
    MAX_STALE_SEC,
    Tenant,
    UserKey,
)
from flowkit.admission.models import Limits, Override
from flowkit.cli import output
from flowkit.cli.errors import EPILOG, add_remedy
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    with_options,
)
from flowkit.errors import ConfigError
from flowkit.text import shown
from flowkit.validation.invalid import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

_NONE = "none"
"""What to write in place of a number to remove a limit."""

limits = typer.Typer(
    help="Show the limits of the queue, with those of single users and tenants, or change them.",
    invoke_without_command=True,
    no_args_is_help=False,
)


def _check_seconds(given: float | None) -> float | None:
    if given is not None and not 1 <= given <= MAX_STALE_SEC:
        problem = ConfigError(f"--stale-sec is {given:g}, which is no time that a request can wait")
        raise add_remedy(problem, f"give a number of seconds from 1 to {MAX_STALE_SEC:,}")
    return given


def _check_cap(context: typer.Context, parameter: typer.CallbackParam, given: str | None) -> str | None:
    number = given is not None and given.isascii() and given.isdigit() and 0 < int(given) <= MAX_HELD
    if given is not None and given != _NONE and not number:
        problem = ConfigError(f"{parameter.opts[0]} is {shown(given)}, which is no limit")
        raise add_remedy(problem, f"give a whole number from 1 to {MAX_HELD:,}, or {_NONE}")
    return given


def _check_user(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    return _check_name(given, UserKey)


def _check_tenant(context: typer.Context, parameter: typer.CallbackParam, given: str) -> str:
    if "/" in given:
        raise ConfigError(f"NAME is {shown(given)}; the name of a tenant must not contain a slash")
    return _check_name(given, Tenant)


def _check_name(given: str, kind: Any) -> str:
    try:
        TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        raise ConfigError(describe(error, "NAME")) from None
    return given


TotalCap = Annotated[
    str | None,
    typer.Option("--max-total", metavar="N", callback=_check_cap, help="Requests that wait or are active."),
]
ActiveCap = Annotated[
    str | None, typer.Option("--max-active", metavar="N", callback=_check_cap, help="Active requests.")
]
Reset = Annotated[bool, typer.Option("--reset", help="Return to the general limits.")]


@limits.callback()
@with_options
def show(
    context: typer.Context,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Show the limits of the queue, with those of single users and tenants, or change them."""
    if context.invoked_subcommand is not None:
        return _refuse_options(context, context.invoked_subcommand)
    return _apply(lambda old: old, where, as_json=as_json)


def _refuse_options(context: typer.Context, command: str) -> None:
    """Raise ConfigError for options in front of a command, which would otherwise use another database without them."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    if any(source is not None and source.name == "COMMANDLINE" for source in sources.values()):
        problem = ConfigError(f"options are given in front of {command}, which does not use them")
        raise add_remedy(problem, f"write them after {command}")


@limits.command("set", epilog=EPILOG)
@with_options
def set_limits(
    max_pending: Annotated[int | None, typer.Option(min=1, max=MAX_QUEUE, help="Requests that wait.")] = None,
    max_active: Annotated[
        int | None, typer.Option(min=1, max=MAX_QUEUE, help="Requests that are active.")
    ] = None,
    max_per_user: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_HELD, help="Requests of one user that wait or are active."),
    ] = None,
    max_active_per_user: Annotated[
        str | None,
        typer.Option(
            metavar="N", callback=_check_cap, help="Active requests of one user; none for any number."
        ),
    ] = None,
    stale_sec: Annotated[
        float | None,
        typer.Option(
            metavar="S", callback=_check_seconds, help="Seconds after which a waiting request expires."
        ),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Return to the defaults, except for limits that are given, too.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Change the general limits. Every process uses them within two seconds."""
    numbers: dict[str, Any] = {
        "max_pending": max_pending,
        "max_active": max_active,
        "max_per_user": max_per_user,
        "stale_sec": stale_sec,
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    given |= _caps(max_active_per_user=max_active_per_user)
    _require_change(given, reset)

    def change(old: Limits) -> Limits:
        kept = replace(Limits(), tenants=old.tenants, users=old.users) if reset else old
        return replace(kept, **given)

    _apply(change, where, as_json=as_json)


@limits.command("user", epilog=EPILOG)
@with_options
def set_user(
    name: Annotated[
        str,
        typer.Argument(callback=_check_user, help="Name of the user, or TENANT/USER, which has precedence."),
    ],
    max_total: TotalCap = None,
    max_active: ActiveCap = None,
    reset: Reset = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Give one user limits of its own. For `none`, the general limit applies."""
    given = _caps(max_total=max_total, max_active=max_active)
    _require_change(given, reset)
    _apply(lambda old: _override(old, "users", name, given, reset=reset), where, as_json=as_json)


@limits.command("tenant", epilog=EPILOG)
@with_options
def set_tenant(
    name: Annotated[str, typer.Argument(callback=_check_tenant, help="Name of the tenant.")],
    max_total: TotalCap = None,
    max_active: ActiveCap = None,
    reset: Reset = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Give one tenant limits of its own. For `none`, it has no such limit."""
    given = _caps(max_total=max_total, max_active=max_active)
    _require_change(given, reset)
    _apply(lambda old: _override(old, "tenants", name, given, reset=reset), where, as_json=as_json)


def _caps(**given: str | None) -> dict[str, int | None]:
    """Return the limits among the options that were given; None for `none`."""
    return {name: None if text == _NONE else int(text) for name, text in given.items() if text is not None}


def _require_change(given: dict[str, Any], reset: bool) -> None:
    if not given and not reset:
        raise add_remedy(ConfigError("no limit is given"), "give at least one option, or --reset")


def _override(old: Limits, kind: str, name: str, given: dict[str, int | None], *, reset: bool) -> Limits:
    """Return limits in which one user or tenant has others. One that has none of its own is left out."""
    own: dict[str, Override] = dict(getattr(old, kind))
    changed = replace(Override() if reset else own.get(name, Override()), **given)
    own.pop(name, None)
    if changed != Override():
        own[name] = changed
    changes: dict[str, Any] = {kind: own}
    return replace(old, **changes)


def _apply(change: Callable[[Limits], Limits], where: DeploymentOptions, *, as_json: bool) -> None:
    """Change the limits, and print them."""
    found = asyncio.run(_store(change, where))
    if as_json:
        return output.document({"queue": where.engine_queue, **asdict(found)})
    console = output.console()
    console.print(_general_table(found, wide=console.is_terminal))
    for title, own in (("user", found.users), ("tenant", found.tenants)):
        if own:
            console.print()
            console.print(_own_table(title, own, wide=console.is_terminal))
    return None


async def _store(change: Callable[[Limits], Limits], where: DeploymentOptions) -> Limits:
    from flowkit.admission.store import AdmissionStore
    from flowkit.cli import servers

    async with servers.database(where) as db:
        store = AdmissionStore(db, queue=where.engine_queue)
        old = await store.limits()
        new = change(old)
        if new != old:
            await store.set_limits(new)
    return new


def _general_table(limits: Limits, *, wide: bool) -> Table:
    from flowkit.cli.screen import plain_table

    table = plain_table(wide=wide)
    table.add_column("limit", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("default", justify="right", no_wrap=True)
    for each in fields(Limits):
        if each.name not in ("tenants", "users"):
            values = (getattr(limits, each.name), getattr(Limits(), each.name))
            table.add_row(each.name, *(_shown(value) for value in values))
    return table


def _own_table(title: str, own: Any, *, wide: bool) -> Table:
    from rich.text import Text

    from flowkit.cli.screen import plain_table

    table = plain_table(wide=wide)
    table.add_column(title, no_wrap=True)
    for each in fields(Override):
        table.add_column(each.name, justify="right", no_wrap=True)
    for name, override in sorted(own.items()):
        table.add_row(Text(name), *(_shown(value) for value in asdict(override).values()))
    return table


def _shown(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.10g}"
