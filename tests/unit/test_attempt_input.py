"""The input of an attempt, its task queue, and the time limits of the engine's own writes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.unit.graphs import node, pulling, two

from flowkit.graph.validation import parse_graph
from flowkit.models import AttemptInput, Node, NodeState, Settings
from flowkit.workflows.document_activities import write_timeout
from flowkit.workflows.node import attempt_input, queue_of
from flowkit.workflows.node_context import NodeRunContext
from flowkit.workflows.payloads import without_defaults
from flowkit.workflows.retry import note_failure


def parsed(**fields: Any) -> Node:
    """Return a node as the workflow holds it."""
    return parse_graph({"nodes": [node(**fields)]}).nodes[0]


def sent(of: Node, **settings: Any) -> AttemptInput:
    """Return the input of a node's first attempt with these settings."""
    flight = NodeRunContext(
        task_id="t",
        settings=Settings(**settings),
        is_draining=lambda: False,
        epoch_of=lambda name: 3,
        on_retry_state_change=lambda index: None,
    )
    return attempt_input(flight, of, NodeState(epoch=1))


@pytest.mark.parametrize("seconds", [0.5, 45, 31_536_000])
def test_the_timeout_of_a_node_travels_with_its_attempt(seconds: float) -> None:
    assert sent(parsed(timeout_sec=seconds)).timeout_sec == seconds
    assert without_defaults(sent(parsed(timeout_sec=seconds)))["timeout_sec"] == seconds


def test_a_role_without_a_timeout_has_none_and_a_function_has_that_of_its_engine() -> None:
    assert sent(parsed(), function_timeout_sec=7.0).timeout_sec is None
    assert sent(parsed(type="coordinator_fn"), function_timeout_sec=7.0).timeout_sec == 7.0
    assert sent(parsed(type="coordinator_fn", timeout_sec=2), function_timeout_sec=7.0).timeout_sec == 2


def test_a_first_attempt_of_a_bare_node_is_sent_in_few_words() -> None:
    assert without_defaults(sent(parsed())) == {
        "task_id": "t",
        "node_id": "extract",
        "index": 0,
        "role": "crawler",
        "epoch": 1,
    }


def test_uids_are_qualified_as_the_task_was_opened() -> None:
    assert not sent(parsed()).qualify_uids
    assert sent(parsed(), qualify_uids=True).qualify_uids


def test_a_node_without_sources_is_sent_none() -> None:
    load = parse_graph(two(io=pulling(from_nodes=[]))).nodes[1]
    assert sent(load).sources == {}
    assert sent(load).io.input_inline == pulling(from_nodes=[])["input_inline"]
    assert sent(parse_graph(two(io=pulling())).nodes[1]).sources == {"extract": 3}


FUNCTIONS = [
    ("noop", "", "q"),
    ("noop", "functions", "q"),
    ("send_report", "", "q"),
    ("send_report", "functions", "functions"),
]


@pytest.mark.parametrize(("fn", "function_queue", "queue"), FUNCTIONS)
def test_functions_that_are_not_built_in_have_a_queue_of_their_own(
    fn: str, function_queue: str, queue: str
) -> None:
    settings = Settings(queue="q", local_functions=("noop",), function_queue=function_queue)
    assert queue_of(parsed(type="coordinator_fn", io={"fn": fn}), settings) == queue
    assert queue_of(parsed(io={"fn": fn}), settings) == "q.crawler"


@pytest.mark.parametrize(("nodes", "seconds"), [(0, 60), (1, 60.1), (5_000, 560)])
def test_a_write_of_many_nodes_may_take_longer(nodes: int, seconds: float) -> None:
    assert write_timeout(nodes) == timedelta(seconds=seconds)


def test_what_is_noted_of_a_failure_is_bounded() -> None:
    state = NodeState()
    note_failure(state, "c" * 5_000, "m" * 50_000)
    assert (len(state.reason_code or ""), len(state.last_error or "")) == (100, 2_000)
