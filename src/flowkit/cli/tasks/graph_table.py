"""The table with which `flowkit validate` shows a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from flowkit.cli.screen import add_names, plain_table
from flowkit.graph.description import group_rows
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from flowkit.graph.description import NodeDescription, Row

MOST_ROWS = 40
"""Rows of the table. A larger graph has one row for each series of equal nodes."""


def graph_table(nodes: Sequence[NodeDescription], *, wide: bool) -> Table:
    """Return a table with a row for each node: when it starts, and how it differs from the defaults.

    `wide` fills the width of the terminal. The last row counts the nodes that do not fit.
    """
    every = group_rows(nodes, MOST_ROWS)
    shown = every[:MOST_ROWS]
    table = plain_table(wide=wide)
    add_names(table, "node", [_name(row) for row in shown])
    add_names(table, "role", [_role(row.node) for row in shown])
    table.add_column("starts", overflow="fold")
    if any(row.node.differs for row in shown):
        table.add_column("options", overflow="fold")
    for row in shown:
        cells = (_name(row), _role(row.node), row.node.starts, row.node.differs)
        table.add_row(*(Text(one_line(cell)) for cell in cells[: len(table.columns)]))
    if hidden := sum(1 + row.others for row in every[MOST_ROWS:]):
        table.add_row(Text(f"… {hidden:,} more", style="dim"))
    return table


def _name(row: Row) -> str:
    return f"{row.node.node_id} and {row.others:,} more" if row.others else row.node.node_id


def _role(node: NodeDescription) -> str:
    return f"{node.role}()" if node.is_function else node.role
