"""The notes in the Web UI: what each node waits for, and why it was skipped."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.fuzz.adapter import graph_of
from tests.fuzz.campaign import plan_of
from tests.fuzz.plans import Features
from tests.unit.graphs import node, pulling

from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.workflows.display.details import Notes, SlotLimits, find_outside_wait
from flowkit.workflows.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_700_000_000.0
FINISHED, FAILED, CANCELLED = NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.CANCELLED
SKIPPED = NodeStatus.SKIPPED


def started(*nodes: dict[str, Any], **fields: Any) -> Scheduler:
    """Return the scheduler of a task whose nodes have not started."""
    graph = parse_graph({"nodes": list(nodes), **fields})
    return Scheduler(graph, [NodeState() for _ in graph.nodes])


def note(scheduler: Scheduler, index: int = -1, now: float = NOW, **limits: int) -> str:
    """Return the note about a node, by default the last one."""
    return Notes(scheduler, SlotLimits(**limits), now).describe(scheduler.nodes[index])


def fan_in(mode: str, parents: int, ended: Sequence[NodeStatus] = ()) -> Scheduler:
    """Return a scheduler whose last node has parents `p0`, `p1`, …, of which the first have ended."""
    above = [node(f"p{i}") for i in range(parents)]
    child = node("child", depends_on=[each["node_id"] for each in above], fan_in=mode)
    scheduler = started(*above, child, on_node_failure="continue")
    for index, status in enumerate(ended):
        scheduler.end(index, status)
    return scheduler


PARENTS: list[tuple[str, int, list[NodeStatus], str]] = [
    ("all", 1, [], "waits for p0"),
    ("all", 3, [], "waits for p0, p1 and p2"),
    ("all", 3, [FINISHED], "waits for p1 and p2"),
    ("all", 4_000, [], "waits for p0, p1, p2 and 3,997 more"),
    ("any", 3, [], "waits for any of p0, p1, p2"),
    ("any", 3, [FAILED], "waits for any of p1, p2"),
    ("any", 2, [FAILED], "waits for p1"),
    ("count:2", 4, [], "waits for 2 of p0, p1, p2, p3"),
    ("count:2", 4, [FINISHED], "waits for any of p1, p2, p3"),
    ("count:2", 3, [FAILED], "waits for p1 and p2"),
    ("all_done", 3, [FAILED], "waits for p1 and p2"),
    ("any", 2, [FINISHED], ""),
    ("all", 1, [FINISHED], ""),
]


@pytest.mark.parametrize(("mode", "parents", "ended", "expected"), PARENTS)
def test_queued_node_names_the_parents_that_can_still_start_it(
    mode: str, parents: int, ended: list[NodeStatus], expected: str
) -> None:
    assert note(fan_in(mode, parents, ended)) == expected


def test_target_with_parents_names_routers_and_parents() -> None:
    router = node("load", routing={"on_failure": ["restore"]})
    scheduler = started(router, node("backup"), node("restore", depends_on=["backup"]))
    assert note(scheduler) == "waits for a route from load (on_failure); and for backup"
    scheduler.end(1, FINISHED)
    assert note(scheduler) == "waits for a route from load (on_failure)"
    scheduler.end(0, FAILED)
    assert note(scheduler) == ""


BOTH, SUCCESS, FAILURE = ["on_success", "on_failure"], ["on_success"], ["on_failure"]
ROUTES: list[tuple[list[list[str]], str]] = [
    ([SUCCESS], "a route from r0 (on_success)"),
    ([BOTH], "a route from r0 (on_success or on_failure)"),
    ([FAILURE, FAILURE], "a route from r0 and r1 (on_failure)"),
    ([FAILURE, SUCCESS], "a route from r1 (on_success), r0 (on_failure)"),
    ([FAILURE] * 9, "a route from r0, r1, r2 and 6 more (on_failure)"),
]


@pytest.mark.parametrize(("lists", "expected"), ROUTES)
def test_target_names_the_routers_and_their_lists(lists: list[list[str]], expected: str) -> None:
    routers = [node(f"r{i}", routing={key: ["t"] for key in own}) for i, own in enumerate(lists)]
    assert note(started(*routers, node("t"))) == f"waits for {expected}"


def test_target_that_one_router_has_started_waits_for_the_end_of_the_others() -> None:
    routers = [node(f"r{i}", routing={"on_failure": ["t"]}) for i in range(3)]
    scheduler = started(*routers, node("t"))
    scheduler.end(1, FAILED)
    assert note(scheduler) == "waits for the end of r0 and r2"


def test_failure_that_a_remediator_can_handle_says_so() -> None:
    scheduler = started(
        node("load", routing={"on_failure": ["restore", "mail"]}), node("restore"), node("mail")
    )
    scheduler.states[0].last_error = "disk_full: 0 bytes left"
    scheduler.end(0, FAILED)
    assert note(scheduler, 0) == "restore or mail can handle it; disk_full: 0 bytes left"
    scheduler.end(1, SKIPPED)
    assert note(scheduler, 0) == "mail can handle it; disk_full: 0 bytes left"
    scheduler.end(2, FINISHED)
    assert note(scheduler, 0) == "handled by mail; disk_full: 0 bytes left"


def test_failure_that_no_remediator_handles_has_only_its_error() -> None:
    scheduler = started(node("load", routing={"on_failure": ["restore"]}), node("restore"))
    scheduler.states[0].last_error = "disk_full: 0 bytes left"
    scheduler.end(0, FAILED)
    scheduler.end(1, FAILED)
    assert note(scheduler, 0) == "disk_full: 0 bytes left"


def test_failure_that_the_task_tolerates_says_so() -> None:
    scheduler = started(node("load", allow_failure=True))
    scheduler.states[0].last_error = "flaky"
    scheduler.end(0, FAILED)
    assert note(scheduler) == "tolerated; flaky"


def in_flight(running: int) -> Scheduler:
    """Return a scheduler of nodes without parents, of which this number run; the last one does not."""
    scheduler = started(*(node(f"n{i}") for i in range(running)), node("last"))
    for state in scheduler.states[:running]:
        state.status = NodeStatus.RUNNING
    return scheduler


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"window": 2, "max_in_flight": 9}, "waits for a slot of role crawler (2 of 2)"),
        ({"window": 3, "max_in_flight": 2}, "waits for a slot of the task (2 of 2)"),
        ({"window": 3, "max_in_flight": 3}, ""),
        ({"window": 3}, ""),
        ({}, ""),
    ],
)
def test_node_with_an_open_gate_waits_for_a_slot(limits: dict[str, int], expected: str) -> None:
    assert note(in_flight(2), **limits) == expected


def test_retry_whose_time_has_come_waits_for_a_slot() -> None:
    scheduler = in_flight(1)
    scheduler.states[-1] = NodeState(
        status=NodeStatus.DEFERRED, epoch=1, failures=1, next_retry_at=NOW, last_error="flaky: no"
    )
    assert note(scheduler, window=1) == "waits for a slot of role crawler (1 of 1); flaky: no"
    before = note(scheduler, now=NOW - 1, window=1)
    assert before == note(scheduler, window=2) == "retry 1 of 2 at 2023-11-14 22:13:20 UTC; flaky: no"


def test_node_that_yielded_names_the_sources_that_must_run() -> None:
    scheduler = started(node("a"), node("b"), node("own", io=pulling(from_nodes=["a", "b"])))
    scheduler.end(0, FINISHED)
    scheduler.states[-1] = NodeState(
        status=NodeStatus.DEFERRED, epoch=1, next_retry_at=NOW, reason_code="yielded", last_error="yielded: …"
    )
    assert note(scheduler) == "waits until b runs; next attempt at 2023-11-14 22:13:20 UTC at the latest"
    scheduler.end(1, FINISHED)
    assert note(scheduler) == "next attempt at 2023-11-14 22:13:20 UTC; yielded: …"


def test_cancelling_node_waits_for_its_attempt() -> None:
    scheduler = in_flight(1)
    scheduler.mark_cancelling()
    assert note(scheduler, 0) == "waits for its attempt to stop"


SKIPS: list[tuple[str, list[NodeStatus], str]] = [
    ("all", [FAILED], "upstream_failed: p0 failed"),
    ("all", [CANCELLED], "upstream_failed: p0 cancelled"),
    ("any", [FAILED, CANCELLED, FAILED], "upstream_failed: p0 and p2 failed, p1 cancelled"),
    ("count:3", [FINISHED, FAILED], "upstream_failed: p1 failed"),
]


@pytest.mark.parametrize(("mode", "ended", "expected"), SKIPS)
def test_skipped_node_names_the_parents_that_caused_it(
    mode: str, ended: list[NodeStatus], expected: str
) -> None:
    assert note(fan_in(mode, 3, ended)) == expected


def test_skipped_branches_name_the_router_and_then_each_other() -> None:
    router = node("load", routing={"on_success": ["publish"], "on_failure": ["restore"]})
    scheduler = started(router, node("publish"), node("restore"), node("check", depends_on=["restore"]))
    scheduler.end(0, FINISHED)
    assert note(scheduler, 2) == "routing: no route from load"
    assert note(scheduler, 3) == "routing: restore skipped"


def test_target_of_a_router_that_failed_without_a_route_names_it() -> None:
    scheduler = started(node("load", routing={"on_success": ["publish"]}), node("publish"))
    scheduler.end(0, FAILED)
    assert note(scheduler) == "upstream_failed: load failed"


@pytest.mark.parametrize("reason", [SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED])
def test_node_of_a_stopped_task_has_only_the_reason(reason: SkipReason) -> None:
    scheduler = fan_in("all", 2)
    scheduler.end(0, CANCELLED)
    scheduler.states[-1] = NodeState(status=NodeStatus.SKIPPED, skip_reason=reason)
    assert note(scheduler) == reason.value


def test_exactly_the_queued_nodes_whose_gate_is_not_open_wait() -> None:
    for number in range(40):
        raw, chance = graph_of(plan_of(1, number, Features())), random.Random(number)
        scheduler = started(*raw.pop("nodes"), **raw)
        for index in [each.index for each in scheduler.nodes if chance.random() < 0.6]:
            if scheduler.has_opened(index):
                scheduler.end(index, chance.choice([FINISHED, FAILED]))
        for each, state in zip(scheduler.nodes, scheduler.states, strict=True):
            text = note(scheduler, each.index)
            if state.status is NodeStatus.QUEUED:
                assert text.startswith("waits for ") is not scheduler.has_opened(each.index)
            elif state.status is NodeStatus.SKIPPED:
                assert text.startswith(f"{state.skip_reason}: ") or scheduler.routing.gate(each.index)


@pytest.mark.parametrize(
    ("status", "shown"),
    [(NodeStatus.QUEUED, "the prerequisites data:eu and data:us"), (CANCELLED, None), (SKIPPED, None)],
)
def test_only_a_node_that_has_not_started_waits_for_prerequisites(
    status: NodeStatus, shown: str | None
) -> None:
    [waiting] = parse_graph({"nodes": [node("a", prerequisites=["data:eu", "data:us"])]}).nodes
    wait = find_outside_wait(waiting, NodeState(status=status), waiting.prerequisites)
    assert (wait and wait.text) == shown
