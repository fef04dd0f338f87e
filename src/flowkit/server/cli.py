"""`flowkit token`, which creates, lists and revokes the bearer tokens of the HTTP server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowkit.cli import output
from flowkit.cli.errors import EPILOG, add_remedy
from flowkit.cli.options import (
    AnyQueue,
    AsJson,
    DeploymentOptions,
    with_options,
)
from flowkit.errors import ConfigError
from flowkit.server.tokens import MAX_ACTOR, Right
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from flowkit.server.tokens import Token

_DAY_SEC = 86_400.0
_MAX_DAYS = 36_500

tokens = typer.Typer(
    help="Create, list and revoke the bearer tokens of the HTTP server.", epilog=EPILOG, no_args_is_help=True
)


@tokens.command("create", epilog=EPILOG)
@with_options
def create(
    actor: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_ACTOR,
            help="Actor for which the token acts. Without it, the token is an operator's.",
        ),
    ] = None,
    rights: Annotated[
        list[Right] | None,
        typer.Option(
            "--right", help="What the token permits. Can be repeated.  [default: flows, with --actor]"
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            help="Role or coordinator function that graphs submitted for admission may use. Can be repeated.  "
            "[default: all but job]",
        ),
    ] = None,
    operator: Annotated[bool, typer.Option("--operator", help="Also give the right operator.")] = False,
    note: Annotated[str, typer.Option(help="What the token is for.")] = "",
    expires: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_DAYS, metavar="DAYS", help="Days after which the token expires."),
    ] = None,
    *,
    where: AnyQueue,
) -> None:
    """Create a token and print it once: FlowKit stores only its hash."""
    scope: dict[str, Any] = {
        "actor": actor,
        "rights": choose_rights(actor, rights or [], operator=operator),
        "roles": frozenset(roles) if roles else None,
    }
    text, notes = asyncio.run(_create(where, scope, note, expires))
    output.echo(text)
    for each in notes:
        output.note(each)


def choose_rights(actor: int | None, rights: Sequence[Right], *, operator: bool) -> frozenset[Right]:
    """Return the rights of a new token: those given, those of an operator, or `flows` for an actor without any."""
    added = {Right.OPERATOR} if operator or actor is None else set()
    return frozenset({*rights, *added} or {Right.FLOWS})


async def _create(
    where: DeploymentOptions, scope: Mapping[str, Any], note: str, expires: int | None
) -> tuple[str, list[str]]:
    """Create a token. Return its text, and what to print about it."""
    from flowkit.cli.servers import database
    from flowkit.server.token_store import TokenStore

    async with database(where) as db:
        store = TokenStore(db)
        await store.prepare()
        seconds = None if expires is None else expires * _DAY_SEC
        token, text = await store.create(**scope, note=note, expires_in_sec=seconds)
        notes = [
            f"created token {token.token_id} for {describe_scope(token)}; it is not shown again, so store it now"
        ]
        if not await store.any_active(Right.OPERATOR):
            notes.append(
                "there is no operator token yet; only an operator can create actors and contexts through the gateway, "
                "so create one with `flowkit token create`"
            )
    return text, notes


@tokens.command("list", epilog=EPILOG)
@with_options
def list_tokens(
    as_json: AsJson = False,
    *,
    where: AnyQueue,
) -> None:
    """Show all tokens without their secrets: ids, rights, notes, and whether they are valid."""
    tokens = asyncio.run(_read(where))
    now = datetime.now(UTC)
    if as_json:
        return output.document({"tokens": [token_fields(token, now) for token in tokens]})
    if not tokens:
        output.note("there are no tokens; create one with `flowkit token create`")
        return None
    console = output.console()
    console.print(tokens_table(tokens, now, wide=console.is_terminal))
    return None


async def _read(where: DeploymentOptions) -> list[Token]:
    from flowkit.cli.servers import database
    from flowkit.server.token_store import TokenStore

    async with database(where) as db:
        return await TokenStore(db).list_tokens()


@tokens.command("revoke", epilog=EPILOG)
@with_options
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the token, as `flowkit token list` shows it.")
    ],
    *,
    where: AnyQueue,
) -> None:
    """Revoke a token. Servers reject it a few seconds later."""
    before = asyncio.run(_revoke(where, token_id))
    if before is None:
        problem = ConfigError(f"there is no token {printed(token_id)}")
        raise add_remedy(problem, "`flowkit token list` shows the ids")
    done = "revoked" if before.revoked_at is None else "was revoked already:"
    output.echo(f"{done} token {before.token_id} for {describe_scope(before)}")


async def _revoke(where: DeploymentOptions, token_id: str) -> Token | None:
    from flowkit.cli.servers import database
    from flowkit.server.token_store import TokenStore

    async with database(where) as db:
        return await TokenStore(db).revoke(token_id)


def describe_scope(token: Token) -> str:
    """Return for whom a token acts and what it permits, such as `actor 7 (flows)`."""
    who = "every actor" if token.actor is None else f"actor {token.actor}"
    return f"{who} ({_permitted(token)})"


def _permitted(token: Token) -> str:
    """Return the rights of a token, with its roles, such as `admission with extract, noop`."""
    rights = ", ".join(sorted(token.rights))
    return rights if token.roles is None else f"{rights} with {', '.join(sorted(token.roles))}"


def token_fields(token: Token, now: datetime) -> dict[str, Any]:
    """Return a token as JSON fields."""
    return {
        "id": token.token_id,
        "actor": token.actor,
        "rights": sorted(token.rights),
        "roles": None if token.roles is None else sorted(token.roles),
        "state": token.refusal(now) or "valid",
        "note": token.note,
        "created_at": _shown_time(token.created_at),
        "expires_at": _shown_time(token.expires_at),
        "revoked_at": _shown_time(token.revoked_at),
    }


def _shown_time(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat(timespec="seconds")


def tokens_table(tokens: Sequence[Token], now: datetime, *, wide: bool) -> Table:
    """Return a table with a row for each token; `wide` fills the width of the terminal."""
    from rich.text import Text

    from flowkit.cli.screen import plain_table

    table = plain_table(wide=wide)
    for heading in ("id", "actor", "rights", "state", "created", "expires"):
        table.add_column(heading, no_wrap=True)
    table.add_column("note", ratio=1 if wide else None, overflow="fold", no_wrap=not wide)
    for token in tokens:
        state = token.refusal(now) or "valid"
        cells = (
            token.token_id,
            "every" if token.actor is None else str(token.actor),
            _permitted(token),
            state,
            f"{token.created_at:%Y-%m-%d}",
            "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d}",
            token.note,
        )
        table.add_row(*(Text(cell, style="" if state == "valid" else "dim") for cell in cells))
    return table
