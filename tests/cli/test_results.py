"""Waiting for a task through Coordinator and TaskClient: results, clear errors, and nothing but Temporal needed."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from flowkit import Coordinator
from flowkit.adapters.tasks import task_fields
from flowkit.client import (
    TaskCancelled,
    TaskCatalog,
    TaskFailed,
    TaskStillOpen,
    UnknownTask,
)
from flowkit.errors import ConfigError
from flowkit.local import Stack
from flowkit.models import TaskStatus
from flowkit.testing import memory_database
from tests.integration.world import World, node

if TYPE_CHECKING:
    from pathlib import Path


def function(node_id: str, *parents: str) -> dict[str, Any]:
    """A node that needs no worker."""
    return node(node_id, "coordinator_fn", *parents)


@pytest.mark.server
async def test_the_result_of_a_finished_task(world: World) -> None:
    engine = await world.engine()
    task_id = await world.create(function("a"))
    result = await engine.result(task_id, timeout=60)
    assert (result.task_id, result.status, result.handled_failures) == (task_id, TaskStatus.FINISHED, [])
    assert await engine.wait(task_id) is TaskStatus.FINISHED


@pytest.mark.server
async def test_a_task_that_nothing_but_temporal_has_started_is_awaited_as_well(world: World) -> None:
    await world.engine()
    client = await world.client()
    graph = {"nodes": [function("a")]}
    await client.start_workflow("Task", {"graph": graph}, id=world.queue, task_queue=world.queue)
    assert (await world.coordinator.result(world.queue)).status is TaskStatus.FINISHED
    await client.start_workflow("Task", {"graph": 7}, id=f"{world.queue}-bad", task_queue=world.queue)
    with pytest.raises(TaskFailed, match="graph must be an object") as caught:
        await world.coordinator.result(f"{world.queue}-bad")
    assert caught.value.cause == "invalid_graph"


@pytest.mark.server
async def test_a_failed_task_is_an_error_for_result_and_a_status_for_wait(world: World) -> None:
    engine = await world.engine()
    await world.worker()
    inline = {"failures": 9, "permanent": True}
    task_id = await world.create(node("a", "failing", inline=inline))
    with pytest.raises(TaskFailed, match="node 'a' failed: flaky: as ordered") as caught:
        await engine.result(task_id)
    assert (caught.value.cause, caught.value.task_id) == ("task_failed", task_id)
    assert await engine.wait(task_id) is TaskStatus.FAILED


@pytest.mark.server
async def test_a_task_without_an_end_in_time_is_a_timeout_and_goes_on(world: World) -> None:
    task_id = await world.create(function("a"))
    with pytest.raises(TimeoutError, match="did not end within 0.2 s; it continues") as caught:
        await world.coordinator.wait(task_id, timeout=0.2)
    assert isinstance(caught.value, TaskStillOpen)
    waiting = asyncio.create_task(world.coordinator.wait(task_id))
    await world.engine()
    assert await waiting is TaskStatus.FINISHED


@pytest.mark.server
async def test_cancelled_and_terminated_tasks_are_told_apart(world: World) -> None:
    cancelled, terminated = await world.create(function("a")), await world.create(function("a"))
    handle = (await world.client()).get_workflow_handle(terminated)
    await handle.terminate(reason="enough")
    with pytest.raises(TaskFailed, match="terminated: enough") as caught:
        await world.coordinator.result(terminated)
    assert caught.value.cause == "terminated"
    await world.coordinator.cancel_task(cancelled)
    await world.engine()
    with pytest.raises(TaskCancelled):
        await world.coordinator.result(cancelled)
    assert await world.coordinator.wait(cancelled) is TaskStatus.CANCELLED


@pytest.mark.server
async def test_an_unknown_task_is_a_clear_error(world: World) -> None:
    for ask in (world.coordinator.result, world.coordinator.wait):
        with pytest.raises(UnknownTask, match="there is no task 'nothing'"):
            await ask("nothing")


ENDS: dict[str, dict[str, Any]] = {
    "finished": {"result": {"nodes": [], "handled_failures": ["a"]}},
    "failed": {"reason": "node 'a' failed: error: no"},
    "cancelled": {"reason": "wrong day"},
    "running": {},
}


@pytest.mark.server
@pytest.mark.parametrize("status", ENDS)
async def test_a_task_that_temporal_has_forgotten_is_told_by_its_document(world: World, status: str) -> None:
    document = task_fields.new_task("old", {}, {"nodes": [function("a")]}, time.time())
    await world.db.tasks.insert_one({**document, "status": status, **ENDS[status]})
    if status == "finished":
        assert (await world.coordinator.result("old")).handled_failures == ["a"]
        return
    kind = TaskCancelled if status == "cancelled" else TaskFailed
    with pytest.raises(kind, match=ENDS[status].get("reason", "its workflow no longer exists in Temporal")):
        await world.coordinator.result("old")


async def nothing(task_id: str) -> None:
    """A function of the user's: each call is an activity with its events."""


@pytest.mark.server
async def test_a_result_is_awaited_across_new_runs(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    with Stack(tmp_path, dynamic_config={"limit.historyCount.suggestContinueAsNew": 30}) as own:
        monkeypatch.setenv("TEMPORAL_ADDRESS", own.temporal_address)
        world = World(temporal=own.temporal_address, mongo=own.mongo_url)
        try:
            names = [f"n{number}" for number in range(20)]
            parents = [[], *([name] for name in names)]
            task_id = await world.create(*(function(n, *p) for n, p in zip(names, parents, strict=False)))
            waiting = asyncio.create_task(world.coordinator.result(task_id))
            first = await (await world.handle(task_id)).describe()
            await world.engine(noop=nothing)
            assert (await waiting).status is TaskStatus.FINISHED
            assert (await (await world.handle(task_id)).describe()).run_id != first.run_id
        finally:
            await world.close()


@pytest.mark.server
async def test_a_result_is_awaited_across_a_reset(world: World) -> None:
    engine = await world.engine()
    await world.worker()
    task_id = await world.create(node("a", "paced", inline={"pause": 3}))
    await world.until_node(task_id, "a", "running")
    waiting = asyncio.create_task(engine.result(task_id))
    client = await world.client()
    before = await client.get_workflow_handle(task_id).describe()
    execution = WorkflowExecution(workflow_id=task_id, run_id=before.run_id)
    reset = ResetWorkflowExecutionRequest(
        namespace=client.namespace,
        workflow_execution=execution,
        workflow_task_finish_event_id=4,
        reason="once more",
        request_id=str(uuid.uuid4()),
    )
    await client.workflow_service.reset_workflow_execution(reset)
    assert (await waiting).status is TaskStatus.FINISHED
    assert (await world.document(task_id))["run_seq"] > 0


async def test_list_tasks_tells_the_newest_first_and_needs_no_temporal() -> None:
    db = memory_database()
    graph = {"name": "nightly", "nodes": [function("a")]}
    for number in range(3):
        document = task_fields.new_task(f"t{number}", {}, graph, 1_700_000_000 + number)
        await db.tasks.insert_one({**document, "status": "failed" if number == 0 else "queued"})
    listed = await Coordinator(db=db).list_tasks(limit=2)
    assert [(task.task_id, task.name) for task in listed] == [("t2", "nightly"), ("t1", "nightly")]
    (failed,) = await Coordinator(db=db).list_tasks("failed")
    assert (failed.task_id, failed.status, failed.finished_at) == ("t0", TaskStatus.FAILED, None)


@pytest.mark.parametrize(("status", "limit"), [("done", 5), (None, 0)])
async def test_list_tasks_refuses_what_it_does_not_know(status: str | None, limit: int) -> None:
    with pytest.raises(ConfigError):
        await TaskCatalog(memory_database()).list_tasks(status, limit)
