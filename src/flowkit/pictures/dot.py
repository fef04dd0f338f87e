"""A picture in the language of Graphviz: https://graphviz.org/doc/info/lang.html. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

from flowkit.pictures.styles import EDGES, NOT_TAKEN, style_of
from flowkit.text import clean, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.pictures.model import Box, Line, Picture

_GRAPH: Final = {
    "nslimit": "1",  # Without these limits, a graph of 5,000 nodes takes minutes.
    "nslimit1": "1",
    "mclimit": "0.1",
    "nodesep": "0.3",
    "ranksep": "0.55",
    "bgcolor": "white",
}
_FONT: Final = {"fontname": "Helvetica,Arial,sans-serif", "fontsize": "11"}
_NODE: Final = {"shape": "box", **_FONT, "fontcolor": "#1c2128", "margin": "0.16,0.08"}
_EDGE: Final = {**_FONT, "fontsize": "9", "fontcolor": "#57606a", "arrowsize": "0.7"}
_LINE_BREAK: Final = "\\n"
_CHAR_POINTS: Final = 6.6
_PADDING_POINTS: Final = 18


def to_dot(picture: Picture) -> str:
    """Return the picture as a digraph. The names of its nodes are the ids."""
    lines = [
        f"digraph {_quote(picture.name)} {{",
        f"  graph [{_attributes({'rankdir': 'LR' if picture.is_sideways else 'TB', **_GRAPH})}];",
        f"  node [{_attributes(_NODE)}];",
        f"  edge [{_attributes(_EDGE)}];",
        *(f"  {_quote(box.name)} [{_describe_box(box)}];" for box in picture.boxes),
        *(_format_line(picture, line) for line in picture.lines),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Return a text as a quoted string that Graphviz shows as it is, without escapes of its own and entities."""
    shown = visible(clean(text)).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;")
    return f'"{shown}"'


def _attributes(given: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={_quote(value)}" for name, value in given.items())


def _describe_box(box: Box) -> str:
    style = style_of(box.status)
    label = _LINE_BREAK.join(_quote(text)[1:-1] for text in (box.heading, *box.details))
    given = {
        "class": box.status or "",
        "style": "rounded,filled,dashed" if style.dashed else "rounded,filled",
        "color": style.stroke,
        "fillcolor": style.fill,
        "peripheries": "2" if box.members > 1 else "",
        "width": f"{_measure(box):.2f}",
    }
    return f'label="{label}", {_attributes({name: value for name, value in given.items() if value})}'


def _pad(label: str) -> str:
    """Return the label of a line with room for wider fonts."""
    blanks = " " * (1 + len(label) // 6)
    return f"{blanks}{label}{blanks}" if label else ""


def _measure(box: Box) -> float:
    """Return the smallest width of a box in inches: many viewers have wider fonts than the one that Graphviz knows."""
    return (max(map(cell_len, (box.heading, *box.details))) * _CHAR_POINTS + _PADDING_POINTS) / 72


def _format_line(picture: Picture, line: Line) -> str:
    style = EDGES[line.kind]
    given = {
        "class": line.kind.value if line.taken else f"{line.kind.value} not-taken",
        "label": _pad(line.condition or (style.word if style.line != "solid" else "")),
        "color": style.color if line.taken else NOT_TAKEN,
        "style": "" if style.line == "solid" else style.line,
        "penwidth": "2.4" if style.is_wide else "",
    }
    ends = " -> ".join(_quote(picture.boxes[end].name) for end in (line.source, line.target))
    return f"  {ends} [{_attributes({name: value for name, value in given.items() if value})}];"
