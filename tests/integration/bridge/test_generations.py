"""Actions on external nodes: what a worker of an earlier generation has stored reaches no later one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from flowkit.testing.external.handlers import scripted
from tests.integration.bridge.test_adoption import LEASE_SEC, doomed, ended, provision
from tests.integration.bridge.test_pulled_inputs import Reader, pull
from tests.integration.handlers import Relay
from tests.integration.harness import node

if TYPE_CHECKING:
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
    assert await operator.wait(task_id, 60) is TaskStatus.FINISHED
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
    assert await operator.wait(task_id, 60) is TaskStatus.FINISHED
    assert [row["batch_uid"] for row in await external.rows(task_id, "extract")] == ["given"]
    assert [(each["state"], each["outcome"]["kind"]) for each in await external.dispatches(task_id)] == [
        ("reported", "cancelled")
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
    assert await operator.wait(task_id, 60) is TaskStatus.FINISHED
    assert entry["first_epoch"] == 2
    assert entry["generation"] == 1
    for name in ("extract", "enrich"):
        assert [row["batch_uid"] for row in await external.rows(task_id, name)] == ["given"]
    assert [each.attempt_epoch for each in worker.sent_for("extract", "TASK_ACCEPTED")] == [1]
