"""Validate and normalize a graph as users write it.

Pure: no Temporal, no I/O. The client and the workflow use the same checks, so they report the same errors. Each check
yields problems as texts that name the place, the value and what is allowed (spec: graph schema, validation)."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from flowkit import limits, temporal_names
from flowkit.errors import GraphError
from flowkit.graph import field_checks
from flowkit.graph.field_checks import json_bytes
from flowkit.graph.input_adapters import replace_alias
from flowkit.graph.routes import find_routers, resolve_routes, route_problems
from flowkit.graph.streams import max_ahead_warnings, read_start_when, resolve_streams
from flowkit.models import (
    COORDINATOR_FN,
    FanIn,
    Graph,
    Node,
    NodeIO,
    OnNodeFailure,
    RetryPolicy,
)
from flowkit.text import did_you_mean, printed, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from flowkit.graph.routes import Routes


RESERVED_FUNCTIONS = frozenset(temporal_names.ENGINE_ACTIVITIES)
"""Names that coordinator functions must not have, because the engine's own activities use them."""

_ENOUGH = 11


def parse_graph(
    graph: object,
    *,
    params: object = None,
    max_nodes: int | None = limits.MAX_NODES,
    max_bytes: int | None = limits.TASK_INPUT_BYTES,
) -> Graph:
    """Validate `graph` and return it normalized. Raise GraphError with the problems found.

    `params` counts only toward the size limit `max_bytes`. With `max_nodes` None, the engine enforces that limit.
    `Graph.warnings` lists problems that do not prevent the graph from running.
    """
    raise_if(list(_size_problems(graph, params, max_nodes, max_bytes)))
    raise_if(_first(field_checks.graph_problems(graph)))
    assert isinstance(graph, dict)
    parents, _ = _parents_by_node(graph)
    raise_if(_first(_relation_problems(graph, parents)))
    return normalized(graph)


def normalized(graph: dict[str, Any]) -> Graph:
    """Return the normalized form of a graph that was accepted before, without validating it again."""
    *_, found = normalizing(graph)
    assert found is not None, "the last step yields the graph"
    return found


def normalizing(graph: dict[str, Any]) -> Iterator[Graph | None]:
    """Normalize a graph as `normalized` does, in steps of at most STEP_NODES nodes.

    Yield None between two steps, and in the end the graph.
    """
    parents, warnings = _parents_by_node(graph)
    routes = resolve_routes(graph, parents, field_checks.edge_pairs(graph))
    fan_ins = {
        raw["node_id"]: field_checks.parse_fan_in(raw.get("fan_in")) or FanIn() for raw in graph["nodes"]
    }
    streams = resolve_streams(graph, routes.parents, fan_ins)
    edge_when = field_checks.edge_conditions(graph)
    nodes: list[Node] = []
    for index, raw in enumerate(graph["nodes"]):
        if len(graph["nodes"]) > STEP_NODES and index % STEP_NODES == 0:
            yield None
        node_id = raw["node_id"]
        node = _node(index, raw, parents[node_id], routes, edge_when.get(node_id, {}))
        own = streams.parents.get(node_id)
        nodes.append(replace(node, streams_from=own) if own else node)
    yield Graph(
        nodes=tuple(nodes),
        name=graph.get("name") if isinstance(graph.get("name"), str) else None,
        on_node_failure=OnNodeFailure(graph.get("on_node_failure", "fail")),
        warnings=(*warnings, *routes.warnings, *streams.warnings, *max_ahead_warnings(tuple(nodes))),
        deadline_sec=field_checks.graph_deadline(graph),
    )


def raise_if(problems: list[str]) -> None:
    """Raise GraphError if there are any problems."""
    if problems:
        raise GraphError(problems)


def _size_problems(
    graph: object, params: object, max_nodes: int | None, max_bytes: int | None
) -> Iterator[str]:
    size = json_bytes(graph, "graph") + json_bytes(params, "params")
    if max_bytes is not None and size > max_bytes:
        yield (
            f"graph and params together are {size:,} bytes of JSON, more than {max_bytes:,}: "
            "start the task with create_task, or put data into a store and pass a reference"
        )
    nodes = graph.get("nodes") if isinstance(graph, dict) else None
    if (
        isinstance(nodes, list)
        and max_nodes is not None
        and (problem := too_many_nodes(len(nodes), max_nodes))
    ):
        yield problem


def _parents_by_node(graph: dict[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the parents of each node, and warnings. `depends_on` takes precedence over edges.

    A node without edges causes no warning, and neither do edges that only add conditions to its parents.
    """
    wired: dict[str, dict[str, None]] = {}
    pairs, conditional = field_checks.edge_pairs(graph), field_checks.edge_conditions(graph)
    for source, target in pairs:
        wired.setdefault(target, {})[source] = None
    wires = any(source not in conditional.get(target, ()) for source, target in pairs)
    parents: dict[str, list[str]] = {}
    warnings: list[str] = []
    for raw in graph["nodes"]:
        node_id, own = raw["node_id"], list(dict.fromkeys(raw.get("depends_on") or []))
        by_edges = list(wired.get(node_id, ()))
        parents[node_id] = own or by_edges
        only_conditions = not wires and set(by_edges) <= set(own)
        if own and by_edges and set(own) != set(by_edges) and not only_conditions:
            warnings.append(
                f"node {node_id!r}: depends_on {own} and edges {by_edges} differ; depends_on takes precedence"
            )
    return parents, warnings


def parents_by_node(graph: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parents of each node: its own `depends_on`, else the sources of the edges that lead to it."""
    return _parents_by_node(graph)[0]


def parents_of(graph: dict[str, Any], node_id: str) -> list[str]:
    """Return the parents of a node of a valid graph; an empty list for an unknown node."""
    return parents_by_node(graph).get(node_id, []) if graph else []


def dependency_path(graph: dict[str, Any], node_id: str, sources: Sequence[str]) -> list[str]:
    """Return the cycle that arises in a valid graph if the node also waits for `sources`.

    The path leads from the node, over nodes that depend on it, back to itself. It is empty if no source depends on it.
    """
    waits = _waits(graph, _parents_by_node(graph)[0])
    waits[node_id] = [*sources, *find_routers(graph).get(node_id, ())]
    cycle = find_cycle(waits)[1:]
    if node_id not in cycle:
        return []
    place = cycle.index(node_id)
    return [node_id, *cycle[place + 1 :], *cycle[: place + 1]]


def _relation_problems(graph: dict[str, Any], parents: dict[str, list[str]]) -> Iterator[str]:
    counts = Counter(raw["node_id"] for raw in graph["nodes"])
    duplicates = [node_id for node_id, n in counts.items() if n > 1]
    for node_id in duplicates:
        yield f"node id {node_id!r} is used {counts[node_id]} times: give each node its own id"
    for source, target in field_checks.edge_pairs(graph):
        for end in (source, target):
            if end not in counts:
                yield f"edge [{printed(source)}, {printed(target)}]: there is no node {printed(end)}{suggestion(end, counts)}"
    yield from route_problems(graph, counts)
    routes = resolve_routes(graph, parents, field_checks.edge_pairs(graph))
    for raw in graph["nodes"]:
        yield from _parent_problems(raw, parents[raw["node_id"]], len(routes.parents[raw["node_id"]]), counts)
    if not duplicates:
        yield from _cycle_problems(graph, parents)


def _cycle_problems(graph: dict[str, Any], parents: Mapping[str, list[str]]) -> Iterator[str]:
    routers = find_routers(graph)
    routed = {node_id: [*own, *routers.get(node_id, ())] for node_id, own in parents.items()}
    if cycle := find_cycle(parents):
        yield f"the graph has a cycle: {' -> '.join(cycle)}; remove one of these dependencies"
    elif len(cycle := find_cycle(routed)) > 2:
        yield f"the graph has a cycle: {' -> '.join(cycle)}; remove one of these dependencies or routes"
    elif not cycle and (cycle := find_cycle(_waits(graph, parents))):
        yield f"input_args.from_nodes makes nodes wait for each other: {' -> '.join(cycle)}; pull from earlier nodes"


def _waits(graph: dict[str, Any], parents: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the nodes that each node must wait for: the parents it cannot start without, its routers, its sources."""
    waits, routers = {}, find_routers(graph)
    for raw in graph["nodes"]:
        own, fan_in = parents[raw["node_id"]], field_checks.parse_fan_in(raw.get("fan_in"))
        needs_all = fan_in is None or fan_in.mode == "all" or len(own) == (fan_in.count or 1)
        sources = field_checks.pull_sources(raw) or ()
        waits[raw["node_id"]] = [*(own if needs_all else ()), *routers.get(raw["node_id"], ()), *sources]
    return waits


def _parent_problems(
    raw: dict[str, Any], own: list[str], gate_parents: int, known: Mapping[str, int]
) -> Iterator[str]:
    where = f"node {raw['node_id']!r}"
    for parent in own:
        if parent not in known:
            yield f"{where}: depends_on names {printed(parent)}, which is not a node{suggestion(parent, known)}"
    fan_in = field_checks.parse_fan_in(raw.get("fan_in"))
    assert fan_in is not None
    if fan_in.mode == "count" and not 1 <= fan_in.count <= gate_parents:
        routing = ", not counting those that route to it" if gate_parents < len(own) else ""
        yield (
            f"{where}: fan_in 'count:{fan_in.count}' must be between 1 and the number of parents "
            f"({gate_parents}){routing}"
        )
    sources = field_checks.pull_sources(raw)
    if field_checks.is_pulling(raw) and sources is None and not own:
        yield f"{where}: input_args.from_nodes is missing, and the node has no parents to pull from"
    if field_checks.is_pulling(raw) and sources is None and (size := json_bytes(own)) > limits.SOURCES_BYTES:
        yield (
            f"{where}: the ids of its {len(own):,} sources are {size:,} bytes of JSON, more than "
            f"{limits.SOURCES_BYTES:,}: combine the sources in several nodes, or give them shorter ids"
        )
    for source in sources or ():
        if source not in known:
            yield f"{where}: input_args.from_nodes names {printed(source)}, which is not a node{suggestion(source, known)}"


def _first(problems: Iterator[str]) -> list[str]:
    """Return one problem more than an error shows. Limited because finding the suggested name is slow."""
    return list(itertools.islice(problems, _ENOUGH))


def _node(
    index: int,
    raw: dict[str, Any],
    parents: list[str],
    routes: Routes,
    edge_when: dict[str, str],
) -> Node:
    node_id, fan_in, io = raw["node_id"], field_checks.parse_fan_in(raw.get("fan_in")), raw.get("io") or {}
    return Node(
        node_id=node_id,
        index=index,
        type=raw["type"],
        depends_on=tuple(routes.parents[node_id]),
        fan_in=fan_in or FanIn(),
        io=_io(io, tuple(parents)),
        retry_policy=_retry_policy(raw.get("retry_policy") or {}),
        allow_failure=bool(raw.get("allow_failure", False)),
        timeout_sec=raw.get("timeout_sec"),
        io_bytes=json_bytes(io) if io else len("{}"),
        max_ahead=io.get("max_ahead") or 0,
        deadline_sec=raw.get("deadline_sec"),
        on_success=routes.on_success.get(node_id, ()),
        on_failure=routes.on_failure.get(node_id, ()),
        conditional=node_id in routes.conditional,
        when=raw.get("when"),
        edge_when={parent: when for parent, when in edge_when.items() if parent in routes.parents[node_id]},
    )


def _io(raw: dict[str, Any], depends_on: tuple[str, ...]) -> NodeIO:
    return NodeIO(
        input_ref=raw.get("input_ref"),
        input_inline=_with_sources(raw.get("input_inline"), depends_on),
        batching=raw.get("batching"),
        start_when=read_start_when(raw),
        fn=raw.get("fn") or temporal_names.NOOP,
        fn_args=raw.get("fn_args") or {},
    )


def _with_sources(inline: dict[str, Any] | None, depends_on: tuple[str, ...]) -> dict[str, Any] | None:
    """Set `from_nodes` to the parents if a pulling node leaves it out. An explicit `[]` means no sources."""
    if not inline or not str(inline.get("input_adapter", "")).startswith("pull."):
        return inline
    args = replace_alias(inline.get("input_args"))
    if args.get("from_nodes") is None:
        args["from_nodes"] = list(depends_on)
    return {**inline, "input_args": args}


STEP_NODES = 5_000
"""A step takes a tenth of a second on a machine without other load. A workflow task may take two seconds."""

_DEFAULT_RETRIES = RetryPolicy()


def _retry_policy(raw: dict[str, Any]) -> RetryPolicy:
    if not raw:
        return _DEFAULT_RETRIES
    given = {key: value for key, value in raw.items() if value is not None and not key.startswith("x-")}
    if "permanent_on" in given:
        given["permanent_on"] = tuple(given["permanent_on"])
    if "max" in given:
        given["max"] = int(given["max"])
    return RetryPolicy(**given)


def unknown_function(raw: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Return the problem of a node whose coordinator function is reserved or not in `known`, or None."""
    name = (raw.get("io") or {}).get("fn") or temporal_names.NOOP
    if raw["type"] == COORDINATOR_FN and name in RESERVED_FUNCTIONS:
        return f"node {raw['node_id']!r}: io.fn is {name!r}, a name that is reserved for the engine; choose another name"
    if raw["type"] != COORDINATOR_FN or name in known:
        return None
    hint = did_you_mean(name, known, otherwise=f"known here: {', '.join(sorted(known))}")
    return f"node {raw['node_id']!r}: io.fn names the unknown function {printed(name)}; {hint}"


def too_many_nodes(count: int, limit: int) -> str | None:
    """Return the problem of a graph with more than `limit` nodes, or None."""
    return (
        f"graph.nodes has {count:,} entries, more than {limit:,}: split the task" if count > limit else None
    )


def find_cycle(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one cycle, from a node back to itself in order of execution, or an empty list if there is none."""
    try:
        TopologicalSorter(parents).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []
