"""Read a graph as users write it, as JSON, into what a program says about its nodes."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from flowkit.flow.specs import ADAPTER, ADAPTER_ARGS, QUARANTINE, SOURCES, Link, NodeSpec
from flowkit.graph.fields import EDGE, GRAPH, IO, NODE
from flowkit.graph.input_adapters import PULL, RECHUNK, replace_alias
from flowkit.graph.routes import ON_FAILURE, ON_SUCCESS, list_targets
from flowkit.graph.streams import is_async
from flowkit.graph.validation import parents_by_node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SETTINGS = tuple(name for name in GRAPH if name not in ("name", "nodes", "edges", "edges_ex"))
"""The keys of a graph beside its name, its nodes and its edges."""


def read_settings(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a valid graph that are not null."""
    return {key: deepcopy(graph[key]) for key in SETTINGS if graph.get(key) is not None}


def read_extra(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a valid graph that mean nothing to FlowKit, and a name that is no text."""
    name = graph.get("name")
    own = GRAPH.keys() if name is None or (isinstance(name, str) and name) else GRAPH.keys() - {"name"}
    return {key: deepcopy(value) for key, value in graph.items() if key not in own}


def read_specs(graph: dict[str, Any]) -> list[NodeSpec]:
    """Return the nodes of a valid graph, in its order. Keys without a value, and those of engines, are left out."""
    parents = parents_by_node(graph)
    specs = [_read_node(raw, parents[raw["node_id"]]) for raw in graph["nodes"]]
    _read_edges(graph, {spec.node_id: spec for spec in specs})
    return specs


def _read_node(raw: dict[str, Any], parents: list[str]) -> NodeSpec:
    spec = NodeSpec(node_id=raw["node_id"], kind=raw["type"], links={parent: Link() for parent in parents})
    _read_io(spec, raw.get("io") or {})
    for key in _FIELDS:
        value = _READERS.get(key, deepcopy)(raw.get(key))
        if value is not None:
            spec.fields[key] = value
    spec.fields |= _own_keys(raw)
    return spec


def _own_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an object that are for the user's own use."""
    return {key: deepcopy(value) for key, value in given.items() if key.startswith("x-")}


def _read_object(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an object without the keys that are null, which means the same; None if nothing is left."""
    known = {key: deepcopy(value) for key, value in (given or {}).items() if value is not None}
    return {**known, **_own_keys(given or {})} or None


def _read_quarantine(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the object with `then`, because an empty one sets batches aside, too."""
    return None if given is None else {"then": QUARANTINE, **(_read_object(given) or {})}


def _read_routing(given: dict[str, Any] | None) -> dict[str, Any] | None:
    raw = {"routing": given if given and any(given.values()) else None}
    lists = {key: [*targets] for key in (ON_SUCCESS, ON_FAILURE) if (targets := list_targets(raw, key))}
    return {**lists, **_own_keys(given or {})} or None


_FIELDS = sorted(NODE.fields.keys() - {"node_id", "type", "depends_on", "io"})
_READERS: dict[str, Callable[[Any], Any]] = {
    "fan_in": lambda given: given and given.lower(),
    "retry_policy": _read_object,
    "map": _read_object,
    "on_batch_failure": _read_quarantine,
    "prerequisites": lambda given: [*given] if given else None,
    "routing": _read_routing,
}
"""How to read the fields that are not taken as they are."""


def _read_io(spec: NodeSpec, io: Mapping[str, Any]) -> None:
    inline = io.get("input_inline")
    if inline is not None and inline.get(ADAPTER) in (PULL, RECHUNK):
        args = replace_alias(deepcopy(inline.get(ADAPTER_ARGS)))
        spec.adapter = inline[ADAPTER]
        spec.sources = args.pop(SOURCES, [*spec.links])
        spec.adapter_args = args
        inline = {key: value for key, value in inline.items() if key not in (ADAPTER, ADAPTER_ARGS)} or None
    spec.inline = deepcopy(inline)
    known = {key: deepcopy(io[key]) for key in IO.fields.keys() - {"input_inline"} if io.get(key) is not None}
    if "start_when" in known:
        known["start_when"] = known["start_when"].lower()
    spec.io = {**known, **_own_keys(io)}


def _read_edges(graph: dict[str, Any], specs: Mapping[str, NodeSpec]) -> None:
    """Note what edges add to the parents of nodes. Edges to a node whose `depends_on` differs have no effect."""
    for edge in graph.get("edges_ex") or []:
        link = specs[edge["to"]].links.get(edge["from"])
        if link is not None:
            link.streams = link.streams or is_async(edge)
            link.when = edge.get("when") if link.when is None else link.when
            link.extra |= {key: deepcopy(value) for key, value in edge.items() if key not in EDGE}
    pairs = [
        *(graph.get("edges") or []),
        *([edge["from"], edge["to"]] for edge in graph.get("edges_ex") or []),
    ]
    for parent, child in pairs:
        routed = specs[parent].fields.get("routing", {}).get(ON_SUCCESS, ())
        if child in routed and parent in specs[child].links:
            specs[child].links[parent].is_edge = True
