"""Invalid calls of clients fail before a task starts. Errors after the start do not fail the call."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from pymongo import errors
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.coordinator.adapters import AdapterError, CoordinatorAdapters
from flowkit.errors import GraphError, StoreRefused, TaskCancelled, TaskFailed
from flowkit.models import TaskStatus
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from flowkit import Coordinator
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

NOOP = {"node_id": "call", "type": "coordinator_fn"}


def nested(levels: int) -> Any:
    """Return nested lists."""
    return [nested(levels - 1)] if levels else 1


endless: dict[str, Any] = {}
endless["self"] = endless

UNSTORABLE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "65 bits": ({"params": {"n": {"id": 2**63}}}, ["params.n.id is 9223372036854775808", "as a string"]),
    "5,000 digits": ({"params": {"n": 10**5_000}}, ["params"]),
    "NUL": ({"params": {"a": {"b\0c": 1}}}, [r"params.a.b\x00c", "NUL", "rename the key"]),
    "surrogate": ({"params": {"a": "x\ud800"}}, ["params.a", "'x\\ud800'"]),
    "surrogate in a key": ({"params": {"\ud800": 1}}, ["params", "surrogates not allowed"]),
    "levels": ({"params": {"a": nested(99)}}, ["params.a[0]", "100 levels", "flatter"]),
    "endless": ({"params": endless}, ["params cannot be written as JSON", "contains itself"]),
    "levels of JSON": ({"params": {"a": nested(900)}}, ["params"]),
    "no JSON": ({"params": {"a": object()}}, ["params cannot be written as JSON", "object"]),
    "not a number": ({"params": {"a": float("nan")}}, ["params.a = nan", "must be JSON"]),
    "bytes": ({"params": {"a": b"\xff"}}, ["params cannot be written as JSON", "utf-8"]),
    "params list": ({"params": []}, ["params must be an object"]),
    "params text": ({"params": ""}, ["params must be an object"]),
    "no graph": ({"graph": None}, ["graph must be an object with 'nodes', not None"]),
    "graph text": ({"graph": "g"}, ["graph must be an object with 'nodes', not 'g'"]),
    "in a node": (
        {"graph": {"nodes": [{**NOOP, "meta": {"size": -(2**63) - 1}}]}},
        ["node 'call': graph.nodes[0].meta.size is -9223372036854775809"],
    ),
}


async def test_values_that_mongodb_cannot_store_are_rejected_before_the_start(harness: Harness) -> None:
    client, wrong = await harness.client(), {}
    for number, (name, (given, reported)) in enumerate(UNSTORABLE.items()):
        task_id = f"{harness.queue}-{number}"
        call = {"params": {}, "graph": {"nodes": [NOOP]}, "task_id": task_id, **given}
        with pytest.raises(GraphError) as caught:
            await harness.coordinator.create_task(**call)
        text = str(caught.value)
        if "\n" in text or len(text) > 600 or not all(part in text for part in reported):
            wrong[name] = text
        with pytest.raises(Exception, match="not found"):
            await client.get_workflow_handle(task_id).describe()
    assert wrong == {}
    assert await harness.db.tasks.count_documents({}) == 0


class Params(BaseModel):
    """Params as a pydantic model."""

    day: int
    tags: set[str]


async def test_models_tuples_and_missing_params_are_accepted(harness: Harness) -> None:
    await harness.engine()
    graph = {"nodes": ({**NOOP, "meta": {"pair": (1, 2)}},)}
    given: list[Any] = [Params(day=7, tags={"x"}), None, {"": 2**63 - 1, "k": {"a.b": nested(90)}}]
    for params in given:
        task_id = await harness.coordinator.create_task(params=params, graph=graph)
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    first: Any = await harness.db.tasks.find_one({"params.day": 7})
    assert (first["params"], first["graph"]["nodes"][0]["meta"]) == (
        {"day": 7, "tags": ["x"]},
        {"pair": [1, 2]},
    )


class Failing(TaskStore):
    """A store that fails to insert a document."""

    def __init__(self, db: Any, error: Exception) -> None:
        super().__init__(db)
        self.error = error

    async def insert_task(self, document: dict[str, Any]) -> None:
        """Fail."""
        raise self.error


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (StoreRefused("MongoDB rejected the operation (OperationFailure: not authorized)"), "not authorized"),
        (errors.OperationFailure("not authorized on flowkit", 13), "OperationFailure: not authorized"),
        (RuntimeError("two\nlines \ud800"), r"RuntimeError: two lines \ud800"),
        (OverflowError("x" * 5_000), "OverflowError: xxx"),
    ],
    ids=["refused", "denied", "unencodable text", "long"],
)
async def test_document_errors_after_the_start_do_not_fail_the_call(
    harness: Harness, caplog: pytest.LogCaptureFixture, error: Exception, reported: str
) -> None:
    await harness.engine()
    tasks = TaskClient(await harness.client(), Failing(harness.db, error), queue=harness.queue)
    with caplog.at_level(logging.WARNING, "flowkit.client"):
        task_id = await tasks.create_task(params={}, graph={"nodes": [NOOP]})
    [record] = [record for record in caplog.records if record.name == "flowkit.client"]
    text = record.getMessage()
    assert f"task {task_id} is running, but its document does not exist yet: " in text
    assert reported in text
    assert "\n" not in text
    assert len(text) < 450
    assert (await tasks.result(task_id)).status is TaskStatus.FINISHED


async def test_query_operator_as_task_id_changes_no_task(harness: Harness) -> None:
    task_id = await harness.create(NOOP)
    before, adapters = await harness.document(task_id), CoordinatorAdapters(db=harness.db)
    condition: Any = {"$gt": ""}
    calls: list[Any] = [
        adapters.vars_set(condition, a=1),
        adapters.vars_incr(condition, key="a"),
        adapters.metrics_aggregate(condition, "call"),
    ]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in found] == [AdapterError] * 3
    assert await harness.document(task_id) == before


# --- cancel ---------------------------------------------------------------------------------------------------------


async def test_cancel_returns_whether_there_was_anything_to_cancel(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    coordinator = harness.coordinator
    assert await coordinator.cancel_task("unknown-" + harness.queue) is False
    ended = await harness.create(NOOP)
    await harness.result(ended)
    assert await coordinator.cancel_task(ended) is False
    open_ = await harness.create(node("a", "paced", inline={"pause": 600}))
    assert await coordinator.cancel_task(open_, reason="half \ud800 " + "x" * 5_000) is True
    assert await coordinator.wait(open_, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    assert await coordinator.cancel_task(open_) is False
    kept = (await harness.document(open_))["coordinator"]["cancel_reason"]
    assert (kept[:12], kept[-1], len(kept)) == ("half \\ud800 ", "…", 1_000)
    assert (await harness.document(ended))["status"] == "finished"


async def test_reset_task_can_be_cancelled(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    failing = node("a", "failing", inline={"failures": 9, "permanent": True})
    task_id = await harness.create(failing)
    with pytest.raises(TaskFailed):
        await harness.coordinator.result(task_id, EVENT_TIMEOUT_SEC)
    assert await harness.coordinator.cancel_task(task_id) is False
    await harness.coordinator.stop()
    client = await harness.client()
    described = await client.get_workflow_handle(task_id).describe()
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=task_id, run_id=described.run_id),
            workflow_task_finish_event_id=4,
            request_id=harness.queue,
        )
    )
    assert await harness.coordinator.cancel_task(task_id) is True
    await harness.coordinator.start()
    with pytest.raises(TaskCancelled):
        await harness.coordinator.result(task_id, EVENT_TIMEOUT_SEC)
    assert await harness.coordinator.cancel_task(task_id) is False


async def test_workflow_that_is_not_a_task_is_not_changed(harness: Harness) -> None:
    client = await harness.client()
    handle = await client.start_workflow("Other", id=f"{harness.queue}-other", task_queue="nobody")
    assert await harness.coordinator.cancel_task(handle.id) is False
    described = await handle.describe()
    assert described.status is WorkflowExecutionStatus.RUNNING
    assert not any(
        e.HasField("workflow_execution_cancel_requested_event_attributes")
        for e in (await handle.fetch_history()).events
    )
    await handle.terminate()


async def test_function_replaced_by_an_invalid_object_fails_the_node_with_a_clear_message(
    harness: Harness,
) -> None:
    engine: Coordinator = await harness.engine()
    engine.adapters["broken"] = "no function"
    task_id = await harness.create({**NOOP, "io": {"fn": "broken"}})
    with pytest.raises(TaskFailed, match="adapter_error: io.fn_args do not match the parameters of 'broken'"):
        await engine.result(task_id, EVENT_TIMEOUT_SEC)
    await eventually(lambda: harness.db.tasks.find_one({"id": task_id, "status": "failed"}))
