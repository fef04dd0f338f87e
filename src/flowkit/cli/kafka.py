"""Whether Kafka brokers respond. Only the commands that use Kafka import its client."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
