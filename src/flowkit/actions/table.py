"""The actions, one row each, and how the input of an action is read. Pure.

From a row follow the update of the workflow with its validator, and what the query `preview` and the client accept.
The record says what its input must be. The signature of the coordinator's method and of the command stand where
they are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flowkit.actions.plans import (
    Plan,
    TaskSnapshot,
    check_starts,
    plan_batches,
    plan_decision,
    plan_end,
    plan_graph_change,
    plan_pause,
    plan_resume,
    plan_retry,
    plan_satisfaction,
)
from flowkit.actions.preconditions import check_revision, check_state
from flowkit.actions.records import (
    CHANGE_GRAPH,
    COMPLETE_NODE,
    DECIDE,
    FAIL_NODE,
    PAUSE,
    RESUME,
    RETRY_BATCHES,
    RETRY_NODE,
    SATISFY,
    SKIP_BATCHES,
    SKIP_NODE,
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
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.text import clean, printed, suggestion
from flowkit.validation.invalid import musts_of, problem_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionKind:
    """An action."""

    name: str
    """The name of the action, which is also the name of its update."""
    record: type[Action]
    """Its input. The type of each field says what it must be."""
    plan: Callable[[Any, TaskSnapshot], Plan]
    """Decides what an action of this kind changes in a task."""
    description: str
    """The description of the update, which Temporal's tools show."""


ACTIONS: Final[Mapping[str, ActionKind]] = {
    kind.name: kind
    for kind in (
        ActionKind(
            name=PAUSE,
            record=Pause,
            plan=plan_pause,
            description="Start nothing new in `scopes`: task, node:ID, below:ID or role:NAME. "
            "Running attempts finish, or stop with interrupt. "
            'Input: {"scopes": ["task"], "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RESUME,
            record=Resume,
            plan=plan_resume,
            description='End the pause of `scopes`, or of all. Input: {"scopes": [], "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RETRY_NODE,
            record=RetryNode,
            plan=plan_retry,
            description="Start a node again that has ended, is held or, with interrupt, runs, and what "
            "depends on it; or end its wait for a retry. "
            'Input: {"node_id": "a", "input_inline": {"limit": 5}, "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=SKIP_NODE,
            record=SkipNode,
            plan=plan_end,
            description='End a node as skipped. Input: {"node_id": "a", "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=COMPLETE_NODE,
            record=CompleteNode,
            plan=plan_end,
            description="End a node as finished, with these results. "
            'Input: {"node_id": "a", "metrics": {}, "batches": [{"batch_uid": "1", "metrics": {}}], '
            '"reason": "", "by": ""}',
        ),
        ActionKind(
            name=FAIL_NODE,
            record=FailNode,
            plan=plan_end,
            description='End a node as failed. Input: {"node_id": "a", "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=RETRY_BATCHES,
            record=RetryBatches,
            plan=plan_batches,
            description="Run a node again that has ended or is held, to try batches again that it has set aside. "
            'Input: {"node_id": "a", "batch_uids": [], "interrupt": false, "reason": "", "by": ""}',
        ),
        ActionKind(
            name=SKIP_BATCHES,
            record=SkipBatches,
            plan=plan_batches,
            description="Accept that batches are missing that a node has set aside. "
            'Input: {"node_id": "a", "batch_uids": [], "reason": "", "by": ""}',
        ),
        ActionKind(
            name=DECIDE,
            record=Decide,
            plan=plan_decision,
            description="Decide about a node of the type approval. "
            'Input: {"node_id": "a", "decision": "approve", "comment": "", "by": ""}; the other decision is reject',
        ),
        ActionKind(
            name=SATISFY,
            record=Satisfy,
            plan=plan_satisfaction,
            description="Fulfil a prerequisite of nodes, also before they are reached. "
            'Input: {"prerequisite": "data:eu", "reason": "", "by": ""}',
        ),
        ActionKind(
            name=CHANGE_GRAPH,
            record=ChangeGraph,
            plan=plan_graph_change,
            description="Add nodes to the graph, and change nodes that have not started. Input: "
            '{"nodes": [{"node_id": "b", "type": "load", "depends_on": ["a"]}], "changes": {"c": {"timeout_sec": 60}}, '
            '"reason": "", "by": ""}',
        ),
    )
}
"""The actions by name, in the order in which pages and errors list them."""

_KIND_OF: Final = {kind.record: kind for kind in ACTIONS.values()}


def plan(action: Action, task: TaskSnapshot) -> Plan:
    """Return what an action changes in a task.

    Raise ActionRejected, which says what would be allowed, if the action changes nothing or does not fit
    the task, or if the task, or a node that the action affects, is no longer as the action expects.
    """
    check_revision(action, task)
    planned = _KIND_OF[type(action)].plan(action, task)
    check_starts(planned, task)
    check_state(action.if_state, planned, task)
    return planned


def parse_action(name: str, given: object) -> Action:
    """Return the action with this name. Raise ActionRejected, which names the field, its value and what is allowed."""
    kind = ACTIONS.get(name)
    if kind is None:
        raise ActionRejected(
            f"there is no action {printed(name)}; the actions are {', '.join(ACTIONS)}",
            RejectionCause.INVALID,
        )
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ActionRejected(
            f"the input of {name} is {printed(given)}; it must be an object such as {_EXAMPLE}",
            RejectionCause.INVALID,
        )
    musts = musts_of(kind.record)
    values = {key: _read_field(kind, key, value) for key, value in given.items() if value is not None}
    for key in ("node_id", "decision", "prerequisite"):
        if key in musts and key not in values:
            raise ActionRejected(
                f"{name} needs {key}, which must be {musts[key][0].be}", RejectionCause.INVALID
            )
    return kind.record(**values)


def _read_field(kind: ActionKind, key: str, value: object) -> Any:
    known = musts_of(kind.record)
    if key not in known:
        hint = suggestion(key, known) or f"; {kind.name} takes {', '.join(known)}"
        raise ActionRejected(
            f"{kind.name} has the unknown field {printed(key)}{hint}", RejectionCause.INVALID
        )
    if problem := problem_with(value, known[key][0], f"{kind.name}: {key}"):
        raise ActionRejected(problem, RejectionCause.INVALID)
    return _normalize(value)


def _normalize(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, (list, tuple)):
        return tuple(clean(each) if isinstance(each, str) else each for each in value)
    return value


_EXAMPLE = '{"reason": "..."}'
