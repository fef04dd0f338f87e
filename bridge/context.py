"""What all parts of one bridge share: its settings, its connections, and access to MongoDB."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from flowkit.adapters.dispatches.inputs import ExternalInputs
from flowkit.adapters.dispatches.store import DispatchStore
from flowkit.adapters.retry import retry_while_unavailable
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.adapters.worker_registry import WorkerRegistry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.client import AsyncActivityHandle, Client

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.bridge.kafka.offsets import Offsets
    from flowkit.bridge.kafka.producer import Producer
    from flowkit.bridge.kafka.topics import Topics
    from flowkit.config import CoordinatorConfig
    from flowkit.core.loop_portal import LoopPortal

T = TypeVar("T")


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
    database_id: str

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
