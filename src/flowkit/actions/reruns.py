"""Decide what a rerun of an ended task starts again. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.actions.changed_nodes import changes_of
from flowkit.actions.plans import Change, Plan, SetAside, TaskSnapshot, change_node, find_node, find_resets
from flowkit.actions.records import RetryNode
from flowkit.actions.scopes import Pauses, children_of
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.models import NodeState, NodeStatus, SkipReason
from flowkit.text import names, printed, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from flowkit.graph.contracts import DataEdge
    from flowkit.models import Node


def plan_rerun(
    node_ids: Sequence[str], nodes: Sequence[Node], states: Sequence[NodeState], keeps: Collection[str] = ()
) -> Plan:
    """Return what starts again in an ended task: these nodes, and those that depend on them.

    The nodes in `keeps` keep their batches, and try those again that they have set aside.
    """
    index_of = {node.node_id: node.index for node in nodes}
    resets, _ = find_resets([index_of[node_id] for node_id in node_ids], nodes, states, children_of(nodes))
    return Plan(
        what=names(node_ids),
        changes=[
            Change(index=index, from_=states[index].status.value, to=NodeStatus.QUEUED.value)
            for index in sorted(resets)
        ],
        resets=tuple(sorted(resets)),
        batches=tuple(SetAside(index=index_of[node_id]) for node_id in keeps),
    )


def check_keeps(planned: Plan, nodes: Sequence[Node], states: Sequence[NodeState]) -> None:
    """Raise ActionRejected if a node keeps batches that it has made from what an earlier node is to make anew."""
    children, kept = children_of(nodes), planned.kept
    renewed = [index for index in planned.resets if index not in kept]
    outdated = find_resets(renewed, nodes, states, children)[0] & kept
    if not outdated:
        return
    index = min(outdated)
    causes = [nodes[each].node_id for each in planned.resets if index in children[each]]
    name = printed(nodes[index].node_id)
    raise ActionRejected(
        f"node {name} cannot keep its batches, because it depends on {names(causes)}, and new batches would "
        f"mix with those that it has made from the earlier ones; run {name} again as a whole, or leave out "
        "the nodes before it"
    )


def kept_sources(planned: Plan, nodes: Sequence[Node], edges: Iterable[DataEdge]) -> dict[str, str]:
    """Return the nodes whose stored batches the nodes that start again read, with their roles by node id.

    These are the nodes that do not start again, and those that keep their batches.
    """
    index_of = {node.node_id: node.index for node in nodes}
    again, kept = frozenset(planned.resets), planned.kept
    found = {nodes[index].node_id: nodes[index].type for index in sorted(kept)}
    for edge in edges:
        if index_of[edge.node] in again and index_of[edge.source] not in again - kept:
            found[edge.source] = edge.source_role
    return found


def choose_reruns(
    given: Sequence[str] | None, nodes: Sequence[Node], states: Sequence[NodeState]
) -> list[str]:
    """Return the ids of the nodes with which a rerun begins.

    Raise ActionRejected if there is none, or an unknown one.
    """
    if given is None:
        chosen = [node.node_id for node in nodes if is_incomplete(states[node.index])]
        if not chosen:
            raise ActionRejected(
                "all nodes have finished, or were skipped by a condition, a route or a user; name the nodes "
                "to run again"
            )
        return chosen
    known = {node.node_id for node in nodes}
    for node_id in given:
        if node_id not in known:
            raise ActionRejected(
                f"the task has no node {printed(node_id)}{suggestion(node_id, known)}", RejectionCause.UNKNOWN
            )
    if not given:
        raise ActionRejected(
            "nodes is empty; name at least one node, or leave it out", RejectionCause.INVALID
        )
    return list(dict.fromkeys(given))


def changed_nodes(
    inputs: Mapping[str, Mapping[str, Any]], limits: Mapping[str, Mapping[str, Any]], nodes: Sequence[Node]
) -> dict[str, Any]:
    """Return the changed fields of nodes, by node id. Raise ActionRejected.

    `inputs` has other values for `input_inline`, and `limits` for `timeout_sec` and `retry_policy`.
    """
    task = TaskSnapshot(nodes=nodes, states=[NodeState() for _ in nodes], pauses=Pauses(nodes, []))
    changed: dict[str, Any] = {}
    for node_id in {**inputs, **limits}:
        node, other = find_node(node_id, task), {**limits.get(node_id, {})}
        if node_id in inputs:
            other["input_inline"] = dict(inputs[node_id])
        elif _has_limits(node, other):
            continue
        action = RetryNode(node_id=node_id, **other)
        if new := change_node(node, action, replace(task, changed=changed)):
            changed[node_id] = changes_of(new)
    return changed


def _has_limits(node: Node, limits: Mapping[str, Any]) -> bool:
    policy = limits.get("retry_policy") or {}
    same_policy = all(getattr(node.retry_policy, name) == value for name, value in policy.items())
    return same_policy and node.timeout_sec == limits.get("timeout_sec", node.timeout_sec)


_INCOMPLETE = frozenset({SkipReason.UPSTREAM_FAILED, SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED})


def is_incomplete(state: NodeState) -> bool:
    """Return whether a rerun starts an ended node again by default: it failed, was cancelled, or was
    skipped for that.
    """
    if state.status is NodeStatus.SKIPPED:
        return state.skip_reason in _INCOMPLETE
    return state.status is not NodeStatus.FINISHED
