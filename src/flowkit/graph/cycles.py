"""Find cycles in the dependencies between nodes."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def find_cycle(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one cycle, from a node back to itself in order of execution, or an empty list if there is none."""
    try:
        TopologicalSorter(parents).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []
