"""Clients that the tests of the bridge use beside the bridge's own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer

from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.producer import Producer
from flowkit.bridge.kafka.topics import Provisioner, Topics, worker_group
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.integration.bridge.conftest import Names


async def command_topic(names: Names, **settings: Any) -> str:
    """Create the topics of the test's role and return its command topic."""
    cfg = names.config(**settings)
    await Provisioner(names.connection, cfg).ensure([names.role()])
    return Topics.of(cfg).cmd(names.role())


@asynccontextmanager
async def worker(names: Names, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
    """Join the workers' group of the test's role, as an external worker does."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=names.bootstrap,
        group_id=worker_group(names.role()),
        enable_auto_commit=False,
        auto_offset_reset="latest",
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


@asynccontextmanager
async def producing(names: Names) -> AsyncIterator[Producer]:
    """Return a producer of the bridge, and stop it at the end."""
    producer = Producer(names.connection)
    try:
        yield producer
    finally:
        await producer.stop()


class Reading:
    """Collects the records that a consumer of the bridge handles."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.failures = 0
        self._changed = asyncio.Condition()

    async def handle(self, records: Sequence[Any]) -> None:
        """Keep the records, or fail if the test wants that."""
        async with self._changed:
            self._changed.notify_all()
            if self.failures > 0:
                self.failures -= 1
                raise ValueError("the test refuses these records")
            self.values += [record.value for record in records]

    async def until(self, wanted: set[bytes]) -> None:
        """Wait until all these values have been handled."""
        async with asyncio.timeout(EVENT_TIMEOUT_SEC), self._changed:
            await self._changed.wait_for(lambda: wanted <= set(self.values))


@asynccontextmanager
async def consuming(names: Names, topic: str, group: str, reading: Reading) -> AsyncIterator[RecordConsumer]:
    """Run a consumer of the bridge."""
    consumer = RecordConsumer(names.connection, [topic], group, reading.handle)
    running = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
