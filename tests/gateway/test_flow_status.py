"""The statuses of flows and their nodes, and the events that lead to them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkit.gateway.events import EventLog
from flowkit.gateway.flows import LatestRun, new_task_id, run_id, transport_id
from flowkit.gateway.models import FlowNode, FlowStatus, NodeStatus
from flowkit.gateway.status import (
    EDGES,
    Cycle,
    FlowRun,
    JobDispatch,
    TaskNode,
    UnknownDependency,
    check_dag,
    flow_cause,
    flow_status,
    levels,
    node_states,
    path,
    waiting_on,
)
from flowkit.gateway.store import FlowStore
from flowkit.models import NodeStatus as TaskNodeStatus
from flowkit.models import TaskStatus
from flowkit.models.ownership import is_flow_run
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Sequence

NODE = FlowNode(id=1)
T = TaskNodeStatus
PENDING, READY, DISPATCHED, RUNNING, COMPLETED, FAILED, CANCELLED = NodeStatus


def status_of(node: TaskNode, *dispatches: JobDispatch) -> NodeStatus:
    """Return the status of a node without parents."""
    return node_states([NODE], FlowRun(nodes={1: node}, dispatches={1: dispatches}))[1].status


def test_a_finished_node_stays_completed_when_its_lost_attempt_is_repeated() -> None:
    done = JobDispatch(generation=0, retry=0, state=RUNNING, outcome="completed", epoch=1)
    child = FlowNode(id=2, depends=[1])
    for node in (TaskNode(status=T.FINISHED, epoch=1), TaskNode(status=T.RUNNING, epoch=2)):
        run = FlowRun(nodes={1: node, 2: TaskNode()}, dispatches={1: [done]})
        assert [each.status for each in node_states([NODE, child], run).values()] == [COMPLETED, READY]


@pytest.mark.parametrize(
    ("node", "dispatch", "wanted"),
    [
        (T.QUEUED, None, READY),
        (T.RUNNING, None, READY),
        (T.RUNNING, {"state": READY}, READY),
        (T.RUNNING, {"state": DISPATCHED}, DISPATCHED),
        (T.RUNNING, {"state": RUNNING}, RUNNING),
        (T.DEFERRED, {"state": RUNNING}, RUNNING),
        (T.RUNNING, {"outcome": "completed"}, RUNNING),
        (T.DEFERRED, {"outcome": "failed"}, FAILED),
        (T.RUNNING, {"outcome": "failed"}, FAILED),
        (T.RUNNING, {"state": RUNNING, "generation": 1}, READY),
        (T.FINISHED, {"outcome": "completed"}, COMPLETED),
        (T.FAILED, {"outcome": "failed"}, FAILED),
        (T.FAILED, None, FAILED),
        (T.CANCELLED, {"state": RUNNING}, CANCELLED),
        (T.SKIPPED, None, CANCELLED),
    ],
)
def test_status_of_a_node(node: TaskNodeStatus, dispatch: dict[str, Any] | None, wanted: NodeStatus) -> None:
    dispatches = [JobDispatch(**{"generation": 0, "retry": 0, **dispatch})] if dispatch is not None else []
    assert status_of(TaskNode(status=node), *dispatches) is wanted


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        ({"status": T.RUNNING, "epoch": 1}, (FAILED, 1, False)),
        ({"status": T.DEFERRED, "epoch": 1}, (FAILED, 1, True)),
        ({"status": T.RUNNING, "epoch": 2}, (FAILED, 2, False)),
        ({"status": T.RUNNING, "epoch": 2, "failures": 1}, (READY, 2, False)),
        ({"status": T.DEFERRED, "epoch": 2, "failures": 1}, (READY, 2, True)),
        ({"status": T.FAILED, "epoch": 2, "failures": 1}, (FAILED, 2, True)),
    ],
)
def test_a_retry_shows_nothing_of_the_failure_before(node: dict[str, Any], shown: tuple[object, ...]) -> None:
    failed = JobDispatch(generation=0, retry=0, outcome="failed", epoch=1)
    state = node_states([NODE], FlowRun(nodes={1: TaskNode(**node)}, dispatches={1: [failed]}))[1]
    assert (state.status, state.attempt, state.is_decided) == shown


def test_a_dispatch_that_is_newer_than_the_document_shows_its_own_attempt() -> None:
    before, after = (JobDispatch(generation=0, retry=n, outcome="failed", epoch=n + 1) for n in (0, 1))
    waits = TaskNode(status=T.DEFERRED, epoch=1, error="the failure before", retry_at=1.0)
    state = node_states([NODE], FlowRun(nodes={1: waits}, dispatches={1: [after, before]}))[1]
    assert (state.status, state.attempt, state.is_decided) == (FAILED, 2, False)


def test_a_held_failure_is_failed() -> None:
    assert status_of(TaskNode(status=T.DEFERRED, held=True)) is FAILED


@pytest.mark.parametrize(
    ("parent", "satisfied", "wanted", "waits"),
    [
        (T.RUNNING, {"a", "b"}, PENDING, []),
        (T.FINISHED, {"a"}, PENDING, ["b"]),
        (T.FINISHED, {"a", "b"}, READY, []),
    ],
)
def test_a_node_is_ready_when_its_parents_are_completed_and_its_prerequisites_satisfied(
    parent: TaskNodeStatus, satisfied: set[str], wanted: NodeStatus, waits: list[str]
) -> None:
    node = FlowNode(id=2, depends=[1], prerequisites=["a", "b"])
    run = FlowRun(nodes={1: TaskNode(status=parent), 2: TaskNode()}, satisfied=frozenset(satisfied))
    assert node_states([NODE, node], run)[2].status is wanted
    assert waiting_on(node, run) == waits


@pytest.mark.parametrize(
    ("status", "reason", "cause"),
    [
        (T.CANCELLED, None, "cancelled"),
        (T.SKIPPED, "upstream_failed", "upstream_failed"),
        (T.SKIPPED, "task_failed", "flow_failed"),
        (T.SKIPPED, "task_cancelled", "cancelled"),
        (T.SKIPPED, "user", "skipped"),
    ],
)
def test_cancelled_nodes_have_a_cause(status: TaskNodeStatus, reason: str | None, cause: str) -> None:
    run = FlowRun(nodes={1: TaskNode(status=status, skip_reason=reason)})
    assert node_states([NODE], run)[1].cause == cause


def test_status_of_a_flow() -> None:
    assert flow_status(None) is FlowStatus.CREATED
    open_ = (TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.DEFERRED)
    assert {flow_status(FlowRun(status=each)) for each in open_} == {FlowStatus.STARTED}
    assert flow_status(FlowRun(status=TaskStatus.FINISHED)) is FlowStatus.FINISHED
    cancelled = FlowRun(status=TaskStatus.CANCELLED, reason="why")
    assert (flow_status(cancelled), flow_cause(cancelled)) == (FlowStatus.ERROR, "cancelled")
    assert flow_cause(FlowRun(status=TaskStatus.FAILED, reason="node 1 failed")) == "node 1 failed"


@pytest.mark.parametrize(("finished_at", "status"), [(None, "running"), (datetime.now(UTC), "failed")])
async def test_a_run_ends_when_its_end_is_stored(finished_at: datetime | None, status: str) -> None:
    db: Any = memory_database()
    await db.tasks.insert_one(
        {"id": "flow:3:40/1", "status": "failed", "finished_at": finished_at, "run_seq": 1}
    )
    store = FlowStore(db)
    assert (await store.task("flow:3:40/1", ["status"]) or {})["status"] == status
    assert await store.task_statuses(["flow:3:40/1"]) == {"flow:3:40/1": (status, 1)}


def test_ways_follow_the_edges() -> None:
    assert path(PENDING, COMPLETED) == [READY, DISPATCHED, RUNNING, COMPLETED]
    assert path(FAILED, RUNNING) == [READY, DISPATCHED, RUNNING]
    assert path(PENDING, CANCELLED) == [CANCELLED]
    assert path(RUNNING, RUNNING) == path(COMPLETED, FAILED) == []


def test_dag_is_checked() -> None:
    with pytest.raises(UnknownDependency) as unknown:
        check_dag([FlowNode(id=1, depends=[7])])
    assert unknown.value.missing == {"1": [7]}
    with pytest.raises(Cycle) as cycle:
        check_dag([FlowNode(id=1), FlowNode(id=2, depends=[1, 3]), FlowNode(id=3, depends=[2])])
    assert cycle.value.nodes == [2, 3]


def test_levels_are_the_longest_paths() -> None:
    nodes = [FlowNode(id=1), FlowNode(id=2, depends=[1]), FlowNode(id=3, depends=[1, 2]), FlowNode(id=4)]
    assert levels(nodes) == [[1, 4], [2], [3]]
    assert levels([]) == []


def test_ids_of_runs_and_jobs_differ_by_deployment_run_flow_and_retry() -> None:
    flow: dict[str, Any] = {"context_id": 3, "caller_id": 11, "id": 40}
    job = {"id": 501, "flow_id": 40}
    assert new_task_id(flow, 1, "1f2e3d4c-5b6a-4788") == "flow:1f2e3d4c:3:40/1"
    assert is_flow_run(new_task_id(flow, 1, "1f2e3d4c"))
    flow["task_id"] = "flow:1f2e3d4c:3:40/1"
    assert transport_id(flow, job, 1, 0, 0) == "1f2e3d4c:3:11:501"
    assert transport_id(flow, job, 1, 0, 2) == "1f2e3d4c:3:11:501/0.2"
    assert transport_id(flow, job, 2, 1, 0) == "1f2e3d4c:3:11:501@40.2/1.0"
    for other in (39, None):
        assert transport_id(flow, {**job, "flow_id": other}, 1, 0, 0) == "1f2e3d4c:3:11:501@40.1"


def test_run_ids_number_the_retries_of_a_run() -> None:
    flow = {"task_id": "flow:3:40/1", "run_seq": 1}
    assert run_id({**flow, "task_id": None}) is None
    assert run_id(flow) == run_id(flow, 1) == "flow:3:40/1"
    assert run_id({**flow, "run_seq": 2}, 1) == run_id(flow, 2) == "flow:3:40/1.2"


# --- events -----------------------------------------------------------------------------------------------------


class Life:
    """One node from its start to its end, one event after the other."""

    def __init__(self) -> None:
        self.node = TaskNode()
        self.dispatches: list[JobDispatch] = []

    def attempt(self, outcome: str, reached: NodeStatus) -> list[tuple[TaskNode, tuple[JobDispatch, ...]]]:
        """Add an attempt, and return what MongoDB says at each moment of it."""
        retry = len([each for each in self.dispatches if each.generation == self.node.generation])
        self.node = replace(self.node, failures=retry, epoch=self.node.epoch + 1)
        seen = [self._at(T.RUNNING)]
        for state in (READY, DISPATCHED, RUNNING)[: 1 + [READY, DISPATCHED, RUNNING].index(reached)]:
            new = JobDispatch(generation=self.node.generation, retry=retry, state=state)
            self.dispatches = [
                each for each in self.dispatches if each.retry != retry or each.generation != new.generation
            ]
            self.dispatches.append(new)
            seen.append(self._at(T.RUNNING))
        if outcome == "lost":
            self.dispatches.pop()
            self.dispatches.append(replace(new, state=reached))
            return [*seen, self._at(T.DEFERRED), self._at(T.RUNNING)]
        if outcome != "timeout":
            self.dispatches[-1] = replace(new, outcome=outcome)
        return [*seen, self._at(T.RUNNING), self._at(T.FINISHED if outcome == "completed" else T.DEFERRED)]

    def end(self, status: TaskNodeStatus) -> tuple[TaskNode, tuple[JobDispatch, ...]]:
        """End the node in another way than by an attempt."""
        return self._at(status)

    def _at(self, status: TaskNodeStatus) -> tuple[TaskNode, tuple[JobDispatch, ...]]:
        self.node = replace(self.node, status=status)
        return self.node, tuple(self.dispatches)


def latest(node: TaskNode, dispatches: Sequence[JobDispatch]) -> LatestRun:
    """Return a run of a flow that has one node."""
    own = {"_id": "3:40", "context_id": 3, "id": 40, "nodes": [{"id": 1}]}
    run = FlowRun(status=TaskStatus.RUNNING, nodes={1: node}, dispatches={1: dispatches})
    return LatestRun({**own, "task_id": "flow:3:40/1", "run_seq": 1, "last_event": 0}, run)


REACHED = st.sampled_from([READY, DISPATCHED, RUNNING])


@given(st.lists(st.tuples(st.sampled_from(["failed", "timeout"]), REACHED), max_size=3), REACHED, st.data())
def test_events_follow_the_edges_however_often_a_gateway_looks(
    failures: list[tuple[str, NodeStatus]], reached: NodeStatus, data: st.DataObject
) -> None:
    life = Life()
    moments = [life.end(T.QUEUED)]
    for outcome, state in failures:
        moments += life.attempt(outcome, state)
    end = data.draw(st.sampled_from([T.FINISHED, T.FAILED, T.CANCELLED, T.SKIPPED]))
    moments += life.attempt("completed", reached) if end is T.FINISHED else [life.end(end)]
    looks = [each for each in moments if data.draw(st.booleans())] + [moments[-1]]
    log, events = EventLog("3:40"), []
    for node, dispatches in looks:
        new = log.missing(latest(node, dispatches), 0.0)
        log.read(new)
        events += new
    changes = [(NodeStatus(each["from_"]), NodeStatus(each["to"])) for each in events if each["node"] == 1]
    at = PENDING
    for before, after in changes:
        assert before is at
        assert after in EDGES[before]
        at = after
    final, dispatches = moments[-1]
    assert at is status_of(final, *dispatches)
    assert [each["seq"] for each in events] == [*range(1, len(events) + 1)]


@pytest.mark.parametrize(("status", "shown"), [(TaskStatus.RUNNING, [1, 2]), (TaskStatus.CANCELLED, [1])])
def test_an_ended_run_does_not_show_a_job_that_was_added_too_late(
    status: TaskStatus, shown: list[int]
) -> None:
    flow = {"_id": "3:40", "context_id": 3, "id": 40, "nodes": [{"id": 1}, {"id": 2}], "run_seq": 1}
    run = FlowRun(status=status, nodes={1: TaskNode(status=T.CANCELLED)})
    assert [node.id for node in LatestRun({**flow, "task_id": "flow:3:40/1"}, run).nodes] == shown


def test_a_cancelled_node_has_no_event_of_a_job_that_ended_later() -> None:
    log, dispatch = EventLog("3:40"), JobDispatch(generation=0, retry=0, state=DISPATCHED)
    log.read(log.missing(latest(TaskNode(status=T.CANCELLED), [dispatch]), 0.0))
    ended = replace(dispatch, state=RUNNING, outcome="completed")
    found = log.missing(latest(TaskNode(status=T.QUEUED, generation=1), [ended]), 0.0)
    assert [(each["generation"], each["from_"], each["to"]) for each in found] == [(1, PENDING, READY)]
