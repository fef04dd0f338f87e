"""The external worker on a real broker: commands, events, cancels, queries, and its life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.kafka_side import KafkaSide

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kafka_server import Broker

pytestmark = pytest.mark.server


@pytest.fixture
async def side(kafka: Broker) -> AsyncIterator[KafkaSide]:
    """Topics and a database for one test."""
    async with KafkaSide(kafka) as made:
        yield made


async def two(run: Any) -> AsyncIterator[dict[str, Any]]:
    """Two batches."""
    yield {"count": 1}
    yield {"count": 2, "name": "é"}


class Gate:
    """A handler that waits before its batch until the test opens it, or a cancel arrives."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def iter_batches(self, run: Any) -> AsyncIterator[dict[str, Any]]:
        """Wait, and yield one batch."""
        await run.cancellable(self.open.wait())
        yield {"count": 1}

    @property
    def handler(self) -> Any:
        """The handler."""

        async def gated(run: Any) -> AsyncIterator[dict[str, Any]]:
            async for batch in self.iter_batches(run):
                yield batch

        return gated


async def test_a_run_sends_its_events_in_order_and_byte_for_byte(side: KafkaSide) -> None:
    async with side.worker(two) as worker:
        await side.start("a")
        await worker.wait_for("idle", node="a")
        records = await side.records(side.topic("topic_status_fmt"))
    assert await side.kinds() == ["TASK_ACCEPTED", "BATCH_OK", "BATCH_OK", "TASK_DONE"]
    assert [record.value for record in records] == [
        entry.value for entry in worker.sent if entry.topic == side.topic("topic_status_fmt")
    ]
    assert {record.key for record in records} == {b"t:a"}
    batches = [record.value for record in records if b'"kind":"BATCH_OK"' in record.value]
    assert '"name":"é"'.encode() in batches[-1]
    state = await side.db.worker_state.find_one({"_id": worker.worker_id})
    assert state["active_run"] is None
    assert worker.runs[0].outcome == "TASK_DONE"


async def test_the_offset_is_committed_when_the_run_starts(side: KafkaSide) -> None:
    gate = Gate()
    async with side.worker(gate.handler) as worker:
        await side.start("a", partition=0)
        await worker.wait_for("committed", node="a")
        assert await side.committed() == 1
        assert worker.busy
        state = await side.db.worker_state.find_one({"_id": worker.worker_id})
        assert state["active_run"] == worker.runs[0].stored()


async def test_a_command_waits_while_its_worker_is_busy(side: KafkaSide) -> None:
    gate = Gate()
    async with side.worker(gate.handler) as worker:
        await side.start("a")
        await worker.wait_for("TASK_HEARTBEAT", count=2)
        assert worker.paused(side.role)
        await side.start("b")
        gate.open.set()
        await worker.wait_for("TASK_DONE", node="b")
    kinds = [(entry.kind, entry.node_id) for entry in worker.sent if entry.kind != "TASK_HEARTBEAT"]
    assert kinds.index(("TASK_DONE", "a")) < kinds.index(("TASK_ACCEPTED", "b"))


async def test_a_rebalance_forgets_the_pause_and_the_busy_worker_drops_the_command(side: KafkaSide) -> None:
    gate = Gate()
    async with side.worker(gate.handler) as busy:
        await side.start("a")
        await busy.wait_for("committed", node="a")
        async with side.worker(two) as second:
            assert not busy.paused(side.role)
            await side.start("b", partition=busy.partitions(side.role)[0])
            dropped = await busy.wait_for("dropped", node="b")
            await side.start("c", partition=second.partitions(side.role)[0])
            await second.wait_for("TASK_DONE", node="c")
        gate.open.set()
        await busy.wait_for("idle", node="a")
    assert dropped.reason == "busy"
    assert busy.sent_for("b") == []


async def test_a_repeated_dedup_id_is_dropped(side: KafkaSide) -> None:
    async with side.worker(two) as worker:
        dedup = await side.start("a")
        await worker.wait_for("idle", node="a")
        await side.start("a", epoch=2, dedup_id=dedup)
        assert (await worker.wait_for("dropped", node="a")).reason == "duplicate"


async def test_a_signal_cancels_the_run_of_its_epoch(side: KafkaSide) -> None:
    gate = Gate()
    async with side.worker(gate.handler) as worker:
        await side.start("a", epoch=3)
        await worker.wait_for("TASK_HEARTBEAT")
        await side.cancel("a", epoch=2)
        await worker.wait_for("cancel_ignored", epoch=2)
        await side.cancel("a", epoch=3, worker="another worker")
        await side.cancel("a", epoch=3, worker=worker.worker_id)
        await worker.wait_for("CANCELLED", node="a", epoch=3)
        await worker.wait_for("idle")
    run = worker.runs[0]
    assert (run.state, run.cancel_reason, run.cancel_deadline_ts_ms) == ("cancelling", "user_request", 5)


async def test_a_flag_in_mongodb_cancels_the_run(side: KafkaSide) -> None:
    await side.db.tasks.insert_one({"id": "t", "coordinator": {"cancelled": True}, "graph": {"nodes": []}})
    async with side.worker(Gate().handler) as worker:
        await side.start("a")
        await worker.wait_for("CANCELLED", node="a")
    assert worker.runs[0].cancel_reason == "db_flag"


async def test_a_query_is_answered_by_what_the_worker_holds(side: KafkaSide) -> None:
    gate = Gate()
    async with side.worker(gate.handler) as worker:
        await side.discover("a")
        idle = await worker.wait_for("TASK_SNAPSHOT", count=1)
        await side.start("a")
        await worker.wait_for("TASK_ACCEPTED")
        await side.discover("a")
        running = await worker.wait_for("TASK_SNAPSHOT", count=2)
        gate.open.set()
        await worker.wait_for("idle")
        await side.discover("other", role="unknown-role")
        await side.discover("a")
        complete = await worker.wait_for("TASK_SNAPSHOT", count=3)
    assert (idle.payload["run_state"], idle.payload["artifacts"]) == ("idle", None)
    assert (running.payload["run_state"], running.payload["attempt_epoch"]) == ("running", 1)
    assert running.payload["lease"]["lease_id"] == worker.runs[0].lease_id
    assert complete.payload["artifacts"] == {"complete": True}
    assert len(await side.records(side.topic("topic_reply"))) == 3


async def test_announcements_frame_the_life_of_a_worker(side: KafkaSide) -> None:
    async with side.worker(two, two) as worker:
        await worker.wait_for("WORKER_ONLINE", count=2)
    kinds = [entry.kind for entry in worker.sent]
    assert (kinds[0], kinds[-1]) == ("WORKER_ONLINE", "WORKER_OFFLINE")
    assert worker.sent[0].payload["type"] == f"{side.role},{side.other_role}"
    assert "resume" not in worker.sent[1].payload


async def test_a_graceful_stop_leaves_the_run_which_a_restart_announces_and_does_not_execute(
    side: KafkaSide,
) -> None:
    worker = side.worker(Gate().handler)
    await worker.start()
    await side.start("a")
    await worker.wait_for("TASK_HEARTBEAT")
    await worker.restart(graceful=True)
    assert await side.kinds() == ["TASK_ACCEPTED"]
    lease = worker.runs[0].lease_id
    online = [entry for entry in worker.sent if "resume" in entry.payload]
    assert [entry.payload["resume"] and entry.payload["resume"]["lease_id"] for entry in online] == [
        None,
        lease,
    ]
    beats = len(worker.sent_for("a", "TASK_HEARTBEAT"))
    await side.discover("a")
    assert (await worker.wait_for("TASK_SNAPSHOT")).payload["lease"]["lease_id"] == lease
    assert not worker.busy
    assert len(worker.sent_for("a", "TASK_HEARTBEAT")) == beats
    await side.start("b")
    await worker.wait_for("TASK_ACCEPTED", node="b")
    await worker.stop()


async def test_a_killed_worker_sends_nothing_and_kafka_does_not_redeliver(side: KafkaSide) -> None:
    worker = side.worker(Gate().handler)
    await worker.start()
    await side.start("a")
    await worker.wait_for("committed", node="a")
    await worker.kill()
    count = len(worker.sent)
    await worker.start()
    await side.start("b")
    await worker.wait_for("TASK_ACCEPTED", node="b")
    await worker.kill()
    kinds = [entry.kind for entry in worker.sent[count:]]
    assert "WORKER_OFFLINE" not in kinds
    assert [run.node_id for run in worker.runs] == ["a", "b"]
