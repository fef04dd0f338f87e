"""Write the note about a node in the current details: what it waits for, or why it ended. Pure.

A node that has not started can wait for several things. Each kind of wait has one function, which returns nothing if
the node does not wait for it; a new kind adds its function to `BEFORE_START`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.graph.description import parent_label
from flowkit.models import NodeStatus, SkipReason, StartWhen
from flowkit.text import names, shorten
from flowkit.workflows.display.summaries import next_attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from flowkit.models import Node, NodeState
    from flowkit.workflows.scheduling.scheduler import Scheduler

_EXPRESSION_CHARS = 60

SILENT = "sends no heartbeats"
"""The note about a node whose attempt sends no heartbeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLimits:
    """The largest number of attempts in flight, by role and over all roles."""

    window: int = 100
    max_in_flight: int = 1_000


class Notes:
    """The notes about the nodes of one task at one moment."""

    def __init__(
        self, scheduler: Scheduler, limits: SlotLimits, now: float, silent_nodes: Collection[str] = ()
    ) -> None:
        self.scheduler = scheduler
        self._silent_nodes = silent_nodes
        self.limits = limits
        self.now = now

    @cached_property
    def in_flight(self) -> Counter[str]:
        """Number of attempts in flight by role."""
        pairs = zip(self.scheduler.nodes, self.scheduler.states, strict=True)
        return Counter(
            node.type for node, state in pairs if state.status in (NodeStatus.RUNNING, NodeStatus.CANCELLING)
        )

    def index(self, node_id: str) -> int:
        """Return the index of a node."""
        return self.scheduler.index_of[node_id]

    def state(self, node_id: str) -> NodeState:
        """Return the state of a node."""
        return self.scheduler.states[self.index(node_id)]

    def open(self, node_ids: Iterable[str]) -> list[str]:
        """Return those of the nodes that have not ended."""
        return [node_id for node_id in node_ids if not self.state(node_id).status.ended]

    def of(self, node: Node) -> str:
        """Return the note about `node`; empty if there is nothing to say."""
        state = self.scheduler.states[node.index]
        error = state.last_error or ""
        if node.node_id in self._silent_nodes:
            return SILENT
        if state.status is NodeStatus.FINISHED:
            return ""  # Most nodes of a task that nears its end.
        match state.status:
            case NodeStatus.QUEUED:
                waits = [wait for rule in BEFORE_START if (wait := rule(self, node))]
                return f"waits for {'; and for '.join(waits)}" if waits else _last_attempt(error)
            case NodeStatus.DEFERRED if state.waits_for or state.next_retry_at:
                return _before_retry(self, node, state, state.next_retry_at or 0.0)
            case NodeStatus.CANCELLING:
                return "waits for its attempt to stop"
            case NodeStatus.FAILED:
                return f"{_consequence(self, node)}{error}"
            case NodeStatus.SKIPPED if state.skip_reason:
                return _skipped(self, node, state.skip_reason)
            case _:
                return _last_attempt(error)


def _last_attempt(error: str) -> str:
    return f"last attempt: {error}" if error else ""


# --- before a node starts -----------------------------------------------------------------------------------------


def _parents(notes: Notes, node: Node) -> str:
    if not notes.scheduler.waits_for_parents(node.index):
        return ""
    parents = notes.open(node.depends_on)
    if node.streams_from:
        parents = [parent_label(node, parent) for parent in parents if not _has_batch(notes, node, parent)]
    if node.streams_from and node.io.start_when is StartWhen.FIRST_BATCH:
        silent = [each for each in notes.open(node.streams_from) if not _has_batch(notes, node, each)]
        return (
            f"the first batch of {names(silent, last=' or ')}"
            if silent
            else names(notes.open(node.depends_on))
        )
    match node.fan_in.mode:
        case "any":
            return _some(1, parents)
        case "count":
            return _some(node.fan_in.count - notes.scheduler.satisfied_parents(node.index), parents)
        case _:
            return names(parents)


def _has_batch(notes: Notes, node: Node, parent: str) -> bool:
    return parent in node.streams_from and notes.state(parent).streamed


def _some(needed: int, parents: list[str]) -> str:
    if needed >= len(parents):
        return names(parents)
    return f"{'any' if needed == 1 else needed} of {names(parents, last=', ')}"


def _routes(notes: Notes, node: Node) -> str:
    """Return the routers that can still start a target, or that must end before it starts."""
    if not node.conditional:
        return ""
    routing, nodes = notes.scheduler.routing, notes.scheduler.nodes
    routers = [nodes[each] for each in routing.open_routers(node.index, notes.scheduler.states)]
    route = routing.gate(node.index)
    if not routers or route is None:
        return ""
    if route.fired:
        return f"the end of {names([each.node_id for each in routers])}"
    success = [each.node_id for each in routers if node.node_id in each.on_success]
    failure = [each.node_id for each in routers if node.node_id in each.on_failure]
    by_list = {"on_success": success, "on_failure": failure}
    if success == failure:
        by_list = {"on_success or on_failure": success}
    return f"a route from {', '.join(f'{names(found)} ({key})' for key, found in by_list.items() if found)}"


def _edge_conditions(notes: Notes, node: Node) -> str:
    if not node.edge_when or not notes.scheduler.waits_for_parents(node.index):
        return ""
    decided = notes.scheduler.states[node.index].edges
    due = [
        parent
        for parent in node.edge_when
        if notes.index(parent) not in decided
        and (notes.state(parent).status is NodeStatus.FINISHED or _has_batch(notes, node, parent))
    ]
    return f"the condition of the edge from {names(due)}" if due else ""


def _condition(notes: Notes, node: Node) -> str:
    if node.when is None or notes.scheduler.states[node.index].condition is not None:
        return ""
    return "its condition" if notes.scheduler.has_opened(node.index) else ""


def _slot(notes: Notes, node: Node) -> str:
    state = notes.scheduler.states[node.index]
    if not notes.scheduler.has_opened(node.index) or _condition(notes, node):
        return ""
    if state.waits_for:
        return state.waits_for
    limits, of_role, total = notes.limits, notes.in_flight[node.type], notes.in_flight.total()
    if of_role >= limits.window:
        return f"a slot of role {node.type} ({of_role:,} of {limits.window:,})"
    if total >= limits.max_in_flight:
        return f"a slot of the task ({total:,} of {limits.max_in_flight:,})"
    return ""


BEFORE_START: tuple[Callable[[Notes, Node], str], ...] = (
    _routes,
    _parents,
    _edge_conditions,
    _condition,
    _slot,
)
"""What a node can wait for before its first attempt, in the order of the note."""


# --- after that ---------------------------------------------------------------------------------------------------


def _before_retry(notes: Notes, node: Node, state: NodeState, at: float) -> str:
    if (state.waits_for or at <= notes.now) and (slot := _slot(notes, node)):
        return f"waits for {slot}; {state.last_error or ''}"
    when = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    idle = notes.open(node.pulls_from) if state.reason_code == reason_codes.YIELDED else []
    if idle:
        return f"waits until {names(idle, last=' or ')} runs; next attempt at {when} at the latest"
    return f"{next_attempt(node, state)} at {when}; {state.last_error or ''}"


def _consequence(notes: Notes, node: Node) -> str:
    """Return, for a failure that need not fail the task, which node handles it; otherwise an empty string."""
    if node.allow_failure:
        return "tolerated; "
    if notes.scheduler.routing.is_handled(node.index):
        finished = [each for each in node.on_failure if notes.state(each).status is NodeStatus.FINISHED]
        return f"handled by {names(finished)}; " if finished else "handled; "
    waits = notes.open(node.on_failure) if notes.scheduler.routing.is_pending(node.index) else []
    return f"{names(waits, last=' or ')} can handle it; " if waits else ""


def _skipped(notes: Notes, node: Node, reason: SkipReason) -> str:
    """Return the reason and, if it lies in other nodes, how those ended."""
    if reason in (SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED):
        return reason.value
    routers = [notes.scheduler.nodes[each].node_id for each in notes.scheduler.routing.routers(node.index)]
    causes = {each: notes.state(each) for each in (*routers, *node.depends_on)}
    by_status = {
        status: [
            each
            for each, state in causes.items()
            if state.status is status and state.skip_reason in (None, reason)
        ]
        for status in (NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.SKIPPED)
    }
    parts = [f"{names(found)} {status.value}" for status, found in by_status.items() if found]
    if reason is SkipReason.CONDITION:
        parts = [*_false_conditions(notes, node), *parts]
    if reason is SkipReason.ROUTING and routers and not parts:
        parts = [f"no route from {names(routers)}"]
    return f"{reason.value}: {', '.join(parts)}" if parts else reason.value


def _false_conditions(notes: Notes, node: Node) -> Iterator[str]:
    state = notes.scheduler.states[node.index]
    if state.condition is False:
        yield f"{shorten(node.when or '', _EXPRESSION_CHARS)} is false"
    edges = [parent for parent in node.edge_when if state.edges.get(notes.index(parent)) is False]
    if edges:
        yield f"the edge from {names(edges)} is false"
