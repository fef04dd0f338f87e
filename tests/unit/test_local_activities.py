"""Which attempts run inside the engine, and how long consecutive local activities may take."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.exceptions import ApplicationError, CancelledError, TimeoutType
from temporalio.exceptions import TimeoutError as AttemptTimeout
from tests.unit.graphs import node, pulling

from flowkit import reason_codes
from flowkit.attempt.failures import failed_attempt, failure, from_error, lost
from flowkit.errors import EpochTaken
from flowkit.graph.validation import parse_graph
from flowkit.models import FailureKind, NodeState
from flowkit.workflows.local_attempts import Streak, fall_back, is_inline, is_local_function
from flowkit.workflows.node import read_failure
from flowkit.workflows.retry import UNREQUESTED_CANCEL
from flowkit.workflows.scheduling.streams import Streams

STREAMS = {"start_when": "first_batch", **pulling()}


def inline(node_id: str, *nodes: dict[str, Any], roles: tuple[str, ...] = ("crawler",), **state: Any) -> bool:
    """Return whether the next attempt of a node runs inside an engine that hosts `roles`."""
    graph = parse_graph({"nodes": list(nodes)})
    found = next(each for each in graph.nodes if each.node_id == node_id)
    return is_inline(found, NodeState(**state), roles=roles, streams=Streams(graph.nodes))


# --- which nodes ------------------------------------------------------------------------------------------------


def test_node_of_a_hosted_role_is_inline() -> None:
    assert inline("extract", node())
    assert not inline("extract", node(), roles=())
    assert not inline("extract", node(), roles=("other",))


def test_node_that_fell_back_stays_ordinary() -> None:
    assert not inline("extract", node(), ordinary=True)


def test_node_that_pulls_is_not_inline() -> None:
    parent, child = node(), node("load", depends_on=["extract"], io=pulling())
    assert not inline("load", parent, child)
    assert inline("extract", parent, child)


def test_neither_end_of_a_streaming_edge_is_inline() -> None:
    parent, child = node(), node("load", depends_on=["extract"], io=STREAMS)
    assert not inline("extract", parent, child)
    assert not inline("load", parent, child)


def test_function_is_not_inline() -> None:
    assert not inline("f", {"node_id": "f", "type": "coordinator_fn"}, roles=("coordinator_fn",))


@pytest.mark.parametrize(
    ("fn", "ordinary", "local"), [("noop", False, True), ("noop", True, False), ("own", False, False)]
)
def test_built_in_function_is_local_unless_it_fell_back(fn: str, ordinary: bool, local: bool) -> None:
    graph = parse_graph({"nodes": [{"node_id": "f", "type": "coordinator_fn", "io": {"fn": fn}}]})
    assert is_local_function(graph.nodes[0], NodeState(ordinary=ordinary), functions=("noop",)) is local


# --- consecutive local activities -------------------------------------------------------------------------------


def test_local_activities_start_in_the_first_second_of_a_streak_and_end_within_two() -> None:
    streak = Streak()
    streak.enter(3, 100.0)
    assert streak.start(100.0) == 2.0
    assert not streak.is_over(100.9)
    assert streak.start(100.9) == pytest.approx(1.1)
    assert streak.is_over(101.0)


def test_next_workflow_task_begins_without_a_streak() -> None:
    streak = Streak()
    streak.enter(3, 100.0)
    streak.start(100.0)
    streak.yield_to_ordinary()
    streak.enter(3, 100.0)
    assert streak.is_over(102.0)
    assert streak.delays_ordinary
    streak.enter(9, 102.0)
    assert not streak.is_over(102.0)
    assert not streak.delays_ordinary
    assert streak.start(102.0) == 2.0


# --- what follows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        AttemptTimeout("late", type=TimeoutType.SCHEDULE_TO_CLOSE, last_heartbeat_details=[]),
        ApplicationError("no such activity", type="NotFoundError"),
    ],
    ids=["timeout", "not registered"],
)
def test_attempt_that_the_engine_cannot_run_falls_back(error: Any) -> None:
    state = NodeState()
    failure = fall_back(state, error, read_failure(error) or UNREQUESTED_CANCEL)
    assert (failure.kind, failure.code) == (FailureKind.HANDOVER, reason_codes.NOT_LOCAL)
    assert state.ordinary


@pytest.mark.parametrize(
    ("error", "ordinary"),
    [
        (failed_attempt(failure("flaky", "no", permanent=False)), False),
        (failed_attempt(lost(reason_codes.LEASE_LOST, "the engine stopped")), True),
        (failed_attempt(from_error(EpochTaken(3))), True),
        (CancelledError("stop"), False),
    ],
    ids=["failure", "loss", "epoch taken", "cancel"],
)
def test_attempt_that_ended_keeps_its_failure(error: Any, ordinary: bool) -> None:
    state, failed = NodeState(), read_failure(error) or UNREQUESTED_CANCEL
    assert fall_back(state, error, failed) is failed
    assert state.ordinary is ordinary


def test_no_attempt_begins_late_in_a_workflow_task() -> None:
    streak = Streak()
    streak.enter(3, 100.0)
    streak.start(101.0)
    streak.enter(3, 101.5)
    assert streak.begin_by(10.0) == 105.0
    assert streak.begin_by(2.0) == 101.0
