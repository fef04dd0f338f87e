"""The table in the Web UI: readable, of limited size, and valid Markdown for any text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs import node
from tests.unit.property_examples import examples

from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason, TaskStatus
from flowkit.workflows.display.details import BYTES, ROWS, TaskQueues, add_page_link
from flowkit.workflows.display.details import render as render_at
from flowkit.workflows.scheduling.scheduler import Scheduler

QUEUES = TaskQueues(namespace="default", prefix="flowkit")


def render(status: TaskStatus, parsed_scheduler: Scheduler, reason: str | None = None) -> str:
    """Return the details of a task whose workers poll the usual queues."""
    return render_at(status, parsed_scheduler, QUEUES, reason)


def scheduler_of(*states: NodeState, **fields: Any) -> Scheduler:
    """Return a scheduler for unconnected nodes `n0`, `n1`, … in these states."""
    graph = parse_graph({"nodes": [node(f"n{i}", **fields) for i in range(len(states))]})
    return Scheduler(graph, list(states))


def rows(text: str) -> list[list[str]]:
    """Return the cells of the table below its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[:2] == ["| node | role | status | attempt | note |", "|:---|:---|:---|:---:|:---|"]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_silent_node_has_a_note() -> None:
    states = [NodeState(status=NodeStatus.RUNNING, epoch=1), NodeState(status=NodeStatus.RUNNING, epoch=1)]
    text = render_at(TaskStatus.DEFERRED, scheduler_of(*states), QUEUES, silent_nodes={"n1"})
    assert [row[-1] for row in rows(text)] == ["", "sends no heartbeats"]


def test_details_link_to_the_page_if_its_address_is_known_and_the_link_fits() -> None:
    assert add_page_link("Task", None, "t") == "Task"
    assert add_page_link("", "https://page", "t") == ""
    linked = add_page_link("Task", "https://page/sub/", "a/b) [c](d")
    link = "[Graph and actions on FlowKit's page](https://page/sub/?task=a%2Fb%29%20%5Bc%5D%28d)"
    assert linked == f"{link}  \nTask"
    full = "x" * BYTES
    assert add_page_link(full, "https://page", "t") == full


def only_row(state: NodeState, **fields: Any) -> list[str]:
    """Return the row of a single node in this state."""
    (row,) = rows(render(TaskStatus.RUNNING, scheduler_of(state, **fields)))
    return row


def test_heading_counts_nodes_by_status_with_failures_first() -> None:
    states = [NodeState(status=s) for s in (NodeStatus.FINISHED, NodeStatus.QUEUED, NodeStatus.FAILED)]
    text = render(TaskStatus.FAILED, scheduler_of(*states, NodeState()))
    assert text.splitlines()[0] == "Task **failed**: 1 failed, 2 queued, 1 finished, of 4 nodes"


def test_heading_shows_why_a_task_was_stopped() -> None:
    text = render(
        TaskStatus.CANCELLED,
        scheduler_of(NodeState(status=NodeStatus.CANCELLED)),
        "wrong\nday | " + "x" * 300,
    )
    heading = text.splitlines()[0]
    assert heading.startswith("Task **cancelled** (wrong day \\| xxx")
    assert heading.endswith("x…): 1 cancelled, of 1 node")
    assert len(heading) < 300


def test_small_graph_is_shown_completely_with_important_nodes_first() -> None:
    states = [NodeState(status=NodeStatus.FINISHED, epoch=2), NodeState(), NodeState()]
    table = rows(
        render(TaskStatus.RUNNING, scheduler_of(*states, NodeState(status=NodeStatus.RUNNING, epoch=1)))
    )
    assert [row[:4] for row in table] == [
        ["n3", "crawler", "running", "1"],
        ["n1", "crawler", "queued", ""],
        ["n2", "crawler", "queued", ""],
        ["n0", "crawler", "finished", "2"],
    ]


def test_large_graph_shows_important_nodes_and_the_number_of_hidden_ones() -> None:
    states = [NodeState(status=NodeStatus.FINISHED) for _ in range(ROWS + 8)]
    states[-1], states[-2] = NodeState(status=NodeStatus.FAILED), NodeState(status=NodeStatus.RUNNING)
    text = render(TaskStatus.RUNNING, scheduler_of(*states))
    table = rows(text)
    assert len(table) == ROWS
    assert [row[2] for row in table[:3]] == ["failed", "running", "finished"]
    assert text.splitlines()[-1] == "… and 8 more nodes; the query `status` has them all"


NOTES: list[tuple[str, NodeState, str]] = [
    ("error", NodeState(status=NodeStatus.FAILED, last_error="flaky: no"), "flaky: no"),
    ("running_again", NodeState(status=NodeStatus.RUNNING, last_error="flaky: no"), "last attempt: flaky: no"),
    ("finished", NodeState(status=NodeStatus.FINISHED, last_error="flaky: no"), ""),
    ("skipped", NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED), "upstream_failed"),
    ("queued", NodeState(), ""),
]  # fmt: skip


@pytest.mark.parametrize("state, note", [row[1:] for row in NOTES], ids=[row[0] for row in NOTES])
def test_note_shows_the_reason(state: NodeState, note: str) -> None:
    assert only_row(state)[-1] == note


def test_waiting_node_shows_when_and_why_it_is_retried() -> None:
    state = NodeState(
        status=NodeStatus.DEFERRED, epoch=1, next_retry_at=1_700_000_000, last_error="flaky: no"
    )
    assert only_row(state)[3:] == ["1", "next attempt at 2023-11-14 22:13:20 UTC; flaky: no"]
    state.failures, state.reason_code = 1, "flaky"
    assert only_row(state)[-1] == "retry 1 of 2 at 2023-11-14 22:13:20 UTC; flaky: no"


def test_running_nodes_link_to_the_workers_of_their_role() -> None:
    states = [NodeState(status=NodeStatus.RUNNING), NodeState(status=NodeStatus.RUNNING), NodeState()]
    output = render(TaskStatus.RUNNING, scheduler_of(*states)).splitlines()
    assert output[0].endswith("  ")
    link = "[crawler](namespaces/default/task-queues/flowkit.crawler)"
    assert output[1:3] == [f"A running node may still wait for a worker. Workers of its role: {link}", ""]


@pytest.mark.parametrize("queue", ["my queue", "a/b", "q?x", "a)b", "ünï"])
def test_queue_that_does_not_fit_into_a_url_is_named_without_a_link(queue: str) -> None:
    text = render_at(
        TaskStatus.RUNNING,
        scheduler_of(NodeState(status=NodeStatus.RUNNING)),
        TaskQueues(namespace="default", prefix=queue),
    )
    assert f"role: crawler, queue {queue}.crawler\n" in text
    assert "](" not in text


def test_link_leads_to_the_queue_of_the_version_that_the_task_has_fixed() -> None:
    running = scheduler_of(NodeState(status=NodeStatus.RUNNING))
    text = render_at(TaskStatus.RUNNING, running, QUEUES, pins={"crawler": "1_4+ab"})
    link = "[crawler](namespaces/default/task-queues/flowkit.crawler@1_4+ab)"
    assert f"Workers of its role: {link} with version 1_4+ab (pinned by this task)\n" in text


def test_only_some_of_many_roles_are_named() -> None:
    graph = parse_graph({"nodes": [node(f"n{i}", type=f"r{i}") for i in range(9)]})
    text = render(
        TaskStatus.RUNNING, Scheduler(graph, [NodeState(status=NodeStatus.RUNNING) for _ in range(9)])
    )
    assert "Workers of its roles: [r0](" in text
    assert "flowkit.r5), 3 more\n" in text


@pytest.mark.parametrize("status", [each for each in NodeStatus if each is not NodeStatus.RUNNING])
def test_without_running_nodes_no_workers_are_named(status: NodeStatus) -> None:
    assert "Workers" not in render(TaskStatus.RUNNING, scheduler_of(NodeState(status=status)))


def test_functions_have_no_workers() -> None:
    running = scheduler_of(NodeState(status=NodeStatus.RUNNING), type="coordinator_fn", io={"fn": "noop"})
    assert "Workers" not in render(TaskStatus.RUNNING, running)


def test_function_node_is_shown_with_its_function_name() -> None:
    assert only_row(NodeState(), type="coordinator_fn", io={"fn": "noop"})[1] == "noop"


@pytest.mark.parametrize("error", ["a | b", "two\nlines", "tab\tand\r\nmore", "|" * 50])
def test_no_text_breaks_the_markdown_table(error: str) -> None:
    text = render(TaskStatus.RUNNING, scheduler_of(NodeState(status=NodeStatus.FAILED, last_error=error)))
    (line,) = [line for line in text.splitlines() if "crawler" in line]
    assert line.replace("\\|", "").count("|") == 6


def test_long_texts_are_truncated_more_in_larger_graphs() -> None:
    states = [NodeState(status=NodeStatus.FAILED, last_error="x" * 5_000) for _ in range(ROWS)]
    notes = [
        [row[-1] for row in rows(render(TaskStatus.FAILED, scheduler_of(*states[:n])))] for n in (1, 4, ROWS)
    ]
    assert [len(note[0]) for note in notes] == [1_200, 300, 80]
    assert {note[-1] for each in notes for note in each} == {"…"}


def test_largest_details_stay_within_their_limit() -> None:
    states = [NodeState(status=NodeStatus.FAILED, last_error="é" * 2_000) for _ in range(5_000)]
    assert len(render(TaskStatus.RUNNING, scheduler_of(*states)).encode()) < 9_000


def test_details_of_four_byte_characters_fit_and_count_the_hidden_nodes() -> None:
    nodes = [
        node(f"{n}" + "\U0001f600" * 190, type="coordinator_fn", io={"fn": "\U0001f601" * 90})
        for n in range(50)
    ]
    states = [NodeState(status=NodeStatus.FAILED, epoch=1, last_error="\U0001f602" * 2_000) for _ in nodes]
    text = render(TaskStatus.FAILED, Scheduler(parse_graph({"nodes": nodes}), states), "\U0001f603" * 5_000)
    assert 15_000 < len(text.encode()) <= BYTES
    assert f"… and {50 - len(rows(text))} more nodes; the query `status` has them all" in text


@settings(max_examples=examples(60))
@given(
    error=st.none() | st.text(st.characters(), max_size=30),
    status=st.sampled_from(NodeStatus),
    counts=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    at=st.none() | st.floats(0, 1e11),
    skip=st.none() | st.sampled_from(SkipReason),
    reason=st.none() | st.text(st.characters(), max_size=30),
)
def test_details_can_be_rendered_for_any_state(
    error: str | None,
    status: NodeStatus,
    counts: tuple[int, int],
    at: float | None,
    skip: SkipReason | None,
    reason: str | None,
) -> None:
    state = NodeState(
        status=status, epoch=counts[0], failures=counts[1], next_retry_at=at, last_error=error, reason_code=error,
        skip_reason=skip,
    )  # fmt: skip
    assert "Task **running**" in render(TaskStatus.RUNNING, scheduler_of(state), reason)


@pytest.mark.parametrize(
    ("routers", "named"),
    [(1, "r0"), (3, "r0, r1 and r2"), (5, "r0, r1, r2 and 2 more")],
    ids=["one", "three", "five"],
)
def test_target_shows_the_nodes_whose_routes_it_waits_for(routers: int, named: str) -> None:
    nodes = [node(f"r{i}", routing={"on_failure": ["t"]}) for i in range(routers)]
    graph = parse_graph({"nodes": [*nodes, node("t")]})
    scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
    notes = {row[0]: row[-1] for row in rows(render(TaskStatus.RUNNING, scheduler))}
    assert notes["t"] == f"waits for a route from {named} (on_failure)"
    assert notes["r0"] == ""
    for router in range(routers):
        scheduler.end(router, NodeStatus.FAILED)
    assert rows(render(TaskStatus.RUNNING, scheduler))[-1][-1] == ""


def test_streaming_node_shows_the_parents_whose_first_batch_it_waits_for() -> None:
    child = node("c", depends_on=["a", "b"], io={"start_when": "first_batch"})
    graph = parse_graph({"nodes": [node("a"), node("b"), child]})
    scheduler = Scheduler(graph, [NodeState() for _ in graph.nodes])
    assert rows(render(TaskStatus.RUNNING, scheduler))[-1][-1] == "waits for the first batch of a or b"
    scheduler.end(0, NodeStatus.FINISHED)
    notes = {row[0]: row[-1] for row in rows(render(TaskStatus.RUNNING, scheduler))}
    assert notes["c"] == "waits for the first batch of b"
    scheduler.add_batch(1)
    notes = {row[0]: row[-1] for row in rows(render(TaskStatus.RUNNING, scheduler))}
    assert notes["c"] == ""


def test_note_of_a_node_whose_condition_is_false_shows_the_expression() -> None:
    skipped = NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.CONDITION)
    decided = NodeState(status=NodeStatus.SKIPPED, skip_reason=SkipReason.CONDITION, condition=False)
    assert only_row(decided, when="vars.sla == 'gold'")[-1] == "condition: vars.sla == 'gold' is false"
    assert only_row(skipped, when="vars.sla == 'gold'")[-1] == "condition"
