"""How the statuses of a flow and its nodes follow from what MongoDB says about its task. Pure functions.

A node is the node of a FlowKit task, whose attempts the handler of the role `job` runs. Each attempt has a
dispatch, the record of the job at its supervisor. A lost attempt continues its dispatch; a retry after a
failure starts a new one.

The handler writes what it learns about a dispatch as `advance` says. Everything else is derived by those who look.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final

from flowkit.adapters.tasks.fields import FAILURES, SATISFIED, read_satisfied
from flowkit.gateway.models import FlowStatus, NodeStatus
from flowkit.models import NodeStatus as TaskNodeStatus
from flowkit.models import SkipReason, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flowkit.gateway.models import FlowNode

P, R, D = NodeStatus.PENDING, NodeStatus.READY, NodeStatus.DISPATCHED
EDGES: Final[dict[NodeStatus, frozenset[NodeStatus]]] = {
    P: frozenset({R, NodeStatus.CANCELLED}),
    R: frozenset({D, NodeStatus.FAILED, NodeStatus.CANCELLED}),
    D: frozenset({NodeStatus.RUNNING, NodeStatus.FAILED, NodeStatus.CANCELLED}),
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
class JobDispatch:
    """The record of one job at its supervisor."""

    generation: int
    retry: int
    """Number of failed attempts before, in the generation."""
    state: NodeStatus = R
    """`Ready` before the supervisor has accepted the job, then `Dispatched` or `Running`."""
    outcome: str | None = None
    """`completed`, `failed`, or `abandoned` if no attempt waits for the supervisor any more; None until then."""
    epoch: int = 0
    """The latest attempt that has opened or changed the record."""


class JobEvent(Enum):
    """What an attempt learns about its dispatch."""

    ACCEPTED = auto()
    """The supervisor has accepted the job."""
    STARTED = auto()
    """The supervisor has started the job."""
    COMPLETED = auto()
    """The result is stored."""
    FAILED = auto()
    """The supervisor has reported a failure of the job."""
    NO_OUTCOME = auto()
    """The attempt has failed without a report of the supervisor."""
    STOPPED = auto()
    """The job was stopped, because its attempt must end. Another attempt may continue the dispatch."""


def advance(dispatch: JobDispatch, event: JobEvent, epoch: int) -> JobDispatch | None:
    """Return a dispatch after an event that the attempt `epoch` reports; None if the report comes too late.

    A state only follows an earlier one, and an outcome is final. Once a later attempt continues the
    dispatch, reports of an earlier one, which was lost, do not count.
    """
    if dispatch.outcome is not None or epoch < dispatch.epoch:
        return None
    state, outcome = dispatch.state, None
    match event:
        case JobEvent.ACCEPTED if state is R:
            state = D
        case JobEvent.STARTED if state in (R, D):
            state = NodeStatus.RUNNING
        case JobEvent.COMPLETED | JobEvent.FAILED:
            state = NodeStatus.RUNNING
            outcome = "completed" if event is JobEvent.COMPLETED else "failed"
        case JobEvent.NO_OUTCOME:
            outcome = "failed"
        case JobEvent.STOPPED:
            pass
        case _:
            return None
    return replace(dispatch, state=state, outcome=outcome, epoch=epoch)


def abandoned(run: FlowRun) -> list[tuple[int, JobDispatch]]:
    """Return the dispatches of an ended run that have no outcome, with the ids of their jobs: none will get any."""
    if not run.status.closed:
        return []
    return [
        (job, each)
        for job, node in run.nodes.items()
        for each in run.dispatches.get(job) or ()
        if each.outcome is None and each.generation <= node.generation
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskNode:
    """The node of the task."""

    status: TaskNodeStatus = TaskNodeStatus.QUEUED
    generation: int = 0
    skip_reason: str | None = None
    epoch: int = 0
    """Number of attempts that have begun, lost ones included."""
    failures: int = 0
    """Number of attempts of the generation that had failed before the latest one began."""
    held: bool = False
    """Whether the node has failed and waits for a decision of an operator."""
    error: str | None = None
    retry_at: float | None = None
    finished_at: float | None = None


_NOT_IN_TASK: Final = TaskNode()


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRun:
    """The latest run of a flow."""

    status: TaskStatus = TaskStatus.QUEUED
    reason: str | None = None
    nodes: Mapping[int, TaskNode] = field(default_factory=dict)
    """By id of the job. Nodes that the task does not have yet are absent."""
    dispatches: Mapping[int, Sequence[JobDispatch]] = field(default_factory=dict)
    """By id of the job, in any order."""
    satisfied: frozenset[str] = frozenset()
    """The prerequisites that are satisfied."""
    finished_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobNode:
    """The status of a node, and which attempt it belongs to."""

    status: NodeStatus
    cause: str | None = None
    generation: int = 0
    retry: int = 0
    attempt: int = 0
    """Number of attempts that have begun, lost ones included."""
    is_decided: bool = True
    """Whether the task document shows what follows after this attempt: after a failure, a retry or the end."""
    via: NodeStatus | None = None
    """Of a failed or cancelled node, the status that its latest attempt had reached; None if no attempt began."""


def flow_status(run: FlowRun | None) -> FlowStatus:
    """Return the status of a flow with this latest run."""
    if run is None:
        return FlowStatus.CREATED
    if not run.status.closed:
        return FlowStatus.STARTED
    return FlowStatus.FINISHED if run.status is TaskStatus.FINISHED else FlowStatus.ERROR


def flow_cause(run: FlowRun | None) -> str | None:
    """Return why a flow has ended with an error."""
    if run is None or run.status not in {TaskStatus.FAILED, TaskStatus.CANCELLED}:
        return None
    return CANCELLED if run.status is TaskStatus.CANCELLED else run.reason or "failed"


def node_states(nodes: Iterable[FlowNode], run: FlowRun | None) -> dict[int, JobNode]:
    """Return the state of each node of a flow, by the id of its job."""
    if run is None:
        return {node.id: JobNode(status=P) for node in nodes}
    completed = {
        job for job, node in run.nodes.items() if _is_completed(node, _current(node, run.dispatches.get(job)))
    }
    return {
        node.id: _node_state(
            begun := run.nodes.get(node.id) or _NOT_IN_TASK,
            run.dispatches.get(node.id) or (),
            is_open=begun.status is TaskNodeStatus.QUEUED
            and completed.issuperset(node.depends)
            and not waiting_on(node, run),
        )
        for node in nodes
    }


def waiting_on(node: FlowNode, run: FlowRun | None) -> list[str]:
    """Return the prerequisites that a node that has not started still needs."""
    if run is None:
        return node.prerequisites
    begun = run.nodes.get(node.id)
    if begun is not None and begun.status is not TaskNodeStatus.QUEUED:
        return []
    return [name for name in node.prerequisites if name not in run.satisfied]


def _node_state(node: TaskNode, dispatches: Sequence[JobDispatch], *, is_open: bool) -> JobNode:
    current = _current(node, dispatches)
    retry = node.failures if current is None else current.retry
    status = _status_of(node, current, is_open=is_open)
    after_failure = current is not None and current.outcome == "failed" and status is not NodeStatus.FAILED
    has_way = status in (NodeStatus.FAILED, NodeStatus.CANCELLED) and not after_failure
    attempt = max(node.epoch, 0 if current is None else current.epoch)
    return JobNode(
        status=status,
        cause=_cause_of(node) if status is NodeStatus.CANCELLED else None,
        generation=node.generation,
        retry=retry + after_failure,
        attempt=attempt,
        is_decided=node.status is not TaskNodeStatus.RUNNING and node.epoch == attempt,
        via=current.state if has_way and current is not None else None,
    )


def _current(node: TaskNode, dispatches: Sequence[JobDispatch] | None) -> JobDispatch | None:
    """Return the dispatch of the latest attempt of a node; None until this attempt has opened it."""
    if not dispatches:
        return None
    own = [each for each in dispatches if each.generation == node.generation]
    latest = max(own, key=lambda each: each.retry, default=None)
    return None if latest is None or latest.retry < node.failures else latest


def _is_completed(node: TaskNode, current: JobDispatch | None) -> bool:
    """Return whether a node has finished, or did before its attempt was lost: the next one finishes it again."""
    if not node.status.begun or current is None:
        return node.status is TaskNodeStatus.FINISHED
    return current.outcome == "completed" and current.epoch < node.epoch


def _status_of(node: TaskNode, current: JobDispatch | None, *, is_open: bool) -> NodeStatus:
    match node.status:
        case TaskNodeStatus.QUEUED:
            return R if is_open else P
        case TaskNodeStatus.FINISHED:
            return NodeStatus.COMPLETED
        case TaskNodeStatus.FAILED:
            return NodeStatus.FAILED
        case TaskNodeStatus.CANCELLED | TaskNodeStatus.SKIPPED:
            return NodeStatus.CANCELLED
    return _status_of_begun(node, current)


def _status_of_begun(node: TaskNode, current: JobDispatch | None) -> NodeStatus:
    """Return the status of a node that runs, or waits for a retry or a decision.

    `current` is the dispatch of its latest attempt; None until this attempt has opened it.
    """
    if node.held:
        return NodeStatus.FAILED
    if current is None:
        return R
    if current.outcome == "failed":
        return NodeStatus.FAILED
    if _is_completed(node, current):
        return NodeStatus.COMPLETED
    return NodeStatus.RUNNING if current.outcome == "completed" else current.state


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


def steps(state: JobNode, dispatches: Sequence[JobDispatch]) -> list[Step]:
    """Return the statuses that have led a node from `Pending` to `state`, oldest first, of all its generations.

    An earlier attempt has passed every status from `Ready` to the one that it has reached, and `Failed`,
    whether anyone saw it or not.
    """
    way: list[Step] = []
    own: dict[int, list[JobDispatch]] = {}
    for each in dispatches:
        own.setdefault(each.generation, []).append(each)
    for generation in sorted(each for each in own if each < state.generation):
        way += _lead_to(_end_of(own[generation]), own[generation])
    return way + _lead_to(state, own.get(state.generation) or ())


def _end_of(dispatches: Sequence[JobDispatch]) -> JobNode:
    """Return how an earlier generation of a node has ended."""
    last = max(dispatches, key=lambda each: each.retry)
    ends = {"completed": NodeStatus.COMPLETED, "failed": NodeStatus.FAILED}
    status = ends.get(last.outcome or "", NodeStatus.CANCELLED)
    return JobNode(status=status, generation=last.generation, retry=last.retry, via=last.state)


def _lead_to(end: JobNode, dispatches: Iterable[JobDispatch]) -> list[Step]:
    """Return the statuses of one generation of a node, from `Pending` to `end`, without `Pending`."""
    reached = {each.retry: each.state for each in dispatches}
    at, all_steps = P, []
    for retry in range(end.retry + 1):
        last = (reached.get(retry), NodeStatus.FAILED) if retry < end.retry else (end.via, end.status)
        for goal in [R, *filter(None, last)] if retry else filter(None, last):
            way = path(at, goal)
            all_steps += [Step(end.generation, retry, status) for status in way]
            at = way[-1] if way else at
    return all_steps


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


def read_run(task: Mapping[str, Any], dispatches: Iterable[Mapping[str, Any]]) -> FlowRun:
    """Return the run that a task document, with the projection RUN_FIELDS, and its dispatches describe."""
    by_job: dict[int, list[JobDispatch]] = {}
    for row in dispatches:
        by_job.setdefault(row["job_id"], []).append(read_dispatch(row))
    return FlowRun(
        status=TaskStatus(task["status"]),
        reason=task.get("reason"),
        nodes={int(node["node_id"]): _read_node(node) for node in task["graph"]["nodes"]},
        dispatches=by_job,
        satisfied=frozenset(read_satisfied(task)),
        finished_at=_seconds(task.get("finished_at")),
    )


def renew(run: FlowRun, generations: Mapping[int, int]) -> FlowRun:
    """Return a run whose nodes have these generations, by id of the job, at least.

    A retry starts new generations. Until the task document shows them, it has the ends of the run before.
    """
    new = {
        job: TaskNode(generation=generation)
        for job, generation in generations.items()
        if job in run.nodes and run.nodes[job].generation < generation
    }
    return replace(run, nodes={**run.nodes, **new}) if new else run


def read_dispatch(row: Mapping[str, Any]) -> JobDispatch:
    """Return the dispatch that a record describes."""
    return JobDispatch(
        generation=row["generation"],
        retry=row["retry"],
        state=NodeStatus(row["state"]),
        outcome=row["outcome"],
        epoch=row["epoch"],
    )


RUN_FIELDS: Final = (
    *("status", "reason", "finished_at", SATISFIED),
    *(f"graph.nodes.{name}" for name in ("node_id", "status", "generation", "skip_reason", "held_until_ms")),
    *(
        f"graph.nodes.{name}"
        for name in ("attempt_epoch", FAILURES, "last_error", "next_retry_at_ms", "finished_at")
    ),
)
"""The fields of a task document that `read_run` reads."""


def _read_node(node: Mapping[str, Any]) -> TaskNode:
    retry_at = node.get("next_retry_at_ms")
    return TaskNode(
        status=TaskNodeStatus(node["status"]),
        generation=node.get("generation") or 0,
        epoch=node.get("attempt_epoch") or 0,
        failures=node.get(FAILURES) or 0,
        skip_reason=node.get("skip_reason"),
        held=node.get("held_until_ms") is not None,
        error=node.get("last_error"),
        retry_at=None if retry_at is None else retry_at / 1000,
        finished_at=_seconds(node.get("finished_at")),
    )


def _seconds(stored: Any) -> float | None:
    return None if stored is None else stored.timestamp()
