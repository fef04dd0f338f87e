"""Kafka or MongoDB are unavailable for a while: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.local import TemporalServer
from flowkit.models import TaskStatus
from flowkit.testing.external import Final, Result
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.external_tasks import ExternalTasks, codes
from tests.integration.bridge.gates import Gate
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import cancelled
from tests.servers import stoppable_mongo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from flowkit.local import Kafka, MongoServer, Stack
    from tests.integration.bridge.conftest import Names

pytestmark = [pytest.mark.server, pytest.mark.slow]

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
OUTAGE_SEC = 4.0
PATIENT = {"lease_ttl_sec": 60.0}
"""Settings of a worker whose lease outlasts the outage."""


@pytest.fixture
async def frail_external(
    stack: Stack, frail: Names, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ExternalTasks]:
    """Tasks with external roles at the broker that the test may stop."""
    made = ExternalTasks(frail, temporal=stack.temporal_address, mongo=stack.mongo_url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.temporal_address)
    yield made
    await made.close()


@pytest.fixture
async def own_mongo(
    tmp_path: Path, names: Names, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ExternalTasks, MongoServer]]:
    """Tasks with external roles on a MongoDB server that the test may stop."""
    with stoppable_mongo(tmp_path) as mongo, TemporalServer(tmp_path) as temporal:
        monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
        monkeypatch.setenv("MONGO_URL", mongo.url)
        made = ExternalTasks(names, temporal=temporal.address, mongo=mongo.url)
        yield made, mongo
        await made.close()


class TwoGates:
    """Yields a batch, waits, yields two batches, waits, and finishes."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    async def handler(self, run: Any) -> AsyncIterator[Any]:
        """Run a node."""
        yield Result({"number": 0}, "b0")
        await run.cancellable(self.first.wait())
        yield Result({"number": 1}, "b1")
        yield Result({"number": 2}, "b2")
        await run.cancellable(self.second.wait())
        yield Final({"total": 3})


async def assert_finished_in_one_epoch(external: ExternalTasks, task_id: str, uids: set[str]) -> None:
    """Check that the task finished, without a retry or a lost lease, and that every batch counts once."""
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    rows = Counter(row["batch_uid"] for row in await external.rows(task_id, "extract"))
    assert rows == dict.fromkeys(uids, 1)
    assert await codes(external, task_id, "extract") == [None]


async def test_outage_of_kafka_loses_nothing_and_counts_nothing_twice(
    frail_external: ExternalTasks, frail_broker: Kafka
) -> None:
    """A command waits for Kafka, events are sent around the outage, and a lease may be lost in it (H33, H34)."""
    external = frail_external
    external.roles = [external.names.role(name) for name in ("waits", "sends", "lapses")]
    external.settings["lease_ttl_sec"] = 3
    await external.served_engine()
    sends, lapses = TwoGates(), Gate()
    handlers = [scripted, sends.handler, lapses.handler]
    waiting, sending, lapsing = [
        await external.external(*handlers, roles=[role], **settings)
        for role, settings in zip(external.roles, (PATIENT, PATIENT, {"lease_ttl_sec": 1.0}), strict=True)
    ]
    before = await external.create(node("extract", external.roles[0], **ONCE))
    assert (await external.result(before)).status is TaskStatus.FINISHED
    sent, lapsed = [await external.create(node("extract", role, **ONCE)) for role in external.roles[1:]]
    for worker in (sending, lapsing):
        await worker.wait_for("BATCH_OK", node="extract")
    await asyncio.to_thread(frail_broker.stop)
    sends.first.set()
    waits = await external.create(node("extract", external.roles[0], inline={"batches": 2}, **ONCE))
    await external.dispatch(waits, "extract")
    await wait_seconds(OUTAGE_SEC)
    await asyncio.to_thread(frail_broker.start)
    sends.second.set()
    lapses.open()
    await assert_finished_in_one_epoch(external, sent, {"b0", "b1", "b2"})
    await assert_finished_without_a_retry(external, waits, {"extract-0", "extract-1"}, "dispatch_lost")
    await assert_finished_without_a_retry(external, lapsed, {"b0", "b1"}, "lease_lost", "dispatch_lost")
    accepted = [e for e in waiting.sent_for("extract", "TASK_ACCEPTED") if e.task_id == waits]
    assert len(accepted) == 1


async def assert_finished_without_a_retry(
    external: ExternalTasks, task_id: str, uids: set[str], *losses: str
) -> None:
    """Check that the task finished, that its attempts ended with these losses at most, and that every batch
    counts once.
    """
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert set(await codes(external, task_id, "extract")) <= {*losses, None}
    rows = Counter(row["batch_uid"] for row in await external.rows(task_id, "extract"))
    assert rows == dict.fromkeys(uids, 1)


async def test_task_can_be_cancelled_and_the_engine_stopped_and_started_while_kafka_is_unavailable(
    frail_external: ExternalTasks, frail_broker: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """The dispatch, which waits for Kafka, sees the cancel long before a quarter of its lease."""
    external = frail_external
    external.settings["cancel_grace_sec"] = 8
    await external.served_engine()
    worker = await external.external(scripted)
    first = await external.create(node("extract", external.role, **ONCE))
    assert (await external.result(first)).status is TaskStatus.FINISHED
    await asyncio.to_thread(frail_broker.stop)
    task_id = await external.create(node("extract", external.role, **ONCE))
    await external.dispatch(task_id, "extract")
    await external.coordinator.cancel_task(task_id)
    assert (await cancelled(external, task_id))["status"] == "cancelled"
    await external.until_reported(task_id, "extract")
    assert [each["outcome"]["kind"] for each in await external.dispatches(task_id)] == ["cancelled"]
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        await external.coordinator.stop()

    caplog.clear()
    await external.coordinator.start()
    later = await external.create(node("extract", external.role, inline={"batches": 2}, **ONCE))

    async def warned() -> bool:
        return f"role {external.role} is not served yet" in caplog.text

    await eventually(warned)
    await external.until_status(later, "running")
    assert await external.dispatches(later) == []
    warnings = [each.getMessage() for each in caplog.records if "is not served yet" in each.getMessage()]
    assert all(external.names.bootstrap in text for text in warnings)
    await asyncio.to_thread(frail_broker.start)
    await external.until_served()
    await assert_finished_in_one_epoch(external, later, {"extract-0", "extract-1"})
    assert [each.task_id for each in worker.sent_for("extract", "TASK_DONE")] == [first, later]


async def test_outage_of_mongodb_loses_no_events_and_no_task(
    own_mongo: tuple[ExternalTasks, MongoServer],
) -> None:
    """A worker sends events, and a client creates a task, while MongoDB is unavailable."""
    external, mongo = own_mongo
    await external.served_engine()
    gates = TwoGates()
    handlers = [gates.handler, scripted]
    sending, waiting = [
        await external.external(*handlers, roles=[role], **PATIENT) for role in external.roles
    ]
    sent = await external.create(node("extract", external.role, **ONCE))
    await external.until_batches(sent, "extract", 1)
    await asyncio.to_thread(mongo.stop)
    gates.first.set()
    await sending.wait_for("BATCH_OK", node="extract", count=3)
    created = await external.create(node("extract", external.other_role, inline={"batches": 2}, **ONCE))
    await wait_seconds(OUTAGE_SEC)
    await asyncio.to_thread(mongo.start)
    await external.until_batches(sent, "extract", 3)
    gates.second.set()
    await assert_finished_in_one_epoch(external, sent, {"b0", "b1", "b2"})
    partial = {"task_id": sent, "status": "partial"}
    assert await external.db.artifacts.count_documents(partial) == 3
    await assert_finished_in_one_epoch(external, created, {"extract-0", "extract-1"})
    assert len(waiting.sent_for("extract", "TASK_ACCEPTED")) == 1
