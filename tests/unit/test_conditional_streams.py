"""Edges that stream and have a condition: the first batch makes the condition due, and the result counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.workflows.scheduling.conditions import DueCondition
from flowkit.workflows.scheduling.scheduler import Scheduler

FINISHED, FAILED = NodeStatus.FINISHED, NodeStatus.FAILED
EDGE = DueCondition(2, 0)
WHOLE = {"start_when": "first_batch"}


def scheduled(fan_in: str = "all", io: dict[str, Any] | None = None) -> Scheduler:
    """Return a scheduler in which node 2 streams from node 0 under a condition, and depends on node 1."""
    edges = [{"from": "a", "to": "c", "when": "params.full"}, {"from": "b", "to": "c"}]
    if io is None:
        edges[0]["mode"] = "async"
    nodes = [node("a"), node("b"), node("c", depends_on=["a", "b"], fan_in=fan_in, io=io or {})]
    graph = parse_graph({"nodes": nodes, "edges_ex": edges, "on_node_failure": "continue"})
    scheduler = Scheduler(graph, [NodeState() for _ in nodes])
    scheduler.pop_ready()
    return scheduler


def restored(scheduler: Scheduler) -> Scheduler:
    """Return a scheduler of a new run that continues the task."""
    graph = parse_graph({"nodes": [node("unused")]})
    states = [replace(state, edges=dict(state.edges)) for state in scheduler.states]
    again = Scheduler(replace(graph, nodes=tuple(scheduler.nodes)), states)
    assert 2 not in again.pop_ready()
    return again


def test_first_batch_makes_the_condition_due_once() -> None:
    scheduler = scheduled()
    scheduler.add_batch(0)
    assert scheduler.pop_due() == [EDGE]
    scheduler.end(0, FINISHED)
    assert scheduler.pop_due() == []
    assert restored(scheduler).pop_due() == [EDGE]


@pytest.mark.parametrize("new_run", [False, True])
@pytest.mark.parametrize("end", [None, FINISHED, FAILED])
def test_true_edge_is_satisfied_by_the_batch_however_the_parent_ends(
    end: NodeStatus | None, new_run: bool
) -> None:
    scheduler = scheduled()
    scheduler.add_batch(0)
    if end is not None:
        scheduler.end(0, end)
    scheduler.decide({EDGE: True})
    if new_run:
        scheduler = restored(scheduler)
    assert 2 not in scheduler.pop_ready()
    scheduler.end(1, FINISHED)
    assert 2 in scheduler.pop_ready()
    assert scheduler.satisfied_parents(2) == 2


@pytest.mark.parametrize("new_run", [False, True])
@pytest.mark.parametrize("end", [None, FINISHED, FAILED])
@pytest.mark.parametrize(
    ("fan_in", "expected"), [("all", None), ("any", None), ("count:2", SkipReason.CONDITION)]
)
def test_false_edge_counts_as_a_skipped_parent_however_the_parent_ends(
    fan_in: str, expected: SkipReason | None, end: NodeStatus | None, new_run: bool
) -> None:
    scheduler = scheduled(fan_in)
    scheduler.add_batch(0)
    scheduler.decide({EDGE: False})
    if end is not None:
        scheduler.end(0, end)
    if new_run and expected is None:
        scheduler = restored(scheduler)
    assert scheduler.states[2].skip_reason is expected
    scheduler.end(1, FINISHED)
    assert (2 in scheduler.pop_ready()) is (expected is None)


@pytest.mark.parametrize(
    ("result", "end", "opens"),
    [(True, None, True), (True, FINISHED, True), (False, None, False), (False, FINISHED, False)],
)
def test_condition_decides_whether_the_batch_of_any_parent_opens_the_gate(
    result: bool, end: NodeStatus | None, opens: bool
) -> None:
    scheduler = scheduled(io=WHOLE)
    scheduler.add_batch(0)
    if end is not None:
        scheduler.end(0, end)
    assert scheduler.pop_due() == [EDGE]
    scheduler.decide({EDGE: result})
    assert (2 in scheduler.pop_ready()) is opens
    scheduler.add_batch(1)
    assert (2 in scheduler.pop_ready()) is not opens


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("new_run", [True, False])
def test_failed_parent_of_an_all_done_gate_counts_once_without_the_condition(
    late: bool, new_run: bool
) -> None:
    scheduler = scheduled("all_done")
    if not late:
        scheduler.add_batch(0)
    scheduler.end(0, FAILED)
    scheduler.add_batch(0)
    if new_run:
        scheduler = restored(scheduler)
    assert scheduler.pop_due() == []
    scheduler.decide({EDGE: True})
    assert 2 not in scheduler.pop_ready()
    scheduler.end(1, FAILED)
    assert scheduler.pop_ready() == [2]
    assert not scheduler.waits_for_parents(2)


@pytest.mark.parametrize("result", [True, False])
@pytest.mark.parametrize("decided_before", [True, False])
def test_batch_whose_signal_comes_after_the_end_counts_once(result: bool, decided_before: bool) -> None:
    scheduler = scheduled()
    scheduler.end(0, FINISHED)
    if decided_before:
        scheduler.decide({EDGE: result})
    scheduler.add_batch(0)
    if not decided_before:
        scheduler.decide({EDGE: result})
    scheduler.end(1, FINISHED)
    assert scheduler.pop_due() == [] or not decided_before
    assert 2 in scheduler.pop_ready()
    assert scheduler.satisfied_parents(2) == 1 + result


@pytest.mark.parametrize("new_run", [False, True])
@pytest.mark.parametrize("result", [True, False])
def test_batch_whose_signal_comes_after_a_failure_makes_the_condition_due(
    result: bool, new_run: bool
) -> None:
    scheduler = scheduled("any")
    scheduler.end(0, FAILED)
    scheduler.add_batch(0)
    scheduler = restored(scheduler) if new_run else scheduler
    assert scheduler.pop_due() == [EDGE]
    scheduler.decide({EDGE: result})
    assert (2 in scheduler.pop_ready()) is result
    scheduler.end(1, FINISHED)
    assert (2 in scheduler.pop_ready()) is not result


def test_late_failure_behind_a_false_edge_does_not_fail_the_child() -> None:
    scheduler = scheduled()
    scheduler.add_batch(0)
    scheduler.decide({EDGE: False})
    scheduler.end(1, FINISHED)
    scheduler.end(0, FAILED)
    scheduler.end(2, FINISHED)
    assert scheduler.states[2].status is FINISHED


def test_late_failure_behind_a_true_edge_fails_the_child() -> None:
    scheduler = scheduled()
    scheduler.add_batch(0)
    scheduler.decide({EDGE: True})
    scheduler.end(1, FINISHED)
    scheduler.end(0, FAILED)
    scheduler.end(2, FINISHED)
    assert (scheduler.states[2].status, scheduler.states[2].reason_code) == (FAILED, "upstream_failed")
