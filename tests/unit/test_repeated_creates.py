"""`create_task` with the id of an existing task while MongoDB is unavailable: Temporal alone knows the
input of the task."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.common import TypedSearchAttributes
from temporalio.exceptions import WorkflowAlreadyStartedError

from flowkit import limits
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient
from flowkit.connection import Namespace
from flowkit.errors import StoreUnavailable, TaskIdTaken
from flowkit.models import temporal_names
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from temporalio.client import Client

RUNNING, COMPLETED, FAILED = (
    WorkflowExecutionStatus.RUNNING,
    WorkflowExecutionStatus.COMPLETED,
    WorkflowExecutionStatus.FAILED,
)
GRAPH: dict[str, Any] = {"nodes": [{"node_id": "a", "type": "coordinator_fn"}]}
SAME: dict[str, Any] = {"nodes": [{"type": "coordinator_fn", "node_id": "a"}]}
OTHER: dict[str, Any] = {"nodes": [{"node_id": "b", "type": "coordinator_fn"}]}


class Temporal:
    """A client of the workflow of one task, and its description and handle."""

    task_queue = "q"
    workflow_type = temporal_names.TASK
    status = RUNNING
    typed_search_attributes = TypedSearchAttributes.empty

    def __init__(self) -> None:
        self.memo: dict[str, Any] | None = None

    async def start_workflow(
        self, kind: str, _: object, *, id: str, memo: dict[str, Any], **__: object
    ) -> None:
        """Start the workflow once."""
        if self.memo is not None:
            raise WorkflowAlreadyStartedError(id, kind)
        self.memo = memo

    def get_workflow_handle(self, *_: object, **__: object) -> Temporal:
        """Return the handle of the workflow."""
        return self

    async def describe(self) -> Temporal:
        """Return the description of the workflow."""
        return self

    async def memo_value(self, name: str, default: object) -> object:
        """Return an entry of the memo."""
        return (self.memo or {}).get(name, default)


@pytest.fixture
async def temporal(monkeypatch: pytest.MonkeyPatch) -> Temporal:
    """A Temporal that has started a task, and a MongoDB that then has become unavailable."""

    async def no_bridge(*_: object) -> list[str]:
        return []

    async def unavailable(*_: object, **__: object) -> None:
        raise StoreUnavailable("the primary stepped down")

    async def namespace_id(_: Namespace) -> str:
        return "n"

    monkeypatch.setattr("flowkit.client.inputs.bridged_problems", no_bridge)
    monkeypatch.setattr(Namespace, "id", namespace_id)
    found = Temporal()
    await create(found, {"day": 1}, GRAPH)
    for kind, name in ((TaskQueries, "input_digest"), (TaskStore, "database_id"), (TaskStore, "insert_task")):
        monkeypatch.setattr(kind, name, unavailable)
    return found


async def create(temporal: Temporal, params: dict[str, Any], graph: dict[str, Any]) -> str:
    """Create the task with a client that knows nothing yet."""
    client = TaskClient(cast("Client", temporal), TaskStore(memory_database()), queue="q")
    return await client.create_task(params=params, graph=graph, task_id="t")


@pytest.mark.parametrize("status", [RUNNING, COMPLETED])
@pytest.mark.parametrize("is_large", [False, True])
async def test_same_input_returns_the_id_and_another_one_is_named(
    temporal: Temporal,
    status: WorkflowExecutionStatus,
    is_large: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    temporal.status = status
    if is_large:
        monkeypatch.setattr(limits, "INPUT_NODES", 0)
    assert await create(temporal, {"day": 1.0}, SAME) == "t"
    assert caplog.messages == []
    with pytest.raises(TaskIdTaken, match="started with other params; choose another id"):
        await create(temporal, {}, GRAPH)
    with pytest.raises(TaskIdTaken, match="started with other params and another graph"):
        await create(temporal, {"day": 2}, OTHER)


async def test_large_task_that_failed_or_has_no_memo_needs_mongodb(
    temporal: Temporal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 0)
    temporal.status = FAILED
    with pytest.raises(StoreUnavailable):
        await create(temporal, {"day": 1}, GRAPH)
    temporal.status, temporal.memo = RUNNING, {}
    with pytest.raises(StoreUnavailable):
        await create(temporal, {"day": 1}, GRAPH)


async def test_input_of_a_task_without_a_memo_is_known_only_to_mongodb(temporal: Temporal) -> None:
    temporal.memo = {}
    with pytest.raises(StoreUnavailable):
        await create(temporal, {"day": 1}, GRAPH)
