"""Figures about the source as data for Plotly, without the colors of the page. Pure."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

from code_index.flow import ANALYZE, ENRICH, GROUP, INDEX
from code_index.page.text import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from code_index.packages import Package

Figure = dict[str, Any]

NODE_COLORS = {INDEX: "#4c8dff", ENRICH: "#e0862f", GROUP: "#2fa58e", ANALYZE: "#a56fd8"}
BLUE, ORANGE, GRAY = "#4c8dff", "#e0862f", "#8a94a3"
DENSITY_COLORS = [[0, "#2b5d9b"], [0.35, "#3f9a8f"], [0.7, "#e3b23c"], [1, "#d9485f"]]
"""From low to high density."""

MAX_PACKAGES = 300
"""Maximum number of packages in the treemap, so that they remain readable."""

MAX_DENSITY = 25
"""Functions and branches per 100 lines at the end of the treemap's color scale."""

LABEL_CHARS = 26
MAX_LABELS = 6
"""Maximum number of package names in the scatter plot."""


def escape(text: str) -> str:
    """Escape a text for Plotly, which interprets tags as formatting."""
    return html.escape(" ".join(text.split()), quote=False)


def shorten(text: str) -> str:
    """Shorten and escape a label."""
    return escape(text if len(text) <= LABEL_CHARS else f"{text[: LABEL_CHARS - 1]}…")


def hover_text(package: Package) -> str:
    """Return the hover text of a package."""
    return (
        f"<b>{escape(package.package)}</b><br>{package.files:,} files, {package.lines:,} lines<br>"
        f"{package.functions:,} functions, complexity {package.complexity:,}<br>"
        f"{density(package):.1f} functions and branches per 100 lines"
    )


def density(package: Package) -> float:
    """Return the number of functions and branches per 100 lines."""
    return 100 * package.complexity / package.lines if package.lines else 0.0


LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def figure(name: str, data: list[dict[str, Any]], **layout: Any) -> Figure:
    """Return a figure for the element `name`."""
    common = {"margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "dragmode": False}
    return {"name": name, "data": data, "layout": {**common, **layout}}


def axis(title: str = "", **options: Any) -> dict[str, Any]:
    """Return an axis that cannot be zoomed, so that swiping scrolls the page."""
    return {"title": {"text": title}, "fixedrange": True, "automargin": True, "zeroline": False, **options}


def treemap(packages: Sequence[Package]) -> Figure:
    """Return a treemap of packages: the size shows lines, the color shows density."""
    shown = sorted(packages, key=lambda one: (-one.lines, one.package))[:MAX_PACKAGES]
    by_name = {package.package: package for package in shown if package.lines}
    names = sorted({above for name in by_name for above in _ancestors(name)})
    return figure(
        "treemap",
        [
            {
                "type": "treemap",
                "ids": names,
                "labels": [escape(name.rpartition(".")[2] or name) for name in names],
                "parents": [name.rpartition(".")[0] for name in names],
                "values": [by_name[name].lines if name in by_name else 0 for name in names],
                "branchvalues": "remainder",
                "hovertext": [
                    hover_text(by_name[name]) if name in by_name else escape(name) for name in names
                ],
                "hoverinfo": "text",
                "textinfo": "label",
                "pathbar": {"thickness": 22},
                "tiling": {"pad": 2},
                "marker": {
                    "colors": [density(by_name[name]) if name in by_name else 0 for name in names],
                    "colorscale": DENSITY_COLORS,
                    "cmin": 0,
                    "cmax": MAX_DENSITY,
                    "cornerradius": 3,
                    "showscale": True,
                    "colorbar": {
                        "orientation": "h",
                        "thickness": 8,
                        "y": -0.02,
                        "yanchor": "top",
                        "len": 0.6,
                        "title": {"text": "functions and branches per 100 lines", "side": "bottom"},
                    },
                },
            }
        ],
    )


def _ancestors(name: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def ranking_bars(ranking: Sequence[Package]) -> Figure:
    """Return stacked bars of functions and branches of the most complex packages."""
    bottom_up = [*reversed(ranking)]
    # Bars are identified by position, because two long names may be translate_errors to the same label.
    positions = [*range(len(bottom_up))]
    parts = {
        "functions": (BLUE, [package.functions for package in bottom_up]),
        "branches": (ORANGE, [package.complexity - package.functions for package in bottom_up]),
    }
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": counts,
            "y": positions,
            "marker": {"color": color},
            "hovertext": [hover_text(package) for package in bottom_up],
            "hoverinfo": "text",
        }
        for name, (color, counts) in parts.items()
    ]
    labels = [shorten(package.package) for package in bottom_up]
    return figure(
        "ranking",
        bars,
        barmode="stack",
        bargap=0.25,
        xaxis=axis(),
        yaxis=axis(tickvals=positions, ticktext=labels, showgrid=False),
        legend=LEGEND,
    )


def scatter(packages: Sequence[Package]) -> Figure:
    """Return a scatter plot of lines and complexity, with a point for each package."""
    points = [package for package in packages if package.lines and package.complexity]
    named = labeled_packages(points)
    whole = {
        "lines": sum(package.lines for package in points),
        "complexity": sum(package.complexity for package in points),
    }
    return figure(
        "scatter",
        [
            _average_line(points, whole),
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [package.lines for package in points],
                "y": [package.complexity for package in points],
                "text": [shorten(package.package) if package in named else "" for package in points],
                "textposition": "middle left",
                "textfont": {"size": 11},
                "hovertext": [hover_text(package) for package in points],
                "hoverinfo": "text",
                "cliponaxis": False,
                "marker": {
                    "color": BLUE,
                    "opacity": 0.7,
                    "size": [min(34.0, 6 + 2 * package.files**0.5) for package in points],
                    "line": {"width": 0},
                },
            },
        ],
        showlegend=False,
        xaxis=axis("lines", type="log", dtick=1),
        yaxis=axis("complexity", type="log", dtick=1),
    )


def labeled_packages(packages: Sequence[Package]) -> list[Package]:
    """Return the most complex packages whose labels do not overlap."""
    chosen: list[Package] = []
    for package in sorted(packages, key=lambda one: (-one.complexity, one.package)):
        if len(chosen) < MAX_LABELS and all(_labels_fit(package, other) for other in chosen):
            chosen.append(package)
    return chosen


def _labels_fit(one: Package, other: Package) -> bool:
    """Return whether two labels fit: wide and low, they need more distance in lines than in complexity."""
    above = abs(math.log10(one.complexity / other.complexity))
    beside = abs(math.log10(one.lines / other.lines))
    return above > 0.2 or beside > 1.3


def _average_line(points: Sequence[Package], whole: Mapping[str, int]) -> dict[str, Any]:
    """Return the line of average density."""
    ends = [min((one.lines for one in points), default=1), max((one.lines for one in points), default=1)]
    slope = whole["complexity"] / whole["lines"] if whole["lines"] else 0
    return {
        "type": "scatter",
        "mode": "lines",
        "x": ends,
        "y": [max(slope * end, 0.1) for end in ends],
        "line": {"color": GRAY, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }


def lengths_shown(lengths: Mapping[str, int]) -> int:
    """Return the length up to which the histogram is drawn; the few longer functions would compress it."""
    return max(20, percentile(lengths, 0.98))


def histogram(lengths: Mapping[str, int]) -> Figure:
    """Return a histogram of functions by length, with the median and the 90th percentile."""
    up_to = lengths_shown(lengths)
    marks = {"median": percentile(lengths, 0.5), "90th percentile": percentile(lengths, 0.9)}
    return figure(
        "lengths",
        [
            {
                "type": "bar",
                "x": [*range(1, up_to + 1)],
                "y": [lengths.get(str(lines), 0) for lines in range(1, up_to + 1)],
                "hovertext": [
                    f"{lengths.get(str(lines), 0):,} functions of {lines} lines"
                    for lines in range(1, up_to + 1)
                ],
                "hoverinfo": "text",
                "marker": {"color": BLUE},
            }
        ],
        bargap=0.1,
        xaxis=axis("lines of a function", range=[0.3, up_to + 0.7]),
        yaxis=axis("functions"),
        shapes=[vertical(at) for at in marks.values()],
        annotations=[
            {
                "x": at,
                "xanchor": "left",
                "y": 1 - 0.09 * row,
                "yref": "paper",
                "yanchor": "top",
                "showarrow": False,
                "text": f" {name}: {at}",
            }
            for row, (name, at) in enumerate(marks.items())
        ],
    )


def vertical(at: float, color: str = GRAY) -> dict[str, Any]:
    """Return a vertical line."""
    line = {"color": color, "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}
