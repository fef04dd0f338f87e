"""Queries of a task whose engine has stopped without a word: views fall back to the document, previews say so."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import PollWorkflowTaskQueueRequest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt import workflows
from flowkit.client import TaskCatalog, TaskClient
from flowkit.errors import ActionUnanswered
from flowkit.reading.state import Servers, TaskReader
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

CEILING_SEC = 60.0
"""Much longer than the tries take, and shorter than any wait of Temporal that is repeated for ever."""


async def servers_of(harness: Harness) -> Servers:
    """Return the clients of a harness."""
    client = await harness.client()
    tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue)
    return Servers(temporal=client, tasks=tasks, catalog=TaskCatalog(harness.db), db=harness.db)


async def test_without_an_answer_a_view_is_that_of_the_document_and_a_preview_says_so(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes the workflow task, and is never heard of again."""
    tries = list[str]()
    ask = workflows._ask

    async def counted(handle: object, name: str, args: object) -> object:
        tries.append(name)
        return await ask(handle, name, args)  # type: ignore[arg-type] # what `query` passes on

    monkeypatch.setattr(workflows, "QUERY_SEC", 0.5)
    monkeypatch.setattr(workflows, "_ask", counted)
    servers, task_id = await servers_of(harness), await harness.create(node("a", "quick"))
    killed = PollWorkflowTaskQueueRequest(
        namespace=servers.temporal.namespace, task_queue=TaskQueue(name=harness.queue), identity="killed"
    )
    await servers.temporal.workflow_service.poll_workflow_task_queue(killed)
    async with asyncio.timeout(CEILING_SEC):
        reader = await TaskReader.at(servers, task_id)
        view = await reader.view()
        hints = await reader.hints(view)
        with pytest.raises(ActionUnanswered, match="nothing has changed: check that an engine runs"):
            await harness.coordinator.preview(task_id, "pause")
    assert (view.source, view.nodes[0].status) == ("document", "queued")
    assert f"no engine of queue {harness.queue} has responded within 5 s" in hints[0]
    assert tries == ["status", "preview", "preview"]


@pytest.mark.nightly
async def test_a_preview_is_answered_by_another_engine_after_one_was_killed(harness: Harness) -> None:
    """Temporal sends the first query to the killed engine, which was the last one to run the workflow."""
    task_id, client = await harness.create(node("a", "quick")), await harness.client()
    engine = harness.process("engine", "--queue", harness.queue)

    async def answers() -> bool:
        with suppress(TimeoutError):
            return bool((await workflows.query(client, task_id, "status"))["nodes"])
        return False

    await eventually(answers)
    await harness.engine()
    engine.kill()
    async with asyncio.timeout(CEILING_SEC):
        assert (await harness.coordinator.preview(task_id, "pause"))["affected"]
