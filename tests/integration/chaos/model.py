"""What must become of a random task, from its plan alone: no code of FlowKit, no time, no order of events.

It tells the end of a task in which every branch runs to its end. Of a task that is stopped (cancelled, or failed
without `on_node_failure: continue`) only those nodes end so that were quick enough; `verify` knows what else may be.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tests.integration.chaos.plans import FINAL, TOUCH

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tests.integration.chaos.plans import NodePlan, TaskPlan

FINISHED, FAILED, SKIPPED = "finished", "failed", "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one batch."""

    items: tuple[int, ...]
    origin: str
    """The node that it was pulled from, or the node itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnd:
    """What is left of one node."""

    status: str
    code: str | None = None
    """Why it failed."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Stored batches by uid."""
    failed_uid: str | None = None
    """The batch that failed in the last attempt."""
    claims: frozenset[tuple[str, str]] = frozenset()
    """Source and uid of every batch that it has pulled."""

    @property
    def skip_reason(self) -> str | None:
        """Why it never ran."""
        return "upstream_failed" if self.status == SKIPPED else None

    @property
    def final(self) -> dict[str, Any]:
        """What `finalize` returns."""
        return {"all_batches": len(self.rows), "all_items": sum(sum(row.items) for row in self.rows.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnd:
    """What is left of a task."""

    status: str
    nodes: Mapping[str, NodeEnd]
    handled_failures: tuple[str, ...]
    """In the order of the graph."""
    stats: Mapping[str, dict[str, float]]
    """Of the nodes whose metrics are summed up."""
    books: Mapping[str, dict[str, Any]]
    """Metas of the merges, without their times."""
    stops: bool
    """Whether the first failure ends the task, so that the other nodes may end otherwise than here."""


def task_end(plan: TaskPlan) -> TaskEnd:
    """How a task ends."""
    ends: dict[str, NodeEnd] = {}
    for node in plan.nodes:
        ends[node.node_id] = node_end(node, ends)
    failed = [plan.nodes[place] for place in plan.order if ends[plan.nodes[place].node_id].status == FAILED]
    minded = [node for node in failed if not node.allow_failure]
    return TaskEnd(
        status=FAILED if minded else FINISHED,
        nodes=ends,
        handled_failures=tuple(node.node_id for node in failed if node.allow_failure),
        stats=dict(_stats(plan.nodes, ends)),
        books=dict(_books(plan.nodes, ends)),
        stops=bool(minded) and not plan.keeps_going,
    )


def node_end(node: NodePlan, above: Mapping[str, NodeEnd]) -> NodeEnd:
    """How a node ends after those above it."""
    if not opens(node.fan_in, [above[parent].status for parent in node.parents]):
        return NodeEnd(status=SKIPPED)
    code = failure_code(node)
    if node.call:
        return NodeEnd(status=FAILED if code else FINISHED, code=code)
    rows = dict(pulled(node.sources, node.chunk, above)) if node.sources else made(node)
    claims = frozenset((source, uid) for source in node.sources for uid in above[source].rows)
    if code is None:
        return NodeEnd(status=FINISHED, rows=rows, claims=claims)
    assert node.trouble is not None
    if node.trouble.at == FINAL:
        return NodeEnd(status=FAILED, code=code, rows=rows, claims=claims)
    stored = dict(list(rows.items())[: node.trouble.at])
    return NodeEnd(status=FAILED, code=code, rows=stored, failed_uid=list(rows)[node.trouble.at])


def opens(fan_in: str, parents: Sequence[str]) -> bool:
    """Whether a gate is open once all parents have ended."""
    finished = sum(status == FINISHED for status in parents)
    if not parents:
        return True
    least = {"all": len(parents), "any": 1}.get(fan_in)
    return finished >= (int(fan_in.partition(":")[2]) if least is None else least)


def failure_code(node: NodePlan) -> str | None:
    """Why the node fails for good; None when it does not."""
    if node.call and any("$" in str(value) for value in node.call.args.values()):
        return "adapter_error"
    if node.trouble is None or node.trouble.times is not None:
        return None
    if node.call and node.call.fn == TOUCH:
        return "adapter_error" if node.trouble.permanent else "unexpected_error"
    return node.trouble.code


def made(node: NodePlan) -> dict[str, Row]:
    """The batches of a node that makes its own."""
    return {batch.uid: Row(items=batch.items, origin=node.node_id) for batch in node.batches}


def pulled(sources: Sequence[str], chunk: int, above: Mapping[str, NodeEnd]) -> Iterator[tuple[str, Row]]:
    """The batches that a node gets from its sources, each under the uid of its own."""
    for source in sources:
        for uid, row in above[source].rows.items():
            if not chunk:
                yield qualified(uid, source, sources), Row(items=row.items, origin=source)
                continue
            for number, start in enumerate(range(0, len(row.items), chunk)):
                items = row.items[start : start + chunk]
                yield chunk_uid(source, uid, number), Row(items=items, origin=source)


def qualified(uid: str, source: str, sources: Sequence[str]) -> str:
    """The uid under which a batch of one of several sources is delivered."""
    if len(sources) < 2 or (source == sources[0] and "@" not in uid):
        return uid
    return f"{quote(uid, safe='')}@{quote(source, safe='')}"


def chunk_uid(source: str, uid: str, number: int) -> str:
    """The uid of a chunk, as the protocol says: BLAKE2b-160 of canonical JSON."""
    key = {"src": source, "parent": uid, "idx": number}
    text = json.dumps(key, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def variables(calls: Iterable[NodePlan]) -> dict[str, Any]:
    """The variables after these functions have had their effect once each, in whatever order."""
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


def _books(nodes: Collection[NodePlan], ends: Mapping[str, NodeEnd]) -> Iterator[tuple[str, dict[str, Any]]]:
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
