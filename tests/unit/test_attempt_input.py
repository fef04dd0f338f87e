"""The input of an attempt, its task queue, and the time limits of the engine's own writes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.graphs import node, pulling, two

from flowkit.graph.validation import parse_graph
from flowkit.models import AttemptInput, Graph, Node, NodeState, NodeStatus, Settings
from flowkit.workflows.document import write_timeout
from flowkit.workflows.node import attempt_input, queue_of
from flowkit.workflows.payloads import without_defaults
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.scheduler import Scheduler


def parsed(**fields: Any) -> Node:
    """Return a node as the workflow holds it."""
    return parse_graph({"nodes": [node(**fields)]}).nodes[0]


def sent(graph: Graph, *before: NodeState, state: NodeState | None = None, **settings: Any) -> AttemptInput:
    """Return the input of an attempt of the node after those with the states `before`."""
    states = [*before, state or NodeState(epoch=1)]
    states += [NodeState() for _ in graph.nodes[len(states) :]]
    return attempt_input(Scheduler(graph, states), Settings(**settings), "t", graph.nodes[len(before)])


def single(**fields: Any) -> Graph:
    """Return a graph of one node."""
    return parse_graph({"nodes": [node(**fields)]})


@pytest.mark.parametrize("seconds", [0.5, 45, 31_536_000])
def test_attempt_input_contains_the_timeout_of_its_node(seconds: float) -> None:
    assert sent(single(timeout_sec=seconds)).timeout_sec == seconds
    assert without_defaults(sent(single(timeout_sec=seconds)))["timeout_sec"] == seconds


def test_role_has_no_default_timeout_and_a_function_has_that_of_its_engine() -> None:
    assert sent(single(), function_timeout_sec=7.0).timeout_sec is None
    assert sent(single(type="coordinator_fn"), function_timeout_sec=7.0).timeout_sec == 7.0
    assert sent(single(type="coordinator_fn", timeout_sec=2), function_timeout_sec=7.0).timeout_sec == 2


def test_first_attempt_of_a_minimal_node_has_a_small_input() -> None:
    assert without_defaults(sent(single())) == {
        "task_id": "t",
        "node_id": "extract",
        "index": 0,
        "role": "crawler",
        "epoch": 1,
    }


def test_attempt_input_contains_the_failures_that_started_the_node() -> None:
    failed = [{"node_id": "a", "attempt_epoch": 2, "reason_code": "full", "error": "full"}]
    routing = {"on_failure": ["rescue"]}
    graph = parse_graph({"nodes": [node("a", routing=routing), node("rescue")]})
    router = NodeState(status=NodeStatus.FAILED, epoch=2, reason_code="full", last_error="full")
    assert without_defaults(sent(graph, router))["failed_nodes"] == failed


def test_node_without_sources_is_sent_none() -> None:
    extract = NodeState(status=NodeStatus.FINISHED, epoch=3)
    load = sent(parse_graph(two(io=pulling(from_nodes=[]))), extract)
    assert load.sources == {}
    assert load.io.input_inline == pulling(from_nodes=[])["input_inline"]
    assert sent(parse_graph(two(io=pulling())), extract).sources == {"extract": 3}


FUNCTIONS = [
    ("noop", "", "q"),
    ("noop", "functions", "q"),
    ("send_report", "", "q"),
    ("send_report", "functions", "functions"),
]


@pytest.mark.parametrize(("fn", "function_queue", "queue"), FUNCTIONS)
def test_user_functions_have_their_own_queue(fn: str, function_queue: str, queue: str) -> None:
    settings = Settings(queue="q", local_functions=("noop",), function_queue=function_queue)
    assert queue_of(parsed(type="coordinator_fn", io={"fn": fn}), settings) == queue
    assert queue_of(parsed(io={"fn": fn}), settings) == "q.crawler"


def test_attempts_of_a_task_that_pins_versions_say_so() -> None:
    graph = parse_graph({"nodes": [node(), node("fn", type="coordinator_fn")], "version_policy": "pin"})
    assert without_defaults(sent(graph))["pin"] is True
    assert sent(graph, NodeState()).pin is False
    settings = Settings(queue="q")
    assert queue_of(graph.nodes[0], settings, "1.4+ab") == "q.crawler@1.4+ab"
    assert queue_of(graph.nodes[1], settings, "1.4+ab") == "q"


@pytest.mark.parametrize(("nodes", "seconds"), [(0, 60), (1, 60.1), (5_000, 560)])
def test_write_of_many_nodes_has_a_longer_timeout(nodes: int, seconds: float) -> None:
    assert write_timeout(nodes) == timedelta(seconds=seconds)


def test_recorded_failure_has_a_limited_size() -> None:
    state = NodeState()
    note_failure(state, "c" * 5_000, "m" * 50_000)
    assert (len(state.reason_code or ""), len(state.last_error or "")) == (100, 2_000)


def sent_by_parent(parent_io: dict[str, Any], child_io: dict[str, Any], **state: Any) -> AttemptInput:
    """Return the input of the parent `extract` of `load`, whose first attempt has this state."""
    graph = parse_graph({"nodes": [node(io=parent_io), node("load", depends_on=["extract"], io=child_io)]})
    return sent(graph, state=NodeState(epoch=1, **state))


STREAMS = {"start_when": "first_batch", **pulling()}


def test_attempt_signals_its_first_batch_only_if_a_child_streams_and_no_attempt_has_signaled() -> None:
    assert sent_by_parent({}, STREAMS).signal_first_batch
    assert not sent_by_parent({}, pulling()).signal_first_batch
    assert not sent_by_parent({}, STREAMS, streamed=True).signal_first_batch


def test_attempt_input_contains_max_ahead_and_the_children_that_it_waits_for() -> None:
    held = sent_by_parent({"max_ahead": 3}, STREAMS)
    assert (held.max_ahead, held.followers) == (3, ("load",))
    assert without_defaults(held)["max_ahead"] == 3
    free = without_defaults(sent_by_parent({"max_ahead": 3}, pulling()))
    assert not {"max_ahead", "followers", "signal_first_batch"} & free.keys()
    assert sent_by_parent({}, STREAMS).followers == ()
