"""Brokers for the tests of the bridge: a shared one, and one that tests may stop."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import CoordinatorConfig
from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.local import Kafka
from tests.integration.bridge.external_tasks import ExternalTasks
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.local import Stack
    from tests.kafka_server import Broker


@dataclass
class Names:
    """Names that no other test uses, at the broker of a test."""

    bootstrap: str
    prefix: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:8]}")

    def config(self, **settings: Any) -> CoordinatorConfig:
        """Return settings whose topics begin with the prefix."""
        own = {
            "kafka_bootstrap": self.bootstrap,
            "kafka_cmd_partitions": 3,
            "topic_cmd_fmt": f"{self.prefix}-cmd-{{type}}",
            "topic_status_fmt": f"{self.prefix}-status-{{type}}",
            **{f"topic_{name}": f"{self.prefix}-{name}" for name in ("query", "reply", "signals")},
            "topic_worker_announce": f"{self.prefix}-announce",
        }
        return CoordinatorConfig(**{**own, **settings})

    @property
    def connection(self) -> KafkaConnection:
        """The connection to the broker."""
        return KafkaConnection.from_config(self.config())

    def role(self, name: str = "indexer") -> str:
        """Return a role of this test; the name of its workers' group follows from it."""
        return f"{self.prefix}-{name}"


@pytest.fixture(scope="session")
def frail_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that tests may stop and restart. A test leaves it running."""
    with Kafka(tmp_path_factory.mktemp("frail-broker")) as broker:
        yield broker


@pytest.fixture
def names(kafka: Broker) -> Names:
    """Names at the shared broker."""
    return Names(kafka.bootstrap_servers)


@pytest.fixture(autouse=True)
async def _closed_clients() -> AsyncIterator[None]:
    """Clients that leave a group during a rebalance close in the background; the loop must not end before them."""
    yield
    await clients.wait_closed(EVENT_TIMEOUT_SEC)


@pytest.fixture
def frail(frail_broker: Kafka) -> Names:
    """Names at the broker that the test may stop."""
    frail_broker.start()
    return Names(frail_broker.bootstrap_servers)


@pytest.fixture
async def external(
    stack: Stack, names: Names, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ExternalTasks]:
    """Tasks with external roles on the shared servers."""
    made = ExternalTasks(names, temporal=stack.temporal_address, mongo=stack.mongo_url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.temporal_address)
    yield made
    await made.close()
