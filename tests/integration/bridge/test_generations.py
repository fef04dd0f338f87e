"""Actions on external nodes: what a worker of an earlier generation has stored reaches no later one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.bridge import dispatcher
from flowkit.models import TaskStatus
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.external_tasks import codes
from tests.integration.bridge.gates import Gate
from tests.integration.bridge.test_adoption import LEASE_SEC, doomed, ended, provision
from tests.integration.bridge.test_pulled_inputs import Reader, pull
from tests.integration.handlers import Relay
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.testing import ExternalWorker
    from flowkit.testing.external.journal import Entry
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

OPEN: dict[str, Any] = {"node_id": "open", "type": "approval"}


async def test_an_external_node_and_its_puller_run_again_with_fewer_batches(external: ExternalTasks) -> None:
    await external.served_engine()
    reader = Reader()
    await external.external(scripted, reader.handler)
    operator = external.coordinator
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 5}),
        node("enrich", external.other_role, "extract", inline=pull()),
        OPEN,
    )
    await external.until_node(task_id, "enrich", "finished")
    await external.until_reported(task_id, "enrich")
    result = await operator.retry_node(task_id, "extract", input_inline={"batches": 2})
    assert [(each["node_id"], each["from"]) for each in result["affected"]] == [
        ("extract", "finished"),
        ("enrich", "finished"),
    ]
    await external.until_node(task_id, "enrich", "finished", epoch=3)
    await operator.decide(task_id, "open", "approve")
    assert await operator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    for name in ("extract", "enrich"):
        assert len(await external.rows(task_id, name)) == 2
        assert {row["attempt_epoch"] for row in await external.rows(task_id, name)} == {3}
    assert (len(reader.in_epoch(1)), len(reader.in_epoch(3))) == (5, 2)


async def test_an_interrupted_external_node_is_cancelled_before_it_is_completed(
    external: ExternalTasks,
) -> None:
    await external.served_engine()
    worker = await external.external(scripted, scripted)
    operator = external.coordinator
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 1, "pause_ms": 60_000}), OPEN
    )
    dispatched = await external.dispatch(task_id, "extract")
    assert dispatched["attempt_epoch"] == 1
    await worker.wait_for("TASK_ACCEPTED")
    await operator.complete_node(
        task_id, "extract", batches=[{"batch_uid": "given", "metrics": {"n": 1}}], interrupt=True
    )
    entry = await external.until_node(task_id, "extract", "finished", epoch=2)
    assert entry["first_epoch"] == 2
    await operator.decide(task_id, "open", "approve")
    assert await operator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert [row["batch_uid"] for row in await external.rows(task_id, "extract")] == ["given"]
    assert [(each["state"], each["outcome"]["kind"]) for each in await external.dispatches(task_id)] == [
        ("reported", "cancelled")
    ]


async def test_an_attempt_waits_until_a_worker_has_skipped_the_command_of_an_interrupted_one(
    external: ExternalTasks,
) -> None:
    await external.served_engine()
    operator, gate = external.coordinator, Gate()
    task_id = await external.create(node("extract", external.role))
    await external.dispatch(task_id, "extract")
    await external.until_node(task_id, "extract", "running")
    await operator.pause(task_id, interrupt=True)
    await external.until_node(task_id, "extract", "deferred")
    await operator.resume(task_id)

    async def waits() -> bool:
        entry = await external.node(task_id, "extract")
        return "has to skip the cancelled attempt 1 first" in str(entry.get("waits_for"))

    await eventually(waits)
    workers = [await external.external(gate.handler) for _ in range(2)]
    await eventually(lambda: sent(workers, "TASK_ACCEPTED", 2))
    first, second = [
        await sent(workers, kind, epoch) for kind, epoch in (("CANCELLED", 1), ("TASK_ACCEPTED", 2))
    ]
    assert first[0].offset < second[0].offset
    gate.open()
    assert await operator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    rows = [row async for row in external.db.artifacts.find({"task_id": task_id})]
    assert {row["attempt_epoch"] for row in rows} == {2}


async def test_attempts_that_wait_for_interrupted_ones_delay_no_others_and_go_on_after_a_restart_of_the_bridge(
    external: ExternalTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CONCURRENT_STARTS", 1)
    await external.served_engine()
    operator, names = external.coordinator, ("n0", "n1")
    task_id = await external.create(*(node(name, external.role) for name in names))

    async def waiting() -> bool:
        entries = [await external.node(task_id, name) for name in names]
        return all("has to skip the cancelled attempt 1" in str(each.get("waits_for")) for each in entries)

    for name in names:
        await external.until_node(task_id, name, "running")
        await external.dispatch(task_id, name)
    await operator.pause(task_id, interrupt=True)
    for name in names:
        await external.until_node(task_id, name, "deferred")
    await operator.resume(task_id)
    await eventually(waiting)
    other = await external.create(node("extract", external.role))
    await external.dispatch(other, "extract")
    await operator.restart()
    await external.external(scripted)
    for each in (task_id, other):
        assert await operator.wait(each, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert [await codes(external, task_id, name) for name in names] == [[None, None]] * 2


async def sent(workers: Sequence[ExternalWorker], kind: str, epoch: int) -> list[Entry]:
    """Return the records of this kind that the workers have sent for an epoch."""
    return [
        each for worker in workers for each in worker.sent_for("extract", kind) if each.attempt_epoch == epoch
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "before the end",
        "before the reset",
        pytest.param("after the end", marks=pytest.mark.nightly),
        pytest.param("after the reset", marks=pytest.mark.nightly),
    ],
)
async def test_an_action_takes_effect_once_although_engine_and_bridge_are_killed_after_it(
    external: ExternalTasks, point: str
) -> None:
    external.settings["lease_ttl_sec"] = LEASE_SEC
    external.roles = [external.role]
    await provision(external)
    worker = await external.external(scripted)
    killed = doomed(external, {external.role: point})
    operator = external.coordinator
    task_id = await external.create(
        node("extract", external.role, inline={"batches": 50, "pause_ms": 200}),
        node("enrich", "relay", "extract", inline=pull()),
        OPEN,
    )
    await external.until_batches(task_id, "extract", 1)
    batch = {"batch_uid": "given", "metrics": {"n": 1}}
    await operator.complete_node(task_id, "extract", batches=[batch], interrupt=True)
    assert await ended(killed) == -9
    await external.engine()
    await external.worker({"relay": Relay()})
    entry = await external.until_node(task_id, "extract", "finished", epoch=2)
    await operator.decide(task_id, "open", "approve")
    assert await operator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert entry["first_epoch"] == 2
    assert entry["generation"] == 1
    for name in ("extract", "enrich"):
        assert [row["batch_uid"] for row in await external.rows(task_id, name)] == ["given"]
    assert [each.attempt_epoch for each in worker.sent_for("extract", "TASK_ACCEPTED")] == [1]
