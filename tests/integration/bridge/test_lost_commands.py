"""Commands that no worker runs: dropped, skipped, queued or stuck. Only lost ones are dispatched again."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.bridge import commands
from flowkit.bridge.kafka.topics import Provisioner
from flowkit.testing import Misbehavior
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.checks import NO_RETRY, check_finished, outcomes, until_sent
from tests.integration.bridge.gates import Gate
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from flowkit.testing import ExternalWorker
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server


async def started(external: ExternalTasks, **fields: Any) -> str:
    """Start a task of one external node `n`, which may not use a retry."""
    return await external.create(node("n", external.role, retry_policy=NO_RETRY, **fields))


async def heartbeat_details(external: ExternalTasks, task_id: str) -> list[dict[str, Any]]:
    """Return the heartbeat details of the task's activities, which the Web UI shows."""
    description = await (await external.handle(task_id)).describe()
    pending = description.raw_description.pending_activities
    return [json.loads(payload.data) for each in pending for payload in each.heartbeat_details.payloads]


def epochs(worker: ExternalWorker, kind: str = "TASK_ACCEPTED") -> list[int | None]:
    """Return the epochs of a worker's events about node `n`."""
    return [entry.attempt_epoch for entry in worker.sent_for("n", kind)]


async def test_command_that_a_busy_worker_drops_after_a_rebalance_is_dispatched_again(
    external: ExternalTasks,
) -> None:
    """H2, H3: a rebalance makes the busy worker read again, so it drops commands and remembers their ids."""
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler)
    first = await started(external)
    await worker.wait_for("BATCH_OK", task=first)
    async with external.new_external(gate.handler):
        await worker.wait_for("assigned", count=2)
    await worker.wait_for("assigned", count=3)
    second = await started(external)
    assert (await worker.wait_for("dropped", task=second)).reason == "busy"
    await external.dispatch(second, "n", epoch=2)
    gate.open()
    await check_finished(external, first, ["done"])
    assert (await external.result(second)).status == "finished"
    codes = await outcomes(external, second)
    assert codes == [*["dispatch_lost"] * (len(codes) - 1), "done"]
    ids = [record["dedup_id"] for record in await external.dispatches(second)]
    assert len({*ids}) == len(ids)
    assert "duplicate" not in {entry.reason for entry in worker.entries if entry.kind == "dropped"}


async def test_tasks_finish_while_workers_join_leave_and_crash(external: ExternalTasks) -> None:
    """H2 to H7: no node uses a retry, and each batch counts once."""
    await external.served_engine()
    names = [f"n{number}" for number in range(10)]
    inline = {"batches": 3, "pause_ms": 150}
    nodes = [node(name, external.role, inline=inline, retry_policy=NO_RETRY) for name in names]
    workers = [await external.external(scripted, lease_ttl_sec=1.5) for _ in range(2)]
    task_id = await external.create(*nodes)
    await workers[0].wait_for("TASK_DONE")
    workers.append(await external.external(scripted, lease_ttl_sec=1.5))
    await workers[1].wait_for("BATCH_OK", count=4)
    await workers[1].stop()
    await workers[0].wait_for("TASK_DONE", count=2)
    await workers[0].kill()
    workers.append(await external.external(scripted, lease_ttl_sec=1.5))
    assert (await external.result(task_id)).status == "finished"
    for name in names:
        rows = await external.rows(task_id, name)
        assert sorted(row["batch_uid"] for row in rows) == [f"{name}-{number}" for number in range(3)]
        ends = await outcomes(external, task_id, name)
        assert {*ends[:-1]} <= {"dispatch_lost", "lease_lost"}
        assert ends[-1] == "done"


async def test_command_that_a_new_group_skips_is_dispatched_again(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H4: the workers are there before the bridge, so it cannot commit first offsets for their group."""
    monkeypatch.setattr(commands, "SKIPPED_AFTER_SEC", 1.0)
    external.settings["kafka_cmd_partitions"] = 1
    await Provisioner(external.names.connection, external.config).ensure([external.role, external.other_role])
    async with external.new_external(Gate().handler):
        await external.served_engine()
    task_id = await started(external)
    await until_sent(external, task_id)
    worker = await external.external(scripted)
    await check_finished(external, task_id, ["dispatch_lost", "done"], uids=("n-0",))
    assert epochs(worker) == [2]


async def test_worker_that_was_there_before_the_bridge_gets_the_first_command(
    external: ExternalTasks,
) -> None:
    """H4: offsets are missing, but the position of the worker is before the command."""
    await Provisioner(external.names.connection, external.config).ensure([external.role, external.other_role])
    worker = await external.external(scripted)
    await external.served_engine()
    task_id = await started(external)
    await check_finished(external, task_id, ["done"], uids=("n-0",))
    assert epochs(worker) == [1]


async def test_command_behind_a_busy_worker_waits_for_many_lease_times(external: ExternalTasks) -> None:
    """H5: it is shown as queued, and neither lost nor sent again."""
    external.settings |= {"kafka_cmd_partitions": 1, "lease_ttl_sec": 2}
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler, lease_ttl_sec=1.0)
    first = await started(external)
    await worker.wait_for("BATCH_OK", task=first)
    second = await started(external)

    async def queued() -> bool:
        shown = await heartbeat_details(external, second)
        return any("a free external worker" in str(each.get("waits_for")) for each in shown)

    await eventually(queued)
    await worker.wait_for("TASK_HEARTBEAT", count=len(worker.sent_for("n", "TASK_HEARTBEAT")) + 20)
    assert await outcomes(external, second) == ["open"]
    gate.open()
    for task_id in (first, second):
        await check_finished(external, task_id, ["done"])


async def test_command_goes_to_the_idle_worker(external: ExternalTasks) -> None:
    """H5: of two workers, one is busy; the bridge chooses a partition of the other one."""
    await external.served_engine()
    gate = Gate()
    workers = [await external.external(gate.handler) for _ in range(2)]
    first = await started(external)
    await asyncio.wait(
        [asyncio.create_task(_accepts(worker)) for worker in workers], return_when="FIRST_COMPLETED"
    )
    (idle,) = [worker for worker in workers if not worker.busy]
    second = await started(external)
    await idle.wait_for("TASK_ACCEPTED", task=second, epoch=1)
    gate.open()
    for task_id in (first, second):
        await check_finished(external, task_id, ["done"])


async def _accepts(worker: ExternalWorker) -> None:
    await worker.wait_for("TASK_ACCEPTED")


async def test_worker_that_cannot_send_its_acceptance_keeps_the_command_until_it_dies(
    external: ExternalTasks,
) -> None:
    """H28: the command is not committed, so Kafka redelivers it to another worker with the same epoch."""
    external.settings["kafka_cmd_partitions"] = 1
    await external.served_engine()
    deaf = await external.external(scripted, misbehavior=Misbehavior(fail_accepted=True))
    task_id = await started(external)
    await deaf.wait_for("loop_ended")
    await deaf.wait_for("WORKER_ONLINE", count=4)
    assert await outcomes(external, task_id) == ["open"]
    await deaf.kill()
    worker = await external.external(scripted)
    await check_finished(external, task_id, ["done"], uids=("n-0",))
    assert epochs(worker) == [1]
