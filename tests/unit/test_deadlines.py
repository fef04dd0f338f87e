"""The rules of deadlines: when they are due, and what has exceeded them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs import node, refusal
from tests.unit.property_examples import examples

from flowkit.graph.validation import parse_graph
from flowkit.models import FailureKind, NodeState, NodeStatus, RetryPolicy
from flowkit.models.actions import ActionState
from flowkit.workflows.deadlines import Deadlines, node_failure
from flowkit.workflows.display.summaries import deadline_summary
from flowkit.workflows.display.task_status import stop_reason
from flowkit.workflows.node import RunningNodes
from flowkit.workflows.retry import Fail, decide
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from flowkit.models import Graph

NOW = 1_000.0
FINISHED = NodeStatus.FINISHED


def deadlines_of(*limits: float | None, **graph: Any) -> tuple[Deadlines, list[NodeState]]:
    """Return the deadlines of unconnected nodes `n0`, `n1`, … with these limits, and the nodes' states."""
    nodes = [node(f"n{i}", deadline_sec=limit) for i, limit in enumerate(limits)]
    states = [NodeState() for _ in limits]
    parsed = parse_graph({"nodes": nodes, **graph})
    return Deadlines(parsed, states, ActionState(), opened_at=NOW), states


def test_graph_without_deadlines_is_never_due() -> None:
    deadlines, states = deadlines_of(None, None)
    deadlines.begin([0, 1], NOW)
    assert (deadlines.next_due(), deadlines.pop_overdue(NOW * 9), deadlines.task_failure(NOW * 9)) == (
        None,
        [],
        None,
    )
    assert states == [NodeState(), NodeState()]


def test_deadline_of_a_node_begins_when_its_gate_opens_first() -> None:
    deadlines, states = deadlines_of(5, 2)
    assert deadlines.next_due() is None
    deadlines.begin([0], NOW)
    deadlines.begin([1], NOW + 1)
    deadlines.begin([0], NOW + 4)
    assert [state.deadline_at for state in states] == [NOW + 5, NOW + 3]
    assert deadlines.next_due() == (NOW + 3, "n1")


def test_nodes_exceed_their_deadlines_in_order_and_once() -> None:
    deadlines, _ = deadlines_of(5, 2, 2)
    deadlines.begin([0, 1, 2], NOW)
    assert deadlines.pop_overdue(NOW + 1.9) == []
    assert deadlines.pop_overdue(NOW + 2) == [1, 2]
    assert deadlines.pop_overdue(NOW + 4) == []
    assert deadlines.next_due() == (NOW + 5, "n0")


def test_ended_node_exceeds_no_deadline() -> None:
    deadlines, states = deadlines_of(1, 3)
    deadlines.begin([0, 1], NOW)
    states[0].status = FINISHED
    assert deadlines.next_due() == (NOW + 3, "n1")
    states[1].status = NodeStatus.SKIPPED
    assert (deadlines.next_due(), deadlines.pop_overdue(NOW + 9)) == (None, [])


def test_deadline_that_passed_while_a_node_could_not_end_is_exceeded_again() -> None:
    deadlines, _ = deadlines_of(1, None)
    deadlines.begin([0, 1], NOW)
    assert deadlines.pop_overdue(NOW + 1) == [0]
    deadlines.restore(0)
    deadlines.restore(1)
    assert deadlines.pop_overdue(NOW + 1) == [0]


def test_task_fails_when_its_deadline_passes() -> None:
    deadlines, _ = deadlines_of(None, deadline_sec=1.5)
    assert deadlines.next_due() == (NOW + 1.5, "the task")
    assert deadlines.task_failure(NOW + 1.4) is None
    assert deadlines.task_failure(NOW + 1.5) == (
        "deadline_exceeded: the task took longer than 1.5 s (deadline_sec)"
    )


def test_deadlines_continue_from_the_states_of_the_previous_run() -> None:
    parsed = parse_graph({"nodes": [node("a", deadline_sec=5), node("b", deadline_sec=5)]})
    states = [NodeState(deadline_at=NOW + 2), NodeState(status=FINISHED, deadline_at=NOW + 1)]
    deadlines = Deadlines(parsed, states, ActionState(), opened_at=NOW)
    deadlines.begin([0], NOW + 1)
    assert deadlines.next_due() == (NOW + 2, "a")
    assert deadlines.pop_overdue(NOW + 2) == [0]


def test_exceeded_deadline_fails_the_node_without_a_retry() -> None:
    failure = node_failure(parse_graph({"nodes": [node("a", deadline_sec=90)]}).nodes[0])
    assert (failure.kind, failure.permanent) == (FailureKind.FAILURE, True)
    message = "the node took longer than 90 s (deadline_sec) from the opening of its gate"
    decision = decide(RetryPolicy(max=9), failure, NodeState(), 0.0)
    assert decision == Fail(code="deadline_exceeded", message=message)


def _running_nodes(graph: Graph) -> RunningNodes:
    """Return the running nodes of a task, of which none has an attempt or a wait, outside of a workflow."""
    nodes = object.__new__(RunningNodes)
    nodes.scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
    nodes.document, nodes.wake, nodes.parked = Mock(), Mock(), set()
    nodes._open, nodes._ended, nodes._given_up, nodes._flights = {}, [], {}, Counter()
    return nodes


def test_approvals_that_are_overdue_together_end_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = {"approve": FINISHED, "reject": NodeStatus.FAILED}
    given = [
        node(each, type="approval", io={"input_inline": {"default": each}}, deadline_sec=9.0)
        for each in defaults
    ]
    children = [node(f"after-{each}", depends_on=[each]) for each in defaults]
    graph = parse_graph({"nodes": [*given, *children], "on_node_failure": "continue"})
    nodes, rebuilds = _running_nodes(graph), Mock(wraps=Scheduler.rebuild)
    nodes.scheduler.pop_ready()
    monkeypatch.setattr(Scheduler, "rebuild", lambda *given: rebuilds(*given))
    nodes.stop({index: node_failure(graph.nodes[index]) for index in range(len(given))}, "deadline")
    statuses = [*defaults.values(), NodeStatus.QUEUED, NodeStatus.SKIPPED]
    assert [state.status for state in nodes.scheduler.states] == statuses
    assert nodes.scheduler.pop_ready() == [2]
    assert rebuilds.call_count == 1


def test_overdue_task_is_stopped_for_its_deadline() -> None:
    assert stop_reason(None, [], None, overdue=True) == "deadline"


def test_summary_of_the_timer_names_what_the_deadline_limits() -> None:
    assert deadline_summary("the task", 3600) == "deadline of the task in 1 h"
    assert len(deadline_summary("é" * 200, 1.0).encode()) <= 200


@pytest.mark.parametrize("value", [0, -1, "10", True, 4e7, [1]])
def test_invalid_deadline_of_a_graph_is_rejected(value: object) -> None:
    assert "graph.deadline_sec" in str(refusal({"nodes": [node("a")], "deadline_sec": value}))


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "check"]), st.integers(0, 3), st.floats(0, 3)), max_size=30
)


@settings(max_examples=examples(60))
@given(limits=st.lists(st.none() | st.floats(0.5, 5), min_size=4, max_size=4), steps=STEPS)
def test_every_open_node_is_reported_exactly_when_its_deadline_passes(
    limits: list[float | None], steps: list[tuple[str, int, float]]
) -> None:
    deadlines, states = deadlines_of(*limits)
    expected: dict[int, float] = {}
    now = NOW
    for step, index, pause in steps:
        now += pause
        limit = limits[index]
        if step == "begin":
            deadlines.begin([index], now)
            if limit is not None and states[index].deadline_at == now + limit:
                expected.setdefault(index, now + limit)
        elif step == "end":
            states[index].status = FINISHED
        else:
            overdue = sorted(i for i, at in expected.items() if at <= now and not states[i].status.ended)
            assert sorted(deadlines.pop_overdue(now)) == overdue
            for each in overdue:
                states[each].status = NodeStatus.FAILED
        due = [at for i, at in expected.items() if not states[i].status.ended]
        found = deadlines.next_due()
        assert (found[0] if found else None) == min(due, default=None)
