"""Graphs whose pictures are kept. `PYTHONPATH=. .venv/bin/python -m tests.pictures.graphs` writes the files anew.

The picture in the documentation, which it also writes, needs Graphviz or Chromium.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowkit.models.waits import WaitKind
from flowkit.pictures.dot import to_dot
from flowkit.pictures.formats import Format, draw
from flowkit.pictures.mermaid import to_mermaid
from flowkit.pictures.model import make_picture
from flowkit.pictures.text import to_text
from flowkit.reading.graphs import EdgeKind, GraphEdge, GraphNode, GraphView, view_graph
from flowkit.reading.state import NodeRow
from tests.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from flowkit.pictures.model import Picture

FOLDER = Path(__file__).parent / "golden"
HOSTILE = '"]; <b>&amp;\\N</b>%%{init}%%`|#'


def row(node_id: str, status: str, **fields: Any) -> NodeRow:
    """Return the state of a node."""
    return NodeRow(node_id=node_id, role="r", status=status, **fields)


def view(
    nodes: int | Iterable[GraphNode], edges: Iterable[tuple[int, int] | tuple[int, int, EdgeKind]]
) -> GraphView:
    """Return a graph of nodes of the role `r`, or of these nodes."""
    made = (
        (GraphNode(node_id=f"node-{index}", role="r") for index in range(nodes))
        if isinstance(nodes, int)
        else nodes
    )
    return GraphView(
        name="g",
        nodes=tuple(made),
        edges=tuple(
            GraphEdge(source=each[0], target=each[1], kind=each[2] if len(each) == 3 else EdgeKind.PLAIN)
            for each in edges
        ),
    )


def _pipeline() -> GraphView:
    streams = {
        "start_when": "first_batch",
        "input_inline": {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["extract"]}},
    }
    return view_graph(
        {
            "name": "nightly",
            "edges_ex": [{"from": "check", "to": "score", "when": "params.full"}],
            "nodes": [
                {"node_id": "extract", "type": "extract"},
                {
                    "node_id": "enrich",
                    "type": "enrich",
                    "parallel": 8,
                    "depends_on": ["extract"],
                    "io": streams,
                },
                {"node_id": "check", "type": "check", "depends_on": ["extract"]},
                {
                    "node_id": "score",
                    "type": "score",
                    "depends_on": ["enrich", "check"],
                    "when": "vars.rows > 10",
                },
                {
                    "node_id": "load",
                    "type": "load",
                    "routing": {"on_success": ["mark"], "on_failure": ["restore"]},
                },
                {"node_id": "mark", "type": "coordinator_fn", "io": {"fn": "vars.set"}},
                {"node_id": "restore", "type": "restore"},
            ],
        }
    )


_STATES = [
    row("extract", "finished", batches=1_200),
    row(
        "enrich",
        "running",
        batches=1_000,
        attempt=2,
        shards="8 shards on 3 workers, 1,000 of 1,200, 5/s, 40 s left",
    ),
    row("check", "failed"),
    row("score", "queued"),
    row(
        "load", "deferred", waits_for="a decision: retry, skip, complete or fail", wait_kind=WaitKind.DECISION
    ),
    row("mark", "queued"),
    row("restore", "skipped"),
]
_CHAIN = [(index, index + 1, EdgeKind.STREAMING) for index in range(4)]
_LAYERS = [(parent, child) for parent in range(20) for child in range(20, 25)]
_FAN = [(0, index) for index in range(1, 4_999)] + [(index, 4_999) for index in range(1, 4_999)]

GRAPHS: Mapping[str, tuple[GraphView, list[NodeRow]]] = {
    "empty": (view(0, []), []),
    "one": (view(1, []), []),
    "diamond": (view(4, [(0, 1), (0, 2), (1, 3), (2, 3)]), []),
    "streams": (
        view(5, _CHAIN),
        [
            row("node-0", "finished", batches=10),
            row("node-1", "running", batches=7),
            row("node-2", "cancelling"),
        ],
    ),
    "pipeline": (_pipeline(), []),
    "pipeline-states": (_pipeline(), _STATES),
    "wide": (
        view([GraphNode(node_id="items", role="resize", parallel=100, is_map=True)], []),
        [row("items", "running", shards="100 shards on 12 workers, 40 of 90,000 so far, 9/s")],
    ),
    "bipartite": (view(25, _LAYERS), []),
    "hostile": (
        view(
            [GraphNode(node_id=HOSTILE, role="r"), GraphNode(node_id="名前 é", role="r", when=HOSTILE)],
            [(0, 1)],
        ),
        [],
    ),
    "nodes-30": (view(30, [(index // 2, index) for index in range(1, 30)]), []),
    "nodes-31": (view(31, [(index // 2, index) for index in range(1, 31)]), []),
    "nodes-5000": (
        view(5_000, _FAN),
        [
            row("node-0", "finished"),
            *(row(f"node-{index}", "running" if index % 7 else "failed") for index in range(1, 90)),
        ],
    ),
    "chain-400": (view(400, [(index, index + 1) for index in range(399)]), []),
}


def picture_of(name: str) -> Picture:
    """Return the picture of one of the graphs."""
    graph, rows = GRAPHS[name]
    return make_picture(graph, {each.node_id: each for each in rows})


def drawn(name: str) -> dict[str, str]:
    """Return the pictures of one of the graphs, by the end of the names of their files."""
    picture = picture_of(name)
    return {"txt": f"{to_text(picture).plain}\n", "mmd": to_mermaid(picture), "dot": to_dot(picture)}


if __name__ == "__main__":
    for each in GRAPHS:
        for suffix, text in drawn(each).items():
            (FOLDER / f"{each}.{suffix}").write_text(text, encoding="utf-8")
    shown = draw(picture_of("pipeline-states"), Format.SVG)
    (ROOT / "docs" / "img" / "graph.svg").write_bytes(shown)
