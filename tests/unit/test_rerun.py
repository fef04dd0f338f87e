"""A rerun of a task that has just ended, while its workflow still closes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus

from flowkit.adapters.tasks.fields import input_digest, new_task
from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskClient, steering
from flowkit.connection import Namespace
from flowkit.errors import ActionRejected
from flowkit.models import RetryPolicy, temporal_names
from flowkit.models.ownership import INPUT_MEMO, MEMO, Owner, OwnerKind
from flowkit.testing import memory_database

CLOSED = datetime.now(UTC)
MARKER = Owner(kind=OwnerKind.ADMISSION, deployment="d", id="7-1")
GRAPH: dict[str, Any] = {"nodes": [{"node_id": "a", "type": "quick", "depends_on": []}]}


@dataclass
class Description:
    """What Temporal says about the latest run of a workflow."""

    run_id: str
    close_time: datetime | None = None
    task_queue: str = "of the task"
    workflow_type: str = temporal_names.TASK

    @property
    def status(self) -> WorkflowExecutionStatus:
        """Whether the run is open."""
        return WorkflowExecutionStatus.FAILED if self.close_time else WorkflowExecutionStatus.RUNNING

    async def memo_value(self, *_: object) -> Any:
        """Return the marker of the workflow."""
        return MARKER.as_memo()[MEMO]


@dataclass
class Temporal:
    """A client whose workflow closes after some looks at it."""

    looks: list[Description]
    started: list[tuple[int, str]] = field(default_factory=list)
    """How many looks were left at each start of a workflow, and the task queue."""
    memos: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    """The inputs of the workflows."""

    def get_workflow_handle(self, task_id: str, **_: object) -> Temporal:
        """Return the handle of the workflow."""
        return self

    async def describe(self) -> Description:
        """Return the next description; the last one again and again."""
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    async def start_workflow(
        self, name: str, given: object, *, task_queue: str, memo: Any, **options: object
    ) -> None:
        """Note a start."""
        self.started.append((len(self.looks), task_queue))
        self.memos.append(memo)
        self.inputs.append(given)


async def rerun(temporal: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Run a task again that has ended, and return the number of the new run."""

    async def namespace_id(_: Namespace) -> str:
        return "n"

    monkeypatch.setattr(Namespace, "id", namespace_id)
    db: Any = memory_database()
    task = new_task("t", {}, GRAPH, 0.0, namespace_id="n", database_id="d")
    task["graph"]["nodes"][0]["status"] = "failed"
    ended = {"status": "failed", "finished_at": CLOSED, "closed_run_id": "first", "run_seq": 1}
    await db.tasks.insert_one({**task, **ended})
    await db.flowkit_meta.insert_one({"_id": "deployment", "value": "d"})
    made = await TaskClient(temporal, TaskStore(db), queue="of the client").steering.rerun("t", **options)
    return int(made["run_seq"])


@pytest.mark.parametrize(
    "looks",
    [
        [Description("first", CLOSED)],
        [Description("first"), Description("first"), Description("first", CLOSED)],
        [Description("first"), Description("of another rerun")],
    ],
)
async def test_rerun_waits_until_the_workflow_of_the_ended_run_has_closed(
    looks: list[Description], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporal = Temporal(looks)
    assert await rerun(temporal, monkeypatch) == 2
    assert temporal.started == [(1, "of the task")]
    assert temporal.memos == [MARKER.as_memo() | {INPUT_MEMO: input_digest({}, GRAPH)}]


async def test_a_rerun_has_new_limits_of_those_nodes_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    temporal = Temporal([Description("first", CLOSED)])
    limits = {"a": {"timeout_sec": 7.0, "retry_policy": {"max": 3}}, "b": {"timeout_sec": 8.0}}
    await rerun(temporal, monkeypatch, limits=limits)
    [given] = temporal.inputs
    changed = given["rerun"]["changed"]
    assert [*changed] == ["a"]
    assert (changed["a"]["timeout_sec"], changed["a"]["retry_policy"]["max"]) == (7.0, 3)


async def test_a_rerun_changes_no_node_that_has_the_limits_already(monkeypatch: pytest.MonkeyPatch) -> None:
    temporal = Temporal([Description("first", CLOSED)])
    await rerun(temporal, monkeypatch, limits={"a": {"retry_policy": {"max": RetryPolicy().max}}})
    assert temporal.inputs[0]["rerun"]["changed"] == {}


async def test_rerun_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "_CLOSING_SEC", 0.0)
    temporal = Temporal([Description("first")])
    with pytest.raises(ActionRejected, match="no engine has closed its workflow"):
        await rerun(temporal, monkeypatch)
    assert temporal.started == []
