"""The graph of a task as people see it: its nodes, and the edges between them by kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flowkit.graph.validation import normalized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from flowkit.models import Graph, Node


class EdgeKind(StrEnum):
    """Why a node waits for another one."""

    PLAIN = "plain"
    """It starts when the other has finished."""
    STREAMING = "streaming"
    """It starts on the first batch of the other."""
    CONDITIONAL = "conditional"
    """A condition decides whether the edge counts."""
    SUCCESS = "success"
    """The other one starts it when it has finished: `on_success`."""
    FAILURE = "failure"
    """The other one starts it when it has failed: `on_failure`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphNode:
    """A node of a graph."""

    node_id: str
    role: str
    function: str | None = None
    """The coordinator function that it calls."""
    parallel: int = 1
    """Largest number of its shards."""
    is_map: bool = False
    """Whether it runs over the items of a list."""
    when: str | None = None
    """The condition under which it starts."""
    sets_aside: bool = False
    """Whether it sets failed batches aside."""
    prerequisites: tuple[str, ...] = ()
    """What must be satisfied before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphEdge:
    """An edge of a graph, between two positions in its list of nodes."""

    source: int
    target: int
    kind: EdgeKind
    condition: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphView:
    """A graph, with its nodes in the order in which it lists them."""

    name: str | None
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]


def view_graph(graph: dict[str, Any]) -> GraphView:
    """Return a valid graph, or that of a task document, as people see it."""
    return view_nodes(normalized(graph))


def view_nodes(graph: Graph) -> GraphView:
    """Return a parsed graph as people see it."""
    return GraphView(
        name=graph.name,
        nodes=tuple(map(_view_node, graph.nodes)),
        edges=tuple(_edges_of(graph)),
    )


def _view_node(node: Node) -> GraphNode:
    return GraphNode(
        node_id=node.node_id,
        role=node.type,
        function=node.io.fn if node.is_function else None,
        parallel=node.parallel,
        is_map=node.map is not None,
        when=node.when,
        sets_aside=node.quarantine is not None,
        prerequisites=tuple(node.prerequisites),
    )


def _edges_of(graph: Graph) -> Iterator[GraphEdge]:
    places = {node.node_id: node.index for node in graph.nodes}
    for node in graph.nodes:
        for parent in node.depends_on:
            condition = node.edge_when.get(parent)
            kind = _kind_of(node, parent)
            yield GraphEdge(source=places[parent], target=node.index, kind=kind, condition=condition)
        yield from _routes(node, places)


def _kind_of(node: Node, parent: str) -> EdgeKind:
    if parent in node.edge_when:
        return EdgeKind.CONDITIONAL
    return EdgeKind.STREAMING if parent in node.streams_from else EdgeKind.PLAIN


def _routes(node: Node, places: Mapping[str, int]) -> Iterator[GraphEdge]:
    for kind, targets in ((EdgeKind.SUCCESS, node.on_success), (EdgeKind.FAILURE, node.on_failure)):
        for target in targets:
            yield GraphEdge(source=node.index, target=places[target], kind=kind)
