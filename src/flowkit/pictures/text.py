"""A picture for a terminal: boxes and lines, or a list of layers for a graph that does not fit.

`placing.py` says where boxes and lines are; this module paints them on characters.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.text import Text

from flowkit.pictures.groups import layers_of
from flowkit.pictures.placing import place
from flowkit.pictures.styles import EDGES, style_of
from flowkit.text import count_of, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flowkit.pictures.model import Box, Line, Picture
    from flowkit.pictures.placing import Cell, Placed

MAX_BOXES: Final = 30
"""Largest number of boxes that are drawn."""
MAX_LINES: Final = 100
"""Largest number of lines that are drawn. With more of them, a layout takes seconds, and lines cannot be told apart."""
COLUMNS: Final = 120
"""Width of a picture in columns, unless a terminal has another one."""

_RIGHT, _LEFT, _DOWN, _UP = 1, 2, 4, 8
_STEPS: Final = {
    (1, 0): (_RIGHT, _LEFT),
    (-1, 0): (_LEFT, _RIGHT),
    (0, 1): (_DOWN, _UP),
    (0, -1): (_UP, _DOWN),
}
"""For each direction of a line: the side on which it leaves a cell, and the side on which it enters the next one."""
_THIN: Final = " ╶╴─╷┌┐┬╵└┘┴│├┤┼"
_WIDE: Final = " ╺╸━╻┏┓┳╹┗┛┻┃┣┫╋"
"""The character of a cell by the sum of the sides at which lines leave it."""
_BROKEN: Final = {"dashed": {"─": "╌", "│": "╎"}, "dotted": {"─": "┈", "│": "┊"}, "solid": {}}


def to_text(picture: Picture, columns: int = COLUMNS) -> Text:
    """Return the picture, drawn if it has few boxes and fits into the columns of the terminal; else as a list."""
    if not picture.boxes:
        return Text("the graph has no nodes")
    is_small = len(picture.boxes) <= MAX_BOXES and len(picture.lines) <= MAX_LINES
    drawn = _draw(picture, columns) if is_small else None
    return _list_layers(picture) if drawn is None else _with_legend(drawn, picture)


def _with_legend(drawn: Text, picture: Picture) -> Text:
    shown = [
        style for kind, style in EDGES.items() if style.mark and kind in {line.kind for line in picture.lines}
    ]
    legend = [f"{style.mark} {style.word}" for style in shown]
    if any(not line.taken for line in picture.lines):
        legend.append("┈ not taken")
    return Text("\n\n").join([drawn, Text("   ".join(legend), style="dim")]) if legend else drawn


def _draw(picture: Picture, columns: int) -> Text | None:
    """Return the lower one of the pictures, from left to right and from top to bottom, that fit; None if none does."""
    placed = {each: place(picture, is_sideways=each) for each in (True, False)}
    canvases = [_paint(picture, found, is_sideways=each) for each, found in placed.items() if found]
    fitting = [each for each in canvases if len(each.columns) <= columns]
    return min(fitting, key=lambda each: len(each.rows)).render() if fitting else None


class _Canvas:
    """Characters with their styles, in cells."""

    def __init__(self) -> None:
        self._cells: dict[Cell, tuple[str, str]] = {}

    @property
    def columns(self) -> range:
        """The columns in use."""
        columns = [column for column, _ in self._cells]
        return range(min(columns), max(columns) + 1)

    @property
    def rows(self) -> range:
        """The rows in use."""
        rows = [row for _, row in self._cells]
        return range(min(rows), max(rows) + 1)

    def put(self, cell: Cell, character: str, style: str) -> None:
        """Set one character."""
        self._cells[cell] = (character, style)

    def write(self, cell: Cell, text: str, style: str) -> None:
        """Write a text to the right, beginning in this cell."""
        column, row = cell
        for character in text:
            width = cell_len(character)
            if not width:  # It combines with the one before it.
                before, _ = self._cells.get((column - 1, row), ("", ""))
                self.put((column - 1, row), before + character, style)
                continue
            self.put((column, row), character, style)
            if width == 2:
                self.put((column + 1, row), "", style)
            column += width

    def render(self) -> Text:
        """Return the lines."""
        return Text("\n").join(map(self._render_row, self.rows))

    def _render_row(self, row: int) -> Text:
        line = Text()
        cells = [self._cells.get((column, row), (" ", "")) for column in self.columns]
        for style, equal in groupby(cells, key=lambda cell: cell[1]):
            line.append("".join(character for character, _ in equal), style)
        line.rstrip()
        return line


def _paint(picture: Picture, placed: Placed, *, is_sideways: bool) -> _Canvas:
    canvas = _Canvas()
    _paint_lines(canvas, picture.lines, placed.paths)
    for line, path in zip(picture.lines, placed.paths, strict=True):
        style = EDGES[line.kind]
        color = _color_of(line)
        if style.mark and not style.is_wide:
            canvas.put(path[0], style.mark, color)
        canvas.put(path[-1], "▶" if is_sideways else "▼", color)
    for box, corner, size in zip(picture.boxes, placed.corners, placed.sizes, strict=True):
        _paint_box(canvas, box, corner, size)
    return canvas


def _color_of(line: Line) -> str:
    return EDGES[line.kind].terminal if line.taken else "dim"


def _paint_lines(canvas: _Canvas, lines: Sequence[Line], paths: Sequence[Sequence[Cell]]) -> None:
    """Paint all lines; in cells that several of them cross, the last one gives the color."""
    sides: defaultdict[Cell, int] = defaultdict(int)
    styles: dict[Cell, tuple[Line, bool]] = {}
    for line, path in zip(lines, paths, strict=True):
        is_wide = EDGES[line.kind].is_wide
        for cell, side in _walk(path):
            _, others_are = styles.get(cell, (line, is_wide))
            styles[cell] = (line, is_wide and others_are)
            sides[cell] |= side
    for cell, (line, is_wide) in styles.items():
        character = (_WIDE if is_wide else _THIN)[sides[cell]]
        canvas.put(cell, _BROKEN[_pattern_of(line)].get(character, character), _color_of(line))


def _pattern_of(line: Line) -> str:
    return EDGES[line.kind].line if line.taken else "dotted"


def _walk(path: Sequence[Cell]) -> Iterator[tuple[Cell, int]]:
    """Yield each cell of a path with the sides at which the path enters and leaves it."""
    for index, (begin, end) in enumerate(pairwise(path)):
        direction = (_sign(end[0] - begin[0]), _sign(end[1] - begin[1]))
        if direction == (0, 0):
            continue
        leaves, enters = _STEPS[direction]
        if not index:
            yield begin, enters
        at = begin
        while at != end:
            yield at, leaves
            at = (at[0] + direction[0], at[1] + direction[1])
            yield at, enters


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _paint_box(canvas: _Canvas, box: Box, corner: Cell, size: tuple[int, int]) -> None:
    column, row = corner
    width, height = size
    style = style_of(box.status).terminal
    is_group = box.members > 1
    top, bottom, side = ("╔═╗", "╚═╝", "║") if is_group else ("┌─┐", "└─┘", "│")
    texts = [box.heading, *box.details]
    for line in range(1, height - 1):
        text = texts[line - 1] if line <= len(texts) else ""
        padding = " " * (width - 3 - cell_len(text))
        canvas.write((column, row + line), side, style)
        canvas.write((column + 1, row + line), f" {text}{padding}", style if line == 1 else "")
        canvas.write((column + width - 1, row + line), side, style)
    canvas.write(corner, f"{top[0]}{top[1] * (width - 2)}{top[2]}", style)
    canvas.write((column, row + height - 1), f"{bottom[0]}{bottom[1] * (width - 2)}{bottom[2]}", style)


# --- larger graphs ------------------------------------------------------------------------------------------------


def _list_layers(picture: Picture) -> Text:
    """Return the boxes by layer: each with what it follows. A layer follows the layers above it."""
    layers = layers_of(len(picture.boxes), picture.edges)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        members[layer].append(index)
    parents: defaultdict[int, list[str]] = defaultdict(list)
    for line in picture.lines:
        word = EDGES[line.kind].word if line.taken else "not taken"
        title = picture.boxes[line.source].title
        parents[line.target].append(f"{title} ({word})" if word else title)
    width = max(cell_len(box.heading) for box in picture.boxes)
    shown = [Text(f"{count_of(picture.nodes, 'node')} in {count_of(len(members), 'layer')}")]
    for layer in sorted(members):
        shown += [Text(), Text(f"layer {layer + 1:,}", style="bold")]
        shown += [_list_box(picture.boxes[index], width, parents[index]) for index in members[layer]]
    return Text("\n").join(shown)


def _list_box(box: Box, width: int, parents: Sequence[str]) -> Text:
    after = f"after {names(parents)}" if parents else ""
    padding = " " * (width - cell_len(box.heading))
    text = Text.assemble("  ", (box.heading, style_of(box.status).terminal), padding)
    for detail in filter(None, (", ".join(box.details), after)):
        text.append(f"  {detail}")
    return text
