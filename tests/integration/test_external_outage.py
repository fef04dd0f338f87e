"""The external worker while its broker is down."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowkit.local import Kafka
from tests.integration.kafka_side import KafkaSide
from tests.integration.test_external_worker import Gate
from tests.kafka_server import Broker

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker that a test may kill and restart. A test leaves it running."""
    with Kafka(tmp_path_factory.mktemp("frail-broker")) as running:
        yield running


async def test_a_run_survives_a_restart_of_the_broker(server: Kafka) -> None:
    gate = Gate()
    broker = Broker(bootstrap_servers=server.bootstrap_servers)
    async with KafkaSide(broker) as side, side.worker(gate.handler) as worker:
        await side.start("a")
        await worker.wait_for("TASK_HEARTBEAT", count=3)
        server.kill()
        server.start()
        gate.open.set()
        await worker.wait_for("TASK_DONE", node="a")
        await side.start("b")
        await worker.wait_for("TASK_DONE", node="b")


@pytest.mark.parametrize("graceful", [False, True], ids=["kill", "stop"])
async def test_a_worker_ends_while_the_broker_is_down(server: Kafka, graceful: bool) -> None:
    async with KafkaSide(Broker(bootstrap_servers=server.bootstrap_servers)) as side:
        worker = side.worker(Gate().handler)
        await worker.start()
        await side.start("a")
        await worker.wait_for("TASK_HEARTBEAT", count=3)
        server.kill()
        await (worker.stop() if graceful else worker.kill())
        assert not worker.alive
        assert "WORKER_OFFLINE" not in {entry.kind for entry in worker.sent}
        server.start()
