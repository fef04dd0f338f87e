"""Waiting for a task with Coordinator and TaskClient: results and errors, with Temporal alone."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest

from flowkit import Coordinator
from flowkit.adapters.tasks.fields import new_task
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
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, node

if TYPE_CHECKING:
    from pathlib import Path


def function(node_id: str, *parents: str) -> dict[str, Any]:
    """Return a node that needs no worker."""
    return node(node_id, "coordinator_fn", *parents)


@pytest.mark.server
async def test_result_and_wait_return_the_outcome_of_a_finished_task(harness: Harness) -> None:
    engine = await harness.engine()
    task_id = await harness.create(function("a"))
    result = await engine.result(task_id, timeout=EVENT_TIMEOUT_SEC)
    assert (result.task_id, result.status, result.handled_failures) == (task_id, TaskStatus.FINISHED, [])
    assert await engine.wait(task_id) is TaskStatus.FINISHED


@pytest.mark.server
async def test_result_waits_for_a_task_started_by_a_plain_temporal_client(harness: Harness) -> None:
    await harness.engine()
    client = await harness.client()
    graph = {"nodes": [function("a")]}
    await client.start_workflow("Task", {"graph": graph}, id=harness.queue, task_queue=harness.queue)
    assert (await harness.coordinator.result(harness.queue)).status is TaskStatus.FINISHED
    await client.start_workflow("Task", {"graph": 7}, id=f"{harness.queue}-bad", task_queue=harness.queue)
    with pytest.raises(TaskFailed, match="graph must be an object") as caught:
        await harness.coordinator.result(f"{harness.queue}-bad")
    assert caught.value.cause == "invalid_graph"


@pytest.mark.server
async def test_failed_task_raises_in_result_and_is_a_status_in_wait(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker()
    inline = {"failures": 9, "permanent": True}
    task_id = await harness.create(node("a", "failing", inline=inline))
    with pytest.raises(TaskFailed, match="node 'a' failed: flaky: as ordered") as caught:
        await engine.result(task_id)
    assert (caught.value.cause, caught.value.task_id) == ("task_failed", task_id)
    assert await engine.wait(task_id) is TaskStatus.FAILED


@pytest.mark.server
async def test_wait_timeout_raises_and_leaves_the_task_running(harness: Harness) -> None:
    task_id = await harness.create(function("a"))
    with pytest.raises(TimeoutError, match="did not end within 0.2 s; it continues") as caught:
        await harness.coordinator.wait(task_id, timeout=0.2)
    assert isinstance(caught.value, TaskStillOpen)
    waiting = asyncio.create_task(harness.coordinator.wait(task_id))
    await harness.engine()
    assert await waiting is TaskStatus.FINISHED


@pytest.mark.server
async def test_result_distinguishes_cancelled_and_terminated_tasks(harness: Harness) -> None:
    cancelled, terminated = await harness.create(function("a")), await harness.create(function("a"))
    handle = (await harness.client()).get_workflow_handle(terminated)
    await handle.terminate(reason="enough")
    with pytest.raises(TaskFailed, match="terminated: enough") as caught:
        await harness.coordinator.result(terminated)
    assert caught.value.cause == "terminated"
    await harness.coordinator.cancel_task(cancelled)
    await harness.engine()
    with pytest.raises(TaskCancelled):
        await harness.coordinator.result(cancelled)
    assert await harness.coordinator.wait(cancelled) is TaskStatus.CANCELLED


@pytest.mark.server
async def test_unknown_task_raises_unknown_task(harness: Harness) -> None:
    for ask in (harness.coordinator.result, harness.coordinator.wait):
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
async def test_result_reads_the_document_of_a_task_that_temporal_no_longer_has(
    harness: Harness, status: str
) -> None:
    document = new_task("old", {}, {"nodes": [function("a")]}, time.time())
    await harness.db.tasks.insert_one({**document, "status": status, **ENDS[status]})
    if status == "finished":
        assert (await harness.coordinator.result("old")).handled_failures == ["a"]
        return
    kind = TaskCancelled if status == "cancelled" else TaskFailed
    with pytest.raises(kind, match=ENDS[status].get("reason", "its workflow no longer exists in Temporal")):
        await harness.coordinator.result("old")


async def nothing(task_id: str) -> None:
    """A user function, so that each call is an activity with its events."""


@pytest.mark.server
async def test_result_follows_continue_as_new(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEMPORAL_ADDRESS")
    with Stack(tmp_path, dynamic_config={"limit.historyCount.suggestContinueAsNew": 30}) as own:
        monkeypatch.setenv("TEMPORAL_ADDRESS", own.temporal_address)
        harness = Harness(temporal=own.temporal_address, mongo=own.mongo_url)
        try:
            names = [f"n{number}" for number in range(20)]
            parents = [[], *([name] for name in names)]
            task_id = await harness.create(*(function(n, *p) for n, p in zip(names, parents, strict=False)))
            waiting = asyncio.create_task(harness.coordinator.result(task_id))
            first = await (await harness.handle(task_id)).describe()
            await harness.engine(noop=nothing)
            assert (await waiting).status is TaskStatus.FINISHED
            assert (await (await harness.handle(task_id)).describe()).run_id != first.run_id
        finally:
            await harness.close()


@pytest.mark.server
async def test_result_follows_a_reset(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline={"pause": 3}))
    await harness.until_node(task_id, "a", "running")
    waiting = asyncio.create_task(engine.result(task_id))
    client = await harness.client()
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
    assert (await harness.document(task_id))["run_seq"] > 0


async def test_list_tasks_returns_the_newest_first_without_temporal() -> None:
    db = memory_database()
    graph = {"name": "nightly", "nodes": [function("a")]}
    for number in range(3):
        document = new_task(f"t{number}", {}, graph, 1_700_000_000 + number)
        await db.tasks.insert_one({**document, "status": "failed" if number == 0 else "queued"})
    listed = await Coordinator(db=db).list_tasks(limit=2)
    assert [(task.task_id, task.name) for task in listed] == [("t2", "nightly"), ("t1", "nightly")]
    (failed,) = await Coordinator(db=db).list_tasks("failed")
    assert (failed.task_id, failed.status, failed.finished_at) == ("t0", TaskStatus.FAILED, None)


@pytest.mark.parametrize(("status", "limit"), [("done", 5), (None, 0)])
async def test_list_tasks_rejects_invalid_arguments(status: str | None, limit: int) -> None:
    with pytest.raises(ConfigError):
        await TaskCatalog(memory_database()).list_tasks(status, limit)
