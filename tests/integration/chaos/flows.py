"""The graphs of random tasks, written by the methods of a Flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from flowkit import Flow
from tests.integration.chaos import handlers, typed
from tests.integration.chaos.conditions import EXPRESSIONS
from tests.integration.chaos.plans import APPROVAL, BUILT, DELAY, HOLD_SEC

if TYPE_CHECKING:
    from flowkit.flow import FlowNode
    from flowkit.worker import RoleHandler
    from tests.integration.chaos.plans import NodePlan, TaskPlan

    AnyFlow = Flow[dict[str, Any]]

_UNTYPED = (handlers.READER, handlers.BUILDER, handlers.WRITER, handlers.STAMPER)
HANDLERS: dict[str, RoleHandler[Any, Any]] = {each.role: each for each in (*_UNTYPED, *typed.TYPED)}
"""The handlers by role."""


def flow_of(plan: TaskPlan) -> AnyFlow:
    """Return the graph of a task as a flow: built node by node, or read from its JSON."""
    if plan.written != BUILT:
        return Flow.from_dict(plan.as_graph())
    policy: Any = "continue" if plan.continues else plan.on_failure
    flow: AnyFlow = Flow("", on_node_failure=policy or None, hold_sec=HOLD_SEC if policy == "hold" else None)
    made: dict[str, FlowNode[Any, Any]] = {}
    for node in plan.nodes:
        made[node.node_id] = _add(flow, node)
        _link(made[node.node_id], node, made)
    for node in plan.nodes:
        targets = {
            "on_success": [made[each] for each in node.on_success],
            "on_failure": [made[each] for each in node.on_failure],
        }
        if node.on_success or node.on_failure:
            made[node.node_id].routes(**targets)
    return flow


def _add(flow: AnyFlow, node: NodePlan) -> FlowNode[Any, Any]:
    """Add a node with all that does not concern other nodes."""
    made = _create(flow, node)
    if not node.kind:
        fails = node.failure is not None and node.failure.times is None
        made.retry(1 if fails else 3, backoff_sec=0.2)
    if node.hold_sec:
        made.holds(node.hold_sec)
    if node.aside:
        made.quarantine(attempts=1, max=len(node.aside))
    if node.when:
        made.when(EXPRESSIONS[node.when])
    return made.needs(*node.prerequisites).allow_failure(node.allow_failure)


def _create(flow: AnyFlow, node: NodePlan) -> FlowNode[Any, Any]:
    if node.kind == APPROVAL:
        default: Literal["approve", "reject"] = "approve" if node.approves else "reject"
        return flow.approval(node.node_id, default=default).deadline(node.wait_sec)
    if node.kind == DELAY:
        return flow.delay(node.node_id, node.wait_sec)
    if node.call is not None:
        return flow.function(node.node_id, node.call.fn, **node.call.args)
    if node.external:
        return flow.external(node.node_id, node.role)
    return flow.node(node.node_id, HANDLERS[node.role])


def _link(made: FlowNode[Any, Any], node: NodePlan, nodes: dict[str, FlowNode[Any, Any]]) -> None:
    """Connect a node with those above it, and say where its batches come from."""
    for name in node.parents:
        verdict = dict(node.edge_when).get(name)
        made.after(nodes[name], streaming=name in node.streams, when=verdict and EXPRESSIONS[verdict])
    if node.first_batch:
        made.after(streaming="first_batch")
    made.gate(cast("Any", int(node.fan_in[6:]) if node.fan_in.startswith("count:") else node.fan_in))
    sources = [nodes[name] for name in node.sources]
    if node.chunk:
        made.rechunks(
            *sources, size=node.chunk, list_key="items", waits=False, poll_ms=200, backoff_max_ms=1000
        )
    elif sources:
        made.pulls(*sources, waits=False, poll_ms=200, backoff_max_ms=1000)
    elif not (node.call or node.kind):
        made.input(node=node.node_id)
    if node.mapped:
        lists = str([[*batch.items] for batch in node.batches])
        made.maps(lists, parallel=node.parallel)
    elif node.parallel > 1:
        made.parallel(node.parallel)
