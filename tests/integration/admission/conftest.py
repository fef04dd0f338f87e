"""An admission queue of its own database, with its side of Kafka, for one test."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from motor.motor_asyncio import AsyncIOMotorClient

from flowkit import CoordinatorConfig
from flowkit.admission.kafka import AdmissionConsumer, AdmissionTopics, EventRelay
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.producer import Producer
from tests.integration.harness import eventually
from tests.servers import drop_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from tests.kafka_server import Broker
    from tests.servers import Start

Event = dict[str, Any]


@dataclass
class Door:
    """A queue, its consumer and its relay."""

    db: Any
    bootstrap: str
    topics: AdmissionTopics
    producer: Producer
    queue: AdmissionQueue = field(init=False)
    consumer: AdmissionConsumer = field(init=False)
    relay: EventRelay = field(init=False)

    def __post_init__(self) -> None:
        """Create the parts of one process."""
        self.queue = AdmissionQueue(AdmissionStore(self.db, queue="q"))
        self.relay = EventRelay(self.queue, self.topics, self.producer)
        self.queue.on_change = self.relay.notify
        self.consumer = AdmissionConsumer(self.queue, self.topics, self.producer)

    @property
    def connection(self) -> KafkaConnection:
        """The connection to the broker."""
        return KafkaConnection(bootstrap=self.bootstrap)

    async def prepare(self) -> None:
        """Create indexes and topics."""
        cfg = CoordinatorConfig(kafka_bootstrap=self.bootstrap, kafka_cmd_partitions=2)
        await asyncio.gather(self.queue.store.prepare(), self.topics.create(self.connection, cfg))
        await self.queue.store.send_events()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RecordConsumer]:
        """Read requests and send events, as a process does."""
        consumer = RecordConsumer(
            self.connection, self.topics.consumed(), self.topics.group_of("q"), self.consumer.handle
        )
        async with background(consumer.run()), background(self.relay.run()):
            yield consumer

    async def produce(self, topic: str, *events: Event | bytes, key: bytes | None = None) -> None:
        """Append records to a topic, all to one partition."""
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap, acks="all") as producer:
            for event in events:
                value = event if isinstance(event, bytes) else json.dumps(event).encode()
                await producer.send(self.topics.prefix + topic, value, key=key, partition=0)

    async def records(self, topic: str, count: int) -> list[Any]:
        """Return the first records of a topic; wait until it has as many."""
        async with AIOKafkaConsumer(
            self.topics.prefix + topic, bootstrap_servers=self.bootstrap, auto_offset_reset="earliest"
        ) as consumer:
            return [await consumer.getone() for _ in range(count)]

    async def events(self, topic: str, count: int) -> list[Event]:
        """Return the first events of a topic; wait until it has as many."""
        return [json.loads(record.value) for record in await self.records(topic, count)]

    async def until_read(self) -> None:
        """Wait until the group has committed everything that its topics contain now."""
        offsets = Offsets(self.connection)
        try:
            for topic in self.topics.consumed():
                ends = await offsets.read_ends(topic)
                await eventually(partial(offsets.has_caught_up, self.topics.group_of("q"), topic, ends))
        finally:
            await offsets.close()

    async def until_counted(self, name: str, count: int = 1) -> None:
        """Wait until the consumer has counted something so often."""

        async def look() -> bool:
            return self.queue.counts["ignored", name] >= count

        await eventually(look)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run something until the end of the block."""
    running = asyncio.create_task(work)
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture(params=["per_type"])
async def door(request: pytest.FixtureRequest, kafka: Broker, start_servers: Start) -> AsyncIterator[Door]:
    """A queue with topics of its own, in one of the two styles."""
    name = uuid.uuid4().hex[:8]
    client: Any = AsyncIOMotorClient(start_servers("mongo")["MONGO_URL"], tz_aware=True)
    topics = AdmissionTopics(style=request.param, prefix=f"t{name}.", group=f"g{name}")
    producer = Producer(KafkaConnection(bootstrap=kafka.bootstrap_servers))
    made = Door(client[f"test_{name}"], kafka.bootstrap_servers, topics, producer)
    await made.prepare()
    yield made
    await producer.stop()
    await drop_database(client, f"test_{name}")
    client.close()
    await clients.wait_closed(60)
