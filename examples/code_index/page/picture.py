"""The picture of the task's graph, as `flowkit graph` draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from code_index.page.tables import node_rows
from flowkit.errors import ConfigError
from flowkit.pictures.formats import Format, draw
from flowkit.pictures.model import make_picture
from flowkit.pictures.text import to_text
from flowkit.reading.graphs import view_graph
from flowkit.reading.state import read_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from code_index.page.attempts import AttemptRun
    from code_index.page.data import DemoRun
    from flowkit.pictures.model import Picture


def graph_picture(run: DemoRun, attempts: Sequence[AttemptRun]) -> Picture:
    """Return the picture of the graph with the states of its nodes."""
    task = run.documents.task
    batches = {row.node: row.batches for row in node_rows(run, attempts)}
    states = read_document({**task}, batches).nodes
    return make_picture(view_graph(task["graph"]), {node.node_id: node for node in states})


def draw_text(picture: Picture) -> Markup:
    """Return the picture as text, which needs no program."""
    return Markup('<pre class="graph">{}</pre>').format(to_text(picture).plain)


def draw_svg(picture: Picture) -> Markup:
    """Return the picture as an SVG element, or as text if there is neither Graphviz nor Chromium.

    The program escapes all names in it.
    """
    try:
        svg = draw(picture, Format.SVG).decode()
    except ConfigError:
        return draw_text(picture)
    return Markup(svg[svg.index("<svg") :])
