"""Two Temporal servers share a database: each engine handles only the tasks of its own server."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from flowkit import Coordinator
from flowkit.cli.tasks.view import describe
from flowkit.connection import Namespace
from flowkit.local import TemporalServer
from flowkit.models import TaskStatus
from tests.integration.world import FLOWKIT, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.integration.world import World

pytestmark = pytest.mark.server

LONG_AGO = timedelta(minutes=10)


@pytest.fixture
def other_server(tmp_path: Path) -> TemporalServer:
    """Return a second server, not started yet, whose namespace is called `default` as well."""
    return TemporalServer(tmp_path)


@pytest.fixture
async def other_engine(world: World, other_server: TemporalServer) -> AsyncIterator[Coordinator]:
    """An engine of the second server on the same queue and the same database."""
    with other_server:
        client = await Client.connect(other_server.address, data_converter=pydantic_data_converter)
        engine = Coordinator(db=world.db, cfg=world.config, client=client)
        await engine.start()
        yield engine
        await engine.stop()


async def until_swept(*engines: Coordinator) -> None:
    """Wait until each engine has completed three more passes of its sweep."""
    for engine in engines:
        for _ in range(3):
            [before] = engine.health().loops
            seen = before.last_ok_at

            async def again(engine: Coordinator = engine, seen: float | None = seen) -> bool:
                return engine.health().loops[0].last_ok_at != seen

            await eventually(again)


async def set_old_dates(world: World) -> None:
    """Change the dates of all documents, so that they look old."""
    await world.db.tasks.update_many({}, {"$set": {"updated_at": datetime.now(UTC) - LONG_AGO}})


def flowkit(world: World, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with this World's servers."""
    return subprocess.run(
        [FLOWKIT, *arguments], env=world.environment, capture_output=True, text=True, check=False
    )


async def test_engine_of_another_server_does_not_close_live_tasks(
    world: World, other_engine: Coordinator
) -> None:
    engine = await world.engine()
    await world.worker()
    task_id = await world.create(node("a", "paced", inline={"batches": 2, "pause": 600}))
    other_id = await other_engine.create_task(params={}, graph={"nodes": [node("a")]})
    await world.until_node(task_id, "a", "running")
    await world.until_status(other_id, "running")
    await set_old_dates(world)
    await until_swept(engine, other_engine)
    statuses = {each: (await world.document(each))["status"] for each in (task_id, other_id)}
    assert statuses == {task_id: "running", other_id: "running"}
    ids = {(await world.document(each))["namespace_id"] for each in (task_id, other_id)}
    assert len(ids) == 2
    assert await Namespace(await world.client()).id() in ids


async def test_document_without_a_namespace_is_closed_only_after_temporal_reports_its_end(
    world: World, other_engine: Coordinator
) -> None:
    engine = await world.engine()
    task_id = await world.create(node("a"))
    await world.until_status(task_id, "running")
    await world.db.tasks.update_one({"id": task_id}, {"$unset": {"namespace_id": ""}})
    await set_old_dates(world)
    await until_swept(engine, other_engine)
    assert (await world.document(task_id))["status"] == "running"
    await (await world.handle(task_id)).terminate()
    assert (await world.until_status(task_id, "failed"))["reason"] == "terminated"


async def test_task_of_a_deleted_workflow_is_lost(world: World) -> None:
    engine = await world.engine()
    task_id = await world.create(node("a"))
    await world.until_status(task_id, "running")
    await engine.stop()
    client = await world.client()
    await client.workflow_service.delete_workflow_execution(deletion(client, task_id))

    async def deleted() -> bool:
        return await describe(client, task_id) is None

    await eventually(deleted)
    await set_old_dates(world)
    await world.engine()
    document = await world.until_status(task_id, "failed")
    assert (document["reason"], document["coordinator"]["cancelled"]) == ("lost", True)


def deletion(client: Client, task_id: str) -> DeleteWorkflowExecutionRequest:
    """Return a request to delete a workflow."""
    execution = WorkflowExecution(workflow_id=task_id)
    return DeleteWorkflowExecutionRequest(namespace=client.namespace, workflow_execution=execution)


async def test_close_orphaned_closes_tasks_of_a_removed_server(
    world: World, other_server: TemporalServer
) -> None:
    with other_server:
        client = await Client.connect(other_server.address, data_converter=pydantic_data_converter)
        lost = await Coordinator(db=world.db, cfg=world.config, client=client).create_task(
            params={}, graph={"nodes": [node("a"), node("b", "quick", "a")]}
        )
        gone = await Namespace(client).id()
    engine = await world.engine()
    alive = await world.create(node("a"))
    await world.until_status(alive, "running")
    await set_old_dates(world)
    await until_swept(engine)
    assert (await world.document(lost))["status"] == "queued"
    here = await Namespace(await world.client()).id()
    listed = json.loads(flowkit(world, "close-orphaned", "--json").stdout)
    assert sorted(listed["namespaces"], key=lambda each: each["namespace_id"] == here) == [
        {"namespace_id": gone, "open_tasks": 1, "name": None},
        {"namespace_id": here, "open_tasks": 1, "name": "default"},
    ]
    refused = flowkit(world, "close-orphaned", "--namespace-id", here)
    assert refused.returncode == 2
    assert f"Temporal has namespace {here} ('default'): its tasks are not orphaned" in refused.stderr
    planned = flowkit(world, "close-orphaned", "--namespace-id", gone, "--dry-run")
    assert planned.stdout == f"would close 1 open tasks of namespace {gone}\n"
    assert (await world.document(lost))["status"] == "queued"
    done = flowkit(world, "close-orphaned", "--namespace-id", gone)
    assert done.stdout == f"closed 1 open tasks of namespace {gone}\n"
    document = await world.document(lost)
    assert (document["status"], document["reason"]) == ("failed", "lost")
    assert set((await world.statuses(lost)).values()) == {"skipped"}
    assert (await world.document(alive))["status"] == TaskStatus.RUNNING
