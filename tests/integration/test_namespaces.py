"""Two Temporal servers share a database: each engine handles only the tasks of its own server."""

from __future__ import annotations

import json
import subprocess
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from flowkit import Coordinator
from flowkit.attempt.workflows import WorkflowState, look_up
from flowkit.connection import Namespace
from flowkit.models import TaskStatus
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC, ROOT, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LONG_AGO = timedelta(minutes=10)


@pytest.fixture
async def other_engine(harness: Harness, short_runs_address: str) -> AsyncIterator[Coordinator]:
    """An engine on the same queue and the same database, of a second server whose namespace is `default` as well."""
    address = short_runs_address
    client = await Client.connect(address, data_converter=pydantic_data_converter)
    engine = Coordinator(db=harness.db, cfg=harness.config, client=client)
    await engine.start()
    yield engine
    await engine.stop()


async def until_swept(*engines: Coordinator) -> None:
    """Wait until each engine has completed three more passes of its sweep."""
    for engine in engines:
        for _ in range(3):
            before = engine.health().loops[0]
            seen = before.last_ok_at

            async def again(engine: Coordinator = engine, seen: float | None = seen) -> bool:
                return engine.health().loops[0].last_ok_at != seen

            await eventually(again)


async def set_old_dates(harness: Harness) -> None:
    """Change the dates of all documents, so that they look old."""
    await harness.db.tasks.update_many({}, {"$set": {"updated_at": datetime.now(UTC) - LONG_AGO}})


def flowkit(harness: Harness, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the servers of the harness."""
    done = fork_server().run(arguments, ROOT, harness.environment, EVENT_TIMEOUT_SEC)
    return subprocess.CompletedProcess(arguments, *done)


async def test_engine_of_another_server_does_not_close_live_tasks(
    harness: Harness, other_engine: Coordinator
) -> None:
    engine = await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline={"batches": 2, "pause": 600}))
    other_id = await other_engine.create_task(params={}, graph={"nodes": [node("a")]})
    await harness.until_node(task_id, "a", "running")
    await harness.until_status(other_id, "running")
    await set_old_dates(harness)
    await until_swept(engine, other_engine)
    statuses = {each: (await harness.document(each))["status"] for each in (task_id, other_id)}
    assert statuses == {task_id: "running", other_id: "running"}
    ids = {(await harness.document(each))["namespace_id"] for each in (task_id, other_id)}
    assert len(ids) == 2
    assert await Namespace(await harness.client()).id() in ids


async def test_document_without_a_namespace_is_closed_only_after_temporal_reports_its_end(
    harness: Harness, other_engine: Coordinator
) -> None:
    engine = await harness.engine()
    task_id = await harness.create(node("a"))
    await harness.until_status(task_id, "running")
    await harness.db.tasks.update_one({"id": task_id}, {"$unset": {"namespace_id": ""}})
    await set_old_dates(harness)
    await until_swept(engine, other_engine)
    assert (await harness.document(task_id))["status"] == "running"
    await (await harness.handle(task_id)).terminate()
    assert (await harness.until_status(task_id, "failed"))["reason"] == "terminated"


async def test_task_of_a_deleted_workflow_is_lost(harness: Harness) -> None:
    engine = await harness.engine()
    task_id = await harness.create(node("a"))
    await harness.until_status(task_id, "running")
    await engine.stop()
    client = await harness.client()
    await client.workflow_service.delete_workflow_execution(deletion(client, task_id))

    async def deleted() -> bool:
        return (await look_up(client, task_id)).state is WorkflowState.ABSENT

    await eventually(deleted)
    await set_old_dates(harness)
    await harness.engine()
    document = await harness.until_status(task_id, "failed")
    assert (document["reason"], document["coordinator"]["cancelled"]) == ("lost", True)


def deletion(client: Client, task_id: str) -> DeleteWorkflowExecutionRequest:
    """Return a request to delete a workflow."""
    execution = WorkflowExecution(workflow_id=task_id)
    return DeleteWorkflowExecutionRequest(namespace=client.namespace, workflow_execution=execution)


async def test_close_orphaned_closes_tasks_of_a_removed_server(
    harness: Harness,
) -> None:
    lost, gone = await harness.create(node("a"), node("b", "quick", "a")), str(uuid.uuid4())
    await (await harness.handle(lost)).terminate()
    await harness.db.tasks.update_one({"id": lost}, {"$set": {"namespace_id": gone}})
    engine = await harness.engine()
    alive = await harness.create(node("a"))
    await harness.until_status(alive, "running")
    await set_old_dates(harness)
    await until_swept(engine)
    assert (await harness.document(lost))["status"] == "queued"
    here = await Namespace(await harness.client()).id()
    listed = json.loads(flowkit(harness, "close-orphaned", "--json").stdout)
    assert sorted(listed["namespaces"], key=lambda each: each["namespace_id"] == here) == [
        {"namespace_id": gone, "open_tasks": 1, "name": None},
        {"namespace_id": here, "open_tasks": 1, "name": "default"},
    ]
    refused = flowkit(harness, "close-orphaned", "--namespace-id", here)
    assert refused.returncode == 2
    assert f"Temporal has namespace {here} ('default'): its tasks are not orphaned" in refused.stderr
    planned = flowkit(harness, "close-orphaned", "--namespace-id", gone, "--dry-run")
    assert planned.stdout == f"would close 1 open tasks of namespace {gone}\n"
    assert (await harness.document(lost))["status"] == "queued"
    done = flowkit(harness, "close-orphaned", "--namespace-id", gone)
    assert done.stdout == f"closed 1 open tasks of namespace {gone}\n"
    document = await harness.document(lost)
    assert (document["status"], document["reason"]) == ("failed", "lost")
    assert set((await harness.statuses(lost)).values()) == {"skipped"}
    assert (await harness.document(alive))["status"] == TaskStatus.RUNNING
