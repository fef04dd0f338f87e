"""Two deployments in one namespace: a task of one is absent for the other, even if its id is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue

from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.workflows import WorkflowState
from flowkit.client import TaskClient
from flowkit.errors import (
    ActionRejected,
    GraphError,
    RejectionCause,
    TaskCancelled,
    TaskIdTaken,
    UnknownTask,
)
from flowkit.models.ownership import MEMO
from tests.integration.harness import EVENT_TIMEOUT_SEC, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

APPROVAL = node("ok", "approval")


async def test_a_task_is_absent_for_another_deployment(harness: Harness, other_harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(APPROVAL)
    await harness.until_node(task_id, "ok", "deferred", epoch=0)
    other = other_harness.coordinator
    assert await other.cancel_task(task_id) is False
    with pytest.raises(UnknownTask):
        await other.result(task_id, timeout=EVENT_TIMEOUT_SEC)
    with pytest.raises(UnknownTask):
        await other.pause(task_id)
    with pytest.raises(TaskIdTaken, match="another deployment"):
        await other.create_task(params={}, graph={"nodes": [APPROVAL]}, task_id=task_id)
    assert await other_harness.db.tasks.count_documents({}) == 0
    assert "there is no task" in await other_harness.command("status", task_id)
    assert await harness.coordinator.create_task(params={}, graph={"nodes": [APPROVAL]}, task_id=task_id)
    assert await harness.coordinator.cancel_task(task_id) is True
    await harness.until_status(task_id, "cancelled")


async def test_a_task_without_a_readable_marker_belongs_to_the_deployment_of_its_queue(
    harness: Harness, other_harness: Harness
) -> None:
    await harness.engine()
    foreign = RawValue(Payload(metadata={"encoding": b"binary/encrypted"}, data=b"x"))
    given = {"graph": {"nodes": [APPROVAL]}, "params": {}}
    id = harness.queue
    await (await harness.client()).start_workflow("Task", given, id=id, task_queue=id, memo={MEMO: foreign})
    other = other_harness.coordinator
    assert await other.cancel_task(id) is False
    with pytest.raises(TaskIdTaken, match="another deployment"):
        await other.create_task(params={}, graph=given["graph"], task_id=id)
    by_command = TaskClient(await harness.client(), TaskStore(harness.db), queue="flowkit", any_queue=True)
    assert (await by_command.look_up(id)).state is WorkflowState.OPEN
    assert await harness.coordinator.cancel_task(id) is True
    with pytest.raises(TaskCancelled):
        await harness.coordinator.result(id, timeout=EVENT_TIMEOUT_SEC)


async def test_ids_of_flows_are_reserved_and_a_rerun_keeps_the_marker(harness: Harness) -> None:
    await harness.name_deployment()
    await harness.engine()
    with pytest.raises(GraphError, match="reserved for the runs of flows"):
        await harness.coordinator.create_task(params={}, graph={"nodes": [APPROVAL]}, task_id="flow:1:3:40/1")
    task_id = await harness.create(APPROVAL)
    await harness.until_node(task_id, "ok", "deferred", epoch=0)
    with pytest.raises(ActionRejected) as rejected:
        await harness.coordinator.satisfy(task_id, "unknown")
    assert rejected.value.cause is RejectionCause.UNKNOWN
    first = await (await harness.handle(task_id)).describe()
    await harness.coordinator.cancel_task(task_id)
    await harness.until_status(task_id, "cancelled")
    await harness.coordinator.rerun(task_id)
    second = await (await harness.handle(task_id)).describe()
    assert second.run_id != first.run_id
    marker = await first.memo_value(MEMO)
    assert marker == {"kind": "task", "deployment": harness.deployment, "id": task_id}
    assert await second.memo_value(MEMO) == marker
