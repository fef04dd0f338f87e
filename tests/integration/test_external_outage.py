"""The external worker while its broker is down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiokafka.consumer.group_coordinator import GroupCoordinator

from flowkit.local import Kafka
from flowkit.testing.external import kafka as clients
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.integration.kafka_side import KafkaSide
from tests.integration.test_external_worker import Gate
from tests.kafka_server import Broker
from tests.unit.event_loop import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Kafka]:
    """A broker that the test may kill and restart."""
    with Kafka(tmp_path) as running:
        yield running


async def test_a_run_survives_a_restart_of_the_broker_and_workers_end_while_it_is_down(
    server: Kafka,
) -> None:
    gate = Gate()
    broker = Broker(bootstrap_servers=server.bootstrap_servers)
    async with KafkaSide(broker) as side, KafkaSide(broker) as killed_side, KafkaSide(broker) as stopped_side:
        killed, stopped = [each.worker(Gate().handler) for each in (killed_side, stopped_side)]
        await killed.start()
        await stopped.start()
        async with side.worker(gate.handler) as worker:
            for each, own in ((side, worker), (killed_side, killed), (stopped_side, stopped)):
                await each.start("a")
                await own.wait_for("TASK_HEARTBEAT", count=3)
            server.kill()
            await killed.kill()
            await stopped.stop()
            for ended in (killed, stopped):
                assert not ended.alive
                assert "WORKER_OFFLINE" not in {entry.kind for entry in ended.sent}
            server.start()
            gate.open.set()
            await worker.wait_for("TASK_DONE", node="a")
            await side.start("b")
            await worker.wait_for("TASK_DONE", node="b")


async def test_a_producer_is_dropped_while_a_record_waits_for_a_connection(kafka: Broker) -> None:
    producer = await clients.open_producer(kafka.bootstrap_servers, kafka.client_settings)
    async with KafkaSide(kafka) as side:
        await producer.client._wait_on_metadata(side.topic("topic_query"))
        await asyncio.gather(*(each.close() for each in producer.client._conns.values()))
        connecting = producer.client._get_conn_lock
        async with connecting:
            dropping = asyncio.create_task(clients.drop_producer(producer))
            await producer.send(side.topic("topic_query"), b"")
            await until(lambda: len(connecting._waiters or ()) > 1)
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            await dropping


async def test_a_worker_ends_although_its_consumers_do_not(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As aiokafka's do now and then while the broker is down."""
    monkeypatch.setattr(clients, "_STOP_SEC", 0.1)
    async with KafkaSide(kafka) as side:
        worker = side.worker(Gate().handler)
        await worker.start()
        monkeypatch.setattr(GroupCoordinator, "close", lambda _: asyncio.Event().wait())
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            await worker.stop()
        assert not worker.alive
