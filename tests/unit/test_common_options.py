"""Commands that name groups of options have the single options of these groups."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from flowkit.cli.options import AnyQueue, DeploymentOptions, HealthOptions, Verbose, with_options

app = typer.Typer()


@app.command()
@with_options
def short(
    name: Annotated[str, typer.Argument()], wide: bool = False, *, where: AnyQueue, reports: HealthOptions
) -> None:
    """Print what a short command gets."""
    typer.echo((name, wide, where, reports))


@app.command()
@with_options
def long(*, where: DeploymentOptions, verbose: Verbose = False) -> None:
    """Print what a process gets, which sets up its log itself."""
    typer.echo((where, verbose))


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return how often a command has set up its log, and whether it logs more."""
    calls: list[bool] = []
    monkeypatch.setattr("flowkit.cli.options.log_warnings", calls.append)
    return calls


def printed(*arguments: str, **environment: str) -> str:
    """Return what a command prints."""
    return CliRunner().invoke(app, arguments, env=environment).output.strip()


def test_a_command_gets_its_groups_with_the_values_of_their_options(logged: list[bool]) -> None:
    given = ("short", "a", "--wide", "--database", "d", "--health-port", "9", "-v")
    where, reports = DeploymentOptions(mongo_url="m", database="d"), HealthOptions(port=9)
    assert printed(*given, MONGO_URL="m") == str(("a", True, where, reports))
    assert logged == [True]


def test_a_group_may_lack_an_option() -> None:
    assert "--queue" not in printed("short", "--help")
    assert "No such option" in printed("short", "a", "--queue", "q")


def test_a_command_with_its_own_verbose_sets_up_its_log_itself(logged: list[bool]) -> None:
    assert printed("long", "--queue", "q", "-v") == str((DeploymentOptions(queue="q"), True))
    assert logged == []
