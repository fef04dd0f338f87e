"""Figures about the source, as Plotly takes them: plain data, without the colours of the page. Pure."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

from code_index.graph import ANALYZE, ENRICH, GROUP, INDEX
from code_index.page.words import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from code_index.packages import Package

Figure = dict[str, Any]

NODE_COLOURS = {INDEX: "#4c8dff", ENRICH: "#e0862f", GROUP: "#2fa58e", ANALYZE: "#a56fd8"}
BLUE, ORANGE, GREY = "#4c8dff", "#e0862f", "#8a94a3"
DENSITY_COLOURS = [[0, "#2b5d9b"], [0.35, "#3f9a8f"], [0.7, "#e3b23c"], [1, "#d9485f"]]
"""From calm to crowded."""

BOXES = 300
"""The treemap shows no more packages than a person can tell apart."""

DENSEST = 25
"""Functions and forks in 100 lines from which on the treemap's colour stays the same."""

LABEL_CHARS = 26
NAMED = 6
"""Packages whose names stand in the scatter plot."""


def plain(text: str) -> str:
    """Text that Plotly shows as it is: it takes tags in texts for formatting."""
    return html.escape(" ".join(text.split()), quote=False)


def short(text: str) -> str:
    """A label that leaves room for its figure."""
    return plain(text if len(text) <= LABEL_CHARS else f"{text[: LABEL_CHARS - 1]}…")


def described(package: Package) -> str:
    """What is shown of a package under the pointer."""
    return (
        f"<b>{plain(package.package)}</b><br>{package.files:,} files, {package.lines:,} lines<br>"
        f"{package.functions:,} functions, complexity {package.complexity:,}<br>"
        f"{density(package):.1f} functions and forks in 100 lines"
    )


def density(package: Package) -> float:
    """Functions and forks in 100 lines."""
    return 100 * package.complexity / package.lines if package.lines else 0.0


LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def figure(name: str, data: list[dict[str, Any]], **layout: Any) -> Figure:
    """A figure for the element `name`."""
    common = {"margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "dragmode": False}
    return {"name": name, "data": data, "layout": {**common, **layout}}


def axis(title: str = "", **options: Any) -> dict[str, Any]:
    """An axis that stays as it is when a finger passes over it."""
    return {"title": {"text": title}, "fixedrange": True, "automargin": True, "zeroline": False, **options}


def treemap(packages: Sequence[Package]) -> Figure:
    """Packages within packages: size is lines, colour is density."""
    shown = sorted(packages, key=lambda one: (-one.lines, one.package))[:BOXES]
    by_name = {package.package: package for package in shown if package.lines}
    names = sorted({above for name in by_name for above in _above(name)})
    return figure(
        "treemap",
        [
            {
                "type": "treemap",
                "ids": names,
                "labels": [plain(name.rpartition(".")[2] or name) for name in names],
                "parents": [name.rpartition(".")[0] for name in names],
                "values": [by_name[name].lines if name in by_name else 0 for name in names],
                "branchvalues": "remainder",
                "hovertext": [described(by_name[name]) if name in by_name else plain(name) for name in names],
                "hoverinfo": "text",
                "textinfo": "label",
                "pathbar": {"thickness": 22},
                "tiling": {"pad": 2},
                "marker": {
                    "colors": [density(by_name[name]) if name in by_name else 0 for name in names],
                    "colorscale": DENSITY_COLOURS,
                    "cmin": 0,
                    "cmax": DENSEST,
                    "cornerradius": 3,
                    "showscale": True,
                    "colorbar": {
                        "orientation": "h",
                        "thickness": 8,
                        "y": -0.02,
                        "yanchor": "top",
                        "len": 0.6,
                        "title": {"text": "functions and forks in 100 lines", "side": "bottom"},
                    },
                },
            }
        ],
    )


def _above(name: str) -> list[str]:
    """`a.b.c`: itself, `a.b` and `a`."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def ranking_bars(ranking: Sequence[Package]) -> Figure:
    """The most complex packages: functions, and on top of them forks."""
    bottom_up = [*reversed(ranking)]
    # The place in the list and not the name: two long names may be cut to the same label.
    places = [*range(len(bottom_up))]
    parts = {
        "functions": (BLUE, [package.functions for package in bottom_up]),
        "forks": (ORANGE, [package.complexity - package.functions for package in bottom_up]),
    }
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": counts,
            "y": places,
            "marker": {"color": colour},
            "hovertext": [described(package) for package in bottom_up],
            "hoverinfo": "text",
        }
        for name, (colour, counts) in parts.items()
    ]
    labels = [short(package.package) for package in bottom_up]
    return figure(
        "ranking",
        bars,
        barmode="stack",
        bargap=0.25,
        xaxis=axis(),
        yaxis=axis(tickvals=places, ticktext=labels, showgrid=False),
        legend=LEGEND,
    )


def scatter(packages: Sequence[Package]) -> Figure:
    """Lines against complexity, a point for each package."""
    points = [package for package in packages if package.lines and package.complexity]
    named = outstanding(points)
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
                "text": [short(package.package) if package in named else "" for package in points],
                "textposition": "middle left",
                "textfont": {"size": 11},
                "hovertext": [described(package) for package in points],
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


def outstanding(packages: Sequence[Package]) -> list[Package]:
    """The most complex packages whose names do not lie on each other."""
    chosen: list[Package] = []
    for package in sorted(packages, key=lambda one: (-one.complexity, one.package)):
        if len(chosen) < NAMED and all(_apart(package, other) for other in chosen):
            chosen.append(package)
    return chosen


def _apart(one: Package, other: Package) -> bool:
    """A name is low and wide: a fifth of a power of ten above another is enough, beside it takes more than one."""
    above = abs(math.log10(one.complexity / other.complexity))
    beside = abs(math.log10(one.lines / other.lines))
    return above > 0.2 or beside > 1.3


def _average_line(points: Sequence[Package], whole: Mapping[str, int]) -> dict[str, Any]:
    """Where packages lie that are as dense as all together."""
    ends = [min((one.lines for one in points), default=1), max((one.lines for one in points), default=1)]
    slope = whole["complexity"] / whole["lines"] if whole["lines"] else 0
    return {
        "type": "scatter",
        "mode": "lines",
        "x": ends,
        "y": [max(slope * end, 0.1) for end in ends],
        "line": {"color": GREY, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }


def lengths_shown(lengths: Mapping[str, int]) -> int:
    """Up to how many lines the distribution is drawn; the few longer functions would squeeze the rest."""
    return max(20, percentile(lengths, 0.98))


def histogram(lengths: Mapping[str, int]) -> Figure:
    """How many functions have how many lines, with the median and the ninth decile."""
    up_to = lengths_shown(lengths)
    marks = {"half": percentile(lengths, 0.5), "nine of ten": percentile(lengths, 0.9)}
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
                "y": 1 - 0.09 * place,
                "yref": "paper",
                "yanchor": "top",
                "showarrow": False,
                "text": f" {name}: at most {at}",
            }
            for place, (name, at) in enumerate(marks.items())
        ],
    )


def vertical(at: float, colour: str = GREY) -> dict[str, Any]:
    """A line from top to bottom."""
    line = {"color": colour, "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": line}
