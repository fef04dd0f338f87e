"""Render the report as one HTML file that needs no network.

Plotly draws the figures: it has a treemap and hover texts, and its package includes the script. Jinja escapes texts.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from code_index.page import figures, text, timeline
from code_index.page.attempts import build_attempts
from code_index.page.picture import draw_svg, draw_text, graph_picture
from code_index.page.tables import node_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from code_index.page.attempts import AttemptRun
    from code_index.page.data import DemoRun
    from flowkit.pictures.model import Picture

HERE = Path(__file__).parent


def write_page(run: DemoRun, path: Path) -> None:
    """Write the report of `run` to `path`."""
    path.write_text(page(run, draw_svg), encoding="utf-8")


def page(run: DemoRun, draw_graph: Callable[[Picture], Markup] = draw_text) -> str:
    """Return the report of `run` as HTML. Everything that comes from the source tree is escaped."""
    attempts = build_attempts(run)
    # The page allows only these two scripts, by their hashes, so a script in the name of a file cannot run.
    scripts = [get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")]
    return _template().render(
        run=run,
        total=run.result.total,
        headline=text.headline(run),
        source_findings=text.source_findings(run),
        run_findings=text.run_findings(run, attempts),
        attempts=attempts,
        graph=draw_graph(graph_picture(run, attempts)),
        nodes=node_rows(run, attempts),
        figures=build_figures(run, attempts),
        problems=run.documents.problems,
        lengths_shown=figures.lengths_shown(run.result.total.lengths),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
    )


def build_figures(run: DemoRun, attempts: Sequence[AttemptRun]) -> list[figures.Figure]:
    """Return the figures that have data."""
    total, incident = run.result.total, run.incident
    killed_at = run.since_start(incident.killed_at) if incident else None
    figures_shown = [timeline.gantt(attempts, run.seconds)]
    if total.files:
        figures_shown.append(timeline.throughput(attempts, run.seconds, killed_at))
    if total.lines:
        figures_shown.append(figures.treemap(run.documents.packages))
    if total.complexity:
        figures_shown += [figures.ranking_bars(run.result.ranking), figures.scatter(run.documents.packages)]
    if total.functions:
        figures_shown.append(figures.histogram(total.lengths))
    return figures_shown


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _template() -> jinja2.Template:
    engine: Any = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template: jinja2.Template = engine.get_template("page.html.jinja")
    return template
