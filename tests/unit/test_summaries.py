"""The names in the Web UI for an attempt, the wait for the next one, and the engine's own writes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.graph.validation import parse_graph
from flowkit.models import NodeRecord, NodeState, NodeStatus, RecordTask, Slot, TaskStatus
from flowkit.workflows.display.summaries import (
    attempt_summary,
    conditions_summary,
    free_summary,
    next_attempt,
    slots_summary,
    timer_summary,
)
from flowkit.workflows.document import write_summary

LONG_ID = "n" * 200


def parsed(node_id: str = "enrich", **fields: Any) -> Any:
    """Return a node as the workflow holds it."""
    return parse_graph({"nodes": [node(node_id, **fields)]}).nodes[0]


def test_first_attempt_has_the_name_of_its_node() -> None:
    assert attempt_summary(parsed(), NodeState(epoch=1)) == "enrich"
    assert attempt_summary(parsed(), NodeState(epoch=3, losses=2)) == "enrich"


def test_attempt_after_a_failure_shows_its_retry_number() -> None:
    state = NodeState(epoch=2, failures=1)
    assert attempt_summary(parsed(retry_policy={"max": 4}), state) == "enrich, retry 1 of 4"


def test_timer_of_a_retry_shows_node_retry_time_and_reason() -> None:
    state = NodeState(failures=1, reason_code="rates_unavailable")
    assert timer_summary(parsed(), state, 600) == "enrich: retry 1 of 2 in 10 min, after rates_unavailable"


@pytest.mark.parametrize("code", ["dispatch_lost", "mongo_unavailable", "cancel_refused", "anything"])
def test_wait_after_a_yield_for_another_reason_has_no_retry_number(code: str) -> None:
    state = NodeState(failures=1, yields=2, reason_code=code, free=True)
    assert next_attempt(parsed(), state) == "next attempt"
    assert timer_summary(parsed(), state, 2) == f"enrich: next attempt in 2 s, after {code}"


def test_timer_after_a_loss_has_no_retry_number() -> None:
    state = NodeState(losses=1, reason_code="lease_lost")
    assert timer_summary(parsed(), state, 2) == "enrich: next attempt in 2 s, after lease_lost"


def test_node_that_yielded_its_slot_waits_for_a_source() -> None:
    assert timer_summary(parsed(), NodeState(yields=1, reason_code="yielded"), 4) == (
        "enrich: waits for a source node, at most 4 s"
    )


def test_long_node_id_is_truncated_in_favor_of_the_rest() -> None:
    state = NodeState(failures=2, reason_code="c" * 200)
    reported = timer_summary(parsed(LONG_ID), state, 600)
    assert ": retry 2 of 2 in 10 min" in reported
    assert len(reported) == 100
    assert attempt_summary(parsed(LONG_ID), state).endswith("…, retry 2 of 2")
    assert len(attempt_summary(parsed(LONG_ID), NodeState())) == 100


@pytest.mark.parametrize("letter", ["\U0001f600", "é", '"', "n"])
@pytest.mark.parametrize("code", ["\U0001f600" * 100, "\x00\n\x1b" * 30, None])
def test_names_of_timers_and_attempts_fit_the_limit_of_temporal(letter: str, code: str | None) -> None:
    enrich = parsed(letter * 200, retry_policy={"max": 10_000})
    for kind in (code, "yielded"):
        state = NodeState(failures=9_999, epoch=9_999, reason_code=kind)
        for text in (
            timer_summary(enrich, state, 9e6),
            attempt_summary(enrich, state),
            attempt_summary(enrich, NodeState()),
        ):
            assert len(text) <= 100 or "waits for" in text
            assert len(text.encode()) <= 200
            assert text.isprintable()


def record(*, nodes: int, cancel_reason: str | None = None) -> RecordTask:
    """Return a write of this many nodes."""
    changed = [
        NodeRecord(index=i, node_id=f"n{i}", status=NodeStatus.DEFERRED, epoch=1) for i in range(nodes)
    ]
    return RecordTask(
        task_id="t",
        run_id="r",
        run_seq=1,
        at=0.0,
        nodes=changed,
        status=TaskStatus.DEFERRED,
        status_history=[],
        cancel_reason=cancel_reason,
    )


WRITES: list[tuple[RecordTask, str]] = [
    (record(nodes=0), "write to MongoDB: task deferred"),
    (record(nodes=1), "write to MongoDB: n0 deferred"),
    (record(nodes=5), "write to MongoDB: n0 deferred, n1 deferred, n2 deferred, 2 more"),
    (record(nodes=1, cancel_reason="enough"), "write to MongoDB: cancel flags, n0 deferred"),
]


@pytest.mark.parametrize("write, name", WRITES, ids=[name for _, name in WRITES])
def test_summary_of_an_engine_write_shows_its_contents(write: RecordTask, name: str) -> None:
    assert write_summary(write) == name


SLOTS = [Slot(node_id="a", epoch=1, role="r"), Slot(node_id="b", epoch=2, role="s")]


def test_summary_of_a_call_for_several_nodes_names_them() -> None:
    assert conditions_summary(["a"]) == "condition of a"
    assert conditions_summary(["a", "b", "a"]) == "conditions of a, b"
    assert slots_summary(SLOTS) == "slot: node a of role r, node b of role s"
    assert free_summary(SLOTS, whole_task=False) == "free slot: node a, node b"
    assert free_summary([], whole_task=True) == "free all slots of the task"
    assert len(slots_summary(SLOTS * 50)) <= 100
