"""Describe a validated graph for its readers: when each node starts, and what differs from the defaults. Pure.

Each feature of the graph language has one function, which yields nothing if a node does not use the feature. A new
feature adds its function to one of the lists at the end of this module: `GRAPH`, `GATE` or `OPTIONS`.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from flowkit.graph.routes import ON_FAILURE, ON_SUCCESS
from flowkit.models import ALL_DONE, APPROVE, OnNodeFailure, RetryPolicy, StartWhen, VersionPolicy
from flowkit.text import format_duration, names, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import FanIn, Graph, Node

_PARENT_CHARS = 26
"""Characters of a parent's id before `(first batch)`."""

_EXPRESSION_CHARS = 60
_EDGES = 3
"""Largest number of edges whose conditions are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """One property of a node or a graph."""

    text: str = ""
    """The property in words; empty if only programs need it."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The property as JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDescription:
    """When a node starts, and how it differs from a node with default values."""

    node_id: str
    role: str
    """The role, or the name of the coordinator function."""
    is_function: bool
    gate: tuple[Detail, ...]
    options: tuple[Detail, ...]

    @property
    def starts(self) -> str:
        """When the node starts, in words."""
        return "; ".join(_list_texts(self.gate)) or "at once"

    @property
    def differs(self) -> str:
        """How the node differs from a node with default values, in words; empty if it does not."""
        return "; ".join(_list_texts(self.options))

    @property
    def as_json(self) -> dict[str, Any]:
        """The description as JSON."""
        kind = "fn" if self.is_function else "role"
        described = {key: value for each in (*self.gate, *self.options) for key, value in each.fields.items()}
        return {"node_id": self.node_id, kind: self.role, "starts": self.starts, **described}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A node, and the number of equal nodes that follow it."""

    node: NodeDescription
    others: int = 0


Routers = dict[str, dict[str, list[str]]]
"""For each target of a route: its routers, with the names of their lists that contain it."""


def describe(graph: Graph) -> list[NodeDescription]:
    """Return the descriptions of all nodes, each after its parents and routers, and otherwise in graph order."""
    routers = _find_routers(graph)
    return [_describe_node(node, routers) for node in _sort_nodes(graph, routers)]


def describe_graph(graph: Graph) -> list[Detail]:
    """Return the properties of the whole graph."""
    return [detail for rule in GRAPH for detail in rule(graph)]


def group_rows(nodes: Sequence[NodeDescription], most: int) -> list[Row]:
    """Return a row for each node. If there are more than `most`, return one row for each series of equal nodes."""
    if len(nodes) <= most:
        return [Row(node=node) for node in nodes]
    series = (
        list(equal) for _, equal in groupby(nodes, key=lambda each: (each.role, each.starts, each.differs))
    )
    return [Row(node=equal[0], others=len(equal) - 1) for equal in series]


def _list_texts(details: Sequence[Detail]) -> list[str]:
    return [detail.text for detail in details if detail.text]


def _describe_node(node: Node, routers: Routers) -> NodeDescription:
    return NodeDescription(
        node_id=node.node_id,
        role=node.io.fn if node.is_function else node.type,
        is_function=node.is_function,
        gate=tuple(detail for rule in GATE for detail in rule(node, routers)),
        options=tuple(detail for rule in OPTIONS for detail in rule(node)),
    )


def _find_routers(graph: Graph) -> Routers:
    found: Routers = {}
    for node in graph.nodes:
        for key, targets in ((ON_SUCCESS, node.on_success), (ON_FAILURE, node.on_failure)):
            for target in targets:
                found.setdefault(target, {}).setdefault(node.node_id, []).append(key)
    return found


def _sort_nodes(graph: Graph, routers: Routers) -> Iterator[Node]:
    index_of = {node.node_id: node.index for node in graph.nodes}
    earlier = {node.index: [*node.depends_on, *routers.get(node.node_id, ())] for node in graph.nodes}
    sorter = TopologicalSorter(
        {index: [index_of[node_id] for node_id in ids] for index, ids in earlier.items()}
    )
    sorter.prepare()
    ready: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        index = heapq.heappop(ready)
        sorter.done(index)
        yield graph.nodes[index]


# --- when a node starts -------------------------------------------------------------------------------------------


def _describe_parents(node: Node, routers: Routers) -> Iterator[Detail]:
    if not node.depends_on:
        return
    if node.streams_from and node.io.start_when is StartWhen.FIRST_BATCH:
        text = f"after the first batch of {names(node.streams_from, last=' or ')}"
    else:
        text = f"after {_format_parents(node.fan_in, format_parents(node, node.depends_on))}"
    fields: dict[str, Any] = {"depends_on": list(node.depends_on), "fan_in": _format_fan_in(node.fan_in)}
    if node.streams_from:
        fields["streams_from"] = list(node.streams_from)
    yield Detail(text=text, fields=fields)


def format_parents(node: Node, parents: Iterable[str]) -> list[str]:
    """Return the ids of parents, and whether their first batches satisfy the edges to `node`."""
    streaming = {*node.streams_from}
    return [
        f"{shorten(parent, _PARENT_CHARS)} (first batch)" if parent in streaming else parent
        for parent in parents
    ]


def _format_fan_in(fan_in: FanIn) -> str:
    return f"count:{fan_in.count}" if fan_in.mode == "count" else fan_in.mode


def _format_parents(fan_in: FanIn, parents: Sequence[str]) -> str:
    if fan_in.mode == ALL_DONE:
        return f"the end of {names(parents)}"
    if fan_in.mode == "all" or len(parents) == 1:
        return names(parents)
    return f"{fan_in.count if fan_in.mode == 'count' else 'any'} of {names(parents, last=', ')}"


def _describe_routes(node: Node, routers: Routers) -> Iterator[Detail]:
    own = routers.get(node.node_id, {})
    if own:
        ends = {
            (ON_SUCCESS,): "succeeds",
            (ON_FAILURE,): "fails",
            (ON_SUCCESS, ON_FAILURE): "succeeds or fails",
        }
        by_end = {
            end: [router for router, keys in own.items() if tuple(keys) == key] for key, end in ends.items()
        }
        parts = [f"{names(found, last=' or ')} {end}" for end, found in by_end.items() if found]
        yield Detail(text=f"if {' or '.join(parts)}", fields={"routed_by": own})
    elif node.conditional:
        yield Detail(text="never: only ignored routes lead to it", fields={"routed_by": {}})


def _describe_edge_conditions(node: Node, routers: Routers) -> Iterator[Detail]:
    if node.edge_when:
        edges = [
            f"edge from {shorten(parent)} when {shorten(text, _EXPRESSION_CHARS)}"
            for parent, text in node.edge_when.items()
        ]
        more = [f"{len(edges) - _EDGES:,} more edges with conditions"] if len(edges) > _EDGES else []
        yield Detail(text="; ".join([*edges[:_EDGES], *more]), fields={"edge_when": dict(node.edge_when)})


def _describe_condition(node: Node, routers: Routers) -> Iterator[Detail]:
    if node.when is not None:
        yield Detail(text=f"when {shorten(node.when, _EXPRESSION_CHARS)}", fields={"when": node.when})


def _describe_prerequisites(node: Node, routers: Routers) -> Iterator[Detail]:
    if node.prerequisites:
        text = f"when {names(node.prerequisites)} {'is' if len(node.prerequisites) == 1 else 'are'} satisfied"
        yield Detail(text=text, fields={"prerequisites": list(node.prerequisites)})


# --- how a node differs from the defaults -------------------------------------------------------------------------


def _describe_sources(node: Node) -> Iterator[Detail]:
    if node.pulls:
        other = set(node.pulls_from) != set(node.depends_on) or not node.pulls_from
        text = f"pulls from {names(node.pulls_from) or 'no node'}" if other else ""
        yield Detail(text=text, fields={"pulls_from": list(node.pulls_from)})


def _describe_timeout(node: Node) -> Iterator[Detail]:
    if node.timeout_sec is not None:
        text = f"timeout {format_duration(node.timeout_sec)}"
        yield Detail(text=text, fields={"timeout_sec": node.timeout_sec})


def _describe_approval(node: Node) -> Iterator[Detail]:
    if (approval := node.approval) is not None:
        wanted = f"asks: {shorten(approval.text, _EXPRESSION_CHARS)}" if approval.text else ""
        default = f"its deadline {'approves' if approval.default == APPROVE else 'rejects'}"
        shown = [wanted, default if node.deadline_sec is not None else ""]
        yield Detail(text="; ".join(filter(None, shown)), fields={"approval": asdict(approval)})


def _describe_delay(node: Node) -> Iterator[Detail]:
    if (delay := node.delay) is not None:
        if delay.sec is not None:
            yield Detail(text=f"waits {format_duration(delay.sec)}", fields={"delay": {"sec": delay.sec}})
        if delay.until is not None:
            until = datetime.fromtimestamp(delay.until, UTC).isoformat()
            yield Detail(text=f"waits until {until}", fields={"delay": {"until": until}})


def _describe_deadline(limited: Node | Graph) -> Iterator[Detail]:
    if limited.deadline_sec is not None:
        text = f"deadline {format_duration(limited.deadline_sec)}"
        yield Detail(text=text, fields={"deadline_sec": limited.deadline_sec})


def _describe_retries(node: Node) -> Iterator[Detail]:
    policy = node.retry_policy
    if policy != RetryPolicy():
        yield Detail(text=_format_retries(policy), fields={"retry_policy": asdict(policy)})


def _format_retries(policy: RetryPolicy) -> str:
    if policy.max == 0:
        return "no retries"
    wait = f"after {format_duration(policy.backoff_sec)}"
    if policy.backoff_coefficient != 1:
        most = "" if policy.max_backoff_sec is None else f" up to {format_duration(policy.max_backoff_sec)}"
        wait += f" ×{policy.backoff_coefficient:g}{most}"
    parts = [f"{policy.max:,} {'retry' if policy.max == 1 else 'retries'} {wait}"]
    if policy.permanent_on and policy.permanent_on != RetryPolicy().permanent_on:
        parts.append(f"not after {names(policy.permanent_on, last=' or ')}")
    return ", ".join(parts)


def _describe_max_ahead(node: Node) -> Iterator[Detail]:
    if node.max_ahead:
        text = f"at most {node.max_ahead:,} batch{'' if node.max_ahead == 1 else 'es'} ahead"
        yield Detail(text=text, fields={"max_ahead": node.max_ahead})


def _describe_parallel(node: Node) -> Iterator[Detail]:
    if node.parallel > 1:
        yield Detail(text=f"up to {node.parallel:,} shards", fields={"parallel": node.parallel})


def _describe_map(node: Node) -> Iterator[Detail]:
    if node.map is not None:
        size = f", in batches of {node.map.batch_size:,}" if node.map.batch_size > 1 else ""
        fields = {"over": node.map.over, "batch_size": node.map.batch_size}
        yield Detail(text=f"for each item of {node.map.over}{size}", fields={"map": fields})


def _describe_quarantine(node: Node) -> Iterator[Detail]:
    if (given := node.quarantine) is not None:
        most = f"{given.most:,}" if given.share is None else f"{given.share * 100:.6g} % of the"
        text = f"sets up to {most} batches aside that fail {given.attempts} times"
        fields = {"attempts": given.attempts, "max": given.most if given.share is None else given.share}
        yield Detail(text=text, fields={"on_batch_failure": fields})


def _describe_hold(node: Node) -> Iterator[Detail]:
    if node.hold_sec is not None:
        text = f"a failure waits up to {format_duration(node.hold_sec)} for a decision"
        yield Detail(text=text, fields={"hold_sec": node.hold_sec})


def _describe_routing(node: Node) -> Iterator[Detail]:
    if node.on_success or node.on_failure:
        text = f"failure starts {names(node.on_failure)}" if node.on_failure else ""
        lists = {ON_SUCCESS: list(node.on_success), ON_FAILURE: list(node.on_failure)}
        yield Detail(text=text, fields={"routing": lists})


def _describe_tolerance(node: Node) -> Iterator[Detail]:
    if node.allow_failure:
        yield Detail(text="may fail", fields={"allow_failure": True})


# --- how a graph differs from the defaults ------------------------------------------------------------------------


_FAILURE_MODES = {
    OnNodeFailure.CONTINUE: "after a failure, the nodes that do not depend on the failed node still run",
    OnNodeFailure.HOLD: "after a failure, the node waits for a decision while other nodes run",
    OnNodeFailure.FINISH_RUNNING: "after a failure, no further node starts, and running nodes finish",
}


def _describe_failure_mode(graph: Graph) -> Iterator[Detail]:
    if text := _FAILURE_MODES.get(graph.on_node_failure):
        yield Detail(text=text, fields={"on_node_failure": graph.on_node_failure.value})


def _describe_version_policy(graph: Graph) -> Iterator[Detail]:
    if graph.version_policy is VersionPolicy.PIN:
        text = "the first attempt of each role fixes the version of its handler"
        yield Detail(text=text, fields={"version_policy": graph.version_policy.value})


GRAPH: tuple[Callable[[Graph], Iterator[Detail]], ...] = (
    _describe_failure_mode,
    _describe_deadline,
    _describe_version_policy,
)
"""The rules that describe a graph."""

GATE: tuple[Callable[[Node, Routers], Iterator[Detail]], ...] = (
    _describe_routes,
    _describe_parents,
    _describe_edge_conditions,
    _describe_condition,
    _describe_prerequisites,
)
"""The rules that describe when a node starts."""

OPTIONS: tuple[Callable[[Node], Iterator[Detail]], ...] = (
    _describe_sources,
    _describe_max_ahead,
    _describe_map,
    _describe_parallel,
    _describe_quarantine,
    _describe_approval,
    _describe_delay,
    _describe_timeout,
    _describe_deadline,
    _describe_retries,
    _describe_hold,
    _describe_routing,
    _describe_tolerance,
)
"""The rules that describe how a node differs from the defaults."""
