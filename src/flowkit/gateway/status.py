"""How the statuses of a flow and its nodes follow from what MongoDB says about its task. Pure functions.

A node is the node of a FlowKit task, whose attempts the handler of the role `job` runs. Each attempt has a dispatch, the
record of the job at its supervisor. A lost attempt continues its dispatch; a retry after a failure starts a new one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final

from flowkit.adapters.tasks.fields import SATISFIED, read_satisfied
from flowkit.gateway.models import FlowStatus, NodeStatus
from flowkit.models import NodeStatus as TaskNodeStatus
from flowkit.models import SkipReason, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.gateway.models import FlowNode

P, R, D = NodeStatus.PENDING, NodeStatus.READY, NodeStatus.DISPATCHED
EDGES: Final[dict[NodeStatus, frozenset[NodeStatus]]] = {
    P: frozenset({R, NodeStatus.CANCELLED}),
    R: frozenset({D, NodeStatus.CANCELLED}),
    D: frozenset({NodeStatus.RUNNING, NodeStatus.CANCELLED}),
    NodeStatus.RUNNING: frozenset({NodeStatus.COMPLETED, NodeStatus.FAILED, NodeStatus.CANCELLED}),
    NodeStatus.FAILED: frozenset({R}),
    NodeStatus.COMPLETED: frozenset(),
    NodeStatus.CANCELLED: frozenset(),
}
"""The transitions of a node within one run."""

CANCELLED: Final = "cancelled"
"""Cause of a flow, and of its nodes, that a client has cancelled."""

_CAUSES: Final[dict[str, str]] = {
    SkipReason.UPSTREAM_FAILED: SkipReason.UPSTREAM_FAILED.value,
    SkipReason.TASK_FAILED: "flow_failed",
    SkipReason.TASK_CANCELLED: CANCELLED,
    SkipReason.USER: "skipped",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """The record of one job at its supervisor."""

    generation: int
    retry: int
    """Number of failed attempts before, in the generation."""
    state: NodeStatus = R
    """`Ready` before the supervisor has accepted the job, then `Dispatched` or `Running`."""
    outcome: str | None = None
    """`completed` or `failed`; None while the supervisor has not replied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskNode:
    """The node of the task."""

    status: TaskNodeStatus = TaskNodeStatus.QUEUED
    generation: int = 0
    skip_reason: str | None = None
    epoch: int = 0
    """Number of attempts that have begun, lost ones included."""
    held: bool = False
    """Whether the node has failed and waits for a decision of an operator."""
    error: str | None = None
    retry_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The latest run of a flow."""

    status: TaskStatus = TaskStatus.QUEUED
    reason: str | None = None
    nodes: Mapping[int, TaskNode] = field(default_factory=dict)
    """By id of the job. Nodes that the task does not have yet are absent."""
    dispatches: Mapping[int, Sequence[Dispatch]] = field(default_factory=dict)
    """By id of the job, in any order."""
    satisfied: frozenset[str] = frozenset()
    """The prerequisites that are satisfied."""
    finished_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """The status of a node, and which attempt it belongs to."""

    status: NodeStatus
    cause: str | None = None
    generation: int = 0
    retry: int = 0
    via: NodeStatus | None = None
    """Of a cancelled node, the status that its latest attempt had reached; None if no attempt began."""


def flow_status(run: Run | None) -> FlowStatus:
    """Return the status of a flow with this latest run."""
    if run is None:
        return FlowStatus.CREATED
    if not run.status.closed:
        return FlowStatus.STARTED
    return FlowStatus.FINISHED if run.status is TaskStatus.FINISHED else FlowStatus.ERROR


def flow_cause(run: Run | None) -> str | None:
    """Return why a flow has ended with an error."""
    if run is None or run.status not in {TaskStatus.FAILED, TaskStatus.CANCELLED}:
        return None
    return CANCELLED if run.status is TaskStatus.CANCELLED else run.reason or "failed"


def node_states(nodes: Iterable[FlowNode], run: Run | None) -> dict[int, NodeState]:
    """Return the state of each node of a flow, by the id of its job."""
    if run is None:
        return {node.id: NodeState(status=P) for node in nodes}
    completed = {id for id, node in run.nodes.items() if node.status is TaskNodeStatus.FINISHED}
    return {
        node.id: _node_state(
            run.nodes.get(node.id) or TaskNode(),
            run.dispatches.get(node.id) or (),
            is_open=completed.issuperset(node.depends) and not waiting_on(node, run),
        )
        for node in nodes
    }


def waiting_on(node: FlowNode, run: Run | None) -> list[str]:
    """Return the prerequisites that a node that has not started still needs."""
    if run is None:
        return node.prerequisites
    begun = run.nodes.get(node.id)
    if begun is not None and begun.status is not TaskNodeStatus.QUEUED:
        return []
    return [name for name in node.prerequisites if name not in run.satisfied]


def _node_state(node: TaskNode, dispatches: Sequence[Dispatch], *, is_open: bool) -> NodeState:
    own = [each for each in dispatches if each.generation == node.generation]
    latest = max(own, key=lambda each: each.retry, default=None)
    status = _status_of(node, latest, is_open=is_open)
    retry = 0 if latest is None else latest.retry
    after_failure = latest is not None and latest.outcome == "failed" and status is not NodeStatus.FAILED
    cancelled = status is NodeStatus.CANCELLED
    return NodeState(
        status=status,
        cause=_cause_of(node) if cancelled else None,
        generation=node.generation,
        retry=retry + after_failure,
        via=latest.state if cancelled and latest is not None and not after_failure else None,
    )


def _status_of(node: TaskNode, latest: Dispatch | None, *, is_open: bool) -> NodeStatus:
    match node.status:
        case TaskNodeStatus.QUEUED:
            return R if is_open else P
        case TaskNodeStatus.FINISHED:
            return NodeStatus.COMPLETED
        case TaskNodeStatus.FAILED:
            return NodeStatus.FAILED
        case TaskNodeStatus.CANCELLED | TaskNodeStatus.SKIPPED:
            return NodeStatus.CANCELLED
    return _status_of_begun(node, latest)


def _status_of_begun(node: TaskNode, latest: Dispatch | None) -> NodeStatus:
    """Return the status of a node that runs, or waits for a retry or a decision."""
    if node.held:
        return NodeStatus.FAILED
    if latest is None:
        return R
    if latest.outcome == "failed":
        return NodeStatus.FAILED
    return NodeStatus.RUNNING if latest.outcome == "completed" else latest.state


def _cause_of(node: TaskNode) -> str:
    """Return why a node was cancelled."""
    if node.status is TaskNodeStatus.CANCELLED:
        return CANCELLED
    return _CAUSES.get(node.skip_reason or "", node.skip_reason or CANCELLED)


# --- events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A status that a node has reached. Equal steps are the same event."""

    generation: int
    retry: int
    status: NodeStatus


def steps(state: NodeState, dispatches: Sequence[Dispatch]) -> list[Step]:
    """Return the statuses that have led a node from `Pending` to `state`, oldest first, of all its generations.

    An earlier attempt has passed every status from `Ready` to `Failed`, whether anyone saw it or not.
    """
    found: list[Step] = []
    for generation in sorted({each.generation for each in dispatches if each.generation < state.generation}):
        found += _lead_to(_end_of([each for each in dispatches if each.generation == generation]))
    return found + _lead_to(state)


def _end_of(dispatches: Sequence[Dispatch]) -> NodeState:
    """Return how an earlier generation of a node has ended."""
    last = max(dispatches, key=lambda each: each.retry)
    ends = {"completed": NodeStatus.COMPLETED, "failed": NodeStatus.FAILED}
    status = ends.get(last.outcome or "", NodeStatus.CANCELLED)
    return NodeState(status=status, generation=last.generation, retry=last.retry, via=last.state)


def _lead_to(end: NodeState) -> list[Step]:
    """Return the statuses of one generation of a node, from `Pending` to `end`, without `Pending`."""
    at, found = P, []
    for retry in range(end.retry + 1):
        goals = [NodeStatus.FAILED] if retry < end.retry else [each for each in (end.via, end.status) if each]
        for goal in [R, *goals] if retry else goals:
            way = path(at, goal)
            found += [Step(end.generation, retry, status) for status in way]
            at = way[-1] if way else at
    return found


def path(start: NodeStatus, goal: NodeStatus) -> list[NodeStatus]:
    """Return the shortest way from one status to another along `EDGES`, without `start`. Empty if there is none."""
    before: dict[NodeStatus, NodeStatus] = {}
    queue = deque([start])
    while queue and goal not in before:
        here = queue.popleft()
        for status in sorted(EDGES[here] - before.keys()):
            before[status] = here
            queue.append(status)
    way: list[NodeStatus] = []
    at = goal
    while at in before and at is not start:
        way.append(at)
        at = before[at]
    return way[::-1]


# --- the graph --------------------------------------------------------------------------------------------------


class UnknownDependency(ValueError):
    """A node depends on a job that is not in the flow."""

    def __init__(self, missing: dict[str, list[int]]) -> None:
        super().__init__("nodes depend on jobs that the flow does not have")
        self.missing = missing
        """Unknown jobs, by id of the node."""


class Cycle(ValueError):
    """Nodes depend on each other."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(f"the nodes {', '.join(map(str, nodes))} depend on each other")
        self.nodes = nodes


def check_dag(nodes: Sequence[FlowNode]) -> None:
    """Raise UnknownDependency or Cycle if the nodes are not the graph of a flow."""
    known = {node.id for node in nodes}
    missing = {
        str(node.id): unknown
        for node in nodes
        if (unknown := [each for each in node.depends if each not in known])
    }
    if missing:
        raise UnknownDependency(missing)
    try:
        TopologicalSorter({node.id: node.depends for node in nodes}).prepare()
    except CycleError as error:
        raise Cycle(sorted({*error.args[1]})) from None


def levels(nodes: Sequence[FlowNode]) -> list[list[int]]:
    """Return the jobs by the number of edges of the longest path that leads to them."""
    depends = {node.id: node.depends for node in nodes}
    depth: dict[int, int] = {}
    for job in TopologicalSorter(depends).static_order():
        depth[job] = max((depth[each] + 1 for each in depends[job]), default=0)
    found: list[list[int]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in nodes:
        found[depth[node.id]].append(node.id)
    return found


# --- the documents ----------------------------------------------------------------------------------------------


def read_run(task: Mapping[str, Any], dispatches: Iterable[Mapping[str, Any]]) -> Run:
    """Return the run that a task document, with the projection RUN_FIELDS, and its dispatches describe."""
    by_job: dict[int, list[Dispatch]] = {}
    for row in dispatches:
        by_job.setdefault(row["job_id"], []).append(
            Dispatch(
                generation=row["generation"],
                retry=row["retry"],
                state=NodeStatus(row["state"]),
                outcome=row.get("outcome"),
            )
        )
    return Run(
        status=TaskStatus(task["status"]),
        reason=task.get("reason"),
        nodes={int(node["node_id"]): _read_node(node) for node in task["graph"]["nodes"]},
        dispatches=by_job,
        satisfied=frozenset(read_satisfied(task)),
        finished_at=_seconds(task.get("finished_at")),
    )


RUN_FIELDS: Final = (
    *("status", "reason", "finished_at", SATISFIED),
    *(f"graph.nodes.{name}" for name in ("node_id", "status", "generation", "skip_reason", "held_until_ms")),
    *(f"graph.nodes.{name}" for name in ("attempt_epoch", "last_error", "next_retry_at_ms", "finished_at")),
)
"""The fields of a task document that `read_run` reads."""


def _read_node(node: Mapping[str, Any]) -> TaskNode:
    retry_at = node.get("next_retry_at_ms")
    return TaskNode(
        status=TaskNodeStatus(node["status"]),
        generation=node.get("generation") or 0,
        epoch=node.get("attempt_epoch") or 0,
        skip_reason=node.get("skip_reason"),
        held=node.get("held_until_ms") is not None,
        error=node.get("last_error"),
        retry_at=None if retry_at is None else retry_at / 1000,
        finished_at=_seconds(node.get("finished_at")),
    )


def _seconds(stored: Any) -> float | None:
    return None if stored is None else stored.timestamp()
