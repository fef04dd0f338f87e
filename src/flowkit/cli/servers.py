"""Connections of a command to Temporal and MongoDB; errors name address and remedy, never a password."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo.errors import PyMongoError
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError

from flowkit.adapters.store import TaskStore
from flowkit.cli.errors import flat, remedied
from flowkit.client import TaskCatalog, TaskClient
from flowkit.connection import DEFAULT_ADDRESS, TemporalUnavailable, connect
from flowkit.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import Client

    from flowkit.cli.options import Where

_SELECTION_TIMEOUT_MS = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Everything a command of tasks asks."""

    temporal: Client
    tasks: TaskClient
    catalog: TaskCatalog


@asynccontextmanager
async def servers(where: Where) -> AsyncIterator[Servers]:
    """Both servers. TemporalUnavailable, StoreUnavailable and ConfigError tell which one, where, and the remedy."""
    async with database(where) as db:
        temporal = await temporal_client()
        tasks = TaskClient(temporal, TaskStore(db), queue=where.engine_queue)
        try:
            yield Servers(temporal=temporal, tasks=tasks, catalog=TaskCatalog(db))
        except RPCError as error:
            problem = TemporalUnavailable(f"Temporal cannot do this ({error.status.name}: {flat(error)})")
            raise remedied(problem, "check that the server runs, and try again") from error


@asynccontextmanager
async def database(where: Where) -> AsyncIterator[Any]:
    """A Motor database; nothing is asked of MongoDB yet. StoreUnavailable of whoever asks gets its address."""
    client = _create_client(where.mongo_url)
    try:
        yield _select_database(client, where.database)
    except StoreUnavailable as error:
        problem = StoreUnavailable(f"no MongoDB answers at {redact_password(where.mongo_url)}")
        raise remedied(problem, "start one, or set MONGO_URL") from error
    finally:
        client.close()


def _create_client(url: str) -> Any:
    try:
        return AsyncIOMotorClient(url, tz_aware=True, serverSelectionTimeoutMS=_SELECTION_TIMEOUT_MS)
    except (PyMongoError, ValueError) as error:
        problem = ConfigError(f"MONGO_URL {redact_password(url)!r} is no address of MongoDB: {flat(error)}")
        raise remedied(problem, "it reads mongodb://host:27017") from None


def _select_database(client: Any, name: str) -> Any:
    try:
        return client[name]
    except PyMongoError as error:
        problem = ConfigError(f"database name {name!r} cannot be used: {flat(error)}")
        raise remedied(problem, "set MONGO_DATABASE to another one") from None


def redact_password(url: str) -> str:
    """An address that may be shown."""
    return re.sub(r"//[^/]*@", "//…@", url)


async def temporal_client() -> Client:
    """A client for the server that `TEMPORAL_*` names. TemporalUnavailable and ConfigError name it and the remedy."""
    try:
        return await connect()
    except TemporalUnavailable as error:
        raise remedied(TemporalUnavailable(error.problem), error.remedy) from error
    except Exception as error:
        problem = ConfigError(f"the settings of Temporal's client cannot be used: {flat(error)}")
        raise remedied(problem, "check TEMPORAL_ADDRESS and the other TEMPORAL_* variables") from error


def temporal_address() -> tuple[str, str]:
    """Address and namespace that `TEMPORAL_*` or Temporal's profile names."""
    settings = ClientConfig.load_client_connect_config()
    return settings.get("target_host", DEFAULT_ADDRESS), settings.get("namespace", "default")
