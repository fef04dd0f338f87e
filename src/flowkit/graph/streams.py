"""Parse and check the streaming of a graph: which nodes start on the first stored batch of a parent. Pure.

A node asks for it in `io.start_when`, and an entry of `edges_ex` in `mode` or `on_batch`.
docs/graphs/data.md defines the rules.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.graph.input_adapters import PULL
from flowkit.models import ENGINE_TYPES, StartWhen
from flowkit.text import EXCERPT, count_of, did_you_mean, names, printed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.models import FanIn, Node

SYNC, ASYNC = "sync", "async"
EDGE_MODES = (SYNC, ASYNC)
ON_BATCH = "on_batch"
_SHOWN_SOURCES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """The streaming edges of a graph."""

    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The parents from which each node streams, by node id. Nodes without such parents are missing."""
    warnings: tuple[str, ...] = ()


def read_start_when(io: Mapping[str, Any]) -> StartWhen:
    """Return when the gate of a node may open. `io` is the valid input of the node."""
    given = io.get("start_when")
    return StartWhen(given.lower()) if given else StartWhen.READY


def edge_mode_problems(edge: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of the `mode` of an entry of `edges_ex`, if it has one."""
    mode = edge.get("mode", SYNC)
    if mode not in EDGE_MODES:
        hint = did_you_mean(
            mode, EDGE_MODES, otherwise="omit 'mode' to start the child when the parent has finished"
        )
        yield (
            f"graph.edges_ex {printed(edge['from'])} -> {printed(edge['to'])}: mode {printed(mode)} must be 'sync' or "
            f"'async'; {hint}"
        )


def is_async(edge: Mapping[str, Any]) -> bool:
    """Return whether the first batch of its parent satisfies an entry of `edges_ex`."""
    return edge.get("mode") == ASYNC or edge.get(ON_BATCH) is True


def resolve_streams(
    graph: dict[str, Any], gate_parents: Mapping[str, Sequence[str]], fan_ins: Mapping[str, FanIn]
) -> Streaming:
    """Return the streaming edges of a graph. `gate_parents` are the parents of each node that do not route to it."""
    edges = _find_async_edges(graph)
    whole = dict.fromkeys(raw["node_id"] for raw in graph["nodes"] if _waits_for_batch(raw))
    if not edges and not whole:
        return Streaming()
    functions = {raw["node_id"]: raw["type"] for raw in graph["nodes"] if raw["type"] in ENGINE_TYPES}
    wanted = {
        node_id: [p for p in gate_parents[node_id] if p in own]
        for node_id, own in edges.items()
        if node_id not in whole
    }
    wanted |= {node_id: gate_parents[node_id] for node_id in whole if fan_ins[node_id].mode != "count"}
    parents = {node_id: tuple(p for p in named if p not in functions) for node_id, named in wanted.items()}
    warnings = [
        *_warn_of_nodes(whole, edges, gate_parents, fan_ins),
        *_warn_of_functions(wanted, functions),
        *_warn_of_edges(graph, gate_parents),
    ]
    return Streaming(
        parents={node_id: own for node_id, own in parents.items() if own}, warnings=tuple(warnings)
    )


def _waits_for_batch(raw: Mapping[str, Any]) -> bool:
    return read_start_when(raw.get("io") or {}) is StartWhen.FIRST_BATCH


def _find_async_edges(graph: dict[str, Any]) -> dict[str, set[str]]:
    """Return the parents whose edges to a node are `async`, by node id."""
    found: dict[str, set[str]] = {}
    for edge in graph.get("edges_ex") or []:
        if is_async(edge):
            found.setdefault(edge["to"], set()).add(edge["from"])
    return found


def _warn_of_nodes(
    whole: Iterable[str],
    edges: Mapping[str, set[str]],
    gate_parents: Mapping[str, Sequence[str]],
    fan_ins: Mapping[str, FanIn],
) -> Iterator[str]:
    for node_id in whole:
        where, fan_in = f"node {node_id!r}: io.start_when 'first_batch'", fan_ins[node_id]
        if not gate_parents[node_id]:
            yield f"{where} has no effect, because the node has no parents whose batches could start it"
        elif fan_in.mode == "count":
            yield (
                f"{where} has no effect with fan_in 'count:{fan_in.count}', which counts finished parents; "
                "to count parents with a batch, use edges_ex with mode 'async'"
            )
        if node_id in edges:
            yield (
                f"{where} applies to all parents, so the async edges that lead to the node are "
                "ignored; keep one of both"
            )


def _warn_of_functions(wanted: Mapping[str, Sequence[str]], functions: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each parent that stores no batches. `functions` has the types of such nodes by their ids."""
    for node_id, parents in wanted.items():
        for parent in parents:
            if parent in functions:
                yield (
                    f"node {node_id!r} cannot start on a batch of {parent!r}, because a node of the type "
                    f"{functions[parent]!r} stores no batches; it waits until {parent!r} has finished"
                )


def _warn_of_edges(graph: dict[str, Any], gate_parents: Mapping[str, Sequence[str]]) -> Iterator[str]:
    parents = {child: {*own} for child, own in gate_parents.items()}
    for edge in graph.get("edges_ex") or []:
        where = f"graph.edges_ex {printed(edge['from'])} -> {printed(edge['to'])}"
        if not isinstance(edge.get(ON_BATCH), (bool, type(None))):
            yield f"{where}: on_batch {printed(edge[ON_BATCH])} is ignored; it must be true or false"
        if is_async(edge) and edge["from"] not in parents.get(edge["to"], ()):
            yield f"{where}: the async edge is ignored, because depends_on or a route takes precedence over it"


def unread_warnings(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield one warning about the nodes that run after others and name no input adapter: they get none of
    their data.
    """
    roles = {node.node_id for node in nodes if node.type not in ENGINE_TYPES}
    unread = [node for node in nodes if node.node_id in roles and _names_no_input(node, roles)]
    if not unread:
        return
    first = unread[0]
    sources = [parent for parent in first.depends_on if parent in roles][:_SHOWN_SOURCES]
    adapter = {"input_adapter": PULL, "input_args": {"from_nodes": sources}}
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in adapter.items()]
    others = f" (and {count_of(len(unread) - 1, 'more node')})" if len(unread) > 1 else ""
    text = (
        f"node {first.node_id!r}{others} runs after {names(sources, last=' and ')} but names no input adapter, so it "
        "gets one batch with its own input, unless its handler reads the data itself; to pull their "
        "batches, add the two "
        'lines below to its io.input_inline, or "input_adapter": "noop" if it needs none of their data'
    )
    yield EXCERPT.join([text, f"{lines[0]},", lines[1]])


def _names_no_input(node: Node, roles: Collection[str]) -> bool:
    reads = node.map or node.expressions or (node.io.input_inline or {}).get("input_adapter")
    return not reads and any(parent in roles for parent in node.depends_on)


def max_ahead_warnings(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a warning for each `max_ahead` that has no effect, because no streaming child pulls from the node."""
    followed = {
        parent
        for node in nodes
        if node.streams_from
        for parent in {*node.streams_from}.intersection(node.pulls_from)
    }
    for node in nodes:
        if node.max_ahead and node.node_id not in followed:
            yield (
                f"node {node.node_id!r}: io.max_ahead has no effect, because no node both starts on a "
                "batch of the node "
                "and pulls from it"
            )
