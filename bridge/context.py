"""What all parts of one bridge share: settings, connections, access to MongoDB, and the count of malformed records."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from cachetools import LRUCache

from flowkit.adapters.dispatches import DispatchStore
from flowkit.adapters.external_inputs import ExternalInputs
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.core.instruments import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from temporalio.client import AsyncActivityHandle, Client

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.dispatches import Dispatch
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.attempt.role_lease import RoleLease
    from flowkit.bridge.kafka.offsets import Offsets
    from flowkit.bridge.kafka.producer import Producer
    from flowkit.bridge.kafka.topics import Topics
    from flowkit.bridge.rules.messages import KafkaRecord
    from flowkit.config import CoordinatorConfig
    from flowkit.core.loop_portal import LoopPortal

T = TypeVar("T")

_logger = logging.getLogger("flowkit.bridge")

REMEMBERED = 10_000
"""How many entries a bridge remembers, to recognize what it has handled a short time ago."""


@dataclass(kw_only=True)
class Stores:
    """The collections that a bridge uses."""

    tasks: TaskStore
    artifacts: ArtifactStore
    dispatches: DispatchStore = field(init=False)
    inputs: ExternalInputs = field(init=False)
    registry: WorkerRegistry = field(init=False)
    events: WorkerEvents = field(init=False)

    def __post_init__(self) -> None:
        db = self.tasks.database
        self.dispatches = DispatchStore(db)
        self.inputs = ExternalInputs(db)
        self.registry = WorkerRegistry(db)
        self.events = WorkerEvents(db)


class MalformedRecords:
    """The malformed records that one bridge has skipped."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Number of skipped records by topic."""
        self._seen = LRUCache[tuple[str, int, int], None](REMEMBERED)

    def skip(self, record: KafkaRecord, why: Exception) -> None:
        """Count a record and log it. A record that Kafka delivers again is neither counted nor logged again."""
        place = (record.topic, record.partition, record.offset)
        if place in self._seen:
            return
        self._seen[place] = None
        self.counts[record.topic] += 1
        MALFORMED.add(record.topic)
        _logger.warning("skipped a malformed record (topic %s, partition %d, offset %d): %s", *place, why)


@dataclass(kw_only=True)
class BridgeContext:
    """Settings and connections of one bridge. MongoDB's driver may run on another event loop than the bridge."""

    bridge_id: str
    roles: tuple[str, ...]
    """The roles that this bridge serves."""
    config: CoordinatorConfig
    client: Client
    stores: Stores
    portal: LoopPortal
    topics: Topics
    producer: Producer
    offsets: Offsets
    deployment: str
    """The result of `TaskStore.deployment`."""
    leases: Mapping[str, RoleLease]
    """The lease of each role."""
    malformed: MalformedRecords = field(default_factory=MalformedRecords)

    async def db(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call()`, run on the event loop of the database. Wait while MongoDB is unavailable."""
        return await self.portal.run(retry_while_unavailable(call))

    def now(self) -> float:
        """Return the time in seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds since an arbitrary moment, by a clock that is never adjusted. It measures durations."""
        return time.monotonic()

    def activity(self, record: Dispatch) -> AsyncActivityHandle:
        """Return Temporal's handle of the activity of an attempt.

        It contains the run id, so that an event of an earlier run cannot complete an attempt of a later one.
        """
        attempt = record.attempt
        return self.client.get_async_activity_handle(
            workflow_id=attempt.task_id, run_id=record.run_id, activity_id=activity_id(record)
        )

    @property
    def database_id(self) -> str:
        """The id of the database."""
        return self.deployment.partition("/")[0]

    def status_group(self, role: str) -> str:
        """Return the consumer group of the status topic of a role. It contains the id of the database."""
        return f"flowkit.{self.database_id}.status.{role}"

    @property
    def announce_group(self) -> str:
        """The consumer group of announcements and replies."""
        return f"flowkit.{self.database_id}.announce"


def activity_id(record: Dispatch) -> str:
    """Return the Temporal activity id of an attempt."""
    return f"{record.attempt.node_id}.{record.attempt.epoch}"
