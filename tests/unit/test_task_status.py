"""How a task's state appears outside of the workflow."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.graph.validation import parse_graph
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.models import NodeState, NodeStatus, StatusChange, TaskStatus
from flowkit.models.temporal_names import SEARCH_ATTRIBUTES
from flowkit.workflows.display import task_status
from flowkit.workflows.scheduling.scheduler import Scheduler

FAILED = NodeState(status=NodeStatus.FAILED, epoch=1, reason_code="flaky", last_error="flaky: no")


def scheduler_of(*states: NodeState, **graph: Any) -> Scheduler:
    """Return a scheduler for unconnected nodes `n0`, `n1`, … in these states."""
    nodes = [node(f"n{i}") for i in range(len(states))]
    return Scheduler(parse_graph({"nodes": nodes, **graph}), list(states))


def test_failed_task_is_stopped_with_the_code_of_its_failure() -> None:
    at = scheduler_of(NodeState(), FAILED)
    assert task_status.stop_reason(at.hard_failure, at.states, "ignored") == "hard_fail:flaky"


@pytest.mark.parametrize(
    "given_reason, reason", [("enough", "enough"), ("", "user_request"), (None, "user_request")]
)
def test_cancelled_task_is_stopped_with_the_given_reason(given_reason: str | None, reason: str) -> None:
    assert task_status.stop_reason(None, [], given_reason) == reason


def test_failure_text_names_the_first_failed_node_and_counts_the_others() -> None:
    assert task_status.failure_text(scheduler_of(NodeState(), FAILED)) == "node 'n1' failed: flaky: no"
    others = scheduler_of(FAILED, FAILED, NodeState(), FAILED, on_node_failure="continue")
    assert task_status.failure_text(others) == "node 'n0' failed: flaky: no (and 2 more failed nodes)"


def test_long_failure_text_is_truncated_before_the_count() -> None:
    long = NodeState(status=NodeStatus.FAILED, last_error="x" * 9_000)
    text = task_status.failure_text(scheduler_of(long, long, on_node_failure="continue"))
    assert text.endswith("x… (and 1 more failed nodes)")
    assert len(text) < LAST_ERROR_CHARS + 50


OPEN: list[tuple[list[NodeStatus], TaskStatus]] = [
    ([NodeStatus.QUEUED], TaskStatus.RUNNING),
    ([NodeStatus.DEFERRED, NodeStatus.QUEUED], TaskStatus.DEFERRED),
    ([NodeStatus.DEFERRED, NodeStatus.RUNNING], TaskStatus.RUNNING),
    ([NodeStatus.DEFERRED, NodeStatus.FINISHED], TaskStatus.DEFERRED),
    ([NodeStatus.FINISHED], TaskStatus.RUNNING),
]


@pytest.mark.parametrize("statuses, status", OPEN)
def test_task_is_deferred_if_nothing_runs_and_a_node_waits(
    statuses: list[NodeStatus], status: TaskStatus
) -> None:
    assert task_status.open_status(scheduler_of(*(NodeState(status=each) for each in statuses))) is status


def changes(count: int) -> list[StatusChange]:
    """Return a history of this many changes, numbered by their time."""
    return [StatusChange(from_="running", to="deferred", at=float(number)) for number in range(count)]


@pytest.mark.parametrize(("count", "omitted"), [(0, 0), (99, 0), (100, 0), (101, 1), (5_000, 4_900)])
def test_long_history_keeps_its_first_ten_and_its_latest_entries(count: int, omitted: int) -> None:
    history = changes(count)
    assert task_status.shorten_history(history) == omitted
    assert len(history) == min(count, 100)
    assert [change.at for change in history[:10]] == [float(number) for number in range(min(count, 10))]
    assert history[10:] == changes(count)[10 + omitted :]


def test_growing_history_is_truncated_every_time() -> None:
    history, omitted = changes(100), 0
    for number in range(100, 500):
        history.append(StatusChange(from_="deferred", to="running", at=float(number)))
        omitted += task_status.shorten_history(history)
    assert (len(history), omitted, history[9].at, history[-1].at) == (100, 400, 9.0, 499.0)


@pytest.mark.parametrize("given_reason", ["x" * 50_000, "\ud800" * 3_000])
def test_cancel_reason_is_truncated_and_can_be_encoded(given_reason: str) -> None:
    reason = task_status.stop_reason(None, [], given_reason)
    assert 0 < len(reason) <= LAST_ERROR_CHARS
    assert reason.encode()


def attributes(registered: tuple[str, ...], *statuses: str, name: str | None = "g") -> dict[str, Any]:
    """Return the search attributes after the last of these statuses, by name."""
    graph = parse_graph({"nodes": [node()], **({"name": name} if name else {})})
    steps = zip(["queued", *statuses], statuses, strict=False)
    history = [StatusChange(from_=None, to="queued", at=0.0)]
    history += [StatusChange(from_=before, to=after, at=0.0) for before, after in steps]
    return {u.key.name: u.value for u in task_status.search_attributes(registered, history, graph, {})}


def test_only_registered_search_attributes_are_set() -> None:
    assert attributes(("FlowkitPipeline",), "running") == {"FlowkitPipeline": "g"}
    assert attributes(("FlowkitStatus",), "running", "deferred") == {"FlowkitStatus": "deferred"}
    assert attributes((), "running", "deferred") == {}
    assert attributes(SEARCH_ATTRIBUTES, "running", name=None) == {"FlowkitStatus": "running"}


STATUS_VALUES: list[tuple[list[str], dict[str, str]]] = [
    (["running"], {"FlowkitPipeline": "g", "FlowkitStatus": "running"}),
    (["running", "deferred"], {"FlowkitStatus": "deferred"}),
    (["running", "deferred", "running"], {"FlowkitStatus": "running"}),
    (["running", "failed"], {"FlowkitStatus": "failed"}),
]


@pytest.mark.parametrize("statuses, expected", STATUS_VALUES, ids=lambda each: "-".join(each))
def test_pipeline_is_set_once_and_each_status(statuses: list[str], expected: dict[str, str]) -> None:
    assert attributes(SEARCH_ATTRIBUTES, *statuses) == expected


NAMES: list[tuple[str | None, dict[str, Any], str | None]] = [
    ("g", {}, "g"),
    ("g", {"pipeline_name": "p"}, "p"),
    ("g", {"pipeline_name": 7}, "g"),
    ("g", {"pipeline_name": ""}, "g"),
    (None, {}, None),
    ("", {}, None),
    ("g" * 300, {}, "g" * 200),
    ("\x00a\nb", {}, "\ufffda\ufffdb"),
    ("\x00", {}, "\ufffd"),
    ("x" + "\ud800" * 300, {}, ("x" + r"\ud800" * 300)[:200]),
]


@pytest.mark.parametrize("graph_name, params, name", NAMES)
def test_pipeline_name_comes_from_the_params_or_the_graph_name(
    graph_name: str | None, params: dict[str, Any], name: str | None
) -> None:
    assert task_status.pipeline_name(graph_name, params) == name
