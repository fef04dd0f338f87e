"""Check the fields of a graph as users write it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.graph.engine_nodes import engine_node_problems
from flowkit.graph.fields import GRAPH, NODE
from flowkit.graph.kinds import field_problems, unknown_keys
from flowkit.graph.streams import edge_mode_problems
from flowkit.models import RUNTIME_KEYS
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Iterator

_NODES_WORDS = ("tasks", "steps", "ops", "jobs", "operators", "templates")
"""What other systems call the nodes of a graph."""


def wrong_graph(graph: object) -> str:
    """Return the problem of a graph that is no object."""
    is_text = isinstance(graph, (str, bytes))
    hint = "; load the text first, for example with json.loads or yaml.safe_load" if is_text else ""
    return f"graph must be an object with 'nodes', not {printed(graph)}{hint}"


def graph_problems(graph: object) -> Iterator[str]:
    """Yield every problem with the keys and values of `graph`. Relations between nodes are not checked here."""
    if not isinstance(graph, dict):
        yield wrong_graph(graph)
        return
    nodes = graph.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        other = next((word for word in _NODES_WORDS if nodes is None and graph.get(word)), None)
        hint = f"; rename {other!r} to 'nodes'" if other else ""
        yield f"graph.nodes must be a list of at least one node, not {printed(nodes)}{hint}"
        return
    for key in ("on_node_failure", "version_policy", "deadline_sec", "hold_sec"):
        field = GRAPH[key]
        if graph.get(key) is not None or (key in graph and not field.nullable):
            yield from field_problems(field, graph[key], "graph.")
    yield from _edge_problems(graph)
    yield from _extended_edge_problems(graph)
    for index, node in enumerate(nodes):
        yield from _node_problems(index, node)


def _edge_problems(graph: dict[str, Any]) -> Iterator[str]:
    edges = graph.get("edges")
    if edges is None:
        return
    if not isinstance(edges, list):
        yield f"graph.edges must be a list of [parent, child] pairs of node ids, not {printed(edges)}"
        return
    for index, edge in enumerate(edges):
        if not _is_pair(edge):
            yield f"graph.edges[{index}] is {printed(edge)}; edges are [parent, child] pairs of node ids"


def _extended_edge_problems(graph: dict[str, Any]) -> Iterator[str]:
    edges = graph.get("edges_ex")
    if edges is None:
        return
    if not isinstance(edges, list):
        yield f"graph.edges_ex must be a list of objects with 'from' and 'to', not {printed(edges)}"
        return
    for index, edge in enumerate(edges):
        if not _is_extended_edge(edge):
            yield f"graph.edges_ex[{index}] must be an object with 'from' and 'to', not {printed(edge)}"
        else:
            yield from edge_mode_problems(edge)


def _is_pair(edge: object) -> bool:
    return isinstance(edge, (list, tuple)) and len(edge) == 2 and all(isinstance(end, str) for end in edge)


def _is_extended_edge(edge: object) -> bool:
    return isinstance(edge, dict) and isinstance(edge.get("from"), str) and isinstance(edge.get("to"), str)


def _node_problems(index: int, node: object) -> Iterator[str]:
    if not isinstance(node, dict):
        yield f"graph.nodes[{index}] must be an object, not {printed(node)}"
        return
    node_id = node.get("node_id")
    where = f"node {printed(node_id)}" if isinstance(node_id, str) else f"graph.nodes[{index}]"
    for problem in unknown_keys(node, NODE, RUNTIME_KEYS):
        yield f"{where}: {problem}"
    for key, field in NODE.fields.items():
        if not field.passes(value := node.get(key)):
            yield from (f"{where}: {problem}" for problem in field_problems(field, value))
    yield from (f"{where}: {problem}" for problem in engine_node_problems(node))


def node_field_problems(name: str, value: object) -> Iterator[str]:
    """Yield the problems of the value of one field of a node."""
    return field_problems(NODE.fields[name], value)
