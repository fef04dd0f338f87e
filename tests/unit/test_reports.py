"""The reports of the workflow stay within their byte budgets, and say when something is omitted."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from tests.unit import largest_tasks
from tests.unit.graphs import node

from flowkit.graph.validation import parse_graph
from flowkit.limits import HANDLED_FAILURES_BYTES, REPORT_BYTES
from flowkit.models import (
    Node,
    NodeRecord,
    NodeState,
    NodeStatus,
    RecordTask,
    SkipReason,
    StatusChange,
    TaskResult,
    TaskStatus,
)
from flowkit.workflows.display.task_status import status_view, task_result
from flowkit.workflows.document import (
    fit_into_close,
    node_record,
    split_record,
)
from flowkit.workflows.payloads import json_size, without_defaults
from flowkit.workflows.scheduling.scheduler import Scheduler

HISTORY = [StatusChange(from_="running", to="deferred", at=1_763_788_905.123456)] * 100
COMMON: dict[str, Any] = {"task_id": "t" * 200, "run_id": "r" * 36, "run_seq": 1, "at": 0.5}


@cache
def failed_scheduler_of(shape: str) -> Scheduler:
    """The largest task that validation accepts, in which every node has failed."""
    return largest_tasks.failed_scheduler(
        largest_tasks.many_nodes() if shape == "most nodes" else largest_tasks.longest_ids()
    )[1]


def records(of: Scheduler) -> list[NodeRecord]:
    """Return all nodes of a scheduler as the documents show them."""
    return [node_record(each, of.states[each.index], pulled=True) for each in of.nodes]


def record(nodes: list[NodeRecord], reason: str | None = "hard_fail:x") -> RecordTask:
    """Return a write of these nodes."""
    return RecordTask(
        **COMMON, nodes=nodes, status=TaskStatus.DEFERRED, status_history=HISTORY, cancel_reason=reason
    )


EDGES = pytest.mark.parametrize("shape", ["most nodes", "longest ids"])


@EDGES
def test_large_write_is_split_without_loss(shape: str) -> None:
    nodes = records(failed_scheduler_of(shape))
    parts = split_record(record(nodes))
    assert len(parts) > 10
    assert max(json_size(without_defaults(part)) for part in parts) <= REPORT_BYTES
    assert [each for part in parts for each in part.nodes] == nodes
    assert [part.cancel_reason for part in parts] == ["hard_fail:x", *[None] * (len(parts) - 1)]


def test_failed_nodes_are_written_first_in_a_split_write() -> None:
    nodes = records(failed_scheduler_of("most nodes"))
    nodes[: len(nodes) // 2] = [
        dataclasses.replace(each, status=NodeStatus.CANCELLING) for each in nodes[: len(nodes) // 2]
    ]
    written = [each.status for part in split_record(record(nodes)) for each in part.nodes]
    assert written == sorted(written, key=lambda status: status is not NodeStatus.FAILED)


@pytest.mark.parametrize("count", [0, 1, 400])
def test_write_that_fits_is_not_split(count: int) -> None:
    whole = record(records(failed_scheduler_of("most nodes"))[:count])
    assert (split_record(whole) == [whole]) == (json_size(without_defaults(whole)) <= REPORT_BYTES)
    short = record([dataclasses.replace(each, last_error="no") for each in whole.nodes])
    assert split_record(short) == [short]


@EDGES
def test_result_keeps_the_handled_failures_that_fit_and_counts_the_others(shape: str) -> None:
    handled = failed_scheduler_of(shape).handled_failures
    result = task_result("t", TaskStatus.FINISHED, handled)
    assert HANDLED_FAILURES_BYTES * 0.9 <= json_size(result.handled_failures) <= HANDLED_FAILURES_BYTES
    assert result.handled_failures == handled[: len(result.handled_failures)]
    assert len(result.handled_failures) + result.handled_failures_omitted == len(handled)
    assert task_result("t", TaskStatus.FINISHED, ["a"]).handled_failures_omitted == 0


def test_nodes_fit_into_the_close_up_to_half_of_its_budget() -> None:
    nodes = records(failed_scheduler_of("most nodes"))
    assert not fit_into_close(nodes)
    assert fit_into_close(nodes[:50])


def test_defaults_are_not_sent() -> None:
    (sent,) = without_defaults(record([NodeRecord(index=0, node_id="a", status=NodeStatus.QUEUED, epoch=0)]))[
        "nodes"
    ]
    assert sent == {"index": 0, "node_id": "a", "status": "queued", "epoch": 0}


# --- the query ------------------------------------------------------------------------------------------------------


@EDGES
def test_largest_status_fits_into_its_budget_and_counts_what_is_omitted(shape: str) -> None:
    result = TaskResult(
        task_id="t", status=TaskStatus.FINISHED, handled_failures=failed_scheduler_of(shape).handled_failures
    )
    view = status_view(TaskStatus.FINISHED, failed_scheduler_of(shape), result)
    assert json_size(view) <= REPORT_BYTES
    whole = len(failed_scheduler_of(shape).nodes)
    assert len(view["nodes"]) + view["nodes_omitted"] == whole
    assert len(view["handled_failures"]) + view["handled_failures_omitted"] == whole
    assert view["nodes_omitted"] > 0
    assert view["errors_cut"] == len(view["nodes"])


def test_errors_are_truncated_before_any_node_is_omitted() -> None:
    graph = {"nodes": [node(f"node-{i}", allow_failure=True) for i in range(5_000)]}
    view = status_view(TaskStatus.RUNNING, largest_tasks.failed_scheduler(graph)[1], None)
    assert REPORT_BYTES * 0.9 <= json_size(view) <= REPORT_BYTES
    assert (view["nodes_omitted"], view["errors_cut"]) == (0, 5_000)
    assert all(each["last_error"].endswith("…") for each in view["nodes"])


def test_finished_nodes_are_omitted_before_failed_ones() -> None:
    graph = parse_graph(largest_tasks.longest_ids(), params={})
    states = [
        NodeState(status=NodeStatus.FAILED if i % 10 == 0 else NodeStatus.FINISHED)
        for i in range(len(graph.nodes))
    ]
    view = status_view(TaskStatus.RUNNING, Scheduler(graph, states), None)
    assert view["nodes_omitted"] > 0
    shown = [each["node_id"] for each in view["nodes"] if each["status"] == "failed"]
    assert shown == [each.node_id for each in graph.nodes[::10]]
    order = {each.node_id: each.index for each in graph.nodes}
    places = [order[each["node_id"]] for each in view["nodes"]]
    assert places == sorted(places)


def small(*states: NodeState) -> Scheduler:
    """Return a scheduler for unconnected nodes `n0`, `n1`, … in these states."""
    return Scheduler(parse_graph({"nodes": [node(f"n{i}") for i in range(len(states))]}), list(states))


def test_status_view_shows_the_decisions_of_the_workflow() -> None:
    skipped = NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)
    waiting = NodeState(status=NodeStatus.DEFERRED, epoch=1, next_retry_at=9.5, last_error="flaky: no")
    view = status_view(TaskStatus.RUNNING, small(skipped, waiting), None)
    assert (view["status"], view["handled_failures"]) == ("running", [])
    assert (view["nodes_omitted"], view["handled_failures_omitted"], view["errors_cut"]) == (0, 0, 0)
    assert [(n["node_id"], n["status"], n["skip_reason"]) for n in view["nodes"]] == [
        ("n0", "skipped", "upstream_failed"),
        ("n1", "deferred", None),
    ]
    assert view["nodes"][1] == {
        "node_id": "n1",
        "type": "crawler",
        "status": "deferred",
        "attempt_epoch": 1,
        "last_error": "flaky: no",
        "skip_reason": None,
        "next_retry_at": 9.5,
    }


def test_status_view_works_before_the_scheduler_exists_and_after_the_end() -> None:
    assert status_view(TaskStatus.QUEUED, None, None) == {
        "status": "queued",
        "nodes": [],
        "handled_failures": [],
        "nodes_omitted": 0,
        "handled_failures_omitted": 0,
        "errors_cut": 0,
    }
    result = TaskResult(task_id="t", status=TaskStatus.FINISHED, handled_failures=["a"])
    assert status_view(TaskStatus.FINISHED, None, result)["handled_failures"] == ["a"]


@pytest.mark.parametrize(
    "status, code, expected",
    [
        (NodeStatus.FAILED, "upstream_failed", True),
        (NodeStatus.FAILED, "torn", False),
        (NodeStatus.DEFERRED, "upstream_failed", False),
    ],
)
def test_record_says_that_a_node_failed_after_its_attempt_finished(
    status: NodeStatus, code: str, expected: bool
) -> None:
    state = NodeState(status=status, epoch=1, reason_code=code)
    assert node_record(Node(node_id="a", index=0, type="t"), state, pulled=False).after_finish is expected
