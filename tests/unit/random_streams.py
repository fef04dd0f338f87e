"""Random streaming edges for the property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from flowkit.models import NodeIO, StartWhen

if TYPE_CHECKING:
    from flowkit.models import Node


@st.composite
def streamed(draw: st.DrawFn, plain: list[Node], *, most: bool = False) -> list[Node]:
    """Let some nodes, or most, start on the first batch of any parent, and let some edges of others stream."""
    made = []
    for node in plain:
        if not most and draw(st.booleans()):
            made.append(node)
        elif node.fan_in.mode != "count" and draw(st.booleans()):
            io = NodeIO(start_when=StartWhen.FIRST_BATCH)
            made.append(replace(node, streams_from=node.depends_on, io=io))
        else:
            some = tuple(parent for parent in node.depends_on if draw(st.booleans()))
            made.append(replace(node, streams_from=some))
    return made
