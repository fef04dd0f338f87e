"""Bridges that stop or die while external workers run: other bridges continue the attempts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.attempt import pollers
from flowkit.bridge import dispatcher, service
from flowkit.bridge.commands import CommandSender
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.models import TaskStatus
from flowkit.testing.external import EachBatch, Misbehavior, Result
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.doomed_engine import POINTS
from tests.integration.bridge.external_tasks import codes
from tests.integration.bridge.gates import Gate
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node, wait_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fork_server import ForkedProcess
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = [pytest.mark.server, pytest.mark.slow]

ONCE: dict[str, Any] = {"retry_policy": {"max": 0}}
NEVER_SENT = ("after the record", "before the send")
"""Points between the record and the send: the adopting bridge ends the attempt, and the next epoch runs."""

LEASE_SEC = 2
"""Temporal runs the activity of a killed bridge again after this time."""


async def provision(external: ExternalTasks) -> None:
    """Create the topics and the workers' first offsets, so that workers can start before any bridge."""
    provisioner = Provisioner(external.names.connection, external.config)
    await provisioner.ensure(external.roles)
    for role in external.roles:
        await provisioner.seed(role)


def doomed(external: ExternalTasks, points: dict[str, str] | None = None) -> ForkedProcess:
    """Start an engine process with a bridge, which kills itself when each role in `points` has reached its point."""
    settings = json.dumps(asdict(external.config), default=list)
    module = "tests.integration.bridge.doomed_engine"
    return external.process(json.dumps(points or {}), module=module, ENGINE_SETTINGS=settings)


async def ended(process: ForkedProcess) -> int:
    """Wait for the end of a process, and return its exit code."""
    return await asyncio.to_thread(process.wait, EVENT_TIMEOUT_SEC)


async def outdated_run_waits(run: Any) -> AsyncIterator[Any]:
    """Yield a batch; in the first epoch, then wait for the cancel."""
    yield Result({"number": 0}, "b0")
    if run.attempt_epoch == 1:
        await run.cancellable(asyncio.Event().wait())


async def assert_one_run_each(external: ExternalTasks, task_id: str, node_id: str, epochs: list[int]) -> None:
    """Check that each of the three batches of a node counts once, and that its last epoch is done."""
    records = [record for record in await external.dispatches(task_id) if record["node_id"] == node_id]
    assert [record["attempt_epoch"] for record in records] == epochs, [
        (record["attempt_epoch"], record["outcome"], record["lease"]) for record in records
    ]
    assert (records[-1]["outcome"]["kind"], records[-1]["batches"]) == ("done", 3)
    node_state = await external.node(task_id, node_id)
    assert (node_state["status"], node_state["attempt_epoch"]) == ("finished", epochs[-1])
    rows = await external.rows(task_id, node_id)
    assert Counter(row["batch_uid"] for row in rows) == {f"{node_id}-{n}": 1 for n in range(3)}
    final = {"task_id": task_id, "node_id": node_id, "batch_uid": "__final__"}
    assert [row["metrics"] async for row in external.db.metrics_raw.find(final)] == [{"total": 3}]


async def test_graceful_stop_hands_running_attempts_to_the_next_bridge(external: ExternalTasks) -> None:
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler)
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    await worker.wait_for("BATCH_OK")
    await external.coordinator.restart()
    gate.open()
    assert (await external.result(task_id)).status == "finished"
    assert [r["attempt_epoch"] for r in await external.dispatches(task_id)] == [1]
    assert len(worker.sent_for("extract", "TASK_ACCEPTED")) == 1


async def test_attempts_of_a_killed_bridge_are_adopted_and_run_once(external: ExternalTasks) -> None:
    """A command is never sent twice for one epoch, and stored results are delivered, wherever the bridge stopped."""
    external.settings["lease_ttl_sec"] = LEASE_SEC
    external.roles = [external.names.role(f"p{number}") for number in range(len(POINTS))]
    nodes = dict(zip([f"n{number}" for number in range(len(POINTS))], POINTS, strict=True))
    await provision(external)
    handlers = [scripted] * len(POINTS)
    workers = await asyncio.gather(*(external.external(*handlers, roles=[role]) for role in external.roles))
    killed = doomed(external, dict(zip(external.roles, POINTS, strict=True)))
    inline = {"batches": 3, "final": {"total": 3}}
    task_id = await external.create(
        *(node(each, role, inline=inline, **ONCE) for each, role in zip(nodes, external.roles, strict=True))
    )
    assert await ended(killed) == -9
    await external.engine()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    for (node_id, point), worker in zip(nodes.items(), workers, strict=True):
        epochs = [1, 2] if point in NEVER_SENT else [1]
        await assert_one_run_each(external, task_id, node_id, epochs)
        accepted = Counter(entry.attempt_epoch for entry in worker.sent_for(node_id, "TASK_ACCEPTED"))
        assert accepted == {epochs[-1]: 1}, point


async def test_checks_of_pulled_inputs_continue_after_the_bridge_is_killed(external: ExternalTasks) -> None:
    """H19: the worker has finished, but its sources have not."""
    external.settings["lease_ttl_sec"] = LEASE_SEC
    await provision(external)
    late = Misbehavior(partial_refused=True, hold=("BATCH_OK", "TASK_DONE"))
    source = await external.external(scripted, misbehavior=late)
    child = await external.external(
        scripted, EachBatch(lambda payload, run: {"n": 1}), roles=[external.other_role]
    )
    killed = doomed(external, {external.other_role: "after a child's end"})
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["extract"], "poll_ms": 50}}
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 3}, **ONCE),
        node("enrich", external.other_role, inline=pull, **ONCE),
    )
    assert await ended(killed) == -9
    await external.engine()
    await source.release()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert await codes(external, task_id, "enrich") == ["unclaimed_batches", None]
    assert len(await external.rows(task_id, "enrich")) == 3
    assert len(child.sent_for("enrich", "TASK_ACCEPTED")) == 2


@asynccontextmanager
async def no_heartbeats(*_: Any) -> AsyncIterator[None]:
    """Send no heartbeats, like a process that is stopped."""
    yield


async def test_command_that_is_sent_after_its_attempt_was_given_up_has_no_effect(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H25: a bridge stops for longer than the lease, just before it sends the command."""
    external.settings["lease_ttl_sec"] = LEASE_SEC
    resume = threading.Event()
    send, stopped = CommandSender.send, iter([True])

    async def late(self: CommandSender, *given: Any) -> int:
        if next(stopped, False):
            await asyncio.to_thread(resume.wait)
        return await send(self, *given)

    monkeypatch.setattr(CommandSender, "send", late)
    monkeypatch.setattr(dispatcher, "sending_heartbeats", no_heartbeats)
    await external.served_engine()
    worker = await external.external(outdated_run_waits)
    task_id = await external.create(node("extract", external.role, **ONCE))
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    resume.set()
    await worker.wait_for("CANCELLED", epoch=1)
    assert worker.runs[-1].cancel_reason == "stale_epoch"
    assert await codes(external, task_id, "extract") == ["dispatch_lost", None]
    (row,) = await external.rows(task_id, "extract")
    assert row["attempt_epoch"] == 2


async def test_two_bridges_share_the_work_and_one_continues_alone(external: ExternalTasks) -> None:
    """Commands are dropped while the workers' group rebalances (H2), but no run is lost or repeated."""
    external.settings["lease_ttl_sec"] = LEASE_SEC
    await provision(external)
    gate = Gate()
    workers = [await external.external(gate.handler) for _ in range(3)]
    killed = doomed(external)
    await external.served_engine()
    tasks: list[str] = []

    async def both_dispatch() -> bool:
        tasks.append(await external.create(node("extract", external.role, **ONCE)))
        records = [await external.dispatch(task_id, "extract") for task_id in tasks]
        return len({record["owner"] for record in records}) == 2 and len(tasks) >= 12

    await eventually(both_dispatch)
    for worker in workers:
        await worker.wait_for("BATCH_OK")
    killed.kill()
    await ended(killed)
    gate.open()
    for task_id in tasks:
        assert (await external.result(task_id)).status is TaskStatus.FINISHED
        assert set(await codes(external, task_id, "extract")) <= {"dispatch_lost", None}
        assert len(await external.rows(task_id, "extract")) == 2
    accepted = [entry.task_id for worker in workers for entry in worker.sent_for("extract", "TASK_ACCEPTED")]
    assert Counter(accepted) == dict.fromkeys(tasks, 1)


async def test_runs_outlive_a_time_without_any_bridge(external: ExternalTasks) -> None:
    """The time without a bridge is much longer than the leases of Temporal and of the workers."""
    external.settings["lease_ttl_sec"] = LEASE_SEC
    await external.served_engine()
    gates = [Gate(), Gate()]
    handlers = [gate.handler for gate in gates]
    ends_meanwhile, runs_on = [
        await external.external(*handlers, roles=[role], lease_ttl_sec=1.0) for role in external.roles
    ]
    task_id = await external.create(
        node("ends", external.role, **ONCE), node("runs", external.other_role, **ONCE)
    )
    for node_id in ("ends", "runs"):
        await external.until_batches(task_id, node_id, 1)
    await external.coordinator.stop()
    gates[0].open()
    await ends_meanwhile.wait_for("TASK_DONE")
    await wait_seconds(3 * LEASE_SEC)
    await external.coordinator.start()
    gates[1].open()
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    for node_id, worker in (("ends", ends_meanwhile), ("runs", runs_on)):
        assert await codes(external, task_id, node_id) == [None]
        assert len(await external.rows(task_id, node_id)) == 2
        assert len(worker.sent_for(node_id, "TASK_ACCEPTED")) == 1


async def test_attempt_of_a_native_worker_is_lost_when_its_role_moves_to_external_workers(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pollers, "_RECENT_SEC", 1.0)
    external.settings |= {"lease_ttl_sec": LEASE_SEC, "worker_types": []}
    external.roles = ["paced"]
    await external.engine()
    native = external.worker_process("Paced")
    task_id = await external.create(node("extract", "paced", inline={"batches": 3, "pause": 3}, **ONCE))
    await external.until_batches(task_id, "extract", 1)
    native.kill()
    await ended(native)
    await external.db.role_leases.delete_many({})  # as after the half minute for which it held the role
    external.settings["worker_types"] = ["paced"]
    with_bridge = await external.engine()

    async def served() -> bool:
        assert with_bridge._bridge is not None
        return all(service.waits_for is None for service in with_bridge._bridge.services)

    await eventually(served)
    await external.external(scripted)
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    assert (await external.node(task_id, "extract"))["attempt_epoch"] == 2
    (record,) = await external.dispatches(task_id)
    assert (record["attempt_epoch"], record["outcome"]["kind"]) == (2, "done")


async def test_outcome_that_a_killed_bridge_delivered_last_is_noted_by_another_bridge(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ORPHANS_SEC", 0.1)
    await external.served_engine()
    await external.external(scripted)
    task_id = await external.create(node("extract", external.role, inline={"final": {"total": 1}}))
    assert (await external.result(task_id)).status is TaskStatus.FINISHED
    await eventually(lambda: noted(external, task_id))
    as_killed = {"state": "ended", "updated_at": datetime.now(UTC) - timedelta(hours=1)}
    as_killed["outcome.metrics"] = {"total": 1}
    await external.db.dispatches.update_one({"task_id": task_id}, {"$set": as_killed})
    await eventually(lambda: noted(external, task_id))
    assert (await external.dispatch(task_id, "extract"))["outcome"]["metrics"] == {}


async def noted(external: ExternalTasks, task_id: str) -> bool:
    """Return whether the record of a task's only attempt is reported."""
    return [record["state"] for record in await external.dispatches(task_id)] == ["reported"]
