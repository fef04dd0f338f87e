"""What the workflow sends to its task document stays within Temporal's limit for payloads, whatever the task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow

from flowkit.actions.plans import Audit, Plan
from flowkit.actions.records import SATISFY, Satisfy
from flowkit.graph.validation import parse_graph
from flowkit.limits import ACTION_TEXT_CHARS, APPLIED_ACTIONS, MAX_NODES, REPORT_BYTES
from flowkit.models import (
    CloseTask,
    NodeRecord,
    NodeState,
    NodeStatus,
    Opened,
    RecordTask,
    Settings,
    SkipReason,
    StatusChange,
    TaskStatus,
)
from flowkit.models.actions import ActionRecord, AppliedAction, PausedScope
from flowkit.workflows import document as task_document
from flowkit.workflows.display.task_status import StatusPublisher, task_result
from flowkit.workflows.document import TaskDocument, may_be_local
from flowkit.workflows.payloads import json_size, without_defaults
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import TaskState

LARGEST_PAYLOAD = 2_000_000


class Sent:
    """Collects what the workflow sends."""

    def __init__(self) -> None:
        self.records: list[RecordTask] = []
        self.closes: list[CloseTask] = []
        self.finished: set[int] = set()

    async def record(self, record: RecordTask, of_nodes: int) -> list[int]:
        """Collect a write of nodes, and find those in `finished`."""
        self.records.append(record)
        return [node.index for node in record.nodes if node.index in self.finished]

    async def close(self, close: CloseTask, nodes: int, *, is_local: bool) -> bool:
        """Collect the close."""
        self.closes.append(close)
        return True


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    collected = Sent()
    monkeypatch.setattr(task_document, "record_document", collected.record)
    monkeypatch.setattr(task_document, "close_document", collected.close)
    monkeypatch.setattr(workflow, "info", lambda: INFO)
    monkeypatch.setattr(workflow, "now", lambda: datetime(2026, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(workflow, "memo_value", lambda key, default: default)
    monkeypatch.setattr(workflow, "wait", asyncio.wait)
    return collected


INFO = SimpleNamespace(
    workflow_id="t" * 200, run_id="r" * 36, namespace="default", get_current_history_length=lambda: 1
)


def ended(count: int, *, finished: int = 0, **state: Any) -> tuple[TaskDocument, Scheduler]:
    """Return the document of a task whose first `finished` nodes finished, and whose other nodes have this state."""
    raw = {"nodes": [{"node_id": f"n{index:019}", "type": "r"} for index in range(count)]}
    graph = parse_graph(raw, max_nodes=None, max_bytes=None)
    nodes = [NodeState(status=NodeStatus.FINISHED, epoch=1) for _ in range(finished)]
    nodes += [NodeState(**state) for _ in range(count - finished)]
    scheduler = Scheduler(graph, nodes)
    opened = Opened(run_seq=1, settings=Settings(), created_at=0.5)
    task = TaskState(
        params={},
        graph=raw,
        opened=opened,
        nodes=nodes,
        status_history=[StatusChange(from_=None, to="running", at=0.5)],
    )
    return TaskDocument(task, scheduler, StatusPublisher(task, graph, scheduler)), scheduler


def applied_in(document: TaskDocument) -> list[AppliedAction]:
    """Return the list of the applied actions, to change it as the workflow does."""
    return document._state.actions.applied


async def close(document: TaskDocument) -> None:
    """Close the document as the workflow does."""
    await document.write_many_unfinished()
    await document.close(task_result(INFO.workflow_id, TaskStatus.CANCELLED, []), "r" * 1_000, local=False)


@pytest.mark.slow
async def test_every_payload_of_the_largest_cancelled_task_fits(sent: Sent) -> None:
    document, _ = ended(
        MAX_NODES, finished=1, status=NodeStatus.CANCELLED, skip_reason=SkipReason.TASK_CANCELLED
    )
    await close(document)
    assert {node.index for part in sent.records for node in part.nodes} == set(range(1, MAX_NODES))
    assert max(json_size(without_defaults(part)) for part in sent.records) <= REPORT_BYTES
    [closed] = sent.closes
    assert closed.unfinished == {NodeStatus.CANCELLED: list(range(1, MAX_NODES))}
    assert json_size(without_defaults(closed)) < LARGEST_PAYLOAD / 10


async def test_close_of_few_unfinished_nodes_carries_them(sent: Sent) -> None:
    document, _ = ended(9, finished=2, status=NodeStatus.FAILED, last_error="boom")
    await close(document)
    assert sent.records == []
    [closed] = sent.closes
    assert [(node.index, node.last_error) for node in closed.nodes] == [(i, "boom") for i in range(2, 9)]
    assert closed.unfinished == {}


SMALL = RecordTask(
    task_id="t", run_id="r", run_seq=1, at=0.0, nodes=[], status=TaskStatus.RUNNING, status_history=[]
)
PAUSED = ActionRecord(revision=1, paused=[PausedScope(scope="task", since=0.0)])


def changed(count: int = 1, **fields: Any) -> list[NodeRecord]:
    """Return transitions of nodes."""
    return [
        NodeRecord(index=i, node_id=f"n{i}", status=NodeStatus.FAILED, epoch=1, **fields)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("fields", "of_nodes", "local"),
    [
        ({}, 1, True),
        ({"nodes": changed(20)}, 500, True),
        ({"nodes": changed(21)}, 500, False),
        ({"nodes": changed()}, 501, False),
        ({"nodes": changed(last_error="e" * 900_000)}, 1, False),
        ({"nodes": changed(cancel_reason="deadline")}, 1, True),
        ({"nodes": changed(cancel_reason="interrupted")}, 1, False),
        ({"cancel_reason": "enough"}, 1, False),
        ({"silent": {0: "n0"}}, 1, False),
        ({"heard": [0]}, 1, False),
        ({"actions": PAUSED}, 1, False),
    ],
)
def test_only_quick_writes_that_follow_from_the_history_are_local(
    fields: dict[str, Any], of_nodes: int, local: bool
) -> None:
    assert may_be_local(replace(SMALL, **fields), of_nodes) is local


async def test_each_write_of_an_action_is_small_and_the_close_has_the_list(sent: Sent) -> None:
    document, _ = ended(1, status=NodeStatus.RUNNING)
    audit = Audit(entries=applied_in(document))
    for number in range(APPLIED_ACTIONS + 5):
        action = Satisfy(prerequisite=f"data:{number}", reason="the nightly export has arrived", by="airflow")
        audit.add(SATISFY, action, Plan(what=action.prerequisite), float(number), f"update-{number}")
        document.write_actions()
        await document.flush()
    assert [[each.revision for each in part.actions.applied] for part in sent.records] == [
        [number + 1] for number in range(APPLIED_ACTIONS + 5)
    ]
    assert max(json_size(without_defaults(part)) for part in sent.records) < 1_000
    await close(document)
    assert [each.revision for each in sent.closes[0].applied] == [*range(6, APPLIED_ACTIONS + 6)]


async def test_each_record_is_later_than_the_one_before_also_if_the_clock_stands_still(sent: Sent) -> None:
    """The server's clock may be set back between two runs.

    The document takes an earlier record for one that is late.
    """
    document, _ = ended(1, status=NodeStatus.RUNNING)
    for _ in range(3):
        document.write_node(0)
        await document.flush()
    first, second, third = (each.at for each in sent.records)
    assert first < second < third == pytest.approx(first + 0.002)


async def test_open_nodes_that_a_write_finds_finished_are_known(sent: Sent) -> None:
    document, scheduler = ended(4, finished=1, status=NodeStatus.DEFERRED, epoch=2)
    scheduler.states[1].first_epoch = 2  # no attempt since the reset
    sent.finished = {1, 2, 3}
    document.write_attempted()
    await document.flush()
    assert [node.index for node in sent.records[0].nodes] == [2, 3]
    assert document.finished() == [2, 3]
    scheduler.end(3, NodeStatus.FINISHED)
    assert document.finished() == [2]


@pytest.mark.parametrize("again", [{"epoch": 3}, {"first_epoch": 2}, {"kept": True}])
async def test_node_that_starts_again_after_a_write_has_found_it_finished_is_not_finished(
    sent: Sent, again: dict[str, Any]
) -> None:
    document, scheduler = ended(1, status=NodeStatus.CANCELLING, epoch=2)
    sent.finished = {0}
    document.write_node(0)
    await document.flush()
    assert document.finished() == [0]
    for name, value in again.items():
        setattr(scheduler.states[0], name, value)
    assert document.finished() == []


async def test_close_omits_early_actions_with_long_texts(sent: Sent) -> None:
    document, _ = ended(1, status=NodeStatus.RUNNING)
    text = "\N{GRINNING FACE}" * ACTION_TEXT_CHARS
    applied_in(document).extend(
        AppliedAction(revision=number, action=SATISFY, at=1.0, by=text, reason=text, what=text)
        for number in range(1, APPLIED_ACTIONS + 1)
    )
    await close(document)
    assert sent.closes[0].applied[-1].revision == APPLIED_ACTIONS
    assert json_size(without_defaults(sent.closes[0])) < LARGEST_PAYLOAD / 4
