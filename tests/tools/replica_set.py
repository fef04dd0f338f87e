"""Starts a replica set of MongoDB on servers that run, and makes its primary step down again and again.

`python -m tests.tools.replica_set initiate 127.0.0.1:27101 127.0.0.1:27102 127.0.0.1:27103`
`python -m tests.tools.replica_set step-down URL --every 20`
"""

from __future__ import annotations

from threading import Event
from typing import Annotated, Any

import typer
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, PyMongoError
from rich.console import Console

NAME = "rs0"
ELECTION_SEC = 60.0
"""A new replica set has a primary within this time, in seconds."""

app = typer.Typer(help=__doc__, no_args_is_help=True)
console = Console()


@app.command()
def initiate(
    members: Annotated[
        list[str], typer.Argument(help="The servers, host:port, that run with --replSet rs0.")
    ],
) -> None:
    """Make servers the members of a replica set, wait for its primary, and print its connection string."""
    client: MongoClient[dict[str, Any]] = MongoClient(f"mongodb://{members[0]}", directConnection=True)
    with client:
        config = [{"_id": number, "host": member} for number, member in enumerate(members)]
        client.admin.command("replSetInitiate", {"_id": NAME, "members": config})
    url = f"mongodb://{','.join(members)}/?replicaSet={NAME}"
    with MongoClient[dict[str, Any]](url, serverSelectionTimeoutMS=ELECTION_SEC * 1000) as whole:
        whole.admin.command("ping")
    console.print(url, soft_wrap=True)


@app.command(name="step-down")
def step_down(
    url: Annotated[str, typer.Argument(help="The connection string of the replica set.")],
    every: Annotated[float, typer.Option(help="Seconds between two elections.")] = 20.0,
) -> None:
    """Let the primary step down every so many seconds, until this program is ended."""
    with MongoClient[dict[str, Any]](url) as client:
        while not Event().wait(every):
            try:
                console.print(_step_down_once(client), soft_wrap=True)
            except PyMongoError as error:
                console.print(f"no step-down: {error}", soft_wrap=True)


def _step_down_once(client: MongoClient[dict[str, Any]]) -> str:
    """Let the primary step down, and return which member it was and which one is the primary now."""
    client.admin.command("ping")
    before = client.primary
    others = len(client.nodes) - 1
    # Without another member, the one that steps down is elected again after these seconds.
    command: dict[str, Any] = {"replSetStepDown": 10 if others else 3, "secondaryCatchUpPeriodSecs": 2}
    try:
        client.admin.command({**command, "force": not others})
    except AutoReconnect:
        pass  # the primary may close its connections
    client.admin.command("ping")
    return f"{before} has stepped down; the primary is {client.primary}"


if __name__ == "__main__":
    app()
