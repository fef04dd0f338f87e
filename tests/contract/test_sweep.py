"""What a sweep does with each document, depending on what Temporal reports about its workflow."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.any_pb2 import Any as Any_
from temporalio.api.common.v1 import GrpcStatus
from temporalio.api.errordetails.v1 import NamespaceNotFoundFailure
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode
from tests.contract.builders import FIRST_RUN, RUN, new_task, opening, stored
from tests.integration.harness import eventually

from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.engine.sweep import Sweep
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from flowkit.connection import Namespace

OWN, OTHER = "ns-own", "ns-other"
Status = WorkflowExecutionStatus


@dataclass(kw_only=True)
class Workflow:
    """A workflow as Temporal describes it."""

    status: WorkflowExecutionStatus
    run_id: str = RUN
    first_run_id: str = FIRST_RUN
    cause: Exception | None = None


@dataclass
class FakeTemporal:
    """A server with these workflows, whose namespace has the id OWN."""

    workflows: dict[str, Workflow] = field(default_factory=dict)
    error: RPCStatusCode | None = None
    details: bytes = b""
    asked: list[str] = field(default_factory=list)

    async def id(self) -> str:
        """Return the id of the namespace."""
        return OWN

    def get_workflow_handle(self, task_id: str, run_id: str | None = None) -> _Handle:
        """Return a handle, as a client does."""
        return _Handle(self, task_id, run_id)


@dataclass
class _Handle:
    server: FakeTemporal
    task_id: str
    run_id: str | None

    async def describe(self) -> Any:
        self.server.asked.append(self.task_id)
        if self.server.error is not None:
            raise RPCError("away", self.server.error, self.server.details)
        found = self.server.workflows.get(self.task_id)
        if found is None or self.run_id not in (None, found.run_id):
            raise RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")
        info = SimpleNamespace(first_run_id=found.first_run_id)
        raw = SimpleNamespace(workflow_execution_info=info)
        return SimpleNamespace(id=self.task_id, run_id=found.run_id, status=found.status, raw_description=raw)

    async def result(self, *, follow_runs: bool) -> None:
        assert not follow_runs
        cause = self.server.workflows[self.task_id].cause
        assert cause is not None
        raise WorkflowFailureError(cause=cause)


@pytest.fixture
def temporal() -> FakeTemporal:
    """A server without workflows."""
    return FakeTemporal()


@pytest.fixture
async def tasks() -> TaskStore:
    """An empty store."""
    return TaskStore(memory_database())


def sweep_of(tasks: TaskStore, temporal: FakeTemporal, second_check_sec: float = 0.0) -> Sweep:
    """Return a sweep that does not wait between two checks."""
    client: Any = temporal
    namespace: Namespace = client
    return Sweep(client, tasks, namespace, every_sec=60, second_check_sec=second_check_sec)


async def open_one(tasks: TaskStore, task_id: str, namespace_id: str = "") -> None:
    """Insert a running task whose document was last written a minute ago."""
    await tasks.open_task(opening("a", task_id=task_id), namespace_id=namespace_id)
    await tasks.database.tasks.update_one({"id": task_id}, {"$set": {"updated_at": seconds_ago(61)}})


def seconds_ago(seconds: float) -> Any:
    """Return a date in the past."""
    from datetime import UTC, datetime, timedelta

    return datetime.now(UTC) - timedelta(seconds=seconds)


async def reason(tasks: TaskStore, task_id: str) -> str | None:
    """Return the reason for which the task document was closed; None if it is open."""
    found: str | None = (await stored(tasks.database, task_id))["reason"]
    return found


async def twice(sweep: Sweep) -> list[str]:
    """Run two passes and return what they close."""
    return [*await sweep.once(), *await sweep.once()]


# --- workflows that do not exist in Temporal --------------------------------------------------------------------


async def test_no_task_is_lost_while_temporal_does_not_find_the_namespace(
    tasks: TaskStore, temporal: FakeTemporal
) -> None:
    detail = Any_()
    detail.Pack(NamespaceNotFoundFailure(namespace="default"))
    status = GrpcStatus(code=5, message="Namespace default is not found.", details=[detail])
    temporal.error, temporal.details = RPCStatusCode.NOT_FOUND, status.SerializeToString()
    await open_one(tasks, "running", OWN)
    sweep = sweep_of(tasks, temporal)
    for _ in range(2):
        with pytest.raises(RPCError):
            await sweep.once()
    assert await reason(tasks, "running") is None


async def test_task_of_the_same_namespace_is_lost_at_the_second_check(
    tasks: TaskStore, temporal: FakeTemporal
) -> None:
    await open_one(tasks, "gone", OWN)
    sweep = sweep_of(tasks, temporal)
    assert await sweep.once() == []
    assert await sweep.once() == ["gone"]
    assert await reason(tasks, "gone") == "lost"


@pytest.mark.parametrize("namespace_id", [OTHER, ""], ids=["of another namespace", "of an earlier release"])
async def test_task_without_or_of_another_namespace_is_never_lost(
    tasks: TaskStore, temporal: FakeTemporal, namespace_id: str
) -> None:
    await open_one(tasks, "elsewhere", namespace_id)
    assert await twice(sweep_of(tasks, temporal)) == []
    assert await reason(tasks, "elsewhere") is None


async def test_two_checks_in_quick_succession_count_as_one(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await open_one(tasks, "gone", OWN)
    assert await twice(sweep_of(tasks, temporal, second_check_sec=60)) == []


async def test_workflow_that_reappears_resets_the_count_of_checks(
    tasks: TaskStore, temporal: FakeTemporal
) -> None:
    await open_one(tasks, "flickers", OWN)
    sweep = sweep_of(tasks, temporal)
    assert await sweep.once() == []
    temporal.workflows["flickers"] = Workflow(status=Status.RUNNING)
    assert await sweep.once() == []
    temporal.workflows.clear()
    assert await sweep.once() == []
    assert await sweep.once() == ["flickers"]


async def test_recent_document_waits_for_its_workflow(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await tasks.open_task(opening("a", task_id="young"), namespace_id=OWN)
    await tasks.database.tasks.update_one({"id": "young"}, {"$set": {"updated_at": seconds_ago(30)}})
    assert await twice(sweep_of(tasks, temporal)) == []


async def test_document_of_a_copied_database_is_not_swept(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await tasks.insert_task(new_task("a", task_id="copy") | {"namespace_id": OWN, "database_id": "other"})
    assert await twice(sweep_of(tasks, temporal)) == []
    assert temporal.asked == []


# --- workflows that exist in Temporal ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        (Workflow(status=Status.RUNNING), None),
        (Workflow(status=Status.CONTINUED_AS_NEW), None),
        (Workflow(status=Status.TERMINATED), "terminated"),
        (Workflow(status=Status.TIMED_OUT), "timed_out"),
        (Workflow(status=Status.COMPLETED), "lost"),
        (Workflow(status=Status.TERMINATED, run_id="run-2"), "terminated"),
        (Workflow(status=Status.TERMINATED, run_id="run-2", first_run_id="other"), None),
        (Workflow(status=Status.TERMINATED, first_run_id=""), "terminated"),
    ],
    ids=["running", "continued", "terminated", "timed out", "completed", "reset", "another", "old server"],
)
@pytest.mark.parametrize("namespace_id", [OWN, ""], ids=["own", "earlier release"])
async def test_document_ends_like_its_own_workflow(
    tasks: TaskStore,
    temporal: FakeTemporal,
    workflow: Workflow,
    expected: str | None,
    namespace_id: str,
) -> None:
    await open_one(tasks, "t", namespace_id)
    temporal.workflows["t"] = workflow
    await sweep_of(tasks, temporal).once()
    assert await reason(tasks, "t") == expected


async def test_task_whose_id_a_later_workflow_uses_is_lost(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await open_one(tasks, "t", OWN)
    temporal.workflows["t"] = Workflow(status=Status.RUNNING, run_id="later", first_run_id="later")
    assert await twice(sweep_of(tasks, temporal)) == ["t"]
    assert await reason(tasks, "t") == "lost"


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("invalid_graph", "node 'a' calls nothing", "invalid_graph: node 'a' calls nothing"),
        ("task_id_taken", "choose another id", "task_id_taken: choose another id"),
        ("task_failed", "node 'a' failed: boom", "node 'a' failed: boom"),
        (None, "x" * 3_000, "x" * 1_999 + "…"),
    ],
)
async def test_reason_of_a_failed_workflow_is_recorded(
    tasks: TaskStore, temporal: FakeTemporal, kind: str | None, message: str, expected: str
) -> None:
    await tasks.insert_task(new_task("a", task_id="t") | {"namespace_id": OWN})
    cause = ApplicationError(message, type=kind)
    temporal.workflows["t"] = Workflow(status=Status.FAILED, cause=cause)
    assert await sweep_of(tasks, temporal).once() == ["t"]
    assert await reason(tasks, "t") == expected


async def test_queued_document_without_a_namespace_is_not_closed(
    tasks: TaskStore, temporal: FakeTemporal
) -> None:
    await tasks.insert_task(new_task("a", task_id="t"))
    temporal.workflows["t"] = Workflow(status=Status.TERMINATED)
    assert await twice(sweep_of(tasks, temporal)) == []


# --- errors that do not stop the sweep --------------------------------------------------------------------------

MALFORMED: list[dict[str, Any]] = [
    {"status": "running"},
    {"id": 7, "status": "running", "namespace_id": OWN},
    {"id": "no nodes", "status": "running", "namespace_id": OWN, "updated_at": "yesterday"},
    {"id": "no graph", "status": "queued", "graph": 3, "updated_at": None},
]


async def test_malformed_documents_are_logged_once_and_do_not_stop_the_sweep(
    tasks: TaskStore, temporal: FakeTemporal, caplog: pytest.LogCaptureFixture
) -> None:
    await tasks.database.tasks.insert_many([{**each} for each in MALFORMED])
    await open_one(tasks, "sound", OWN)
    temporal.workflows["sound"] = Workflow(status=Status.TERMINATED)
    sweep = sweep_of(tasks, temporal)
    assert await twice(sweep) == ["sound"]
    assert await reason(tasks, "sound") == "terminated"
    reported = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(reported) == 1, "the document without an id"
    assert sweep.health.last_error == "'id'"


async def test_unreachable_server_is_logged_and_the_sweep_continues(
    tasks: TaskStore, temporal: FakeTemporal
) -> None:
    await open_one(tasks, "t", OWN)
    temporal.workflows["t"] = Workflow(status=Status.TERMINATED)
    temporal.error = RPCStatusCode.UNAVAILABLE
    client: Any = temporal
    sweep = Sweep(client, tasks, client, every_sec=0.001)
    task = asyncio.create_task(sweep.run())

    async def noted() -> bool:
        return sweep.health.last_error == "away"

    await eventually(noted)
    assert sweep.health.running
    temporal.error = None

    async def closed() -> bool:
        return await reason(tasks, "t") == "terminated" and sweep.health.last_ok_at is not None

    await eventually(closed)
    task.cancel()
    await asyncio.wait([task])
    assert not sweep.health.running
    assert await OpenTasks(tasks.database).take_turn(OWN, "the next one", 1)


async def test_only_one_of_two_engines_sweeps(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await open_one(tasks, "t", OWN)
    first, second = sweep_of(tasks, temporal), sweep_of(tasks, temporal)
    await first.once()
    await second.once()
    assert temporal.asked == ["t"]
