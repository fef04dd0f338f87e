"""The table that the Web UI shows: readable, bounded, and well-formed whatever the texts hold."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.graphs import node

from flowkit.models import NodeState, NodeStatus, SkipReason, TaskStatus
from flowkit.workflows.details import ROWS, render
from flowkit.workflows.graph import Walk
from flowkit.workflows.validation import parse_graph


def walk(*states: NodeState, **fields: Any) -> Walk:
    """A walk over unconnected nodes `n0`, `n1`, … in these states."""
    graph = parse_graph({"nodes": [node(f"n{i}", **fields) for i in range(len(states))]})
    return Walk(graph, list(states))


def rows(text: str) -> list[list[str]]:
    """Cells of the table, below its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[:2] == ["| node | role | status | attempt | note |", "|---|---|---|---|---|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def only_row(state: NodeState, **fields: Any) -> list[str]:
    """The row of a node in this state."""
    (row,) = rows(render(TaskStatus.RUNNING, walk(state, **fields)))
    return row


def test_the_heading_counts_nodes_by_status_the_most_telling_first() -> None:
    states = [NodeState(status=s) for s in (NodeStatus.FINISHED, NodeStatus.QUEUED, NodeStatus.FAILED)]
    text = render(TaskStatus.FAILED, walk(*states, NodeState()))
    assert text.splitlines()[0] == "**failed**: 1 failed, 2 queued, 1 finished (of 4)"


def test_a_small_graph_is_shown_whole_in_its_own_order() -> None:
    states = [NodeState(status=NodeStatus.FINISHED, epoch=2), NodeState(), NodeState()]
    table = rows(render(TaskStatus.RUNNING, walk(*states)))
    assert [row[:4] for row in table] == [
        ["n0", "crawler", "finished", "2"],
        ["n1", "crawler", "queued", ""],
        ["n2", "crawler", "queued", ""],
    ]


def test_a_large_graph_shows_what_matters_and_tells_how_many_more_there_are() -> None:
    states = [NodeState(status=NodeStatus.FINISHED) for _ in range(ROWS + 8)]
    states[-1], states[-2] = NodeState(status=NodeStatus.FAILED), NodeState(status=NodeStatus.RUNNING)
    text = render(TaskStatus.RUNNING, walk(*states))
    table = rows(text)
    assert len(table) == ROWS
    assert [row[2] for row in table[:3]] == ["failed", "running", "finished"]
    assert text.splitlines()[-1] == "… and 8 more nodes"


NOTES: list[tuple[str, NodeState, str]] = [
    ("error", NodeState(status=NodeStatus.FAILED, last_error="flaky: no"), "flaky: no"),
    ("running_again", NodeState(status=NodeStatus.RUNNING, last_error="flaky: no"), "flaky: no"),
    ("finished", NodeState(status=NodeStatus.FINISHED, last_error="flaky: no"), ""),
    ("skipped", NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED), "upstream_failed"),
    ("queued", NodeState(), ""),
]  # fmt: skip


@pytest.mark.parametrize("state, note", [row[1:] for row in NOTES], ids=[row[0] for row in NOTES])
def test_the_note_says_why(state: NodeState, note: str) -> None:
    assert only_row(state)[-1] == note


def test_a_waiting_node_tells_when_it_is_retried_and_why() -> None:
    state = NodeState(
        status=NodeStatus.DEFERRED, epoch=1, next_retry_at=1_700_000_000, last_error="flaky: no"
    )
    assert only_row(state)[3:] == ["1", "retry at 22:13:20 UTC; flaky: no"]


def test_a_function_is_shown_by_its_name() -> None:
    assert only_row(NodeState(), type="coordinator_fn", io={"fn": "noop"})[1] == "noop"


@pytest.mark.parametrize("error", ["a | b", "two\nlines", "tab\tand\r\nmore", "|" * 50])
def test_no_text_breaks_the_table(error: str) -> None:
    text = render(TaskStatus.RUNNING, walk(NodeState(status=NodeStatus.FAILED, last_error=error)))
    (line,) = [line for line in text.splitlines() if "crawler" in line]
    assert line.replace("\\|", "").count("|") == 6


def test_long_texts_are_cut() -> None:
    assert only_row(NodeState(status=NodeStatus.FAILED, last_error="x" * 500))[-1] == "x" * 79 + "…"


def test_the_largest_details_stay_small() -> None:
    states = [NodeState(status=NodeStatus.FAILED, last_error="é" * 2_000) for _ in range(5_000)]
    assert len(render(TaskStatus.RUNNING, walk(*states)).encode()) < 20_000
