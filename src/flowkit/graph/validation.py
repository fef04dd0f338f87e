"""Validate and normalize a graph as users write it.

Pure: no Temporal, no I/O. The client and the workflow use the same checks, so they report the same errors. Each check
yields problems as texts that name the place, the value and what is allowed (spec: graph schema, validation)."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from flowkit import limits
from flowkit.errors import GraphError
from flowkit.graph.encoding import encode_json, json_bytes
from flowkit.graph.engine_nodes import read_approval, read_delay
from flowkit.graph.expressions import expressions_of
from flowkit.graph.field_checks import graph_problems
from flowkit.graph.fields import parse_fan_in, read_share
from flowkit.graph.input_adapters import PULL, RECHUNK, replace_alias
from flowkit.graph.routes import ON_FAILURE, find_routers, list_targets, resolve_routes, route_problems
from flowkit.graph.streams import max_ahead_warnings, read_start_when, resolve_streams
from flowkit.models import (
    ALL_DONE,
    APPROVAL,
    COORDINATOR_FN,
    DEFAULT_HOLD_SEC,
    ENGINE_NODES,
    FanIn,
    Graph,
    ItemMap,
    Node,
    NodeIO,
    OnNodeFailure,
    Quarantine,
    RetryPolicy,
    VersionPolicy,
    temporal_names,
)
from flowkit.text import did_you_mean, printed, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from flowkit.graph.routes import Routes


RESERVED_FUNCTIONS = frozenset(temporal_names.ENGINE_ACTIVITIES)
"""Names that coordinator functions must not have, because the engine's own activities use them."""

_ENOUGH = 11

_PATH_ENDS = 4
"""How many ids of each end of a long path an error shows."""

STEP_NODES = 5_000
"""A step takes a tenth of a second on a machine without other load. A workflow task may take two seconds."""

_DEFAULT_RETRIES = RetryPolicy()


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
    raise_if(_take_first(graph_problems(graph)))
    assert isinstance(graph, dict)
    wiring = _read_wiring(graph)
    raise_if(_take_first(_wiring_problems(graph, wiring)))
    return _take_last(_normalize(graph, wiring))


def normalized(graph: dict[str, Any]) -> Graph:
    """Return the normalized form of a graph that was accepted before, without validating it again."""
    return _take_last(normalizing(graph))


def _take_last(steps: Iterator[Graph | None]) -> Graph:
    *_, found = steps
    assert found is not None, "the last step yields the graph"
    return found


def normalizing(graph: dict[str, Any]) -> Iterator[Graph | None]:
    """Normalize a graph as `normalized` does, in steps of at most STEP_NODES nodes.

    Yield None between two steps, and in the end the graph.
    """
    yield from _normalize(graph, _read_wiring(graph))


def _normalize(graph: dict[str, Any], wiring: _Wiring) -> Iterator[Graph | None]:
    streams = resolve_streams(graph, wiring.routes.parents, wiring.fan_ins)
    nodes: list[Node] = []
    for index, raw in enumerate(graph["nodes"]):
        if len(graph["nodes"]) > STEP_NODES and index % STEP_NODES == 0:
            yield None
        streams_from = streams.parents.get(raw["node_id"], ())
        nodes.append(_make_node(index, raw, wiring, streams_from, _resolve_hold(raw, graph)))
    yield Graph(
        nodes=tuple(nodes),
        name=graph.get("name") if isinstance(graph.get("name"), str) else None,
        on_node_failure=OnNodeFailure(graph.get("on_node_failure", "fail")),
        warnings=(
            *wiring.warnings,
            *wiring.routes.warnings,
            *streams.warnings,
            *max_ahead_warnings(tuple(nodes)),
            *_hold_warnings(graph),
            *_deadline_warnings(graph),
        ),
        deadline_sec=graph.get("deadline_sec"),
        hold_sec=graph.get("hold_sec") or DEFAULT_HOLD_SEC,
        version_policy=VersionPolicy(graph.get("version_policy", "any")),
    )


def _resolve_hold(raw: dict[str, Any], graph: dict[str, Any]) -> float | None:
    """Return for how long the failure of a node is held, or None if it is not held."""
    is_default = graph.get("on_node_failure") == OnNodeFailure.HOLD
    wanted = raw.get("hold_on_failure")
    if not (is_default if wanted is None else wanted) or _why_never_held(raw):
        return None
    return raw.get("hold_sec") or graph.get("hold_sec") or DEFAULT_HOLD_SEC


def _why_never_held(raw: dict[str, Any]) -> str:
    """Return why the failure of a node is never held; empty if it may be."""
    if raw["type"] in ENGINE_NODES:
        return f"nodes of the type {raw['type']!r} are never held"
    if raw.get("allow_failure"):
        return "'allow_failure' tolerates the failure"
    return "'routing.on_failure' handles the failure" if list_targets(raw, ON_FAILURE) else ""


def _hold_warnings(graph: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for each node with settings of a hold that have no effect."""
    for raw in graph["nodes"]:
        wanted, where = raw.get("hold_on_failure"), f"node {raw['node_id']!r}"
        if wanted and (why := _why_never_held(raw)):
            yield f"{where}: hold_on_failure has no effect, because {why}"
        elif raw.get("hold_sec") is not None and _resolve_hold(raw, graph) is None:
            why = _why_never_held(raw) or "its failure is not held; set 'hold_on_failure' to true"
            yield f"{where}: hold_sec has no effect, because {why}"


def _deadline_warnings(graph: dict[str, Any]) -> Iterator[str]:
    """Yield a warning for each node whose deadline never comes, because the task has a shorter one."""
    most = graph.get("deadline_sec")
    for raw in graph["nodes"] if most is not None else ():
        own = raw.get("deadline_sec")
        if own is not None and own >= most:
            default = ", and the default of the approval is never chosen" if raw["type"] == APPROVAL else ""
            yield (
                f"node {raw['node_id']!r}: deadline_sec ({own:g} s) has no effect, because the deadline of the task "
                f"({most:g} s) ends it before{default}"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wiring:
    """How the nodes of a graph depend on each other, by node id: what their keys and the edges say, read once."""

    edges: list[tuple[str, str]]
    """`edges` and `edges_ex` as (parent, child) pairs."""
    edge_when: dict[str, dict[str, str]]
    """The conditions of edges by child and parent."""
    parents: dict[str, list[str]]
    """The parents of each node: its own `depends_on`, else the sources of the edges that lead to it."""
    fan_ins: dict[str, FanIn]
    sources: dict[str, list[str] | None]
    """`from_nodes` of each pulling node; None if the node leaves it out and therefore pulls from its parents."""
    routers: dict[str, list[str]]
    """The nodes that name a node in one of their lists of `routing`, including lists that FlowKit ignores."""
    routes: Routes
    warnings: list[str]


def _read_wiring(graph: dict[str, Any]) -> _Wiring:
    edges, edge_when = _read_edges(graph), _read_edge_conditions(graph)
    parents, warnings = _read_parents(graph, edges, edge_when)
    return _Wiring(
        edges=edges,
        edge_when=edge_when,
        parents=parents,
        fan_ins={raw["node_id"]: parse_fan_in(raw.get("fan_in")) or FanIn() for raw in graph["nodes"]},
        sources={raw["node_id"]: _read_sources(raw) for raw in graph["nodes"] if _is_pulling(raw)},
        routers=find_routers(graph),
        routes=resolve_routes(graph, parents, edges),
        warnings=warnings,
    )


def _read_edges(graph: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [(source, target) for source, target in graph.get("edges") or []]
    return pairs + [(edge["from"], edge["to"]) for edge in graph.get("edges_ex") or []]


def _read_edge_conditions(graph: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the conditions of edges. Values of another type are left to `conditions`, which rejects them."""
    found: dict[str, dict[str, str]] = {}
    for edge in graph.get("edges_ex") or []:
        if isinstance(edge.get("when"), str):
            found.setdefault(edge["to"], {})[edge["from"]] = edge["when"]
    return found


def _read_parents(
    graph: dict[str, Any], edges: Sequence[tuple[str, str]], conditional: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the parents of each node, and warnings. `depends_on` takes precedence over edges.

    A node without edges causes no warning, and neither do edges that only add conditions to its parents.
    """
    wired: dict[str, dict[str, None]] = {}
    for source, target in edges:
        wired.setdefault(target, {})[source] = None
    wires = any(source not in conditional.get(target, ()) for source, target in edges)
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


def _is_pulling(raw: dict[str, Any]) -> bool:
    inline = (raw.get("io") or {}).get("input_inline") or {}
    return inline.get("input_adapter") in (PULL, RECHUNK)


def _read_sources(pulling: dict[str, Any]) -> list[str] | None:
    named = replace_alias(pulling["io"]["input_inline"].get("input_args")).get("from_nodes")
    return None if named is None else list(named)


def parents_by_node(graph: dict[str, Any]) -> dict[str, list[str]]:
    """Return the parents of each node: its own `depends_on`, else the sources of the edges that lead to it."""
    return _read_parents(graph, _read_edges(graph), _read_edge_conditions(graph))[0]


def parents_of(graph: dict[str, Any], node_id: str) -> list[str]:
    """Return the parents of a node of a valid graph; an empty list for an unknown node."""
    return parents_by_node(graph).get(node_id, []) if graph else []


def dependency_path(graph: dict[str, Any], node_id: str, sources: Sequence[str]) -> list[str]:
    """Return the cycle that arises in a valid graph if the node also waits for `sources`.

    The path leads from the node, over nodes that depend on it, back to itself. It is empty if no source depends on it.
    """
    wiring = _read_wiring(graph)
    waits = _find_waits(wiring)
    waits[node_id] = [*sources, *wiring.routers.get(node_id, ())]
    cycle = find_cycle(waits)[1:]
    if node_id not in cycle:
        return []
    place = cycle.index(node_id)
    return [node_id, *cycle[place + 1 :], *cycle[: place + 1]]


def _wiring_problems(graph: dict[str, Any], wiring: _Wiring) -> Iterator[str]:
    counts = Counter(raw["node_id"] for raw in graph["nodes"])
    duplicates = [node_id for node_id, n in counts.items() if n > 1]
    for node_id in duplicates:
        yield f"node id {node_id!r} is used {counts[node_id]} times: give each node its own id"
    yield from _look_alikes(counts)
    for source, target in wiring.edges:
        for end in (source, target):
            if end not in counts:
                yield (
                    f"edge [{printed(source)}, {printed(target)}]: there is no node "
                    f"{printed(end)}{suggestion(end, counts)}"
                )
    yield from route_problems(graph, counts)
    yield from _parallel_problems(graph)
    yield from _map_problems(graph)
    yield from _quarantine_problems(graph)
    for raw in graph["nodes"]:
        yield from _parent_problems(raw["node_id"], wiring, counts)
    if not duplicates:
        yield from _cycle_problems(wiring)


def _look_alikes(node_ids: Iterable[str]) -> Iterator[str]:
    """Yield node ids that Unicode considers equal, such as an `é` that is one character or two: people
    cannot distinguish them.
    """
    forms: dict[str, str] = {}
    for node_id in node_ids:
        form = node_id if node_id.isascii() else unicodedata.normalize("NFC", node_id)
        if form in forms:
            yield (
                f"node ids {forms[form]!a} and {node_id!a} look the same, because they are Unicode forms of one "
                "text: rename one"
            )
        forms[form] = node_id


def shards_of(raw: Mapping[str, Any]) -> int:
    """Return the largest number of shards of a valid node."""
    return int((raw.get("map") or {}).get("parallel") or raw.get("parallel") or 1)


def _map_problems(graph: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of nodes that cannot process items."""
    for raw in graph["nodes"]:
        if not raw.get("map"):
            continue
        where, io = f"node {raw['node_id']!r}: map", raw.get("io") or {}
        if raw.get("parallel"):
            yield f"{where} has its own 'parallel': set map.parallel in place of parallel"
        if raw["type"] == COORDINATOR_FN or raw["type"] in ENGINE_NODES:
            yield f"{where} needs a role, whose handler processes the items, and type is {raw['type']!r}"
        elif (io.get("input_inline") or {}).get("input_adapter"):
            yield f"{where} gives the batches of the node, as io.input_inline.input_adapter does: remove one of them"


def _quarantine_problems(graph: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of nodes that have no batches to set aside."""
    for raw in graph["nodes"]:
        if raw.get("on_batch_failure") is not None and (
            raw["type"] == COORDINATOR_FN or raw["type"] in ENGINE_NODES
        ):
            yield f"node {raw['node_id']!r}: on_batch_failure needs a role, and type is {raw['type']!r}: remove it"


def _parallel_problems(graph: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of nodes that cannot have shards."""
    for raw in graph["nodes"]:
        if (shards := shards_of(raw)) == 1:
            continue
        where = f"node {raw['node_id']!r}: parallel is {shards}, but"
        if not _is_pulling(raw) and not raw.get("map"):
            yield (
                f"{where} the node does not pull, so it has no batches to share: set io.input_inline.input_adapter to "
                f"{PULL!r}, and let another node make the batches, or use map"
            )
        elif graph.get("version_policy") == VersionPolicy.PIN:
            yield f"{where} graph.version_policy is 'pin', which shards do not support: remove one of them"


def _parent_problems(node_id: str, wiring: _Wiring, known: Mapping[str, int]) -> Iterator[str]:
    where, own, fan_in = f"node {node_id!r}", wiring.parents[node_id], wiring.fan_ins[node_id]
    for parent in own:
        if parent not in known:
            yield f"{where}: depends_on names {printed(parent)}, which is not a node{suggestion(parent, known)}"
    gate_parents = len(wiring.routes.parents[node_id])
    if fan_in.mode == "count" and not 1 <= fan_in.count <= gate_parents:
        routing = ", not counting those that route to it" if gate_parents < len(own) else ""
        yield (
            f"{where}: fan_in 'count:{fan_in.count}' must be between 1 and the number of parents "
            f"({gate_parents}){routing}"
        )
    if node_id in wiring.sources:
        yield from _source_problems(where, wiring.sources[node_id], own, known)


def _source_problems(
    where: str, sources: list[str] | None, parents: list[str], known: Mapping[str, int]
) -> Iterator[str]:
    """Yield the problems of the nodes from which a node pulls; None in place of `sources` means its parents."""
    if sources is None and not parents:
        yield f"{where}: input_args.from_nodes is missing, and the node has no parents to pull from"
    if sources is None and (size := json_bytes(parents)) > limits.SOURCES_BYTES:
        yield (
            f"{where}: the ids of its {len(parents):,} sources are {size:,} bytes of JSON, more than "
            f"{limits.SOURCES_BYTES:,}: combine the sources in several nodes, or give them shorter ids"
        )
    for source in sources or ():
        if source not in known:
            yield (
                f"{where}: input_args.from_nodes names {printed(source)}, which is not a "
                f"node{suggestion(source, known)}"
            )


def _cycle_problems(wiring: _Wiring) -> Iterator[str]:
    if cycle := find_cycle(wiring.parents):
        yield f"the graph has a cycle: {format_path(cycle)}; remove one of these dependencies"
        return
    if not wiring.routers and not any(wiring.sources.values()):
        return  # Nodes wait for their parents only.
    routed = {node_id: [*own, *wiring.routers.get(node_id, ())] for node_id, own in wiring.parents.items()}
    if len(cycle := find_cycle(routed)) > 2:
        yield f"the graph has a cycle: {format_path(cycle)}; remove one of these dependencies or routes"
    elif not cycle and (cycle := find_cycle(_find_waits(wiring))):
        yield f"input_args.from_nodes makes nodes wait for each other: {format_path(cycle)}; pull from earlier nodes"


def _find_waits(wiring: _Wiring) -> dict[str, list[str]]:
    """Return the nodes that each node must wait for: the parents it cannot start without, its routers, its sources."""
    waits: dict[str, list[str]] = {}
    for node_id, own in wiring.parents.items():
        fan_in, sources = wiring.fan_ins[node_id], wiring.sources.get(node_id) or ()
        needs_all = fan_in.mode in ("all", ALL_DONE) or len(own) == (fan_in.count or 1)
        waits[node_id] = [*(own if needs_all else ()), *wiring.routers.get(node_id, ()), *sources]
    return waits


def format_path(path: Sequence[str]) -> str:
    """Return a path of node ids for a sentence.

    Of a long one, it has the first and the last ids, and the number between.
    """
    more = len(path) - 2 * _PATH_ENDS
    shown = [*path[:_PATH_ENDS], f"… {more:,} more …", *path[-_PATH_ENDS:]] if more > 1 else path
    return " -> ".join(shown)


def find_cycle(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one cycle, from a node back to itself in order of execution, or an empty list if there is none."""
    try:
        TopologicalSorter(parents).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def _take_first(problems: Iterator[str]) -> list[str]:
    """Return one problem more than an error shows. Limited because finding the suggested name is slow."""
    return list(itertools.islice(problems, _ENOUGH))


def _make_node(
    index: int, raw: dict[str, Any], wiring: _Wiring, streams_from: tuple[str, ...], hold_sec: float | None
) -> Node:
    node_id, io, routes = raw["node_id"], raw.get("io") or {}, wiring.routes
    conditions, encoded = wiring.edge_when.get(node_id, {}), encode_json(io) if io else b"{}"
    parents = {*routes.parents[node_id]} if conditions else ()
    items = _read_map(raw)
    return Node(
        node_id=node_id,
        index=index,
        type=raw["type"],
        depends_on=tuple(routes.parents[node_id]),
        fan_in=wiring.fan_ins[node_id],
        io=_make_io(io, tuple(wiring.parents[node_id])),
        retry_policy=_make_retry_policy(raw.get("retry_policy") or {}),
        allow_failure=bool(raw.get("allow_failure", False)),
        timeout_sec=raw.get("timeout_sec"),
        io_bytes=len(encoded),
        max_ahead=io.get("max_ahead") or 0,
        deadline_sec=raw.get("deadline_sec"),
        on_success=routes.on_success.get(node_id, ()),
        on_failure=routes.on_failure.get(node_id, ()),
        conditional=node_id in routes.conditional,
        streams_from=streams_from,
        when=raw.get("when"),
        expressions=expressions_of(io, encoded, items.over if items else None),
        map=items,
        edge_when={parent: when for parent, when in conditions.items() if parent in parents},
        hold_sec=hold_sec,
        parallel=shards_of(raw),
        quarantine=_read_quarantine(raw),
        prerequisites=tuple(raw.get("prerequisites") or ()),
        approval=read_approval(raw),
        delay=read_delay(raw),
    )


def _read_quarantine(raw: Mapping[str, Any]) -> Quarantine | None:
    given = raw.get("on_batch_failure")
    if given is None:
        return None
    most, share = given.get("max"), read_share(given.get("max"))
    limit: dict[str, Any] = (
        {"most": None, "share": share} if share is not None else {"most": int(most)} if most else {}
    )
    tries = {"attempts": int(given["attempts"])} if given.get("attempts") else {}
    return Quarantine(**tries, **limit)


def _read_map(raw: Mapping[str, Any]) -> ItemMap | None:
    given = raw.get("map")
    return ItemMap(over=given["over"], batch_size=int(given.get("batch_size") or 1)) if given else None


def _make_io(raw: dict[str, Any], depends_on: tuple[str, ...]) -> NodeIO:
    return NodeIO(
        input_ref=raw.get("input_ref"),
        input_inline=_add_sources(raw.get("input_inline"), depends_on),
        batching=raw.get("batching"),
        start_when=read_start_when(raw),
        fn=raw.get("fn") or temporal_names.NOOP,
        fn_args=raw.get("fn_args") or {},
    )


def _add_sources(inline: dict[str, Any] | None, depends_on: tuple[str, ...]) -> dict[str, Any] | None:
    """Set `from_nodes` to the parents if a pulling node leaves it out. An explicit `[]` means no sources."""
    if not inline or not str(inline.get("input_adapter", "")).startswith("pull."):
        return inline
    args = replace_alias(inline.get("input_args"))
    if args.get("from_nodes") is None:
        args["from_nodes"] = list(depends_on)
    return {**inline, "input_args": args}


def _make_retry_policy(raw: dict[str, Any]) -> RetryPolicy:
    if not raw:
        return _DEFAULT_RETRIES
    given = {key: value for key, value in raw.items() if value is not None and not key.startswith("x-")}
    if "permanent_on" in given:
        given["permanent_on"] = tuple(given["permanent_on"])
    if "max" in given:
        given["max"] = int(given["max"])
    return RetryPolicy(**given)


def executor_of(raw: Mapping[str, Any]) -> str | None:
    """Return the role or the coordinator function that runs a node; None if the workflow runs it itself."""
    if raw["type"] == COORDINATOR_FN:
        return (raw.get("io") or {}).get("fn") or temporal_names.NOOP
    return None if raw["type"] in ENGINE_NODES else raw["type"]


def unknown_function(raw: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Return the problem of a node whose coordinator function is reserved or not in `known`, or None."""
    name = executor_of(raw) if raw["type"] == COORDINATOR_FN else None
    if name in RESERVED_FUNCTIONS:
        return (
            f"node {raw['node_id']!r}: io.fn is {name!r}, a name that is reserved for the engine; "
            "choose another name"
        )
    if name is None or name in known:
        return None
    hint = did_you_mean(name, known, otherwise=f"known here: {', '.join(sorted(known))}")
    return f"node {raw['node_id']!r}: io.fn names the unknown function {printed(name)}; {hint}"


def too_many_nodes(count: int, limit: int) -> str | None:
    """Return the problem of a graph with more than `limit` nodes, or None."""
    return (
        f"graph.nodes has {count:,} entries, more than {limit:,}: split the task" if count > limit else None
    )
