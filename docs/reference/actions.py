"""The table of docs/actions.md: what each action does to a node in each state, as the rules decide it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.actions.changed_nodes import changeable
from flowkit.actions.plans import TaskSnapshot
from flowkit.actions.records import (
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
from flowkit.actions.scopes import Pauses
from flowkit.actions.table import plan
from flowkit.errors import ActionRejected
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.models.actions import PausedScope

if TYPE_CHECKING:
    from collections.abc import Iterator

DASH = "–"
WITH_INTERRUPT = ", with `interrupt`"

_GRAPH: dict[str, Any] = {
    "nodes": [
        {"node_id": "p", "type": "r", "allow_failure": True},
        {"node_id": "n", "type": "r", "depends_on": ["p"], "prerequisites": ["x"], "on_batch_failure": {}},
        {"node_id": "routed", "type": "r"},
        {"node_id": "ok", "type": "approval"},
        {"node_id": "router", "type": "r", "routing": {"on_failure": ["routed"]}},
    ]
}
_ACTIONS: dict[str, Any] = {
    "`retry_node`": lambda node_id, more: RetryNode(node_id=node_id, interrupt=more),
    "`skip_node`": lambda node_id, more: SkipNode(node_id=node_id, interrupt=more),
    "`complete_node`": lambda node_id, more: CompleteNode(node_id=node_id, interrupt=more),
    "`fail_node`": lambda node_id, more: FailNode(node_id=node_id, interrupt=more),
    "`retry_batches`": lambda node_id, more: RetryBatches(node_id=node_id, interrupt=more),
    "`skip_batches`": lambda node_id, more: SkipBatches(node_id=node_id, interrupt=more),
    "`decide`": lambda node_id, _: Decide(node_id=node_id, decision="approve"),
    "`satisfy`": lambda _, __: Satisfy(prerequisite="x"),
    "`pause`": lambda node_id, more: Pause(scopes=(f"node:{node_id}",), interrupt=more),
    "`resume`": lambda _, __: Resume(),
    "`change_graph`": lambda node_id, _: ChangeGraph(changes={node_id: {"timeout_sec": 60}}),
}


def _state(status: NodeStatus, **fields: Any) -> NodeState:
    return NodeState(status=status, epoch=int(status is not NodeStatus.QUEUED), **fields)


_STATES: dict[str, tuple[str, NodeState]] = {
    "queued, which lacks a prerequisite": ("n", _state(NodeStatus.QUEUED)),
    "running": ("n", _state(NodeStatus.RUNNING)),
    "waits for a retry": ("n", _state(NodeStatus.DEFERRED, next_retry_at=1.0)),
    "held": ("n", _state(NodeStatus.DEFERRED, held_until=1.0, reason_code="x")),
    "approval that waits": ("ok", _state(NodeStatus.DEFERRED)),
    "finished": ("n", _state(NodeStatus.FINISHED)),
    "finished, with batches set aside": ("n", _state(NodeStatus.FINISHED, failed_batches=2)),
    "failed, in a task that continues": ("n", _state(NodeStatus.FAILED)),
    "skipped by a user": ("n", _state(NodeStatus.SKIPPED, skip_reason=SkipReason.USER)),
    "skipped by a condition": ("n", _state(NodeStatus.SKIPPED, skip_reason=SkipReason.CONDITION)),
    "skipped because of a parent": ("n", _state(NodeStatus.SKIPPED, skip_reason=SkipReason.UPSTREAM_FAILED)),
    "skipped by a route": ("routed", _state(NodeStatus.SKIPPED, skip_reason=SkipReason.ROUTING)),
    "paused, before it starts": ("n", _state(NodeStatus.QUEUED)),
    "being reset by an earlier action": ("n", _state(NodeStatus.QUEUED)),
}


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| state of the node | {' | '.join(_ACTIONS)} |", f"|:---|{':---|' * len(_ACTIONS)}"]
    rows += [f"| {words} | {' | '.join(outcomes.values())} |" for words, outcomes in cells().items()]
    return "\n".join([*rows, ""])


def cells() -> dict[str, dict[str, str]]:
    """Return the cells of the table, by the state of the node and the name of the action."""
    return {
        words: {name.strip("`"): _outcome(words, node_id, state, make) for name, make in _ACTIONS.items()}
        for words, (node_id, state) in _STATES.items()
    }


def _outcome(words: str, node_id: str, state: NodeState, make: Any) -> str:
    """Return the next state, with `interrupt` if only that allows the action, or DASH if the task rejects it."""
    for interrupt in (False, True):
        with suppress(ActionRejected):
            if (found := _next_state(words, node_id, state, make(node_id, interrupt))) is not None:
                return f"{found}{WITH_INTERRUPT}" if interrupt else found
    return DASH


def refusals() -> Iterator[tuple[str, str, str]]:
    """Yield the state, the action and the error of each cell in which the task rejects the action."""
    for words, (node_id, state) in _STATES.items():
        for name, make in _ACTIONS.items():
            try:
                _next_state(words, node_id, state, make(node_id, True))
            except ActionRejected as error:
                yield words, name.strip("`"), str(error)


def _next_state(words: str, node_id: str, state: NodeState, action: Action) -> str | None:
    nodes = changeable(parse_graph(_GRAPH), {}).nodes
    index = next(node.index for node in nodes if node.node_id == node_id)
    states = [NodeState(status=NodeStatus.FAILED, epoch=1) for _ in nodes]
    states[index] = replace(state)
    paused = [PausedScope(scope=f"node:{node_id}", since=0.0)] if words.startswith("paused") else []
    task = TaskSnapshot(
        nodes=nodes,
        states=states,
        pauses=Pauses(nodes, paused),
        resetting={index} if words.startswith("being reset") else (),
    )
    changes = plan(action, task).changes
    return next((each.to for each in changes if each.index == index), None)
