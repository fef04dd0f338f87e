"""Predict from its plan alone how a random task ends: independent of FlowKit's code, of time, and of order.

The prediction holds for a task in which every branch runs to its end. When a cancel or a failure stops the task, fewer
nodes end like this; `verify` knows which differences are allowed then.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from flowkit.activities.batches.puller import ITEMS
from tests.integration.chaos.conditions import ERROR, FALSE
from tests.integration.chaos.plans import DELAY, EXTERNAL_FINAL, FINAL, TOUCH
from tests.integration.chaos.routes import CONDITION, ROUTING, UPSTREAM_FAILED, routers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tests.integration.chaos.plans import NodePlan, TaskPlan

FINISHED, FAILED, SKIPPED = "finished", "failed", "skipped"
BAD_CONDITION = "bad_condition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one batch."""

    items: tuple[int, ...]
    origin: str
    """The source of the batch, or the node itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """The predicted end of one node."""

    status: str
    code: str | None = None
    """Reason code of a failed node."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Stored batches by uid."""
    aside: tuple[str, ...] = ()
    """Uids of the batches that are set aside."""
    failed_uid: str | None = None
    """The batch that failed in the last attempt."""
    claims: frozenset[tuple[str, str]] = frozenset()
    """Source and uid of every pulled batch."""
    external: bool = False
    """Whether an external worker runs the node; its final metrics do not depend on stored batches."""
    reasons: frozenset[str] = frozenset()
    """Skip reasons that the node passes on if it does not finish. Several if they depend on the order of events."""
    otherwise: NodeEnd | None = None
    """How a skipped node ends instead if a batch has started it before its parent failed."""

    @property
    def skip_reason(self) -> str | None:
        """The skip reason of a skipped node."""
        return min(self.reasons) if self.status == SKIPPED else None

    @property
    def tolerated(self) -> bool:
        """Whether a gate with the mode `all` tolerates the node."""
        return self.status == SKIPPED and UPSTREAM_FAILED not in self.reasons

    @property
    def final(self) -> dict[str, Any]:
        """The metrics that `finalize` returns."""
        if self.external:
            return dict(EXTERNAL_FINAL)
        return {"all_batches": len(self.rows), "all_items": sum(sum(row.items) for row in self.rows.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnd:
    """The predicted end of a task."""

    status: str
    nodes: Mapping[str, NodeEnd]
    handled_failures: tuple[str, ...]
    """Ids of tolerated failures, in graph order."""
    stats: Mapping[str, dict[str, float]]
    """Stats of the nodes that a `metrics.aggregate` names."""
    aggregates: Mapping[str, dict[str, Any]]
    """Metas of `merge.generic` nodes, without `merged_at`."""
    stops: bool
    """Whether the first failure stops the task, so that other nodes may end differently."""


def task_end(plan: TaskPlan) -> TaskEnd:
    """Predict the end of a task."""
    ends = node_ends(plan.nodes)
    failed = [plan.nodes[place] for place in plan.order if ends[plan.nodes[place].node_id].status == FAILED]
    unhandled = [node for node in failed if not is_handled(node, plan.nodes, ends)]
    return TaskEnd(
        status=FAILED if unhandled else FINISHED,
        nodes=ends,
        handled_failures=tuple(node.node_id for node in failed if node not in unhandled),
        stats=dict(_stats(plan.nodes, ends)),
        aggregates=dict(_aggregates(plan.nodes, ends)),
        stops=bool(unhandled) and not plan.continues,
    )


def node_ends(nodes: Sequence[NodePlan]) -> dict[str, NodeEnd]:
    """Predict the ends of nodes in topological order."""
    ends: dict[str, NodeEnd] = {}
    for node in nodes:
        ends[node.node_id] = node_end(node, ends, routers_of(node, nodes))
    return ends


def is_predictable(nodes: Sequence[NodePlan]) -> bool:
    """Return whether all results are the same in every order of events.

    A skipped node must have a single possible reason, a node whose edge has a condition that cannot be evaluated must
    not be skipped before FlowKit evaluates it, and a function must find the results of all its parents.
    """
    ends = node_ends(nodes)
    return (
        all(len(end.reasons) == 1 for end in ends.values() if end.status == SKIPPED)
        and all(_finds_parents(node, ends) for node in nodes if ends[node.node_id].status != SKIPPED)
        and not any(_may_be_skipped_before(node, nodes, ends) for node in nodes if _fails_by_edge(node, ends))
    )


def _may_be_skipped_before(node: NodePlan, nodes: Sequence[NodePlan], ends: Mapping[str, NodeEnd]) -> bool:
    """Return whether a node may be skipped before FlowKit evaluates the condition of its edge.

    It is not if the other parents end by conditions that become due at the end of the same parent, or later.
    """
    if not skip_reasons(node, ends, routers_of(node, nodes)):
        return False
    failing = {parent for parent in _bad_edges(node, ends) if parent not in node.streams}
    others = [
        each for each in nodes if each.node_id in node.parents and ends[each.node_id].status != FINISHED
    ]
    return bool(
        node.first_batch
        or routers_of(node, nodes)
        or not all(_is_decided_at_end_of(failing, each, nodes, ends) for each in others)
    )


def _is_decided_at_end_of(
    parents: Collection[str], node: NodePlan, nodes: Sequence[NodePlan], ends: Mapping[str, NodeEnd]
) -> bool:
    """Return whether a node ends by its conditions, and these become due at the end of one of these parents."""
    end = ends[node.node_id]
    by_condition = end.code == BAD_CONDITION or (end.status == SKIPPED and end.reasons == {CONDITION})
    waits = not (node.first_batch or node.streams or routers_of(node, nodes))
    return by_condition and waits and len(node.parents) == 1 and node.parents[0] in parents


def _finds_parents(node: NodePlan, ends: Mapping[str, NodeEnd]) -> bool:
    """Return whether a function that reads the results of its parents finds all of them; True for other nodes."""
    reads = node.call is not None and node.call.fn in {"metrics.aggregate", "merge.generic"}
    return not reads or all(ends[parent].status == FINISHED for parent in node.parents)


def is_handled(node: NodePlan, nodes: Sequence[NodePlan], ends: Mapping[str, NodeEnd]) -> bool:
    """Return whether the task tolerates the failure of a node, or a target of `on_failure` handles it."""
    return node.allow_failure or _is_remedied(node, {each.node_id: each for each in nodes}, ends)


def _is_remedied(node: NodePlan, plans: Mapping[str, NodePlan], ends: Mapping[str, NodeEnd]) -> bool:
    return any(
        ends[each].status == FINISHED
        or (ends[each].status == FAILED and _is_remedied(plans[each], plans, ends))
        for each in node.on_failure
    )


def node_end(node: NodePlan, above: Mapping[str, NodeEnd], routers: Sequence[NodePlan] = ()) -> NodeEnd:
    """Predict the end of a node from the ends of its parents, routers and sources."""
    passed_on = frozenset([ROUTING if node.on_failure else UPSTREAM_FAILED])
    if _fails_by_edge(node, above):
        return NodeEnd(status=FAILED, code=BAD_CONDITION, reasons=passed_on)
    if reasons := skip_reasons(node, above, routers):
        return NodeEnd(status=SKIPPED, reasons=reasons, otherwise=_drained(node, above))
    if node.when == FALSE:
        return NodeEnd(status=SKIPPED, reasons=frozenset([CONDITION]))
    if node.when == ERROR:
        return NodeEnd(status=FAILED, code=BAD_CONDITION, reasons=passed_on)
    return replace(end_of_run(node, above), reasons=passed_on)


def _fails_by_edge(node: NodePlan, above: Mapping[str, NodeEnd]) -> bool:
    """Return whether FlowKit evaluates a condition of an edge to the node for which this is not possible."""
    return bool(_bad_edges(node, above))


def _bad_edges(node: NodePlan, above: Mapping[str, NodeEnd]) -> list[str]:
    """Return the parents from which FlowKit evaluates a condition for which this is not possible."""
    return [
        parent for parent, verdict in node.edge_when if verdict == ERROR and above[parent].status == FINISHED
    ]


def _drained(node: NodePlan, above: Mapping[str, NodeEnd]) -> NodeEnd | None:
    """Return how a node ends that a batch has started, and that fails with a parent after it has done its work."""
    if not node.first_batch or all(above[parent].status != FAILED for parent in node.parents):
        return None
    return replace(end_of_run(node, above), status=FAILED, code=UPSTREAM_FAILED)


def gate_parents(node: NodePlan, nodes: Sequence[NodePlan]) -> list[str]:
    """Return the parents that the gate of a node counts."""
    routers = {router.node_id for router in routers_of(node, nodes)}
    return [parent for parent in node.parents if parent not in routers]


def _seen(node: NodePlan, parent: str, end: NodeEnd) -> NodeEnd:
    """Return how a parent counts for the gate of a node, given the condition of the edge."""
    if end.status == FINISHED and dict(node.edge_when).get(parent) == FALSE:
        return NodeEnd(status=SKIPPED, reasons=frozenset([CONDITION]))
    return end


def skip_reasons(node: NodePlan, above: Mapping[str, NodeEnd], routers: Sequence[NodePlan]) -> frozenset[str]:
    """Return why a node is skipped; an empty set if it runs."""
    names = {router.node_id for router in routers}
    parents = [_seen(node, parent, above[parent]) for parent in node.parents if parent not in names]
    reasons = frozenset[str]()
    if not gate_opens(node.fan_in, parents):
        reasons |= {reason for end in parents if end.status != FINISHED for reason in end.reasons}
    if routers and not any(fires(router, above[router.node_id], node) for router in routers):
        ends = [above[name] for name in names]
        reasons |= {
            reason for end in ends for reason in ([ROUTING] if end.status == FINISHED else end.reasons)
        }
    return reasons


def fires(router: NodePlan, end: NodeEnd, target: NodePlan) -> bool:
    """Return whether a router that ended this way starts the target."""
    lists = {FINISHED: router.on_success, FAILED: router.on_failure}
    return target.node_id in lists.get(end.status, ())


def gate_opens(fan_in: str, parents: Sequence[NodeEnd]) -> bool:
    """Return whether a gate opens after all parents have ended like this."""
    if fan_in == "all_done":
        return True
    counted = [end.status for end in parents if not (fan_in == "all" and end.tolerated)]
    return opens(fan_in, counted) and (bool(counted) or not parents)


def end_of_run(node: NodePlan, above: Mapping[str, NodeEnd]) -> NodeEnd:
    """Predict the end of a node that starts, from what its sources hold."""
    code = final_code(node)
    if node.kind:
        return NodeEnd(status=FAILED if code else FINISHED, code=code)
    if node.call:
        return NodeEnd(status=FAILED if code else FINISHED, code=code)
    rows = dict(pulled(node, above)) if node.sources else made(node)
    claims = frozenset((source, uid) for source in node.sources for uid in above[source].rows)
    if node.mapped:
        claims = frozenset((ITEMS, batch.uid) for batch in node.batches)
    if code is None:
        return NodeEnd(status=FINISHED, rows=rows, claims=claims, aside=node.aside, external=node.external)
    assert node.failure is not None
    if node.failure.at == FINAL:
        return NodeEnd(status=FAILED, code=code, rows=rows, claims=claims, aside=node.aside)
    stored = dict(list(rows.items())[: node.failure.at])
    failed_uid = None if node.is_source else list(rows)[node.failure.at]
    return NodeEnd(status=FAILED, code=code, rows=stored, failed_uid=failed_uid)


def opens(fan_in: str, parents: Sequence[str]) -> bool:
    """Whether a gate opens, given the statuses of all parents."""
    finished = sum(status == FINISHED for status in parents)
    if not parents:
        return True
    least = {"all": len(parents), "any": 1}.get(fan_in)
    return finished >= (int(fan_in.partition(":")[2]) if least is None else least)


def final_code(node: NodePlan) -> str | None:
    """Return the reason code of a permanent failure, or None."""
    if node.kind:
        return None if node.kind == DELAY or node.approves else "rejected"
    if node.call and any("$" in str(value) for value in node.call.args.values()):
        return "adapter_error"
    if node.failure is None or node.failure.times is not None:
        return None
    if node.call and node.call.fn == TOUCH:
        return "adapter_error" if node.failure.permanent else "unexpected_error"
    return node.failure.code


def made(node: NodePlan) -> dict[str, Row]:
    """Return the batches of a node without sources, except those that it sets aside."""
    kept = [batch for batch in node.batches if batch.uid not in node.aside]
    return {batch.uid: Row(items=batch.items, origin=node.node_id) for batch in kept}


def pulled(node: NodePlan, above: Mapping[str, NodeEnd]) -> Iterator[tuple[str, Row]]:
    """Yield the batches of a pulling node with their uids. External workers do not change uids."""
    for source in node.sources:
        for uid, row in above[source].rows.items():
            if not node.chunk:
                stored = uid if node.external else qualified(uid, source, node.sources)
                yield stored, Row(items=row.items, origin=source)
                continue
            for number, start in enumerate(range(0, len(row.items), node.chunk)):
                items = row.items[start : start + node.chunk]
                yield chunk_uid(source, uid, number), Row(items=items, origin=source)


def qualified(uid: str, source: str, sources: Sequence[str]) -> str:
    """Return the uid under which a node stores a batch of one of its sources."""
    if len(sources) < 2 or (source == sources[0] and "@" not in uid):
        return uid
    return f"{quote(uid, safe='')}@{quote(source, safe='')}"


def chunk_uid(source: str, uid: str, number: int) -> str:
    """Return the uid of a chunk: BLAKE2b-160 of canonical JSON, as in the protocol."""
    key = {"src": source, "parent": uid, "idx": number}
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def variables(calls: Iterable[NodePlan]) -> dict[str, Any]:
    """Return the variables after each of these functions took effect exactly once, in any order."""
    tree: dict[str, Any] = {}
    for node in calls:
        assert node.call is not None
        args = node.call.args
        if node.call.fn == "vars.incr":
            _place(tree, args["key"], args["by"], adds=True)
        elif node.call.fn == "vars.set":
            for path, value in args["kv"].items():
                _place(tree, path, value)
        elif node.call.fn == "vars.merge":
            for path, value in _leaves(args["data"]):
                _place(tree, path, value)
    return tree


def _place(tree: dict[str, Any], path: str, value: Any, *, adds: bool = False) -> None:
    *above, leaf = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[leaf] = tree.get(leaf, 0) + value if adds else value


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _stats(
    nodes: Collection[NodePlan], ends: Mapping[str, NodeEnd]
) -> Iterator[tuple[str, dict[str, float]]]:
    makers = {node.node_id for node in nodes if not node.call}
    for node in nodes:
        if node.call and node.call.fn == "metrics.aggregate" and ends[node.node_id].status == FINISHED:
            summed = node.call.args["node_id"]
            mean = node.call.args["mode"] == "mean"
            yield summed, _sums(ends[summed], mean=mean) if summed in makers else {}


def _sums(end: NodeEnd, *, mean: bool) -> dict[str, float]:
    totals = [float(sum(row.items)) for row in end.rows.values()]
    if not totals:
        return {name: float(value) for name, value in end.final.items()}
    each = {"n": float(len(totals)), "total": sum(totals)}
    shares = {name: value / len(totals) for name, value in each.items()} if mean else each
    return {**shares, **{name: float(value) for name, value in end.final.items()}}


def _aggregates(
    nodes: Collection[NodePlan], ends: Mapping[str, NodeEnd]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for node in nodes:
        if node.call and node.call.fn == "merge.generic" and ends[node.node_id].status == FINISHED:
            uids = [uid for name in node.parents for uid in ends[name].rows]
            yield (
                node.node_id,
                {
                    "merged_from": list(node.parents),
                    "complete_nodes": sorted(node.parents),
                    "partial_batches": len(uids),
                    "distinct_batch_uids": len(set(uids)),
                },
            )
