"""One process of the admission queue: its dispatcher, its front door over HTTP, and its side of Kafka."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.adapters.tasks.store import TaskStore
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.kafka import AdmissionConsumer, AdmissionTopics, EventRelay
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.attempt.background import Health
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.producer import Producer
from flowkit.client import TaskClient
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.attempt.background import LoopHealth
    from flowkit.config import CoordinatorConfig
    from flowkit.server.serving import HttpServer


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionSettings:
    """What one process does."""

    queue: str
    """Task queue of the engine, which is also the name of the admission queue."""
    dispatches: bool = True
    """Whether it gives slots and starts requests. Otherwise, other processes do."""
    addresses: Sequence[tuple[str, int]] = ()
    """Hosts and ports of the HTTP API. Empty for a process without it."""
    certificate: str | None = None
    """PEM file with the certificate of the HTTP API. None for HTTP without TLS."""
    key: str | None = None
    kafka: CoordinatorConfig | None = None
    """The settings `kafka_…` of a process that reads requests from Kafka and sends events to it; None for
    one without."""
    topics: AdmissionTopics = field(default_factory=AdmissionTopics)


class AdmissionProcess:
    """Runs its parts between `start` and `stop`. Any number of processes can run in parallel."""

    def __init__(self, *, db: Any, client: Client, settings: AdmissionSettings) -> None:
        self._db = db
        self._settings = settings
        self._store = AdmissionStore(db, queue=settings.queue)
        self.queue = AdmissionQueue(self._store)
        tasks = TaskClient(client, TaskStore(db), queue=settings.queue)
        connection = KafkaConnection.from_config(settings.kafka) if settings.kafka else None
        self._connection = connection
        self._producer = Producer(connection) if connection else None
        self._relay = EventRelay(self.queue, settings.topics, self._producer) if self._producer else None
        self._consumer = self._new_consumer()
        self._dispatcher: Dispatcher | None = None
        if settings.dispatches:
            on_events = self._relay.notify if self._relay else None
            self._dispatcher = Dispatcher(self.queue, tasks, on_events=on_events)
        elif self._relay:
            self.queue.on_change = self._relay.notify
        self._server: HttpServer | None = None
        self._running: list[asyncio.Task[None]] = []

    def _new_consumer(self) -> RecordConsumer | None:
        if self._connection is None or self._producer is None:
            return None
        topics = self._settings.topics
        consumer = AdmissionConsumer(self.queue, topics, self._producer)
        return RecordConsumer(
            self._connection, topics.consumed(), topics.group_of(self._settings.queue), consumer.handle
        )

    @property
    def ports(self) -> list[int]:
        """The ports on which the HTTP API listens."""
        return [] if self._server is None else [each.port for each in self._server.bound]

    async def start(self) -> None:
        """Create indexes and topics, and start all parts. If an error is raised, nothing is left running."""
        await self._store.prepare()
        try:
            if self._settings.kafka is not None and self._connection is not None:
                await self._settings.topics.create(self._connection, self._settings.kafka)
                await self._store.send_events()
            if self._dispatcher is not None:
                await self._dispatcher.start()
            self._running = [
                asyncio.create_task(part.run()) for part in (self._relay, self._consumer) if part
            ]
            if self._settings.addresses:
                await self._start_server()
        except BaseException:
            await self.stop()
            raise

    async def _start_server(self) -> None:
        from flowkit.admission.api import admission_routes
        from flowkit.admission.metrics import metrics_route
        from flowkit.server.serving import serve

        self._server = await serve(
            [*admission_routes(self.queue), metrics_route(self.queue)],
            self._settings.addresses,
            db=self._db,
            health=lambda: self.health().ok,
            certificate=self._settings.certificate,
            key=self._settings.key,
        )

    async def stop(self) -> None:
        """Accept nothing more, then stop dispatching, and end what this process has begun."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        running, self._running = self._running, []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._dispatcher is not None:
            await self._dispatcher.stop()
        if self._producer is not None:
            await self._producer.stop()
        with suppress(StoreUnavailable):
            await self.queue.session.close()

    async def wait_stopped(self) -> None:
        """Wait until a part ends on its own, and raise its error."""
        waits = list(self._running)
        if self._server is not None:
            waits.append(asyncio.create_task(self._server.wait_stopped()))
        if not waits:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def health(self) -> Health:
        """Return whether all parts run."""
        serves = self._server is None or self._server.health().ok
        return Health(running=serves, loops=tuple(self._loops()))

    def _loops(self) -> list[LoopHealth]:
        loops = [] if self._dispatcher is None else list(self._dispatcher.loops)
        if self._running:
            loops += [part.health for part in (self._relay, self._consumer) if part]
        return loops
