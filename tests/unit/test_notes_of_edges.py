"""The notes in the Web UI about streaming edges and conditions."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node
from tests.unit.test_notes import FAILED, FINISHED, note

from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState
from flowkit.workflows.scheduling.conditions import DueCondition
from flowkit.workflows.scheduling.scheduler import Scheduler

ASYNC = {"from": "p0", "to": "child", "mode": "async"}


def child(*edges: dict[str, Any], parents: int = 2, **fields: Any) -> Scheduler:
    """Return the scheduler of a task whose last node has the parents `p0`, `p1`, … and these entries of `edges_ex`."""
    ids = [f"p{i}" for i in range(parents)]
    given = {edge["from"] for edge in edges}
    wired = [{"from": each, "to": "child"} for each in ids if each not in given]
    nodes = [*map(node, ids), node("child", depends_on=ids, **fields)]
    graph = parse_graph({"nodes": nodes, "edges_ex": [*edges, *wired], "on_node_failure": "continue"})
    return Scheduler(graph, [NodeState() for _ in graph.nodes])


def test_node_waits_for_the_batch_or_the_end_of_each_parent() -> None:
    scheduler = child(ASYNC)
    assert note(scheduler) == "waits for p0 (first batch) and p1"
    scheduler.add_batch(0)
    assert note(scheduler) == "waits for p1"
    scheduler.end(1, FINISHED)
    assert note(scheduler) == ""


@pytest.mark.parametrize(("fan_in", "parents", "after"), [("any", 2, ""), ("count:2", 3, "any of p1, p2")])
def test_batch_counts_as_a_parent(fan_in: str, parents: int, after: str) -> None:
    scheduler = child(ASYNC, parents=parents, fan_in=fan_in)
    scheduler.add_batch(0)
    assert note(scheduler) == (f"waits for {after}" if after else "")


def test_node_that_starts_on_any_batch_says_so() -> None:
    scheduler = child(io={"start_when": "first_batch"})
    assert note(scheduler) == "waits for the first batch of p0 or p1"
    scheduler.add_batch(1)
    assert note(scheduler) == ""


def test_node_with_an_open_gate_waits_for_its_condition() -> None:
    scheduler = child(when="params.full")
    scheduler.end(0, FINISHED)
    assert note(scheduler) == "waits for p1"
    scheduler.end(1, FINISHED)
    assert note(scheduler) == "waits for its condition"
    scheduler.decide({DueCondition(2): True})
    assert note(scheduler) == ""


def test_node_with_a_false_condition_shows_it() -> None:
    scheduler = child(when="params.full ||\n params.test")
    scheduler.end(0, FINISHED)
    scheduler.end(1, FINISHED)
    scheduler.decide({DueCondition(2): False})
    assert note(scheduler) == "condition: params.full || params.test is false"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_condition_of_an_edge_is_awaited_and_its_result_is_shown(mode: str) -> None:
    edge = {"from": "p0", "to": "child", "when": "params.full", "mode": mode}
    scheduler = child(edge, parents=1)
    if mode == "async":
        scheduler.add_batch(0)
    else:
        scheduler.end(0, FINISHED)
    assert note(scheduler) == "waits for the condition of the edge from p0"
    scheduler.decide({DueCondition(1, 0): False})
    assert note(scheduler) == "condition: the edge from p0 is false"


def test_edge_without_a_batch_of_a_failed_parent_is_not_awaited() -> None:
    scheduler = child({"from": "p0", "to": "child", "when": "params.full"}, fan_in="any")
    scheduler.end(0, FAILED)
    assert note(scheduler) == "waits for p1"
