"""What the benchmark asks of a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One sample: `tasks` concurrent runs of `nodes` nodes, `repeats` times in a row."""

    nodes: int
    wide: bool
    tasks: int
    repeats: int
