"""Which nodes the ends of others start or skip, by examples."""

from __future__ import annotations

import pytest

from flowkit.models import FanIn, Graph, Node, NodeState, NodeStatus, SkipReason
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.scheduler import Scheduler


def graph_of(*nodes: tuple[str, list[str], FanIn]) -> Graph:
    """Return a graph from (id, parents, fan-in)."""
    return Graph(
        nodes=tuple(
            Node(node_id=node_id, index=i, type="t", depends_on=tuple(parents), fan_in=fan_in)
            for i, (node_id, parents, fan_in) in enumerate(nodes)
        ),
    )


def new_scheduler(graph: Graph) -> Scheduler:
    """Return a scheduler for a graph that has not started."""
    return Scheduler(graph, [NodeState() for _ in graph.nodes])


ALL, ANY = FanIn(), FanIn(mode="any")


@pytest.mark.parametrize("fan_in", [ANY, FanIn(mode="count", count=1)])
def test_open_gate_stays_open_when_the_other_parent_fails(fan_in: FanIn) -> None:
    scheduler = new_scheduler(graph_of(("a", [], ALL), ("b", [], ALL), ("c", ["a", "b"], fan_in)))
    scheduler.end(0, NodeStatus.FINISHED)
    scheduler.end(1, NodeStatus.FAILED)
    assert scheduler.pop_ready() == [2]
    assert scheduler.states[2].status is NodeStatus.QUEUED


@pytest.mark.parametrize("first, second", [("p", "q"), ("q", "p")])
def test_skip_inherits_the_strongest_reason_in_any_order_of_nodes(first: str, second: str) -> None:
    """The same end skips `p` and `q`, so neither comes before the other."""
    fans = {"p": (["x"], ALL), "q": (["x", "y"], ANY)}
    two = FanIn(mode="count", count=2)
    graph = graph_of(
        ("x", [], ALL), ("y", [], ALL), (first, *fans[first]), (second, *fans[second]), ("c", ["p", "q"], two)
    )
    scheduler = new_scheduler(graph)
    scheduler.end(1, NodeStatus.FAILED)
    scheduler.end(0, NodeStatus.SKIPPED, SkipReason.ROUTING)
    assert scheduler.states[4].skip_reason is SkipReason.UPSTREAM_FAILED


@pytest.mark.parametrize("first", [0, 1])
def test_all_done_gate_opens_at_the_last_end_whatever_the_ends(first: int) -> None:
    scheduler = new_scheduler(
        graph_of(("a", [], ALL), ("b", [], ALL), ("c", ["a", "b"], FanIn(mode="all_done")))
    )
    ends = [(0, NodeStatus.FAILED, None), (1, NodeStatus.SKIPPED, SkipReason.UPSTREAM_FAILED)]
    scheduler.pop_ready()
    scheduler.end(*ends[first])
    assert scheduler.pop_ready() == []
    scheduler.end(*ends[1 - first])
    assert scheduler.pop_ready() == [2]


def test_descendants_of_a_stopped_node_have_the_reason_of_the_stop() -> None:
    scheduler = new_scheduler(graph_of(("a", [], ALL), ("b", ["a"], ALL), ("c", ["b"], ALL)))
    scheduler.states[0].epoch = 1
    scheduler.end_all(NodeStatus.CANCELLED, SkipReason.TASK_CANCELLED)
    assert [state.skip_reason for state in scheduler.states] == [None, *[SkipReason.TASK_CANCELLED] * 2]


def test_stopped_node_does_not_keep_the_error_of_an_earlier_attempt() -> None:
    scheduler = new_scheduler(graph_of(("a", [], ALL)))
    state = scheduler.states[0]
    state.epoch, state.status = 1, NodeStatus.DEFERRED
    note_failure(state, "flaky", "the first attempt failed")
    scheduler.end_all(NodeStatus.CANCELLED, SkipReason.TASK_CANCELLED)
    assert (state.status, state.last_error, state.reason_code) == (NodeStatus.CANCELLED, None, None)


def test_finished_node_does_not_keep_the_error_of_an_earlier_attempt() -> None:
    scheduler = new_scheduler(graph_of(("a", [], ALL)))
    state = scheduler.states[0]
    note_failure(state, "flaky", "the first attempt failed")
    state.epoch, state.status = 2, NodeStatus.CANCELLING
    scheduler.end(0, NodeStatus.FINISHED)
    assert (state.status, state.last_error, state.reason_code) == (NodeStatus.FINISHED, None, None)


def test_late_end_changes_nothing() -> None:
    scheduler = new_scheduler(graph_of(("a", [], ALL), ("b", ["a"], ALL)))
    scheduler.end(0, NodeStatus.FINISHED)
    scheduler.end(0, NodeStatus.FAILED)
    assert scheduler.states[0].status is NodeStatus.FINISHED
    assert scheduler.hard_failure is None
