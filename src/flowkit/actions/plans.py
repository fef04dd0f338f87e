"""Decide what an action changes in a running task, or why the task rejects it. Pure.

The planners return what an action changes, for the states that the nodes have now. The workflow applies a
plan in the same workflow task in which it made it; the query `preview` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.actions.changed_nodes import change_policy, changes_of, rebuild_node
from flowkit.actions.records import (
    COMPLETE_NODE,
    FAIL_NODE,
    RETRY_BATCHES,
    RETRY_NODE,
    SKIP_BATCHES,
    SKIP_NODE,
    TASK_SCOPE,
    Action,
    ChangeGraph,
    CompleteNode,
    Decide,
    FailNode,
    Pause,
    Resume,
    RetryBatches,
    RetryNode,
    Satisfy,
    SkipBatches,
    SkipNode,
)
from flowkit.core.utils import dumps
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.graph.changes import edge_problem
from flowkit.graph.encoding import json_bytes
from flowkit.graph.field_checks import node_field_problems
from flowkit.limits import (
    ACTION_AFFECTED,
    ACTION_NAMES_CHARS,
    ACTION_RESULTS_BYTES,
    ACTION_SCOPES,
    ACTION_TEXT_CHARS,
    APPLIED_ACTIONS,
    CHANGED_NODES_BYTES,
)
from flowkit.models import ALL_DONE, APPROVE, NodeOutcome, NodeState, NodeStatus, SkipReason
from flowkit.models.actions import AppliedAction
from flowkit.models.graphs import inherited_reason
from flowkit.text import names, printed, suggestion, truncate
from flowkit.validation.storable import storage_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flowkit.actions.scopes import Pauses
    from flowkit.models import Node

PAUSED = "paused"
"""What a plan calls the state of a paused node that runs no attempt."""

HELD = "held"
"""What a plan calls the state of a node that has failed and waits for a decision."""

NEW = "new"
CHANGED = "queued, changed"
"""What a plan calls the states of a node that it adds to the graph, and of one that it changes before it starts."""

DUE = "deferred, due now"
"""What a plan calls the state of a node whose wait for a retry it ends."""

WAITING = "waiting"
"""What a plan calls the state of an approval that waits for a decision, or of a node that lacks prerequisites."""

_IN_FLIGHT = frozenset({NodeStatus.RUNNING, NodeStatus.CANCELLING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A node that an action affects: its state before and after, in words."""

    index: int
    from_: str
    to: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an action changes."""

    what: str
    """What the action is about, for the audit."""
    names: tuple[str, ...] = ()
    """The scopes or the prerequisite that it is about."""
    changes: Sequence[Change] = ()
    notes: tuple[str, ...] = ()
    pauses: tuple[str, ...] = ()
    """Scopes that become paused."""
    resumes: frozenset[str] = frozenset()
    """Scopes whose pause ends."""
    interrupts: tuple[int, ...] = ()
    """Indexes of the nodes whose attempts are stopped."""
    resets: tuple[int, ...] = ()
    """Indexes of the nodes that start again, in the order of the graph. `interrupts` are some of them."""
    batches: tuple[SetAside, ...] = ()
    """What becomes of batches that nodes have set aside. If such a node starts again, it stays in its generation."""
    unblocks: frozenset[int] = frozenset()
    """Indexes of nodes below these that have not started, so that their gates have to be decided again."""
    end: NodeEnd | None = None
    """How the node of the action ends: at once, or in its new generation if it starts one."""
    changed: Node | None = None
    """The node of the action with changed fields."""
    ends_wait: int | None = None
    """Index of the node whose wait for a retry ends, or those of its shards."""
    satisfies: str | None = None
    """The prerequisite that becomes satisfied."""
    adds: tuple[str, ...] = ()
    """The ids of the nodes that are added to the graph. Their indexes follow those of the present nodes."""
    replaces: tuple[int, ...] = ()
    """Indexes of the nodes that change before they start."""

    @cached_property
    def kept(self) -> frozenset[int]:
        """Indexes of the nodes that start again in their generation, with the batches that they have stored."""
        return frozenset(each.index for each in self.batches).intersection(self.resets)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnd:
    """How a decision ends a node."""

    index: int
    status: NodeStatus
    failure: tuple[str, str] | None = None
    """The reason code and the text of the failure of a node that fails."""
    outcome: NodeOutcome | None = None
    """The results of a node that a person completes, which the reset writes to the task document with its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """What becomes of batches that a node has set aside: they are skipped, or else tried again."""

    index: int
    batch_uids: tuple[str, ...] = ()
    """Empty for all."""
    skips: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskSnapshot:
    """The state of a running task, from which an action is planned."""

    nodes: Sequence[Node]
    states: Sequence[NodeState]
    pauses: Pauses
    run_seq: int = 1
    """The number of the run of the task."""
    revision: int = 0
    applied: Sequence[AppliedAction] = ()
    """The latest actions that were applied, oldest first."""
    resetting: Collection[int] = ()
    """The nodes whose reset or change by an earlier action is in progress."""
    waiting: Collection[int] = ()
    """The nodes that wait for a retry, or of which a shard does."""
    changes_graph: bool = False
    """Whether an earlier change of the graph is in progress."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """By node id, the fields of nodes that earlier actions have changed."""
    satisfied: Collection[str] = ()
    """The prerequisites that are satisfied."""
    stoppers: Collection[int] = ()
    """The failed nodes because of which the task starts no further node (`finish_running`)."""

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The index of each node by its id."""
        return {node.node_id: node.index for node in self.nodes}


# --- planning -----------------------------------------------------------------------------------------------------


def check_starts(planned: Plan, task: TaskSnapshot) -> None:
    """Raise ActionRejected if nodes would not start again that the plan resets, because the task starts no
    further node.

    Skipped nodes lose nothing.
    """
    stoppers = [index for index in task.stoppers if index not in planned.resets]
    decided = None if planned.end is None else planned.end.index
    lost = (i for i in planned.resets if i != decided and task.states[i].status is not NodeStatus.SKIPPED)
    again = [task.nodes[index].node_id for index in lost]
    if not stoppers or not again:
        return
    failed = names([task.nodes[index].node_id for index in stoppers])
    way = (
        f"retry_node of {failed}, or complete_node, first"
        if len(stoppers) == 1
        else "complete_node of them first"
    )
    raise ActionRejected(
        f"{names(again)} would not start again, because {failed} failed and the task starts no further node "
        f"(finish_running): {way}, or rerun after the end of the task"
    )


def name_state(node: Node, state: NodeState) -> str:
    """Return what a plan calls the state of a node."""
    if state.held_until is not None:
        return HELD
    if node.approval is not None and state.status is NodeStatus.DEFERRED:
        return WAITING
    return state.status.value


def find_node(node_id: str, task: TaskSnapshot) -> Node:
    """Return a node that an action names. Raise ActionRejected if there is none, or if its reset is in progress."""
    index = task.index_of.get(node_id)
    if index is None:
        hint = suggestion(node_id, (node.node_id for node in task.nodes))
        raise ActionRejected(f"the task has no node {printed(node_id)}{hint}", RejectionCause.UNKNOWN)
    if index in task.resetting:
        raise ActionRejected(
            f"an earlier action resets node {printed(node_id)} at present; try again when it is queued",
            RejectionCause.BUSY,
        )
    return task.nodes[index]


def plan_retry(action: RetryNode, task: TaskSnapshot) -> Plan:
    """Return the plan that starts a node again, in a new generation, or ends its wait for a retry in the
    present one.
    """
    node = find_node(action.node_id, task)
    state = task.states[node.index]
    changed = change_node(node, action, task)
    is_restart = changed is not None or action.interrupt
    if not _may_restart(node, state, task) or (state.status in _IN_FLIGHT and not action.interrupt):
        if changed is None and node.index in task.waiting:
            return _plan_end_of_wait(node, state, task)
        way = _describe_way(node, state, task)
        raise ActionRejected(f"node {printed(node.node_id)} is {name_state(node, state)}; {way}")
    if is_restart or state.status.ended or state.held_until is not None:
        planned = _plan_reset(RETRY_NODE, node, task, interrupt=action.interrupt, to=NodeStatus.QUEUED.value)
        return replace(planned, changed=changed)
    if not _waits_for_retry(node, state, task):
        raise ActionRejected(
            f"node {printed(node.node_id)} waits for no retry: it continues "
            f"{'after the pause, which resume ends' if node.index in task.pauses.paused else 'as soon as it can'}; "
            "interrupt=true starts it again in a new generation"
        )
    return _plan_end_of_wait(node, state, task)


def _waits_for_retry(node: Node, state: NodeState, task: TaskSnapshot) -> bool:
    """Return whether a node waits for a retry, also after the pause that holds it, or for its sources."""
    return state.next_retry_at is not None or state.retry_left is not None or node.index in task.waiting


def _plan_end_of_wait(node: Node, state: NodeState, task: TaskSnapshot) -> Plan:
    """Return the plan that lets a node, or its shards, start the next attempt now. The node stays in its generation."""
    name, is_paused = printed(node.node_id), node.index in task.pauses.paused
    to = state.status.value if state.status in _IN_FLIGHT else PAUSED if is_paused else DUE
    notes = [f"node {name} keeps its batches and its retry budget; interrupt=true starts it anew"]
    if is_paused:
        notes.append(f"node {name} starts its next attempt after the pause")
    return Plan(
        what=node.node_id,
        changes=[Change(index=node.index, from_=name_state(node, state), to=to)],
        notes=tuple(notes),
        ends_wait=node.index,
    )


def _may_restart(node: Node, state: NodeState, task: TaskSnapshot) -> bool:
    """Return whether retry_node can start a node again, perhaps only with `interrupt`."""
    if state.held_until is not None:
        return True
    if state.status.ended:
        return not _Skips(task).is_blocked(node)
    return state.status.begun and node.approval is None and node.delay is None


def _describe_way(node: Node, state: NodeState, task: TaskSnapshot) -> str:
    """Return which actions start a node again, or decide about it, in its present state."""
    if state.status.ended and (skips := _Skips(task)).is_blocked(node):
        causes = names(skips.find_causes(node)) or "its parents"
        why = "which has not routed to it" if skips.lacks_route(node) else "because of which it was skipped"
        return f"retry_node of {causes}, {why}, starts it again, and complete_node ends it as finished"
    if state.status.ended or state.held_until is not None:
        return "retry_node starts it again, also with another input"
    if state.status in _IN_FLIGHT:
        return "retry_node with interrupt=true stops its attempt and starts it again"
    if node.approval is not None and state.status.begun:
        return "decide approves or rejects it"
    if node.delay is not None and state.status.begun:
        return "complete_node or skip_node ends its delay"
    if state.status.begun:
        now = "" if _waits_for_retry(node, state, task) else " with interrupt=true"
        return f"retry_node{now} starts it again"
    if node.index in task.pauses.paused:
        return "it is paused: resume ends the pause, and change_graph changes its input before it starts"
    missing = [each for each in node.prerequisites if each not in task.satisfied]
    waits = f"it waits for {names(missing)}, which satisfy reports, and " if missing else ""
    return f"{waits}change_graph changes its input before it starts"


_INHERITED = frozenset({SkipReason.CONDITION, SkipReason.USER})
"""Reasons for which a node may be skipped itself, or because its parents were."""


class _Skips:
    """The nodes for whose ends others were skipped."""

    def __init__(self, task: TaskSnapshot) -> None:
        self._states = task.states
        self._by_id = {node.node_id: node for node in task.nodes}
        self._routers: dict[str, list[Node]] = {}
        for node in task.nodes:
            for target in (*node.on_success, *node.on_failure):
                self._routers.setdefault(target, []).append(node)

    def is_blocked(self, node: Node) -> bool:
        """Return whether a skipped node would be skipped again, because of its parents or its routers."""
        state = self._states[node.index]
        if state.skip_reason in (SkipReason.ROUTING, SkipReason.UPSTREAM_FAILED):
            return True
        if state.skip_reason not in _INHERITED or state.condition is False or False in state.edges.values():
            return False
        unfinished = self._find_blockers(node)
        needed = {"count": node.fan_in.count, ALL_DONE: 0}.get(node.fan_in.mode, 1)
        is_closed = len(node.depends_on) - len(unfinished) < min(needed, len(node.depends_on))
        reasons = {self._passed_on(each) for each in unfinished}
        return is_closed and reasons == {state.skip_reason}

    def lacks_route(self, node: Node) -> bool:
        """Return whether a node was skipped because no route leads to it."""
        return node.conditional and self._states[node.index].skip_reason is SkipReason.ROUTING

    def _find_blockers(self, node: Node) -> list[Node]:
        """Return the parents that have ended without finishing."""
        parents = (self._by_id[each] for each in node.depends_on)
        return [each for each in parents if self._states[each.index].status.ended and self._passed_on(each)]

    def _passed_on(self, node: Node) -> SkipReason | None:
        state = self._states[node.index]
        return inherited_reason(node, state.status, state.skip_reason)

    def find_causes(self, node: Node) -> list[str]:
        """Return the ids of the nodes for whose ends a node was skipped, directly or through others."""
        causes: dict[str, None] = {}
        seen, waiting = {node.index}, [node]
        while waiting:
            each = waiting.pop()
            routers = self._routers.get(each.node_id, []) if self.lacks_route(each) else []
            new = [one for one in (*self._find_blockers(each), *routers) if one.index not in seen]
            seen.update(one.index for one in new)
            waiting += [one for one in new if self.is_blocked(one)]
            causes |= {one.node_id: None for one in new if not self.is_blocked(one)}
        return [*causes]


_ENDS: Mapping[type[Action], tuple[str, NodeStatus]] = {
    SkipNode: (SKIP_NODE, NodeStatus.SKIPPED),
    CompleteNode: (COMPLETE_NODE, NodeStatus.FINISHED),
    FailNode: (FAIL_NODE, NodeStatus.FAILED),
}


def plan_end(action: SkipNode | CompleteNode | FailNode, task: TaskSnapshot) -> Plan:
    """Return the plan that ends a node in a new generation."""
    name, status = _ENDS[type(action)]
    node = find_node(action.node_id, task)
    state = task.states[node.index]
    is_same = state.status is status and state.skip_reason in (None, SkipReason.USER)
    if is_same and not isinstance(action, CompleteNode):
        raise ActionRejected(
            f"node {printed(node.node_id)} is {status.value} already; {_describe_way(node, state, task)}"
        )
    if state.status in _IN_FLIGHT and not action.interrupt:
        raise ActionRejected(
            f"node {printed(node.node_id)} is {state.status.value}; interrupt=true stops its attempt"
        )
    planned = _plan_reset(name, node, task, interrupt=action.interrupt, to=status.value)
    failure = (reason_codes.FAILED_BY_USER, _describe_by("failed", action.by, action.reason))
    end = NodeEnd(
        index=node.index,
        status=status,
        failure=failure if isinstance(action, FailNode) else None,
        outcome=_read_outcome(action) if isinstance(action, CompleteNode) else None,
    )
    return replace(planned, end=end)


def _describe_by(what: str, by: str, why: str) -> str:
    """Return what a person has decided, who, and why."""
    return what + (f" by {by}" if by else "") + (f": {why}" if why else "")


def _read_outcome(action: CompleteNode) -> NodeOutcome:
    reference = None if action.artifacts_ref is None else dict(action.artifacts_ref)
    return NodeOutcome(metrics=dict(action.metrics), artifacts_ref=reference, batches=[*action.batches])


def plan_batches(action: RetryBatches | SkipBatches, task: TaskSnapshot) -> Plan:
    """Return the plan that tries batches again that a node has set aside, or continues without them."""
    name = RETRY_BATCHES if isinstance(action, RetryBatches) else SKIP_BATCHES
    node = find_node(action.node_id, task)
    state = task.states[node.index]
    if node.quarantine is None:
        raise ActionRejected(
            f"node {printed(node.node_id)} sets no batches aside, because it has no on_batch_failure; "
            f"{_describe_way(node, state, task)}"
        )
    has_finished = state.status is NodeStatus.FINISHED
    if not has_finished and state.status is not NodeStatus.FAILED and state.held_until is None:
        raise ActionRejected(
            f"node {printed(node.node_id)} is {name_state(node, state)}; {name} is for a node that has "
            f"finished or failed, or is held; {_describe_way(node, state, task)}"
        )
    if has_finished and not state.failed_batches and not (action.batch_uids and name == RETRY_BATCHES):
        raise ActionRejected(
            f"node {printed(node.node_id)} has set no batch aside that is not skipped; "
            f"{_describe_way(node, state, task)}"
        )
    aside = SetAside(index=node.index, batch_uids=action.batch_uids, skips=name == SKIP_BATCHES)
    if has_finished and aside.skips:
        change = Change(index=node.index, from_=state.status.value, to=state.status.value)
        return Plan(what=_describe_batches(node, action), changes=[change], batches=(aside,))
    planned = _plan_reset(name, node, task, interrupt=action.interrupt, to=NodeStatus.QUEUED.value)
    notes = (f"node {printed(node.node_id)} keeps its other batches", *planned.notes)
    return replace(planned, what=_describe_batches(node, action), notes=notes, batches=(aside,))


def _describe_batches(node: Node, action: RetryBatches | SkipBatches) -> str:
    uids = action.batch_uids
    return f"{node.node_id}: {names(uids) if uids else 'all batches that are set aside'}"


def _plan_reset(name: str, node: Node, task: TaskSnapshot, *, interrupt: bool, to: str) -> Plan:
    """Return the plan that starts new generations of a node and of what depends on it. `to` is its next state."""
    resets, unblocks = find_resets([node.index], task.nodes, task.states, task.pauses.children)
    if busy := [task.nodes[index].node_id for index in resets & {*task.resetting}]:
        raise ActionRejected(
            f"an earlier action resets {names(busy)} at present; try again when it is done",
            RejectionCause.BUSY,
        )
    running = sorted(index for index in resets if task.states[index].status in _IN_FLIGHT)
    if running and not interrupt:
        shown = names([task.nodes[index].node_id for index in running])
        raise ActionRejected(
            f"{shown} depend{'s' if len(running) == 1 else ''} on node {printed(node.node_id)} and "
            f"run{'s' if len(running) == 1 else ''}; interrupt=true stops "
            f"{'it' if len(running) == 1 else 'them'}, or wait for the end"
        )
    ordered = [node.index, *sorted(resets - {node.index})]
    return Plan(
        what=node.node_id,
        changes=[
            Change(
                index=index,
                from_=name_state(task.nodes[index], task.states[index]),
                to=to if index == node.index else NodeStatus.QUEUED.value,
            )
            for index in ordered
        ],
        notes=tuple(_describe_effects(name, ordered, task)),
        interrupts=tuple(running),
        resets=tuple(sorted(resets)),
        unblocks=frozenset(unblocks),
    )


def find_resets(
    targets: Sequence[int],
    nodes: Sequence[Node],
    states: Sequence[NodeState],
    children: Sequence[Mapping[int, bool]],
) -> tuple[set[int], set[int]]:
    """Return the nodes that start a new generation with `targets`, and the open ones below them that have not started.

    A node below that has started in its generation, or ended, starts again, unless it has started by a gate that needs
    only some parents (`any`, `count:n`), and uses nothing that a reset node has stored.
    """
    resets, unstarted, waiting = {*targets}, set[int](), [*targets]
    while waiting:
        for child, uses in children[waiting.pop()].items():
            state = states[child]
            if child in resets:
                continue
            if not (state.status.ended or state.status.begun or state.kept):
                unstarted.add(child)
            elif uses or not _stays(nodes[child], state):
                resets.add(child)
                waiting.append(child)
    return resets, unstarted


def _stays(node: Node, state: NodeState) -> bool:
    """Return whether a node has started by a gate that needs only some of its parents."""
    return node.fan_in.mode in ("any", "count") and state.status is not NodeStatus.SKIPPED


def _describe_effects(name: str, resets: Sequence[int], task: TaskSnapshot) -> Iterator[str]:
    """Yield notes about what a reset does not undo."""
    again = [
        task.nodes[index].node_id
        for index in resets
        if task.nodes[index].is_function and task.states[index].status is NodeStatus.FINISHED
    ]
    if name not in (RETRY_NODE, RETRY_BATCHES) and resets and task.nodes[resets[0]].is_function:
        again = [each for each in again if each != task.nodes[resets[0]].node_id]
    if again:
        yield f"functions that take effect once more: {names(again)}"
    if any(task.states[index].epoch for index in resets):
        yield "variables keep their values"


def change_node(node: Node, action: RetryNode, task: TaskSnapshot) -> Node | None:
    """Return the node with the fields that the action changes; None if it changes none. Raise ActionRejected."""
    given = (action.input_inline, action.input_ref, action.timeout_sec, action.retry_policy)
    if all(each is None for each in given):
        return None
    io, policy = node.io, node.retry_policy
    if action.input_inline is not None:
        merged = {**(io.input_inline or {}), **action.input_inline}
        io = replace(io, input_inline={key: value for key, value in merged.items() if value is not None})
    if action.input_ref is not None:
        io = replace(io, input_ref=action.input_ref)
    if action.retry_policy is not None:
        policy = change_policy(policy, action.retry_policy)
    fields_of_io = {"input_inline": io.input_inline, "input_ref": io.input_ref}
    problem = next(
        chain(node_field_problems("io", fields_of_io), storage_problems({"io": fields_of_io})), None
    )
    changed = rebuild_node(
        node, io=io, retry_policy=policy, timeout_sec=action.timeout_sec or node.timeout_sec
    )
    if problem is not None:
        raise ActionRejected(f"the changed input of node {printed(node.node_id)}: {problem}")
    if (changed.pulls, changed.pulls_from) != (node.pulls, node.pulls_from):
        raise ActionRejected(
            f"input_inline changes from which nodes {printed(node.node_id)} pulls; retry_node changes only "
            "other parts of the input"
        )
    if json_bytes(task.changed) + json_bytes(changes_of(changed)) > CHANGED_NODES_BYTES:
        raise ActionRejected(
            f"the changed fields of all nodes would have more than {CHANGED_NODES_BYTES:,} bytes of JSON; pass a "
            "reference in input_ref"
        )
    return changed


def plan_decision(action: Decide, task: TaskSnapshot) -> Plan:
    """Return the plan that ends an approval."""
    node = find_node(action.node_id, task)
    state = task.states[node.index]
    if node.approval is None:
        raise ActionRejected(
            f"node {printed(node.node_id)} is no approval, and it is {name_state(node, state)}; "
            f"{_describe_way(node, state, task)}"
        )
    if state.status is not NodeStatus.DEFERRED or state.held_until is not None:
        raise ActionRejected(
            f"node {printed(node.node_id)} is {name_state(node, state)}, so it does not wait for a decision; "
            f"{_describe_way(node, state, task)}"
        )
    approves = action.decision == APPROVE
    end = end_of_approval(node.index, approves=approves, comment=action.comment, by=action.by)
    return Plan(
        what=f"{node.node_id}: {action.decision}",
        changes=[Change(index=node.index, from_=WAITING, to=end.status.value)],
        end=end,
    )


def end_of_approval(index: int, *, approves: bool, comment: str = "", by: str = "") -> NodeEnd:
    """Return how a decision ends an approval."""
    if approves:
        return NodeEnd(index=index, status=NodeStatus.FINISHED)
    failure = (reason_codes.REJECTED, _describe_by("rejected", by, comment))
    return NodeEnd(index=index, status=NodeStatus.FAILED, failure=failure)


def plan_satisfaction(action: Satisfy, task: TaskSnapshot) -> Plan:
    """Return the plan that fulfils a prerequisite."""
    named = [node for node in task.nodes if action.prerequisite in node.prerequisites]
    if not named:
        known = dict.fromkeys(each for node in task.nodes for each in node.prerequisites)
        hint = suggestion(action.prerequisite, known) or (
            f"; its nodes name {names([*known])}" if known else "; its nodes have no prerequisites"
        )
        raise ActionRejected(
            f"no node of the task names the prerequisite {printed(action.prerequisite)}{hint}",
            RejectionCause.UNKNOWN,
        )
    if action.prerequisite in task.satisfied:
        raise ActionRejected(
            f"the prerequisite {printed(action.prerequisite)} is satisfied already",
            RejectionCause.ALREADY_SATISFIED,
        )
    open_nodes = [node for node in named if task.states[node.index].status is NodeStatus.QUEUED]
    satisfied = {*task.satisfied, action.prerequisite}
    lacking = {node.index: node.node_id for node in open_nodes if {*node.prerequisites} - satisfied}
    return Plan(
        what=action.prerequisite,
        names=(action.prerequisite,),
        changes=[
            Change(
                index=node.index,
                from_=WAITING,
                to=WAITING if node.index in lacking else NodeStatus.QUEUED.value,
            )
            for node in open_nodes
        ],
        notes=(f"nodes that wait for further prerequisites: {names([*lacking.values()])}",)
        if lacking
        else (),
        satisfies=action.prerequisite,
    )


def plan_graph_change(action: ChangeGraph, task: TaskSnapshot) -> Plan:
    """Return the plan of a change. An activity validates the changed graph before the task applies it."""
    if task.changes_graph:
        raise ActionRejected(
            "an earlier change of the graph is in progress; try again when it is done", RejectionCause.BUSY
        )
    if not action.nodes and not action.changes:
        raise ActionRejected(
            "change_graph needs nodes to add or changes; edges and edges_ex lead to nodes that it adds",
            RejectionCause.INVALID,
        )
    known = {node.node_id for node in task.nodes}
    new = [each["node_id"] for each in action.nodes]
    if taken := [node_id for node_id in new if node_id in known]:
        raise ActionRejected(
            f"the task has the {'node' if len(taken) == 1 else 'nodes'} {names(taken)} already; give new "
            "nodes other ids, or name nodes that have not started in changes",
            RejectionCause.TAKEN,
        )
    edges = [*((each[0], each[1]) for each in action.edges), *((e["from"], e["to"]) for e in action.edges_ex)]
    if problem := edge_problem({*new}, edges):
        raise ActionRejected(problem, RejectionCause.INVALID)
    replaced = [_find_unstarted(node_id, task) for node_id in action.changes]
    first = len(task.nodes)
    return Plan(
        what=names([*new, *action.changes]),
        changes=[
            *(
                Change(index=first + place, from_=NEW, to=NodeStatus.QUEUED.value)
                for place in range(len(new))
            ),
            *(Change(index=index, from_=NodeStatus.QUEUED.value, to=CHANGED) for index in replaced),
        ],
        adds=tuple(new),
        replaces=tuple(replaced),
    )


def _find_unstarted(node_id: str, task: TaskSnapshot) -> int:
    node = find_node(node_id, task)
    state = task.states[node.index]
    if state.status is not NodeStatus.QUEUED:
        raise ActionRejected(
            f"node {printed(node_id)} is {name_state(node, state)}, and change_graph changes only nodes that have not "
            f"started; {_describe_way(node, state, task)}"
        )
    return node.index


def plan_pause(action: Pause, task: TaskSnapshot) -> Plan:
    """Return the plan that pauses scopes."""
    pauses, states = task.pauses, task.states
    scopes = tuple(dict.fromkeys(action.scopes)) or (TASK_SCOPE,)
    known = {each.scope for each in pauses.scopes}
    new = tuple(scope for scope in scopes if scope not in known)
    if len(known) + len(new) > ACTION_SCOPES:
        raise ActionRejected(
            f"the task would have {len(known) + len(new)} paused scopes, and {ACTION_SCOPES} are allowed; "
            "resume some, or pause the whole task"
        )
    covered = {index for scope in scopes for index in pauses.nodes_of(scope)}
    running = sorted(index for index in covered if states[index].status is NodeStatus.RUNNING)
    interrupts = tuple(running) if action.interrupt else ()
    if not new and not interrupts:
        raise ActionRejected(
            f"{names(scopes)} {'is' if len(scopes) == 1 else 'are'} paused already; resume ends a pause, and "
            "interrupt=true stops attempts that still run"
        )
    stopped = {*interrupts}
    paused = pauses.newly_paused(new) | stopped
    open_nodes = [
        index
        for index in sorted(paused)
        if not (states[index].status.ended or states[index].held_until is not None)
    ]
    if not open_nodes:
        raise ActionRejected(f"all nodes of {names(scopes)} have ended, or wait for a decision")
    in_flight = [index for index in open_nodes if states[index].status in _IN_FLIGHT]
    finish = {index for index in in_flight if index not in stopped}
    notes = []
    if finish:
        notes.append(f"attempts that run until their end: {len(finish):,}; interrupt=true stops them")
    if interrupts:
        notes.append(
            f"attempts that stop, and run again after the pause without a retry: {len(interrupts):,}"
        )
    return Plan(
        what=", ".join(new or scopes),
        names=tuple(new or scopes),
        changes=[_paused(index, states[index], runs_on=index in finish) for index in open_nodes],
        notes=tuple(notes),
        pauses=new,
        interrupts=interrupts,
    )


def _paused(index: int, state: NodeState, *, runs_on: bool) -> Change:
    return Change(
        index=index,
        from_=state.status.value,
        to=f"{state.status.value}, then {PAUSED}" if runs_on else PAUSED,
    )


def plan_resume(action: Resume, task: TaskSnapshot) -> Plan:
    """Return the plan that ends the pause of scopes."""
    pauses, states = task.pauses, task.states
    known = [each.scope for each in pauses.scopes]
    if not known:
        raise ActionRejected("nothing is paused, so there is nothing to resume; pause a scope first")
    for scope in action.scopes:
        if scope not in known:
            raise ActionRejected(
                f"scopes has {printed(scope)}, but the paused scopes are {', '.join(known)}",
                RejectionCause.UNKNOWN,
            )
    ends = frozenset(action.scopes or known)
    freed = pauses.paused_only_by(ends)
    covered = {index for scope in ends for index in pauses.nodes_of(scope)}
    still = [index for index in covered - freed if not states[index].status.ended]
    ended = tuple(scope for scope in known if scope in ends)
    rest = [scope for scope in known if scope not in ends]
    return Plan(
        what=", ".join(ended),
        names=ended,
        changes=[
            Change(index=index, from_=_held_name(states[index]), to=states[index].status.value)
            for index in sorted(freed)
            if not states[index].status.ended
        ],
        notes=(f"nodes that stay paused by {names(rest)}: {len(still):,}",) if still else (),
        resumes=ends,
    )


def _held_name(state: NodeState) -> str:
    return f"{state.status.value}, then {PAUSED}" if state.status in _IN_FLIGHT else PAUSED


# --- what was applied ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Audit:
    """The actions that were applied to a task: the latest APPLIED_ACTIONS of them, and their number."""

    entries: list[AppliedAction] = field(default_factory=list)
    """The list changes in place, because it is part of the state of the task."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The results of the latest of them, by the id of the update. The dictionary changes in place, too."""

    @property
    def revision(self) -> int:
        """The number of actions that were applied."""
        return self.entries[-1].revision if self.entries else 0

    def find(self, update_id: str) -> dict[str, Any] | None:
        """Return the result of an update that was applied before, in this run or in an earlier one."""
        if update_id in self.results:
            return self.results[update_id]
        entry = next((each for each in self.entries if each.update_id == update_id), None)
        return None if entry is None else _forgotten_result(entry)

    def keep_result(self, update_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Keep the result of an update, and forget the oldest ones if all together are too large. Return the result."""
        self.results[update_id] = result
        while self.results and len(dumps(self.results)) > ACTION_RESULTS_BYTES:
            del self.results[next(iter(self.results))]
        return result

    def add(self, name: str, action: Action, planned: Plan, at: float, update_id: str) -> None:
        """Note an action that is applied now."""
        self.entries.append(
            AppliedAction(
                revision=self.revision + 1,
                action=name,
                at=at,
                by=action.by,
                reason=action.reason,
                what=truncate(planned.what, ACTION_TEXT_CHARS),
                names=[*planned.names] if sum(map(len, planned.names)) <= ACTION_NAMES_CHARS else [],
                affected=len(planned.changes),
                update_id=update_id,
            )
        )
        del self.entries[:-APPLIED_ACTIONS]


def result_of(planned: Plan, nodes: Sequence[Node], revision: int) -> dict[str, Any]:
    """Return the result of an action as JSON.

    It lists at most ACTION_AFFECTED nodes, and notes how many more there are.

    `nodes` are those of the task, with or without the nodes that the plan adds.
    """
    first = len(nodes) if planned.adds and planned.changes[0].index >= len(nodes) else None

    def node_id(index: int) -> str:
        return nodes[index].node_id if first is None or index < first else planned.adds[index - first]

    shown, more = planned.changes[:ACTION_AFFECTED], len(planned.changes) - ACTION_AFFECTED
    return {
        "revision": revision,
        "affected": [{"node_id": node_id(each.index), "from": each.from_, "to": each.to} for each in shown],
        "notes": [*planned.notes, *([f"and {more:,} more nodes"] if more > 0 else [])],
    }


def _forgotten_result(entry: AppliedAction) -> dict[str, Any]:
    """Return the result of an update that was applied before, and whose own result the task no longer keeps."""
    note = (
        f"this update was applied before, as revision {entry.revision}, to {entry.affected:,} nodes; it is not applied "
        "again, and the task no longer keeps which nodes these were"
    )
    return {"revision": entry.revision, "affected": [], "notes": [note]}
