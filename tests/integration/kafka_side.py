"""The other side of external workers: sends what an engine sends, and reads the topics. Shares no code with either."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from flowkit.testing import memory_database
from tests.integration.harness import PatientWorker, wait_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.testing.external import Misbehavior
    from tests.kafka_server import Broker

FAST = {"hb_interval_sec": 0.05, "lease_ttl_sec": 0.5, "announce_interval_sec": 0.1, "db_cancel_poll_ms": 20}
"""Settings with short intervals."""

QUERIES = "workers.query.v1"
"""The group of all workers that read queries."""

SESSION_MS = 6_000
"""The shortest session timeout that brokers accept by default."""


class KafkaSide:
    """Topics with a random prefix, roles with random names, and an empty database."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.prefix = uuid.uuid4().hex[:8]
        self.role = f"indexer-{self.prefix}"
        self.other_role = f"enricher-{self.prefix}"
        self.db: Any = memory_database()
        self.topics = {
            "topic_cmd_fmt": f"{self.prefix}.cmd.{{type}}",
            "topic_status_fmt": f"{self.prefix}.status.{{type}}",
            "topic_worker_announce": f"{self.prefix}.announce",
            "topic_query": f"{self.prefix}.query",
            "topic_reply": f"{self.prefix}.reply",
            "topic_signals": f"{self.prefix}.signals",
        }
        self._producer: Any = None

    async def __aenter__(self) -> Self:
        cmd, status, *rest = self.topics.values()
        per_role = [text.format(type=role) for role in (self.role, self.other_role) for text in (cmd, status)]
        commands = [name for name in per_role if ".cmd." in name]
        await self.broker.create_topics(*commands, partitions=2)
        await self.broker.create_topics(*(name for name in per_role if name not in commands), *rest)
        self._producer = AIOKafkaProducer(**self.broker.arguments)
        await self._producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._producer.stop()

    def worker(self, *handlers: Any, misbehavior: Misbehavior | None = None, **more: Any) -> PatientWorker:
        """Return a worker that is not started: the first handler runs this side's role, the second the other."""
        roles = (self.role, self.other_role)
        return PatientWorker(
            self.db,
            dict(zip(roles, handlers, strict=False)),
            bootstrap_servers=self.broker.bootstrap_servers,
            kafka=self.broker.client_settings,
            consumer={"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 300},
            misbehavior=misbehavior,
            **{**FAST, **self.topics, **more},
        )

    def topic(self, name: str, role: str = "") -> str:
        """Return the name of a topic."""
        return self.topics[name].format(type=role or self.role)

    async def start(
        self, node: str, *, epoch: int = 1, role: str = "", partition: int | None = None, **changes: Any
    ) -> str:
        """Send TASK_START, and return its dedup id. `inline` is the node's input."""
        chosen, inline = role or self.role, changes.pop("inline", None)
        payload = {"cmd": "TASK_START", "input_ref": None, "input_inline": inline, "batching": None}
        message = self.message("cmd", node, epoch, {**payload, "cancel_token": "c"}, chosen, **changes)
        await self.send(self.topic("topic_cmd_fmt", chosen), message, partition)
        return str(message["dedup_id"])

    async def cancel(self, node: str, *, epoch: int = 1, worker: str | None = None) -> None:
        """Send the CANCEL signal."""
        payload = {"sig": "CANCEL", "reason": "user_request", "cancel_token": None, "deadline_ts_ms": 5}
        message = self.message("event", node, epoch, payload, target_worker_id=worker)
        await self.send(self.topic("topic_signals"), message)

    async def discover(self, node: str, *, role: str = "") -> None:
        """Send TASK_DISCOVER.

        The workers of all tests share one group. Without a committed offset, each of its rebalances begins at the end
        of the topic, and loses what was sent before. So queries that no worker answers are sent until one is committed.
        """
        while not await self.committed(QUERIES, self.topic("topic_query")):
            await self.send(self.topic("topic_query"), self._query(node, "unknown-role"))
            await wait_seconds(0.2)
        await self.send(self.topic("topic_query"), self._query(node, role or self.role))

    def _query(self, node: str, role: str) -> dict[str, Any]:
        return self.message("query", node, 2, {"query": "TASK_DISCOVER", "want_epoch": 2}, role)

    def message(
        self, kind: str, node: str, epoch: int, payload: dict[str, Any], role: str = "", **changes: Any
    ) -> dict[str, Any]:
        """Return an engine's message about a node of the task `t`."""
        return {
            "v": 1,
            "msg_type": kind,
            "role": "coordinator",
            "corr_id": str(uuid.uuid4()),
            "dedup_id": uuid.uuid4().hex,
            "task_id": "t",
            "node_id": node,
            "step_type": role or self.role,
            "attempt_epoch": epoch,
            "ts_ms": 1_764_000_000_000,
            "payload": payload,
            "target_worker_id": None,
            **changes,
        }

    async def send(self, topic: str, message: Any, partition: int | None = None) -> None:
        """Send a message, or bytes as they are."""
        value = message if isinstance(message, bytes) else json.dumps(message).encode()
        await self._producer.send_and_wait(topic, value, partition=partition)

    async def records(self, topic: str) -> list[Any]:
        """Return all records that a topic of one partition holds now."""
        place = TopicPartition(topic, 0)
        async with AIOKafkaConsumer(**self.broker.arguments, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            end = (await consumer.end_offsets([place]))[place]
            return [await consumer.getone() for _ in range(end)]

    async def find(self, topic: str, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for the first message of a topic of one partition whose payload matches, and return the payload."""
        async with AIOKafkaConsumer(**self.broker.arguments, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(topic, 0)])
            while True:
                payload: dict[str, Any] = json.loads((await consumer.getone()).value)["payload"]
                if matches(payload):
                    return payload

    async def kinds(self, role: str = "") -> list[str]:
        """Return the kinds of the records on a role's status topic, without heartbeats."""
        records = await self.records(self.topic("topic_status_fmt", role))
        kinds = [json.loads(record.value)["payload"]["kind"] for record in records]
        return [kind for kind in kinds if kind != "TASK_HEARTBEAT"]

    async def committed(self, group: str = "", topic: str = "") -> int:
        """Return how many records of a topic a group has committed, on all partitions; by default, of the role's."""
        chosen = topic or self.topic("topic_cmd_fmt")
        admin = AIOKafkaAdminClient(**self.broker.arguments)
        await admin.start()
        try:
            offsets = await admin.list_consumer_group_offsets(group or f"workers.{self.role}.v1")
        finally:
            await admin.close()
        return sum(max(each.offset, 0) for place, each in offsets.items() if place.topic == chosen)
