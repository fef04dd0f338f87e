"""Cancel, Terminate and Reset, with the requests that the buttons of Temporal's Web UI send."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import CancelledError

from flowkit import reason_codes
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.failures import lost
from flowkit.attempt.storage import AttemptStorage
from flowkit.attempt.supervision import AttemptFailed
from flowkit.models import NodeStatus, TaskStatus
from flowkit.worker import Batch, BatchResult
from flowkit.workflows import document
from tests.integration.handlers import Gated, Paced, Stubborn
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from flowkit.models import NodeRecord, RecordTask
    from flowkit.worker import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LONG = {"batches": 50, "pause": 60}


async def cancelled(harness: Harness, task_id: str) -> dict[str, Any]:
    """Wait until the workflow is closed as Canceled, and return the task document."""
    with pytest.raises(WorkflowFailureError) as caught:
        await harness.result(task_id)
    assert isinstance(caught.value.cause, CancelledError)
    description = await (await harness.handle(task_id)).describe()
    assert description.status is WorkflowExecutionStatus.CANCELED
    return await harness.document(task_id)


async def noted(harness: Harness, attempt: str) -> dict[str, Any]:
    """Return what a handler recorded when it saw its cancel."""

    async def look() -> dict[str, Any] | None:
        found: dict[str, Any] | None = await harness.db.notes.find_one({"_id": attempt})
        return found

    return await eventually(look)


async def test_cancel_reaches_the_handler_and_no_later_node_starts(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "paced", inline=LONG), node("b", "quick", "a"), node("c", "quick", "b")
    )
    await harness.until_node(task_id, "a", "running")
    assert await harness.coordinator.cancel_task(task_id, reason="budget is spent")
    document = await cancelled(harness, task_id)
    note = await noted(harness, "a.1")
    assert note["reason"] == "budget is spent"
    assert (document["status"], document["coordinator"]["cancel_reason"]) == ("cancelled", "budget is spent")
    assert document["coordinator"]["cancelled"] is True
    assert await harness.statuses(task_id) == {"a": "cancelled", "b": "skipped", "c": "skipped"}
    assert {n.get("skip_reason") for n in document["graph"]["nodes"]} == {None, "task_cancelled"}
    assert await harness.rows(task_id, "b") == []


class Breaking(Gated):
    """A Gated that fails if its input says so."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, then fail or return one metrics row."""
        done = await super().process_batch(batch, ctx)
        failed = BatchResult(success=False, reason_code="broken", error="no data", permanent=True)
        return failed if batch.payload.get("fails") else done


async def test_cancel_takes_precedence_over_the_end_of_the_last_node_that_arrives_with_it(
    harness: Harness,
) -> None:
    engine, handler = await harness.engine(), Breaking()
    await harness.worker({"gated": handler})
    tasks = [await harness.create(node("a", "gated", inline={"fails": fails})) for fails in (True, False)]
    handles = [await harness.handle(task_id) for task_id in tasks]
    for task_id in tasks:
        await harness.until_node(task_id, "a", "running")
    await engine.stop()
    for handle in handles:
        await handle.cancel()
    handler.gate.set()

    async def has_ended() -> bool:
        found = [(await each.describe()).raw_description.pending_activities for each in handles]
        return not any(found)

    await eventually(has_ended)
    await harness.engine()
    documents = [await cancelled(harness, task_id) for task_id in tasks]
    assert [each["status"] for each in documents] == ["cancelled", "cancelled"]
    assert [each["graph"]["nodes"][0]["status"] for each in documents] == ["failed", "finished"]


async def test_cancel_without_a_reason_gets_the_documented_one(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline=LONG))
    await harness.until_node(task_id, "a", "running")
    await (await harness.handle(task_id)).cancel()
    document = await cancelled(harness, task_id)
    assert document["coordinator"]["cancel_reason"] == "user_request"


async def test_cancelled_task_does_not_retry_a_waiting_node(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    policy = {"max": 3, "backoff_sec": 600}
    task_id = await harness.create(node("a", "failing", inline={"failures": 1}, retry_policy=policy))
    await harness.until_status(task_id, "deferred")
    await harness.coordinator.cascade_cancel(task_id, reason="upstream_failure")
    document = await cancelled(harness, task_id)
    (only,) = document["graph"]["nodes"]
    assert (only["status"], only["attempt_epoch"]) == ("cancelled", 1)


async def test_task_without_workers_can_be_cancelled(harness: Harness) -> None:
    await harness.engine()
    task_id = await harness.create(node("a"), node("b", "quick", "a"))
    await harness.until_status(task_id, "running")
    await harness.coordinator.cancel_task(task_id)
    document = await cancelled(harness, task_id)
    assert document["status"] == "cancelled"
    assert document["graph"]["nodes"][0].get("started_at") is None


async def test_handler_that_ignores_its_cancel_is_abandoned_after_the_grace_period(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 0.5
    await harness.engine()
    await harness.worker({"stubborn": Stubborn()})
    task_id = await harness.create(node("a", "stubborn", inline={"pause": 4}))
    await harness.until_node(task_id, "a", "running")
    await harness.coordinator.cancel_task(task_id)
    document = await cancelled(harness, task_id)
    assert document["graph"]["nodes"][0]["status"] == "cancelled"


async def test_node_that_finishes_before_it_learns_of_the_cancel_stays_finished(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is about to stop, and its document shows how the attempt finishes the node meanwhile."""
    gated, stopping, go_on, write = Gated(), asyncio.Event(), threading.Event(), TaskStore.record

    async def record(store: TaskStore, transitions: RecordTask) -> list[NodeRecord]:
        if any(each.status is NodeStatus.CANCELLING for each in transitions.nodes):
            test_loop.call_soon_threadsafe(stopping.set)
            await asyncio.to_thread(go_on.wait, EVENT_TIMEOUT_SEC)
        return await write(store, transitions)

    test_loop = asyncio.get_running_loop()
    monkeypatch.setattr(TaskStore, "record", record)
    monkeypatch.setattr(document, "FLAGS_TIMEOUT_SEC", EVENT_TIMEOUT_SEC)
    await harness.engine()
    await harness.worker({"gated": gated})
    task_id = await harness.create(node("a", "gated"), node("b", "gated", "a"))
    await harness.until_node(task_id, "a", "running")
    assert await harness.coordinator.cancel_task(task_id)
    await stopping.wait()
    gated.gate.set()
    await harness.until_node(task_id, "a", "finished")
    go_on.set()
    await cancelled(harness, task_id)
    assert await harness.statuses(task_id) == {"a": "finished", "b": "skipped"}


async def test_node_whose_worker_is_lost_after_the_last_write_stays_finished(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel comes before another attempt has begun."""
    waiting, begin, end = asyncio.Event(), AttemptStorage.begin, AttemptStorage.end

    async def begin_once(storage: AttemptStorage) -> Any:
        if storage._attempt.epoch > 1:
            waiting.set()
            await asyncio.Event().wait()
        return await begin(storage)

    async def end_unheard(storage: AttemptStorage, *given: Any, **options: Any) -> None:
        await end(storage, *given, **options)
        raise AttemptFailed(lost(reason_codes.LEASE_LOST, "the worker is gone"))

    monkeypatch.setattr(AttemptStorage, "begin", begin_once)
    monkeypatch.setattr(AttemptStorage, "end", end_unheard)
    harness.settings["cancel_grace_sec"] = 0.5
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "quick"), node("b", "quick", "a"))
    await waiting.wait()
    assert await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    assert await harness.statuses(task_id) == {"a": "finished", "b": "skipped"}


async def test_flag_written_into_the_document_cancels_the_task(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a", "paced", inline=LONG), node("b", "quick", "a"))
    await harness.until_node(task_id, "a", "running")
    await harness.db.tasks.update_one({"id": task_id}, {"$set": {"coordinator.cancelled": True}})
    document = await cancelled(harness, task_id)
    assert document["coordinator"]["cancel_reason"] == "db_flag"
    assert (await noted(harness, "a.1"))["reason"] == "db_flag"


async def test_cancel_of_an_unknown_task_is_reported(harness: Harness) -> None:
    assert await harness.coordinator.cancel_task(f"nothing-{uuid.uuid4()}") is False


async def test_terminate_closes_the_document_and_stops_the_workers(harness: Harness) -> None:
    await harness.engine()
    stopped: list[str] = []

    class Watched(Paced):
        async def process_batch(self, batch: Any, ctx: Any) -> Any:
            try:
                return await super().process_batch(batch, ctx)
            finally:
                stopped.append(ctx.node_id)

    await harness.worker({"paced": Watched()})
    task_id = await harness.create(node("a", "paced", inline=LONG), node("b", "paced", "a"))
    await harness.until_node(task_id, "a", "running")
    await (await harness.handle(task_id)).terminate(reason="pressed the button")
    document = await harness.until_status(task_id, "failed")
    assert document["reason"] == "terminated"
    assert document["coordinator"]["cancelled"] is True
    assert await harness.statuses(task_id) == {"a": "cancelled", "b": "skipped"}

    async def has_stopped() -> bool:
        return stopped == ["a"]

    await eventually(has_stopped)


async def reset(harness: Harness, task_id: str, node_id: str) -> None:
    """Reset to the workflow task that scheduled the first attempt of `node_id`."""
    handle = await harness.handle(task_id)
    history = await handle.fetch_history()
    scheduled = next(
        event.activity_task_scheduled_event_attributes
        for event in history.events
        if event.activity_task_scheduled_event_attributes.activity_id == f"{node_id}.1"
    )
    description = await handle.describe()
    client = await harness.client()
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=task_id, run_id=description.run_id),
            reason="test",
            workflow_task_finish_event_id=scheduled.workflow_task_completed_event_id,
            request_id=str(uuid.uuid4()),
        )
    )


async def test_reset_of_a_finished_task_runs_its_nodes_again_with_new_epochs(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", inline={"batches": 3}),
        node("b", "quick", "a", inline={"batches": 4}),
        node("c", "quick", "b"),
    )
    await harness.result(task_id)
    await reset(harness, task_id, "b")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    document = await harness.document(task_id)
    epochs = {n["node_id"]: n["attempt_epoch"] for n in document["graph"]["nodes"]}
    assert epochs == {"a": 1, "b": 2, "c": 2}
    assert set((await harness.statuses(task_id)).values()) == {"finished"}
    assert document["status"] == "finished"
    rows = await harness.rows(task_id, "b")
    assert sorted(row["batch_uid"] for row in rows) == ["b0", "b1", "b2", "b3"]
    assert sum(row["metrics"]["n"] for row in rows) == 4


async def test_reset_of_a_running_task_takes_the_node_from_its_worker(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", inline={"batches": 2}), node("b", "paced", "a", inline={"batches": 6, "pause": 0.5})
    )
    await harness.until_batches(task_id, "b", 2)
    await reset(harness, task_id, "b")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 2
    rows = await harness.rows(task_id, "b")
    assert sorted(row["batch_uid"] for row in rows) == [f"b{i}" for i in range(6)]


async def test_reset_after_terminate_reopens_the_document(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"), node("b", "paced", "a", inline={"batches": 2, "pause": 1}))
    await harness.until_node(task_id, "b", "running")
    await (await harness.handle(task_id)).terminate()
    await harness.until_status(task_id, "failed")
    await reset(harness, task_id, "b")
    await harness.result(task_id)
    document = await harness.document(task_id)
    assert (document["status"], document["reason"]) == ("finished", None)
    assert "cancelled" not in document["coordinator"]
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 2


async def test_terminate_after_a_reset_closes_the_document_again(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"), node("b", "paced", "a", inline=LONG))
    for _ in range(2):
        await harness.until_node(task_id, "b", "running")
        await (await harness.handle(task_id)).terminate()
        document = await harness.until_status(task_id, "failed")
        assert document["reason"] == "terminated"
        await reset(harness, task_id, "b")
    await harness.until_status(task_id, "running")
    await harness.coordinator.cancel_task(task_id)
    assert (await cancelled(harness, task_id))["status"] == "cancelled"


async def test_reason_of_a_rejected_task_is_in_its_document(harness: Harness) -> None:
    task_id = await harness.create(node("a", "coordinator_fn", io={"fn": "nobody.knows"}))
    await harness.engine()
    with pytest.raises(WorkflowFailureError):
        await harness.result(task_id)
    document = await harness.document(task_id)
    assert document["status"] == "failed"
    assert document["reason"].startswith(
        "invalid_graph: node 'a': io.fn names the unknown function 'nobody.knows'"
    )
