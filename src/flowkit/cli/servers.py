"""Connections to Temporal and MongoDB, and whether Kafka brokers respond. Errors name the address and the
remedy, but never a password."""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo.common import VALIDATORS
from pymongo.errors import ConfigurationError, InvalidName, PyMongoError
from temporalio.service import RPCError

from flowkit.adapters.mongo import CommandTimes
from flowkit.adapters.tasks.store import TaskStore
from flowkit.cli import output
from flowkit.cli.errors import add_remedy
from flowkit.cli.loading import look_in_current_folder
from flowkit.client import TaskCatalog, TaskClient
from flowkit.connection import TemporalUnavailable, connect
from flowkit.core.instruments import is_measured
from flowkit.errors import ConfigError, StoreDenied, StoreUnavailable
from flowkit.reading.state import Servers
from flowkit.text import one_line, printed, shown_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from temporalio.client import Client

    from flowkit.cli.options import DeploymentOptions
    from flowkit.products import ProcessMetrics


_logger = logging.getLogger("flowkit.client")

_ANSWER_MS = 5_000
_NAMED = (VALIDATORS.keys() | {"port"}) - {"username", "password"}
"""The parts of an address that errors name."""
_DATABASE_BYTES = 63
"""Longest name of a database, by MongoDB's rule."""


@asynccontextmanager
async def servers(where: DeploymentOptions, metrics: ProcessMetrics | None = None) -> AsyncIterator[Servers]:
    """Connect to both servers. Raises TemporalUnavailable, StoreUnavailable or ConfigError.

    What Temporal's SDK measures becomes part of `metrics`.
    """
    async with database(where) as db:
        temporal = await connect_temporal(metrics)
        any_queue = where.queue is None  # most commands name a task only
        tasks = TaskClient(temporal, TaskStore(db), queue=where.engine_queue, any_queue=any_queue)
        try:
            yield Servers(temporal=temporal, tasks=tasks, catalog=TaskCatalog(db), db=db)
        except RPCError as error:
            problem = TemporalUnavailable(
                f"Temporal rejected the request ({error.status.name}: {one_line(error)})"
            )
            raise add_remedy(problem, "check that the server is running, then try again") from error


@asynccontextmanager
async def database(where: DeploymentOptions) -> AsyncIterator[Any]:
    """Yield a Motor database without connecting. A StoreUnavailable in the block gets the address added."""
    client = _create_motor(where.mongo_url)
    try:
        yield _name_part(client, where.database)
    except StoreDenied as error:
        denied = StoreDenied(f"{one_line(error)} (at {shown_address(where.mongo_url)})")
        raise add_remedy(denied, "check the user, its password and its roles in MONGO_URL") from error
    except StoreUnavailable as error:
        problem = StoreUnavailable(f"no MongoDB server responds at {shown_address(where.mongo_url)}")
        raise add_remedy(problem, "start one, or set MONGO_URL") from error
    finally:
        client.close()


def _create_motor(url: str) -> Any:
    try:
        with warnings.catch_warnings(record=True) as ignored:
            warnings.simplefilter("always")
            client: Any = AsyncIOMotorClient(
                url,
                tz_aware=True,
                serverSelectionTimeoutMS=_ANSWER_MS,
                event_listeners=[CommandTimes()] if is_measured() else [],
            )
    except (PyMongoError, ValueError, OSError) as error:
        problem = ConfigError(
            f"MONGO_URL ({shown_address(url)}) is not a MongoDB address{_explain_url(error)}"
        )
        raise add_remedy(
            problem, "use the form mongodb://host:27017, and percent-encode user and password"
        ) from None
    for warning in ignored:
        _logger.warning("MONGO_URL has an option that the driver ignores%s", _explain_url(warning.message))
    return client


def _explain_url(error: Exception | str) -> str:
    """Return what the driver says about an address, without its words, which may contain parts of a password."""
    if isinstance(error, OSError) and error.strerror:
        return f": {error.strerror}"
    if isinstance(error, ConfigurationError) and error.__cause__ is not None:
        return ": its DNS records cannot be read"
    words = re.findall(r"\w+", str(error).partition("Did you mean")[0].lower())
    return next((f": check {word}" for word in words if word in _NAMED), "")


def _name_part(client: Any, name: str) -> Any:
    try:
        if len(name.encode()) > _DATABASE_BYTES:
            raise InvalidName(f"it is longer than {_DATABASE_BYTES} bytes")
        return client[name]
    except (PyMongoError, UnicodeEncodeError) as error:
        problem = ConfigError(f"database name {printed(name)} is invalid: {one_line(error)}")
        raise add_remedy(problem, "set MONGO_DATABASE to a valid name") from None


async def connect_temporal(metrics: ProcessMetrics | None = None) -> Client:
    """Connect to the server that `TEMPORAL_*` names. Raises TemporalUnavailable or ConfigError.

    What Temporal's SDK measures becomes part of `metrics`.
    """
    output.forward_core_log(metrics)
    look_in_current_folder()  # FLOWKIT_DATA_CONVERTER may name a module there, as options may
    try:
        return await connect()
    except TemporalUnavailable as error:
        raise add_remedy(TemporalUnavailable(error.problem), error.remedy) from error
    except ConfigError:
        raise
    except Exception as error:
        problem = ConfigError(f"invalid settings for Temporal's client: {one_line(error)}")
        raise add_remedy(problem, "check TEMPORAL_ADDRESS and the other TEMPORAL_* variables") from error


DEFAULT_PORT = 9092


async def accepts_connections(bootstrap: str, seconds: float) -> bool:
    """Whether at least one of the brokers, `host:port` separated by commas, accepts a connection."""
    addresses = [text.strip() for text in bootstrap.split(",") if text.strip()]
    return any(await asyncio.gather(*(_accepts(address, seconds) for address in addresses)))


async def describe_brokers(bootstrap: str) -> str | None:
    """Return the number of brokers and the id of their cluster; None if they do not respond."""
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    with _without_its_log(), suppress(KafkaError, OSError, ValueError):
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        try:
            await client.start()
            cluster = await client.describe_cluster()
        finally:
            await client.close()
        count = len(cluster["brokers"])
        return f"{count} broker{'s' if count > 1 else ''}, cluster {cluster['cluster_id']}"
    return None


async def _accepts(address: str, seconds: float) -> bool:
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(DEFAULT_PORT))
    with suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        return True
    return False


@contextmanager
def _without_its_log() -> Iterator[None]:
    """Keep aiokafka from logging a failed connection, which the caller reports."""
    logger = logging.getLogger("aiokafka")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
