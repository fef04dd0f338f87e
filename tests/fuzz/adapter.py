"""Connects the fuzz to FlowKit: graphs as users write them, events as calls of the scheduler, results as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fuzz.clock import Clock
from tests.fuzz.model import End
from tests.fuzz.plans import ERROR, FALSE, TRUE, Features

from flowkit import reason_codes
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.models.actions import ActionState
from flowkit.workflows.deadlines import Deadlines, DeadlineTimer
from flowkit.workflows.evaluations import NoResult, apply_results
from flowkit.workflows.retry import note_failure
from flowkit.workflows.scheduling.conditions import DueCondition
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import columns_of, states_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.fuzz.model import Edge
    from tests.fuzz.plans import Arrow, Plan, Step

    from flowkit.models import AttemptFailure

SUPPORTED = Features(streaming=True, conditions=True, deadlines=True)
"""The features that FlowKit has."""


_WHEN: dict[str | None, dict[str, str]] = {
    TRUE: {"when": "1 < 2"},
    FALSE: {"when": "1 > 2"},
    ERROR: {"when": "1 / 0 > 1"},
}
"""Conditions by how they turn out. The fuzz evaluates them by this table."""
_RESULTS: dict[str, bool | NoResult] = {
    "1 < 2": True,
    "1 > 2": False,
    "1 / 0 > 1": NoResult(reason_codes.BAD_CONDITION, "division by zero"),
}


def graph_of(plan: Plan) -> dict[str, Any]:
    """Return the graph as a user writes it."""
    steps = {step.name: step for step in plan.steps}
    return {
        "nodes": [_node(steps[name]) for name in plan.order],
        "edges": [list(pair) for pair in plan.edges],
        "edges_ex": [_entry(arrow) for arrow in plan.arrows],
        "on_node_failure": "continue" if plan.continues else "fail",
        **_deadline(plan),
    }


def _deadline(part: Plan | Step) -> dict[str, float]:
    return {} if part.deadline is None else {"deadline_sec": part.deadline}


def _node(step: Step) -> dict[str, Any]:
    return {
        "node_id": step.name,
        "type": "coordinator_fn" if step.function else "role",
        "depends_on": list(step.depends_on),
        "fan_in": step.fan_in,
        "allow_failure": step.allow_failure,
        "routing": {"on_success": list(step.on_success), "on_failure": list(step.on_failure)},
        "io": {"start_when": "first_batch" if step.first_batch else "ready"},
        **_WHEN.get(step.when, {}),
        **_deadline(step),
    }


def _entry(arrow: Arrow) -> dict[str, Any]:
    entry: dict[str, Any] = {"from": arrow.source, "to": arrow.target}
    entry |= {"mode": "async"} if arrow.streams else {}
    return {**entry, **_WHEN.get(arrow.when, {})}


class Subject:
    """A scheduler under test, with the calls that the workflow makes."""

    def __init__(self, plan: Plan) -> None:
        self._graph = parse_graph(graph_of(plan))
        self._index = {node.node_id: node.index for node in self._graph.nodes}
        self.clock = Clock()
        self._restore([NodeState() for _ in self._graph.nodes])

    def _restore(self, states: list[NodeState]) -> None:
        self.clock.stop_timers()
        self._scheduler = Scheduler(self._graph, states)
        self._stops: dict[int, AttemptFailure] = {}
        self._deadlines = DeadlineTimer(
            Deadlines(self._graph, states, ActionState(), opened_at=Clock.OPENED_AT),
            self._graph,
            stop_nodes=self._stop_nodes,
        )

    def rebuild(self) -> None:
        """Continue as new: restore a scheduler from the encoded states."""
        encoded = columns_of(self._scheduler.states, 1_000_000)
        self._restore(states_of(encoded))

    def _stop_nodes(self, failures: dict[int, AttemptFailure], reason: str) -> None:
        """Fail nodes that wait. Those that run fail when their attempts have ended."""
        self._stops |= failures
        for index in failures:
            state = self._scheduler.states[index]
            if state.status is NodeStatus.RUNNING:
                state.status = NodeStatus.CANCELLING
            else:
                self._fail_stopped(index)

    def _fail_stopped(self, index: int) -> None:
        failure = self._stops[index]
        note_failure(self._scheduler.states[index], failure.code, failure.message)
        self._scheduler.end(index, NodeStatus.FAILED)

    def fire_timers(self) -> None:
        """Let the timers fire that are due, and let the workflow process them."""
        self.clock.fire()
        if self._deadlines.has_events:
            self._deadlines.process_events()

    def start_ready(self) -> list[str]:
        """Return the nodes that may start now, and start an attempt of each."""
        ready = self._deadlines.begin(self._scheduler.pop_ready())
        for index in ready:
            self._begin(index)
        return [self._graph.nodes[index].node_id for index in ready]

    def _begin(self, index: int) -> None:
        state = self._scheduler.states[index]
        state.epoch += 1
        state.status = NodeStatus.RUNNING

    def retry(self, name: str) -> None:
        """End an attempt of a node; the node waits for its retry."""
        self._scheduler.states[self._index[name]].status = NodeStatus.DEFERRED

    def run_again(self, name: str) -> None:
        """Start the next attempt of a node that waits for its retry."""
        self._begin(self._index[name])

    def stream(self, name: str) -> bool:
        """Report a batch of a node. Return whether it is the first one."""
        return self._scheduler.add_batch(self._index[name])

    def take_due(self) -> list[Edge]:
        """Return the conditions that have become due since the last call."""
        return [self._edge(due) for due in self._scheduler.pop_due()]

    def _edge(self, due: DueCondition) -> Edge:
        name = self._graph.nodes[due.node].node_id
        return (name if due.parent is None else self._graph.nodes[due.parent].node_id, name)

    def evaluated(self, group: Iterable[Edge]) -> None:
        """Report the results of conditions that were evaluated together."""
        due = [
            DueCondition(self._index[name], None if above == name else self._index[above])
            for above, name in group
        ]
        apply_results(self._scheduler, due, _RESULTS)

    def end(self, name: str, end: End) -> None:
        """End a node."""
        index, reason = self._index[name], SkipReason(end.reason) if end.reason else None
        if index in self._stops and not self._scheduler.states[index].status.ended:
            self._fail_stopped(index)
        else:
            self._scheduler.end(index, NodeStatus(end.status), reason)

    def stop(self, reason: str) -> None:
        """Stop the task."""
        self._scheduler.mark_cancelling()
        self._scheduler.end_all(NodeStatus.CANCELLED, SkipReason(reason))

    def ends(self) -> dict[str, End]:
        """Return the ends of all nodes that have ended."""
        states = zip(self._graph.nodes, self._scheduler.states, strict=True)
        return {node.node_id: _end_of(state) for node, state in states if state.status.ended}

    def take_changed(self) -> set[str]:
        """Return the nodes that the workflow must write since the last call."""
        changed = {self._graph.nodes[index].node_id for index in self._scheduler.changed}
        self._scheduler.changed.clear()
        return changed

    def deadlines(self) -> dict[str, float]:
        """Return when the open nodes must have ended whose deadlines have begun, in seconds since the task
        was opened.
        """
        states = zip(self._graph.nodes, self._scheduler.states, strict=True)
        begun = {node.node_id: state.deadline_at for node, state in states if not state.status.ended}
        return {name: at - self.clock.OPENED_AT for name, at in begun.items() if at is not None}

    def stopping(self) -> set[str]:
        """Return the nodes that fail when their attempts have ended."""
        states = zip(self._graph.nodes, self._scheduler.states, strict=True)
        return {node.node_id for node, state in states if state.status is NodeStatus.CANCELLING}

    @property
    def is_overdue(self) -> bool:
        """Whether the task must fail because it has exceeded its deadline."""
        return self._deadlines.task_failure is not None

    @property
    def done(self) -> bool:
        """Whether all nodes have ended."""
        return self._scheduler.done

    @property
    def hard_failure(self) -> str | None:
        """The failure that stops the task."""
        failure = self._scheduler.hard_failure
        return failure.node_id if failure else None

    @property
    def failures(self) -> list[str]:
        """The failures that make the task fail, in graph order."""
        return [node.node_id for node in self._scheduler.failures]

    @property
    def handled_failures(self) -> list[str]:
        """The failures that do not, in graph order."""
        return self._scheduler.handled_failures


def _end_of(state: NodeState) -> End:
    return End(state.status.value, state.skip_reason.value if state.skip_reason else state.reason_code)
