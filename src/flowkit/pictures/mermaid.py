"""A picture as a Mermaid flowchart, which GitHub and GitLab draw in Markdown: https://mermaid.js.org. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flowkit.pictures.styles import EDGES, NOT_TAKEN, STATUSES, StatusStyle
from flowkit.reading.graphs import EdgeKind
from flowkit.text import clean, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.pictures.model import Box, Line, Picture

_ARROWS: Final = {
    EdgeKind.PLAIN: "-->",
    EdgeKind.STREAMING: "==>",
    EdgeKind.CONDITIONAL: "-.->",
    EdgeKind.SUCCESS: "-.->",
    EdgeKind.FAILURE: "-.->",
}
_SPECIAL: Final = re.compile(r"[\x00-\x1f!-'*;<>?@\[-^`{-\x7f]|\u200b")
"""ASCII characters that Mermaid, Markdown or HTML may interpret; letters, digits, blanks and `()+,-./:=_` do not."""


def to_mermaid(picture: Picture) -> str:
    """Return the picture as a flowchart. Names and texts are in quotes, with entities for all special characters."""
    lines = [
        f"flowchart {'LR' if picture.is_sideways else 'TB'}",
        *(f"  {_format_box(index, box)}" for index, box in enumerate(picture.boxes)),
        *(f"  {_format_line(line)}" for line in picture.lines),
        *_define_classes(picture),
        *_style_lines(picture),
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"#{ord(found[0])};", visible(clean(text)))


def _format_box(index: int, box: Box) -> str:
    label = "<br/>".join(_escape(text) for text in (box.heading, *box.details))
    shape = f'[["{label}"]]' if box.members > 1 else f'("{label}")'
    return f"n{index}{shape}{f':::{box.status}' if box.status else ''}"


def _format_line(line: Line) -> str:
    style = EDGES[line.kind]
    label = _escape(line.condition or (style.word if style.line != "solid" else ""))
    text = f'|"{label}"|' if label else ""
    return f"n{line.source} {_ARROWS[line.kind]}{text} n{line.target}"


def _define_classes(picture: Picture) -> Iterator[str]:
    shown = {box.status for box in picture.boxes}
    for status, style in STATUSES.items():
        if status in shown:
            yield f"  classDef {status} {_describe_style(style)}"


def _describe_style(style: StatusStyle) -> str:
    dashed = ",stroke-dasharray:4 3" if style.dashed else ""
    return f"fill:{style.fill},stroke:{style.stroke},color:#1c2128{dashed}"


def _style_lines(picture: Picture) -> Iterator[str]:
    """Yield the colors of the lines: one line of text for each color, which names the positions of its edges."""
    colors: dict[str, list[str]] = {}
    for index, line in enumerate(picture.lines):
        color = EDGES[line.kind].color if line.taken else NOT_TAKEN
        colors.setdefault(color, []).append(str(index))
    for color, indexes in colors.items():
        yield f"  linkStyle {','.join(indexes)} stroke:{color}"
