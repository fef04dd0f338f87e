"""How a task's state is told to the outside."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.limits import CLOSE_ERRORS_CHARS, LAST_ERROR_CHARS
from flowkit.models import NodeState, NodeStatus, SkipReason, StatusChange, TaskResult, TaskStatus
from flowkit.workflows import endings
from flowkit.workflows.graph import Walk
from flowkit.workflows.validation import parse_graph

FAILED = NodeState(status=NodeStatus.FAILED, epoch=1, reason_code="flaky", last_error="flaky: no")


def walk(*states: NodeState, **graph: Any) -> Walk:
    """A walk over unconnected nodes `n0`, `n1`, … in these states."""
    nodes = [node(f"n{i}") for i in range(len(states))]
    return Walk(parse_graph({"nodes": nodes, **graph}), list(states))


def test_a_task_that_failed_hard_is_stopped_for_the_failures_code() -> None:
    at = walk(NodeState(), FAILED)
    assert endings.stop_reason(at.hard_failure, at.states, "ignored") == "hard_fail:flaky"


@pytest.mark.parametrize("said, reason", [("enough", "enough"), ("", "user_request"), (None, "user_request")])
def test_a_cancelled_task_is_stopped_for_what_the_canceller_said(said: str | None, reason: str) -> None:
    assert endings.stop_reason(None, [], said) == reason


def test_the_failure_text_names_the_first_failed_node_and_counts_the_others() -> None:
    assert endings.failure_text(walk(NodeState(), FAILED)) == "node 'n1' failed: flaky: no"
    others = walk(FAILED, FAILED, NodeState(), FAILED, on_node_failure="continue")
    assert endings.failure_text(others) == "node 'n0' failed: flaky: no (and 2 more failed nodes)"


def test_a_long_failure_text_is_cut_before_the_count() -> None:
    long = NodeState(status=NodeStatus.FAILED, last_error="x" * 9_000)
    text = endings.failure_text(walk(long, long, on_node_failure="continue"))
    assert text.endswith("x (and 1 more failed nodes)")
    assert len(text) < LAST_ERROR_CHARS + 50


OPEN: list[tuple[list[NodeStatus], TaskStatus]] = [
    ([NodeStatus.QUEUED], TaskStatus.RUNNING),
    ([NodeStatus.DEFERRED, NodeStatus.QUEUED], TaskStatus.DEFERRED),
    ([NodeStatus.DEFERRED, NodeStatus.RUNNING], TaskStatus.RUNNING),
    ([NodeStatus.DEFERRED, NodeStatus.FINISHED], TaskStatus.DEFERRED),
    ([NodeStatus.FINISHED], TaskStatus.RUNNING),
]


@pytest.mark.parametrize("statuses, status", OPEN)
def test_a_task_is_deferred_while_nothing_runs_and_a_node_waits(
    statuses: list[NodeStatus], status: TaskStatus
) -> None:
    assert endings.open_status(walk(*(NodeState(status=each) for each in statuses))) is status


def test_few_errors_keep_their_length() -> None:
    states = [NodeState(last_error="x" * LAST_ERROR_CHARS) for _ in range(10)]
    assert endings.error_room(states)[1] is False
    assert endings.error_room([NodeState()]) == (CLOSE_ERRORS_CHARS, False)


def test_many_errors_share_the_room_that_there_is() -> None:
    states = [NodeState(last_error="x" * LAST_ERROR_CHARS) for _ in range(1_000)]
    room, cut = endings.error_room(states)
    assert (room, cut) == (200, True)
    assert endings.error_room(states * 5) == (80, True)


def attributes(registered: tuple[str, ...], *statuses: str, name: str | None = "g") -> dict[str, Any]:
    """Search attributes set after the last of these statuses, by their names."""
    graph = parse_graph({"nodes": [node()], **({"name": name} if name else {})})
    steps = zip(["queued", *statuses], statuses, strict=False)
    history = [StatusChange(from_=None, to="queued", at=0.0)]
    history += [StatusChange(from_=before, to=after, at=0.0) for before, after in steps]
    return {u.key.name: u.value for u in endings.search_attributes(registered, history, graph, {})}


def test_only_registered_search_attributes_are_set() -> None:
    assert attributes(("FlowkitPipeline",), "running") == {"FlowkitPipeline": "g"}
    assert attributes(("FlowkitStatus",), "running", "deferred") == {"FlowkitStatus": "deferred"}
    assert attributes((), "running", "deferred") == {}
    assert attributes(endings.SEARCH_ATTRIBUTES, "running", name=None) == {}


TOLD: list[tuple[list[str], dict[str, str]]] = [
    (["running"], {"FlowkitPipeline": "g"}),
    (["running", "finished"], {}),
    (["running", "cancelled"], {}),
    (["running", "deferred"], {"FlowkitStatus": "deferred"}),
    (["running", "deferred", "running"], {"FlowkitStatus": "running"}),
    (["running", "deferred", "running", "finished"], {"FlowkitStatus": "finished"}),
    (["running", "failed"], {"FlowkitStatus": "failed"}),
]


@pytest.mark.parametrize("statuses, told", TOLD, ids=lambda each: "-".join(each))
def test_the_pipeline_is_told_once_and_the_status_as_soon_as_it_says_more_than_temporals(
    statuses: list[str], told: dict[str, str]
) -> None:
    assert attributes(endings.SEARCH_ATTRIBUTES, *statuses) == told


NAMES: list[tuple[str | None, dict[str, Any], str | None]] = [
    ("g", {}, "g"),
    ("g", {"pipeline_name": "p"}, "p"),
    ("g", {"pipeline_name": 7}, "g"),
    ("g", {"pipeline_name": ""}, "g"),
    (None, {}, None),
    ("", {}, None),
    ("g" * 300, {}, "g" * 200),
]


@pytest.mark.parametrize("graph_name, params, name", NAMES)
def test_a_task_is_called_by_its_pipeline_or_its_graph(
    graph_name: str | None, params: dict[str, Any], name: str | None
) -> None:
    assert endings.pipeline_name(graph_name, params) == name


def test_the_status_view_tells_what_the_workflow_decided() -> None:
    skipped = NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)
    waiting = NodeState(status=NodeStatus.DEFERRED, epoch=1, next_retry_at=9.5, last_error="flaky: no")
    view = endings.status_view(TaskStatus.RUNNING, walk(skipped, waiting), None)
    assert (view["status"], view["handled_failures"]) == ("running", [])
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


def test_the_status_view_works_before_the_walk_and_after_the_end() -> None:
    assert endings.status_view(TaskStatus.QUEUED, None, None) == {
        "status": "queued",
        "nodes": [],
        "handled_failures": [],
    }
    result = TaskResult(task_id="t", status=TaskStatus.FINISHED, handled_failures=["a"])
    assert endings.status_view(TaskStatus.FINISHED, None, result)["handled_failures"] == ["a"]
