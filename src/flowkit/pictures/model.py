"""What a picture shows: boxes for nodes or groups of nodes, and lines between them, in words. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from flowkit.models import NodeStatus
from flowkit.pictures.groups import collapse, is_large
from flowkit.pictures.styles import DECISION, STATUSES, style_of
from flowkit.reading.graphs import EdgeKind
from flowkit.text import clean, describe_set_aside, shorten, truncate, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.pictures.groups import Edge
    from flowkit.reading.graphs import GraphNode, GraphView
    from flowkit.reading.state import NodeRow

    States = Mapping[str, NodeRow]

TITLE_CHARS = 32
CONDITION_CHARS = 40
SIDEWAYS_NODES = 12
"""A larger graph is drawn from left to right, as on the page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A node, or a group of nodes."""

    name: str
    """The id of the node, or of the first node of the group."""
    title: str
    details: tuple[str, ...]
    """Lines below the title: its role, when it starts, its state."""
    status: str | None = None
    """None for a graph that no task runs."""
    symbol: str = ""
    members: int = 1

    @property
    def heading(self) -> str:
        """The symbol and the title."""
        return f"{self.symbol} {self.title}" if self.symbol else self.title


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """An edge between two positions in the list of boxes."""

    source: int
    target: int
    kind: EdgeKind
    condition: str = ""
    taken: bool = True
    """False if one of its nodes was skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A graph as it is drawn."""

    name: str
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    nodes: int
    """How many nodes the boxes stand for."""

    @property
    def edges(self) -> list[Edge]:
        """The lines without their state."""
        return [(line.source, line.target, line.kind) for line in self.lines]

    @property
    def is_sideways(self) -> bool:
        """Whether it is drawn from left to right."""
        return self.nodes > SIDEWAYS_NODES


def make_picture(graph: GraphView, states: States = MappingProxyType({})) -> Picture:
    """Return the picture of a graph with the states of its nodes by id; without states, nothing has a status.

    All texts are on one line, without control characters, and not too long for a box.
    """
    edges: list[Edge] = [(each.source, each.target, each.kind) for each in graph.edges]
    groups = [[index] for index in range(len(graph.nodes))]
    if is_large(len(graph.nodes), edges):
        groups, edges = collapse([each.role for each in graph.nodes], edges)
    streams = _find_streams(graph)
    boxes = [_make_box(graph, group, states, streams) for group in groups]
    conditions = {(each.source, each.target): each.condition for each in graph.edges if each.condition}
    return Picture(
        name=_shown(graph.name or "graph", TITLE_CHARS),
        boxes=tuple(boxes),
        lines=tuple(_make_line(each, groups, boxes, conditions) for each in edges),
        nodes=len(graph.nodes),
    )


def _shown(text: str, chars: int) -> str:
    return truncate(visible(clean(shorten(text, chars))), chars)


def _find_streams(graph: GraphView) -> dict[int, list[str]]:
    """Return the ids of the nodes from which each node streams, by its position."""
    streams: dict[int, list[str]] = {}
    for edge in graph.edges:
        if edge.kind is EdgeKind.STREAMING:
            streams.setdefault(edge.target, []).append(graph.nodes[edge.source].node_id)
    return streams


def _make_box(
    graph: GraphView, group: Sequence[int], states: States, streams: Mapping[int, Sequence[str]]
) -> Box:
    nodes = [graph.nodes[index] for index in group]
    rows = [states[node.node_id] for node in nodes if node.node_id in states]
    if len(nodes) > 1:
        return _make_group(nodes, rows)
    (node,) = nodes
    above = sum(states[parent].batches for parent in streams.get(group[0], ()) if parent in states)
    state = [_shown(_describe_state(row, above), 2 * TITLE_CHARS) for row in rows]
    when = [_shown(f"if {node.when}", CONDITION_CHARS)] if node.when else []
    status = rows[0].status if rows else None
    return Box(
        name=node.node_id,
        title=_shown(node.node_id, TITLE_CHARS),
        details=(_describe_role(node), *when, *state),
        status=status,
        symbol=DECISION if rows and rows[0].awaits_decision else style_of(status).symbol,
    )


def _make_group(nodes: Sequence[GraphNode], rows: Sequence[NodeRow]) -> Box:
    counts = Counter(row.status for row in rows)
    found = [status for status in STATUSES if status in counts]
    status = found[0] if found else None
    decisions = sum(row.awaits_decision for row in rows)
    waits = [f"{DECISION} {decisions:,} wait for a decision"] if decisions else []
    if aside := sum(row.failed_batches for row in rows):
        waits.append(describe_set_aside(aside))
    return Box(
        name=nodes[0].node_id,
        title=_shown(f"{len(nodes):,} × {nodes[0].role}", TITLE_CHARS),
        details=(*(f"{style_of(each).symbol} {counts[each]:,} {each}" for each in found), *waits),
        status=status,
        symbol=DECISION if decisions else style_of(status).symbol,
        members=len(nodes),
    )


def _describe_role(node: GraphNode) -> str:
    role = f"{node.function}()" if node.function else node.role
    width = " ×" + f"{node.parallel:,}" if node.parallel > 1 else ""
    return f"{_shown(role, TITLE_CHARS)}{width}{', map' if node.is_map else ''}"


def _describe_state(row: NodeRow, above: int) -> str:
    """Return the state of a node in words, the longest ones last.

    `above` is the number of batches that it can have so far; 0 if unknown.
    """
    attempt = f"attempt {row.attempt:,}" if row.attempt > 1 else ""
    decides = "waits for a decision" if row.awaits_decision else ""
    shards = ", ".join(row.shards.split(", ")[:2])
    aside = f"{row.failed_batches:,} set aside" if row.failed_batches else ""
    batches = shards or _describe_batches(row, above)
    return ", ".join(filter(None, (row.status, decides, attempt, aside, batches)))


def _describe_batches(row: NodeRow, above: int) -> str:
    if above and not NodeStatus(row.status).ended:
        return f"{row.batches + row.failed_batches:,} of {above:,} batches"
    if not row.batches:
        return ""
    return f"{row.batches:,} {'batch' if row.batches == 1 else 'batches'}"


def _make_line(
    edge: Edge,
    groups: Sequence[Sequence[int]],
    boxes: Sequence[Box],
    conditions: Mapping[tuple[int, int], str],
) -> Line:
    source, target, kind = edge
    condition = (
        conditions.get((groups[source][0], groups[target][0])) if kind == EdgeKind.CONDITIONAL else None
    )
    return Line(
        source=source,
        target=target,
        kind=EdgeKind(kind),
        condition=_shown(condition or "", CONDITION_CHARS),
        taken=not any(boxes[end].status == NodeStatus.SKIPPED for end in (source, target)),
    )
