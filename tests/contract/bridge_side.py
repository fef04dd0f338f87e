"""The parts of a real bridge that handle the records of workers, on a test's database and without a Temporal server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from aiokafka import ConsumerRecord
from temporalio.client import Client
from tests.unit.bridge_records import TASK, attempt, lease, message, record

from flowkit import CoordinatorConfig
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches import Dispatch, key_of
from flowkit.adapters.tasks.store import TaskStore
from flowkit.bridge.service import Bridge
from flowkit.core.loop_portal import LoopPortal
from flowkit.protocol.messages import Envelope

if TYPE_CHECKING:
    from collections.abc import Sequence

ROLES = ("indexer", "parser")


class BridgeSide:
    """A bridge that serves `ROLES` and is not running. A test passes records to it, as its consumers do.

    It notes the outcomes that a running bridge reports to Temporal, and the signals that it sends.
    """

    def __init__(self, bridge: Bridge, db: Any) -> None:
        self.bridge = bridge
        self.db = db
        self.topics = bridge.context.topics
        self.dispatches = bridge.context.stores.dispatches
        self.delivered: list[Dispatch] = []
        self.signals: list[Envelope] = []
        self.opened: dict[str, Dispatch] = {}
        """The records of `open`, by node id."""
        mock.patch.object(bridge.delivery, "start", self._deliver).start()
        mock.patch.object(bridge.context.producer, "send", self._send).start()

    @classmethod
    async def create(cls, db: Any, config: CoordinatorConfig | None = None) -> BridgeSide:
        """Return a bridge on a database, with its indexes."""
        tasks, artifacts = TaskStore(db), ArtifactStore(db)
        await tasks.prepare()
        await artifacts.prepare()
        bridge = Bridge(
            await Client.connect("127.0.0.1:1", lazy=True),
            config=config or CoordinatorConfig(),
            roles=ROLES,
            tasks=tasks,
            artifacts=artifacts,
            portal=LoopPortal(),
            deployment="d",
        )
        await bridge.prepare()
        return cls(bridge, db)

    def _deliver(self, ended: Dispatch, *, overdue: bool = False) -> None:
        assert not overdue
        self.delivered.append(ended)

    async def _send(self, topic: str, key: str | None, value: bytes, _: int | None = None) -> tuple[int, int]:
        assert (topic, key) != (self.topics.signals, "")
        self.signals.append(Envelope.from_json(value))
        return 0, 0

    async def open(
        self,
        node_id: str,
        *,
        role: str = "indexer",
        accepted: bool = True,
        lease_id: str = "l1",
        **fields: Any,
    ) -> Dispatch:
        """Store the record of an open attempt, which worker `w1` has accepted."""
        held = lease("w1", lease_id, expires_at=time.time() + 30) if accepted else None
        made = record(attempt=attempt(node_id=node_id, role=role), lease=held, **fields)
        self.opened[node_id] = made
        return await self.dispatches.insert(made)

    async def dispatch(self, node_id: str, epoch: int = 1) -> Dispatch:
        """Return the record of an attempt."""
        key = key_of(TASK, node_id, epoch)
        return (await self.dispatches.find_all([key]))[key]

    async def handle(self, *records: ConsumerRecord[bytes, bytes]) -> None:
        """Handle records in the polls of one group after another, and write what the polls leave for later."""
        shared = {self.topics.announce, self.topics.reply}
        await self.bridge.status.handle([each for each in records if each.topic not in shared])
        await self.bridge.announcements.handle([each for each in records if each.topic in shared])
        await self.bridge.status.settle()

    def event(
        self,
        kind: str,
        node_id: str,
        payload: dict[str, Any] | None = None,
        *,
        topic: str = "",
        role: str = "indexer",
        **changes: Any,
    ) -> ConsumerRecord[bytes, bytes]:
        """Return an event of worker `w1` as it sends it, on the status topic of the role unless another is given."""
        own = topic or self.topics.status(role)
        sent = message(kind, payload, **{"node_id": node_id, "step_type": role, **changes})
        return kafka_record(own, Envelope(**sent).to_json(), f"{TASK}:{node_id}")

    async def codes(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Return how the attempts ended: the code of the failure, or else the kind of the end, or the state."""
        keys = {key_of(TASK, node_id, 1): node_id for node_id in node_ids}
        found = await self.dispatches.find_all(keys)
        return {keys[key]: _code(each) for key, each in found.items()}


def _code(held: Dispatch) -> str:
    if held.outcome is None:
        return held.state.value
    return held.outcome.failure.code if held.outcome.failure else held.outcome.kind.value


_offsets = iter(range(10**9))


def kafka_record(topic: str, value: bytes | None, key: str | None = None) -> ConsumerRecord[bytes, bytes]:
    """Return a record as a consumer receives it."""
    made: ConsumerRecord[bytes, bytes] = ConsumerRecord(
        topic=topic,
        partition=0,
        offset=next(_offsets),
        timestamp=0,
        timestamp_type=0,
        key=None if key is None else key.encode(),
        value=value,
        checksum=None,
        serialized_key_size=0,
        serialized_value_size=0,
        headers=(),
    )
    return made
