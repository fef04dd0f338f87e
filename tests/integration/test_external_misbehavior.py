"""What an external worker does wrong on a real broker, by nature or by a switch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.testing import Misbehavior
from flowkit.testing.external import Malformed
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT
from tests.integration.kafka_side import FAST, KafkaSide
from tests.integration.test_external_worker import Gate, two

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.local import Stack
    from flowkit.testing import ExternalWorker
    from tests.fork_server import ForkedProcess
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


@contextlib.asynccontextmanager
async def restarted_after(crash: Any, side: KafkaSide) -> AsyncIterator[ExternalWorker]:
    """A worker that accepted the node `a` on a partition with committed offsets, crashed, and runs again."""
    worker = side.worker(two)
    await worker.start()
    await side.start("first", partition=0)
    await worker.wait_for("idle", node="first")
    worker.misbehavior.crash_after_accepted = crash
    await side.start("a", partition=0)
    await worker.wait_for("killed")
    assert (await side.kinds())[-1] == "TASK_ACCEPTED"
    worker.misbehavior.reset()
    async with worker:
        yield worker


async def test_kafka_redelivers_after_a_crash_before_the_commit(side: KafkaSide) -> None:
    async with restarted_after("before_commit", side) as worker:
        await worker.wait_for("TASK_DONE", node="a")
        assert [run.node_id for run in worker.runs] == ["first", "a", "a"]


@pytest.mark.slow
async def test_a_crash_after_the_commit_loses_the_run(side: KafkaSide) -> None:
    async with restarted_after("after_commit", side) as worker:
        await side.start("b", partition=0)
        await worker.wait_for("TASK_DONE", node="b")
        assert [run.node_id for run in worker.runs] == ["first", "a", "b"]


async def test_a_worker_whose_acceptance_fails_stays_busy_and_deaf(side: KafkaSide) -> None:
    async with side.worker(two, misbehavior=Misbehavior(fail_accepted=True)) as worker:
        await side.start("a")
        await worker.wait_for("loop_ended")
        assert worker.busy
        await side.discover("a")
        assert (await worker.wait_for("TASK_SNAPSHOT")).payload["run_state"] == "running"
        assert await side.kinds() == []
        assert await side.committed() == 0


async def test_a_worker_that_never_pauses_drops_commands_while_it_is_busy(side: KafkaSide) -> None:
    async with side.worker(Gate().handler, misbehavior=Misbehavior(never_pause=True)) as worker:
        await side.start("a", partition=0)
        await worker.wait_for("committed", node="a")
        await side.start("b", partition=0)
        assert (await worker.wait_for("dropped", node="b")).reason == "busy"
        await worker.wait_for("committed", node="b")
    assert [run.node_id for run in worker.runs] == ["a"]


async def test_a_stored_run_of_another_role_is_cleared(side: KafkaSide) -> None:
    worker = side.worker(Gate().handler, worker_id="w-one")
    async with worker:
        await side.start("a")
        await worker.wait_for("committed", node="a")
    changed = side.worker(two, worker_id="w-one", roles=[side.other_role])
    async with changed:
        assert changed.held is None
        assert changed.sent[0].payload["resume"] is None
    assert (await side.db.worker_state.find_one({"_id": "w-one"}))["active_run"] is None


async def test_a_stored_run_with_unknown_fields_prevents_the_start(side: KafkaSide) -> None:
    await side.db.worker_state.insert_one({"_id": "w-one", "active_run": {"task_id": "t", "mood": "good"}})
    worker = side.worker(two, worker_id="w-one")
    with pytest.raises(TypeError, match="mood"):
        await worker.start()
    assert not worker.alive
    assert worker.sent == []


async def test_two_workers_own_the_same_epoch(side: KafkaSide) -> None:
    thief = side.worker(two, misbehavior=Misbehavior(second_owner=True))
    async with side.worker(two) as owner, thief:
        await side.start("a")
        leases = {(await worker.wait_for("TASK_ACCEPTED")).payload["lease_id"] for worker in (owner, thief)}
        ends = [await worker.wait_for("TASK_DONE") for worker in (owner, thief)]
    assert len(leases) == 2
    assert ends[0].message["dedup_id"] == ends[1].message["dedup_id"]


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


async def test_old_heartbeat_loops_survive_into_the_next_run(side: KafkaSide) -> None:
    async with side.worker(two, Gate().handler, hb_interval_sec=0.5) as worker:
        await side.start("a")
        await worker.wait_for("idle", node="a")
        await side.start("b", role=side.other_role)
        await worker.wait_for("TASK_HEARTBEAT", node="b", count=3)
    topics = {entry.topic for entry in worker.sent_for("b", "TASK_HEARTBEAT")}
    assert topics == {side.topic("topic_status_fmt", role) for role in (side.role, side.other_role)}


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


async def process(side: KafkaSide, stack: Stack, *more: str) -> ForkedProcess:
    """Start a worker process, and return when it is ready."""
    settings = [f"--setting={name}={value}" for name, value in {**FAST, **side.topics}.items()]
    identity = ["--roles", side.role, "--worker-id", "w-one", "--database", f"test_{side.prefix}"]
    servers = ["--mongo-url", stack.mongo_url, "--bootstrap-servers", side.broker.bootstrap_servers]
    arguments = [*settings, *identity, *servers, *more]
    module, pipe = "flowkit.testing.external", subprocess.PIPE
    started = fork_server().start(arguments, ROOT, os.environ, module=module, stdout=pipe)
    assert started.stdout is not None
    with started.stdout as stdout:
        line = await asyncio.to_thread(stdout.readline)
        assert line == f"external worker w-one is ready: {side.role}\n"
    return started


async def code_of(process: ForkedProcess) -> int:
    """Wait for the end of a process, and return its exit code."""
    return await asyncio.to_thread(process.wait, EVENT_TIMEOUT_SEC)


async def test_a_worker_process_runs_scripted_nodes_and_stops_gracefully(
    side: KafkaSide, stack: Stack
) -> None:
    started = await process(side, stack)
    await side.start("a", inline={"batches": 2})
    await side.find(side.topic("topic_status_fmt"), lambda payload: payload["kind"] == "TASK_DONE")
    started.terminate()
    assert await code_of(started) == 0
    assert await side.kinds() == ["TASK_ACCEPTED", "BATCH_OK", "BATCH_OK", "TASK_DONE"]
    last = (await side.records(side.topic("topic_worker_announce")))[-1]
    assert json.loads(last.value)["payload"]["kind"] == "WORKER_OFFLINE"


async def test_a_killed_worker_process_announces_its_run_after_the_restart(
    side: KafkaSide, stack: Stack
) -> None:
    started = await process(side, stack)
    await side.start("a", inline={"batches": 2, "pause_ms": 60_000})
    await side.find(side.topic("topic_status_fmt"), lambda payload: payload["kind"] == "TASK_HEARTBEAT")
    started.kill()
    await code_of(started)
    again = await process(side, stack)
    online = await side.find(side.topic("topic_worker_announce"), lambda payload: bool(payload.get("resume")))
    assert online["resume"]["node_id"] == "a"
    again.terminate()
    await code_of(again)


async def test_a_process_crashes_by_misbehavior(side: KafkaSide, stack: Stack) -> None:
    started = await process(side, stack, "--misbehavior", "crash_after=BATCH_OK")
    await side.start("a", inline={"batches": 2})
    assert await code_of(started) == 137
    assert await side.kinds() == ["TASK_ACCEPTED", "BATCH_OK"]
