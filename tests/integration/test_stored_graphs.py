"""Graphs that are too large for the input of a workflow: `create_task` stores them, and the workflow reads them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit import limits
from flowkit.graph import validation
from flowkit.models import TaskStatus
from flowkit.worker import BatchResult, RoleHandler
from flowkit.workflows import opening
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node
from tests.integration.test_large_graphs import run_ids
from tests.replay.test_replay import replay
from tests.servers import SUGGESTED_EVENTS

if TYPE_CHECKING:
    from temporalio.client import WorkflowHandle, WorkflowHistory

    from flowkit.models import TaskResult
    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext
    from flowkit.workflows.task import Task

pytestmark = pytest.mark.server

NODES = 40


class Sums(RoleHandler):
    """Adds the items of a batch, and the days of the params."""

    role = "sum"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the sums."""
        return BatchResult(
            success=True, metrics={"sum": sum(batch.payload["items"]), "of": sum(ctx.params["days"])}
        )


def chain(text_bytes: int) -> list[dict[str, Any]]:
    """Return a chain of nodes with random text, which compression only halves."""
    rng = random.Random(1)
    parents = [(), *((f"n{index}",) for index in range(NODES - 1))]
    return [
        node(f"n{index}", "quick", *own, inline={"text": rng.randbytes(text_bytes // 2).hex()})
        for index, own in enumerate(parents)
    ]


def large() -> list[dict[str, Any]]:
    """Return a chain of nodes with 1.6 MB of text."""
    return chain(40_000)


async def start(harness: Harness) -> None:
    """Start an engine and a worker, which a busy machine may keep from heartbeats."""
    harness.settings["lease_ttl_sec"] = 120
    await harness.engine()
    await harness.worker({"quick": Quick()})


async def assert_finished(harness: Harness, task_id: str, nodes: list[dict[str, Any]]) -> None:
    """Wait for the end of the task, and check that its document has every node with its input, and as finished."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    entries = (await harness.document(task_id))["graph"]["nodes"]
    assert [entry["io"] for entry in entries] == [each["io"] for each in nodes]
    assert {(entry["status"], entry["attempt_epoch"]) for entry in entries} == {("finished", 1)}


async def reason(handle: WorkflowHandle[Task, TaskResult]) -> str:
    """Return the reason with which a task fails."""
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    return str(caught.value.cause)


async def test_graph_of_several_parts_runs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkit.adapters.tasks.stored_graphs.STORED_PART_BYTES", 400_000)
    await start(harness)
    nodes = large()
    assert len(json.dumps(nodes)) > limits.TASK_INPUT_BYTES
    task_id = await harness.create(*nodes)
    await assert_finished(harness, task_id, nodes)
    assert await harness.db.stored_graphs.count_documents({"task_id": task_id}) > 1


async def test_graph_of_many_nodes_is_stored_whatever_its_size(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 1)
    await start(harness)
    task_id = await harness.create(node("a"), node("b", "quick", "a"))
    await harness.result(task_id)
    assert await harness.db.stored_graphs.count_documents({"task_id": task_id}) == 1


async def test_large_params_are_stored_and_reach_expressions_and_handlers(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_PARAMS_BYTES", 20)
    await harness.engine()
    await harness.worker({"sum": Sums()})
    sums = node("a", "sum") | {"map": {"over": "params.days", "batch_size": 2}}
    params = {
        "days": [1, 2, 3],
        "priority": 5,
        "pipeline_name": "sums",
        "text": "x" * limits.LARGE_DOCUMENT_BYTES,
    }
    task_id = await harness.coordinator.create_task(params=params, graph={"nodes": [sums]})
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await harness.db.stored_graphs.count_documents({"task_id": task_id}) == 1
    rows = harness.db.metrics_raw.find({"task_id": task_id}).sort("batch_uid")
    assert [row["metrics"] async for row in rows] == [{"sum": 3, "of": 6}, {"sum": 3, "of": 6}]
    history = await (await harness.handle(task_id)).fetch_history()
    scheduled = [event.activity_task_scheduled_event_attributes for event in history.events]
    attempts = [
        json.loads(each.input.payloads[0].data) for each in scheduled if each.activity_type.name == "sum"
    ]
    assert attempts
    assert all(each["document_bytes"] > limits.LARGE_DOCUMENT_BYTES for each in attempts), "their writes wait"


async def test_small_graph_is_not_stored(harness: Harness) -> None:
    await start(harness)
    task_id = await harness.create(node("a"))
    await harness.result(task_id)
    assert await harness.db.stored_graphs.count_documents({}) == 0


async def test_every_run_of_a_task_reads_the_stored_graph(short_runs: Harness) -> None:
    await start(short_runs)
    nodes = large()
    task_id = await short_runs.create(*nodes)
    await assert_finished(short_runs, task_id, nodes)
    assert len(await run_ids(short_runs, task_id)) > 1


async def test_stored_graph_is_normalized_in_several_workflow_tasks_of_each_run(
    short_runs: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 1)
    monkeypatch.setattr(opening, "LONGER", 0)
    await start(short_runs)
    monkeypatch.setattr(validation, "STEP_NODES", NODES)
    whole = await replayed_runs(short_runs)
    monkeypatch.setattr(validation, "STEP_NODES", NODES // 4)
    in_steps = await replayed_runs(short_runs)
    assert len(in_steps) > 1
    assert min(map(steps, in_steps)) >= max(map(steps, whole)) + 3


async def test_task_with_a_large_graph_continues_as_new_later_than_suggested(
    short_runs: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 1)
    await start(short_runs)
    suggested = await replayed_runs(short_runs)
    monkeypatch.setattr(validation, "STEP_NODES", NODES // 4)
    monkeypatch.setattr(opening, "SUGGESTED_EVENTS", SUGGESTED_EVENTS // 2)
    later = await replayed_runs(short_runs)
    assert 1 < len(later) < len(suggested)


async def replayed_runs(harness: Harness) -> list[WorkflowHistory]:
    """Run a task whose graph is stored, replay each of its runs, and return their histories."""
    nodes = chain(100)
    task_id = await harness.create(*nodes)
    await assert_finished(harness, task_id, nodes)
    client = await harness.client()
    runs = [client.get_workflow_handle(task_id, run_id=run) for run in await run_ids(harness, task_id)]
    histories = [await run.fetch_history() for run in runs]
    for history in histories:
        await replay(history)
    return histories


def steps(run: WorkflowHistory) -> int:
    """Return the number of timers with which a run ends the steps of preparing its graph."""
    return sum(b"prepare the graph in steps" in event.user_metadata.summary.data for event in run.events)


async def test_task_fails_if_its_stored_graph_was_deleted(harness: Harness) -> None:
    task_id = await harness.create(*large())
    await harness.db.stored_graphs.delete_many({})
    await start(harness)
    text = await reason(await harness.handle(task_id))
    assert "part 1 of 1 of the graph of task" in text
    assert "create the task again" in text


async def test_engine_applies_its_own_limits_to_a_stored_graph(harness: Harness) -> None:
    task_id = await harness.create(*large())
    harness.settings["max_nodes"] = NODES - 1
    await harness.engine()
    assert "40 entries, more than 39" in await reason(await harness.handle(task_id))
