"""Runs an external worker as a process: `python -m flowkit.testing.external --roles indexer`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from flowkit.testing.external.misbehavior import Misbehavior
from flowkit.testing.external.worker import ExternalWorker

SCRIPTED = "flowkit.testing.external.handlers:scripted"
TLS_FILES = ("ssl_cafile", "ssl_certfile", "ssl_keyfile")
CRASHED = 137
"""The exit code of a crash by misbehavior, as after SIGKILL."""


class WorkerProcess(ExternalWorker):
    """A worker whose crash ends its process at once."""

    def _crash(self) -> None:
        os._exit(CRASHED)


def main(
    roles: Annotated[str, typer.Option(help="Roles to serve, separated by commas.")],
    handler: Annotated[
        list[str] | None,
        typer.Option(
            help="MODULE:NAME for all roles, or ROLE=MODULE:NAME for one. Repeatable. "
            "Without it, the input_inline of each node says what the node does."
        ),
    ] = None,
    bootstrap_servers: Annotated[
        str, typer.Option(envvar="KAFKA_BOOTSTRAP_SERVERS", help="Addresses of Kafka.")
    ] = "localhost:9092",
    mongo_url: Annotated[
        str, typer.Option(envvar="MONGO_URL", help="Address of MongoDB.")
    ] = "mongodb://localhost:27017",
    database: Annotated[
        str, typer.Option(envvar="MONGO_DATABASE", help="Database of the engine.")
    ] = "flowkit",
    worker_id: Annotated[str | None, typer.Option(help="Id of the worker; random by default.")] = None,
    misbehavior: Annotated[
        list[str] | None, typer.Option(help="FIELD=VALUE of Misbehavior. Repeatable.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="FIELD=VALUE of ExternalSettings. Repeatable.")
    ] = None,
    kafka: Annotated[
        list[str] | None,
        typer.Option(help=f"NAME=VALUE for all Kafka clients, also {', '.join(TLS_FILES)}. Repeatable."),
    ] = None,
    consumer: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for Kafka consumers only. Repeatable.")
    ] = None,
) -> None:
    """Run an external worker until SIGTERM or SIGINT. Print a line when it is ready."""
    names = [role for role in roles.split(",") if role]
    options = {
        "roles": names,
        "bootstrap_servers": bootstrap_servers,
        "worker_id": worker_id,
        "misbehavior": Misbehavior.parse(misbehavior or []),
        "kafka": _with_tls(_pairs(kafka)),
        "consumer": _pairs(consumer),
        **_pairs(setting),
    }
    asyncio.run(_serve(mongo_url, database, _handlers(names, handler or [SCRIPTED]), options))


async def _serve(mongo_url: str, database: str, handlers: dict[str, Any], options: dict[str, Any]) -> None:
    from pymongo import AsyncMongoClient

    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_url, tz_aware=True)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with client, WorkerProcess(client[database], handlers, **options) as worker:
        typer.echo(f"external worker {worker.worker_id} is ready: {', '.join(worker.roles)}")
        sys.stdout.flush()
        await stopping.wait()


def _handlers(roles: list[str], given: list[str]) -> dict[str, Any]:
    """Return the handler of each role: the one given for it, else the last one given for all."""
    named = dict(text.split("=", 1) for text in given if "=" in text)
    general = [text for text in given if "=" not in text]
    chosen = {role: named.get(role, general[-1] if general else None) for role in roles}
    return {role: _load(name) for role, name in chosen.items() if name}


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (AttributeError, ImportError, ValueError) as error:
        problem = f"{name!r} cannot be loaded: {error}; name it as module:Handler"
        raise typer.BadParameter(problem, param_hint="--handler") from error


def _pairs(given: list[str] | None) -> dict[str, Any]:
    pairs = dict(text.partition("=")[::2] for text in given or [])
    return {name: _parsed(text) for name, text in pairs.items()}


def _with_tls(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of aiokafka, with a TLS context in place of the names of files."""
    ca, certificate, key = (options.pop(name, None) for name in TLS_FILES)
    if not (ca or certificate):
        return options
    context = ssl.create_default_context(cafile=ca)
    if certificate:
        context.load_cert_chain(certificate, key)
    return {**options, "ssl_context": context}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    typer.run(main)
