"""`flowkit token` creates, lists and revokes bearer tokens, and prints a secret only once."""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.cli.app import run
from flowkit.server.cli import choose_rights
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

OPERATOR_NOTE = "there is no operator token yet"


@pytest.fixture(autouse=True)
def _database(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of the commands, in memory."""
    made = memory_database()

    @asynccontextmanager
    async def database(_: Any) -> AsyncIterator[Any]:
        yield made

    monkeypatch.setattr("flowkit.cli.servers.database", database)


@pytest.mark.parametrize(
    ("actor", "rights", "operator", "chosen"),
    [
        (None, [], False, {Right.OPERATOR}),
        (None, [Right.FLOWS], False, {Right.OPERATOR, Right.FLOWS}),
        (7, [], False, {Right.FLOWS}),
        (7, [Right.FLOWS], False, {Right.FLOWS}),
        (7, [], True, {Right.OPERATOR}),
        (7, [Right.FLOWS], True, {Right.OPERATOR, Right.FLOWS}),
    ],
)
def test_rights_follow_from_the_options(
    actor: int | None, rights: list[Right], operator: bool, chosen: set[Right]
) -> None:
    assert {*choose_rights(actor, rights, operator=operator)} == chosen


def test_token_is_printed_once_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "create", "--note", "laptop", "--expires", "30"]) == 0
    created = capsys.readouterr()
    text = created.out.strip()
    assert re.fullmatch(r"fk_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", text)
    assert "for every actor (operator); it is not shown again" in created.err
    assert OPERATOR_NOTE not in created.err
    assert run(["token", "list"]) == 0
    listed = capsys.readouterr().out
    assert "laptop" in listed
    assert text.split("_", 2)[2] not in listed


def test_token_of_an_actor_without_an_operator_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "create", "--actor", "7"]) == 0
    assert OPERATOR_NOTE in capsys.readouterr().err
    assert run(["token", "create", "--operator", "--actor", "8"]) == 0
    assert OPERATOR_NOTE not in capsys.readouterr().err
    assert run(["token", "create", "--actor", "9"]) == 0
    assert OPERATOR_NOTE not in capsys.readouterr().err


def test_revoked_token_is_listed_as_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    run(["token", "create", "--actor", "7"])
    token_id = capsys.readouterr().out.split("_")[1]
    assert run(["token", "revoke", token_id]) == 0
    assert capsys.readouterr().out == f"revoked token {token_id} for actor 7 (flows)\n"
    assert run(["token", "revoke", token_id]) == 0
    assert "was revoked already: token" in capsys.readouterr().out
    assert run(["token", "list", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["tokens"]
    assert {"id": token_id, "actor": 7, "rights": ["flows"], "state": "revoked"}.items() <= listed.items()
    assert {*listed} == {
        *("id", "actor", "rights", "roles", "state"),
        *("note", "created_at", "expires_at", "revoked_at"),
    }


def test_token_shows_the_roles_that_it_may_use(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--actor", "7", "--right", "admission", "--role", "sum", "--role", "extract")
    assert run(["token", "create", *given]) == 0
    assert "for actor 7 (admission with extract, sum)" in capsys.readouterr().err
    assert run(["token", "list", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)["tokens"]
    assert listed["roles"] == ["extract", "sum"]


def test_empty_list_says_how_to_create_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "list"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "there are no tokens; create one with `flowkit token create`\n")


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["revoke", "abc"], "there is no token 'abc'; `flowkit token list` shows the ids"),
        (["create", "--actor", "-1"], "--actor"),
        (["create", "--actor", "4294967296"], "--actor"),
        (["create", "--right", "everything"], "'operator', 'flows'"),
        (["create", "--expires", "0"], "--expires"),
        (["create", "--actor", "7", "--role", "sum"], "add `--right admission`"),
        (["create", "--role", "sum"], "an operator may use every role"),
        (["create", "--actor", "7", "--right", "admission", "--role", ""], "a role is ''"),
        (["create", "--note", "x" * 201], "note has 201 characters; it may have up to 200"),
    ],
)
def test_invalid_option_exits_with_code_2(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["token", *arguments]) == 2
    assert reported in capsys.readouterr().err
