"""Changes of the graph of a running task: what they may alter, and how new nodes join the scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node, pulling

from flowkit.actions.changed_nodes import changeable
from flowkit.graph.changes import change_graph, change_problems, merge_patch
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus
from flowkit.models.actions import PausedScope
from flowkit.workflows.scheduling.scheduler import Scheduler

BASE: dict[str, Any] = {
    "nodes": [
        node("a"),
        node("b", depends_on=["a"], io={"input_inline": {"x": 1}}),
        node("r", routing={"on_success": ["t"]}),
        node("t"),
    ]
}


@pytest.mark.parametrize(
    ("value", "patch", "merged"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b", "b": 1}, {"a": None}, {"b": 1}),
        ({"a": ["b"]}, {"a": ["c", {"d": None}]}, {"a": ["c", {"d": None}]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        ([1, 2], {"a": "b"}, {"a": "b"}),
    ],
)
def test_merge_patch_follows_the_rfc(value: Any, patch: Any, merged: Any) -> None:
    assert merge_patch(value, patch) == merged


def problems(added: dict[str, Any], *, replaced: dict[int, dict[str, Any]] | None = None) -> list[str]:
    changed = replaced or {}
    after = parse_graph(change_graph(BASE, added, changed))
    return [*change_problems(parse_graph(BASE), after, added, changed.keys())]


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ({"nodes": [node("x")], "edges": [["x", "b"]]}, None),
        ({"nodes": [node("x")], "edges": [["x", "a"]]}, "alters node 'a', namely what it waits for"),
        ({"nodes": [node("x", depends_on=["r"])]}, "alters node 'r', namely how it routes"),
        ({"nodes": [node("x", routing={"on_failure": ["t"]})]}, "node 'x': routing names t, but a new node"),
        ({"nodes": [node("x", routing={"on_failure": ["y"]}), node("y")]}, None),
        ({"nodes": [node("x", depends_on=["a", "b"])]}, None),
    ],
)
def test_new_nodes_leave_the_present_ones_as_they_are(added: dict[str, Any], problem: str | None) -> None:
    found = problems(added)
    assert problem in found[0] if problem else found == []


def test_changed_nodes_may_differ_only_in_some_fields() -> None:
    other = node("b", depends_on=["a"], io=pulling(from_nodes=["r"]), timeout_sec=5, when="true")
    assert problems({}, replaced={1: other}) == []
    assert "alters node 'b'" in problems({}, replaced={1: {**other, "allow_failure": True}})[0]


def grown(added: list[dict[str, Any]], *states: NodeState, paused: str = "") -> Scheduler:
    scopes = [PausedScope(scope=paused, since=1.0)] if paused else []
    scheduler = Scheduler(changeable(parse_graph(BASE), {}), [*states], scopes)
    scheduler.pop_ready()
    nodes = parse_graph(change_graph(BASE, {"nodes": added}, {})).nodes
    scheduler.change_graph([], nodes[len(states) :], [0] * len(added))
    scheduler.rebuild([index for index, state in enumerate(states) if state.status.begun])
    return scheduler


def states(*statuses: NodeStatus) -> list[NodeState]:
    return [NodeState(status=status, epoch=1) for status in statuses]


FINISHED, RUNNING, QUEUED, FAILED = (
    NodeStatus.FINISHED,
    NodeStatus.RUNNING,
    NodeStatus.QUEUED,
    NodeStatus.FAILED,
)


def test_new_node_starts_at_once_if_its_parents_have_finished() -> None:
    added = [node("x", depends_on=["a"]), node("y", depends_on=["x"])]
    scheduler = grown(added, *states(FINISHED, RUNNING, RUNNING, QUEUED))
    assert scheduler.pop_ready() == [4]
    assert scheduler.index_of["y"] == 5
    scheduler.end(4, FINISHED)
    assert scheduler.pop_ready() == [5]


def test_new_node_is_skipped_if_its_parents_have_failed() -> None:
    scheduler = grown([node("x", depends_on=["a"])], *states(FAILED, QUEUED, RUNNING, QUEUED))
    assert scheduler.states[4].status is NodeStatus.SKIPPED
    assert 4 in scheduler.changed


def test_new_node_that_streams_from_a_running_one_starts_as_if_there_was_a_batch() -> None:
    follower = node("x", depends_on=["a"], io={**pulling(), "start_when": "first_batch"})
    scheduler = grown([follower], *states(RUNNING, QUEUED, RUNNING, QUEUED))
    assert scheduler.pop_ready() == [4]
    assert scheduler.streams.followers(scheduler.nodes[0]) == ("x",)
    scheduler = grown([follower], *states(QUEUED, QUEUED, RUNNING, QUEUED))
    assert 4 not in scheduler.pop_ready()


@pytest.mark.parametrize("scope", ["task", "below:a", "role:crawler"])
def test_pause_covers_new_nodes_of_its_scope(scope: str) -> None:
    scheduler = grown([node("x", depends_on=["a"])], *states(RUNNING, QUEUED, RUNNING, QUEUED), paused=scope)
    assert 4 in scheduler.pauses.paused
    assert scheduler.pauses.children[0].keys() == {1, 4}
