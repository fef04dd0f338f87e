"""Where the boxes and lines of a picture are on a grid of characters. The library graphlay computes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from math import floor
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.pictures.model import Picture

Cell = tuple[int, int]
"""A column and a row."""

_UNIT: Final = 10
"""Length of a cell in the coordinates of the layout."""
_TUNING: Final = {"routing": {"step_flatten": 0}, "coords": {"main_path_room": 0}}
"""Without these, long lines come closer to a box than a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where the layout has put everything, in cells."""

    corners: list[Cell]
    """The upper left cells of the boxes."""
    sizes: list[tuple[int, int]]
    paths: list[list[Cell]]
    """The corners of each line, from the cell after its first box to the cell before its last one."""


def place(picture: Picture, *, is_sideways: bool) -> Placed | None:
    """Let the library place boxes and lines. Return None if a line is crooked or crosses a box, or if boxes overlap.

    It gets boxes that are one cell longer at each end, for the ends of lines, and one cell narrower at each side, so
    that no line ends at a corner.
    """
    import graphlay  # here, because only this picture needs it

    longer, wider = (2, -2) if is_sideways else (-2, 2)
    sizes = [_measure(picture, index, is_sideways=is_sideways) for index in range(len(picture.boxes))]
    graph = graphlay.Graph()
    for width, height in sizes:
        graph.node(width=(width + longer) * _UNIT, height=(height + wider) * _UNIT)
    for line in picture.lines:
        graph.edge(line.source, line.target)
    found = graphlay.layout(graph, options=_options(is_sideways=is_sideways))
    placed = _round_up(found, sizes, longer, wider)
    return placed if _is_clean(placed) else None


def _is_clean(placed: Placed) -> bool:
    cells = [
        (column, row)
        for (left, top), (width, height) in zip(placed.corners, placed.sizes, strict=True)
        for column in range(left, left + width)
        for row in range(top, top + height)
    ]
    boxes = {*cells}
    parts = [part for path in placed.paths for part in pairwise(path)]
    straight = all(begin[0] == end[0] or begin[1] == end[1] for begin, end in parts)
    crossed = any(boxes & {*_cells_between(*part)} for part in parts)
    return straight and not crossed and len(boxes) == len(cells)


def _cells_between(begin: Cell, end: Cell) -> Iterator[Cell]:
    (left, right), (top, bottom) = sorted((begin[0], end[0])), sorted((begin[1], end[1]))
    return product(range(left, right + 1), range(top, bottom + 1))


def _measure(picture: Picture, index: int, *, is_sideways: bool) -> tuple[int, int]:
    """Return the width and height of a box, with room for the ends of its lines."""
    box = picture.boxes[index]
    lines = max(
        sum(line.source == index for line in picture.lines),
        sum(line.target == index for line in picture.lines),
    )
    width = 4 + max(cell_len(text) for text in (box.heading, *box.details))
    height = 3 + len(box.details)
    return (width, max(height, lines + 2)) if is_sideways else (max(width, 2 * lines + 3), height)


def _options(*, is_sideways: bool) -> dict[str, Any]:
    across = 1 if is_sideways else 2
    spacing = {
        "layer_gap": 1,
        "node_gap": across + 2,
        "dummy_gap": across + 1,
        "port_gap": across,
        "port_stroke_clear": 1,
        "stub": 0,
        "isolated_gap": 3,
        "reroute_node_gap": 1,
    }
    return {
        "direction": "leftright" if is_sideways else "topbottom",
        "spacing": {name: cells * _UNIT for name, cells in spacing.items()},
        "routing": {"style": "orthogonal", "lane_gap": _UNIT, "bundle_parallel": False},
        "tuning": _TUNING,
    }


def _round_up(found: Any, sizes: list[tuple[int, int]], longer: int, wider: int) -> Placed:
    """Return the cells of a layout. It keeps lines a cell apart, so rounding down gives each its own cells."""
    corners = [
        (
            node["center"]["x"] - (width + longer) * _UNIT / 2,
            node["center"]["y"] - (height + wider) * _UNIT / 2,
        )
        for node, (width, height) in zip(found.nodes, sizes, strict=True)
    ]
    placed = [_cell(*corner) for corner in corners]
    paths = [[_cell(point["x"], point["y"]) for point in edge["points"]] for edge in found.edges]
    # The boxes are painted from one cell inside or outside of what the layout has placed, and a line begins in the cell
    # beside its box.
    along, across = ((1, 0), (0, 1)) if longer > 0 else ((0, 1), (1, 0))
    for path in paths:
        path[0] = (path[0][0] - along[0], path[0][1] - along[1])
    shift = (along[0] - across[0], along[1] - across[1])
    return Placed(
        corners=[(column + shift[0], row + shift[1]) for column, row in placed], sizes=sizes, paths=paths
    )


def _cell(x: float, y: float) -> Cell:
    return floor(x / _UNIT + 0.01), floor(y / _UNIT + 0.01)
