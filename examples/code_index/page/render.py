"""The page, out of data alone: one file that asks nothing of any network.

Plotly draws, because it has a treemap, shows names under the pointer, and brings its script along in its package.
Jinja escapes.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from code_index.page import figures, timeline, words
from code_index.page.attempts import attempts_of
from code_index.page.tables import node_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from code_index.page.attempts import AttemptRun
    from code_index.page.data import Run

HERE = Path(__file__).parent


def write_page(run: Run, path: Path) -> None:
    """Write the report of `run` to `path`."""
    path.write_text(page(run), encoding="utf-8")


def page(run: Run) -> str:
    """The report of `run` as HTML. Whatever comes from the source tree is escaped."""
    attempts = attempts_of(run)
    # Only these two scripts may run, known by their hashes: a script that came in with a file's name would not.
    scripts = [get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")]
    return _template().render(
        run=run,
        total=run.outcome.total,
        headline=words.headline(run),
        findings=words.findings(run),
        story=words.story(run, attempts),
        attempts=attempts,
        nodes=node_rows(run, attempts),
        figures=drawn(run, attempts),
        problems=run.documents.problems,
        lengths_shown=figures.lengths_shown(run.outcome.total.lengths),
        scripts=[Markup(script) for script in scripts],
        script_hashes=[_hash(script) for script in scripts],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
    )


def drawn(run: Run, attempts: Sequence[AttemptRun]) -> list[figures.Figure]:
    """The figures that have something to show."""
    total, incident = run.outcome.total, run.incident
    killed_at = run.since_start(incident.killed_at) if incident else None
    made = [timeline.gantt(attempts, run.seconds)]
    if total.files:
        made.append(timeline.throughput(attempts, run.seconds, killed_at))
    if total.lines:
        made.append(figures.treemap(run.documents.packages))
    if total.complexity:
        made += [figures.ranking_bars(run.outcome.ranking), figures.scatter(run.documents.packages)]
    if total.functions:
        made.append(figures.histogram(total.lengths))
    return made


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
