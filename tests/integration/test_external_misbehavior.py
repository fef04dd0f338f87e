"""What an external worker does wrong on a real broker, by nature or by a switch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import Misbehavior
from flowkit.testing.external import Malformed
from tests.integration.kafka_side import FAST, KafkaSide
from tests.integration.test_external_worker import Gate, two

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.local import Stack
    from tests.kafka_server import Broker

pytestmark = pytest.mark.server


@pytest.fixture
async def side(kafka: Broker) -> AsyncIterator[KafkaSide]:
    """Topics and a database for one test."""
    async with KafkaSide(kafka) as made:
        yield made


@pytest.mark.parametrize("poison", [b"no JSON", b"{}"], ids=["not JSON", "no envelope"])
async def test_an_invalid_record_ends_one_loop_and_the_worker_looks_healthy(
    side: KafkaSide, poison: bytes
) -> None:
    async with side.worker(two, two) as worker:
        await side.send(side.topic("topic_cmd_fmt"), poison)
        await worker.wait_for("loop_ended")
        await side.start("b", role=side.other_role)
        await worker.wait_for("TASK_DONE", node="b")
        await worker.wait_for("WORKER_ONLINE", count=2)
        assert await side.committed() == 0


async def test_dropped_commands_are_committed_without_an_event(side: KafkaSide) -> None:
    async with side.worker(two, misbehavior=Misbehavior(drop_commands=1)) as worker:
        await side.start("a")
        assert (await worker.wait_for("dropped", node="a")).reason == "misbehavior"
        await side.start("a", epoch=2)
        await worker.wait_for("TASK_DONE", epoch=2)
    assert worker.sent_for("a")[0].attempt_epoch == 2
    assert await side.committed() == 2


@pytest.mark.parametrize(("crash", "accepted"), [("before_commit", ["a", "a"]), ("after_commit", ["a", "b"])])
async def test_a_crash_after_acceptance_loses_the_run_or_repeats_it(
    side: KafkaSide, crash: Any, accepted: list[str]
) -> None:
    worker = side.worker(two, misbehavior=Misbehavior(crash_after_accepted=crash))
    await worker.start()
    await side.start("warm-up", partition=1, dedup_id="same")
    await worker.wait_for("killed")
    assert await side.kinds() == ["TASK_ACCEPTED"]
    assert worker.runs[0].outcome is None
    worker.misbehavior.reset()
    await worker.start()
    assert accepted


async def test_a_worker_whose_acceptance_fails_stays_busy_and_deaf(side: KafkaSide) -> None:
    async with side.worker(two, misbehavior=Misbehavior(fail_accepted=True)) as worker:
        await side.start("a")
        await worker.wait_for("loop_ended")
        assert worker.busy
        await side.discover("a")
        assert (await worker.wait_for("TASK_SNAPSHOT")).payload["run_state"] == "running"
        assert await side.kinds() == []
        assert await side.committed() == 0


async def test_two_workers_own_the_same_epoch(side: KafkaSide) -> None:
    thief = side.worker(Gate().handler, misbehavior=Misbehavior(second_owner=True))
    async with side.worker(Gate().handler) as owner, thief:
        await side.start("a")
        leases = {(await worker.wait_for("TASK_ACCEPTED")).payload["lease_id"] for worker in (owner, thief)}
    assert len(leases) == 2
    beats = [worker.sent_for("a", "TASK_HEARTBEAT")[0].message["dedup_id"] for worker in (owner, thief)]
    assert len(beats) == 2


async def test_heartbeats_can_arrive_on_the_topic_of_another_role(side: KafkaSide) -> None:
    misbehavior = Misbehavior(heartbeats_on=side.other_role)
    async with side.worker(Gate().handler, misbehavior=misbehavior) as worker:
        await side.start("a")
        await worker.wait_for("TASK_HEARTBEAT", count=2)
    records = await side.records(side.topic("topic_status_fmt", side.other_role))
    assert json.loads(records[0].value)["step_type"] == side.other_role


async def test_a_silent_worker_sends_no_heartbeat(side: KafkaSide) -> None:
    async with side.worker(Gate().handler, misbehavior=Misbehavior(silence=True)) as worker:
        await side.start("a")
        await worker.wait_for("suppressed", count=3)
    assert worker.sent_for("a", "TASK_HEARTBEAT") == []


async def test_a_worker_that_sends_no_terminal_event_is_free_again(side: KafkaSide) -> None:
    async with side.worker(two, misbehavior=Misbehavior(no_terminal=True)) as worker:
        await side.start("a")
        await worker.wait_for("idle", node="a")
        worker.misbehavior.reset()
        await side.start("b")
        await worker.wait_for("TASK_DONE", node="b")
    assert "TASK_DONE" not in {entry.kind for entry in worker.sent_for("a")}


async def test_malformed_records_reach_any_topic(side: KafkaSide) -> None:
    async with side.worker(two) as worker:
        await side.start("a")
        done = await worker.wait_for("TASK_DONE")
        await worker.wait_for("idle")
        for topic in (None, side.topic("topic_worker_announce"), side.topic("topic_reply")):
            for kind in Malformed:
                await worker.send_malformed(kind, topic, done)
        records = await side.records(side.topic("topic_reply"))
    assert len(records) == len(Malformed)
    assert None in {record.value for record in records}


async def test_a_batch_beyond_the_record_limit_fails_the_task(side: KafkaSide) -> None:
    async def large(run: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"text": "x" * 2**20}

    async with side.worker(large) as worker:
        await side.start("a")
        failed = await worker.wait_for("TASK_FAILED", node="a")
    assert failed.payload["reason_code"] == "unexpected_error"
    assert failed.payload["permanent"] is False


async def test_a_worker_process_runs_scripted_nodes_until_it_is_killed(side: KafkaSide, stack: Stack) -> None:
    settings = [f"--setting={name}={value}" for name, value in {**FAST, **side.topics}.items()]
    command = [sys.executable, "-m", "flowkit.testing.external", "--roles", side.role, *settings]
    options = ["--mongo-url", stack.mongo_url, "--database", f"test_{side.prefix}", "--worker-id", "w-one"]
    address = ["--bootstrap-servers", side.broker.bootstrap_servers]
    with subprocess.Popen([*command, *options, *address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"external worker w-one is ready: {side.role}\n"
        await side.start("a", inline={"batches": 2})
        watcher = side.worker(two, misbehavior=Misbehavior(second_owner=True, silence=True))
        async with watcher:
            await side.start("b", inline={"batches": 1})
            await watcher.wait_for("idle")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    kinds = [
        json.loads(record.value)["payload"] for record in await side.records(side.topic("topic_status_fmt"))
    ]
    own = [
        each["kind"] for each in kinds if each["worker_id"] == "w-one" and each["kind"] != "TASK_HEARTBEAT"
    ]
    assert own[:4] == ["TASK_ACCEPTED", "BATCH_OK", "BATCH_OK", "TASK_DONE"]
    announced = [
        json.loads(record.value)["payload"]
        for record in await side.records(side.topic("topic_worker_announce"))
    ]
    assert {"kind": "WORKER_OFFLINE", "worker_id": "w-one"} in announced
