"""A recorder that keeps in memory what this process measures."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowkit.core import instruments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.core.instruments import Counter, Gauge, Histogram

Labels = tuple[str, ...]


class Measured:
    """What was measured, by the instrument and its labels."""

    def __init__(self) -> None:
        self.counts: dict[Counter, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self.values: dict[Histogram, dict[Labels, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.states: dict[Gauge, dict[Labels, float]] = defaultdict(dict)

    def add(self, instrument: Counter, amount: float, labels: Labels) -> None:
        """Add to a counter."""
        self.counts[instrument][labels] += amount

    def observe(self, instrument: Histogram, value: float, labels: Labels) -> None:
        """Note one value of a histogram."""
        self.values[instrument][labels].append(value)

    def set(self, instrument: Gauge, values: dict[Labels, float]) -> None:
        """Replace all values of a gauge."""
        self.states[instrument] = dict(values)


@contextmanager
def measuring() -> Iterator[Measured]:
    """Record what this process measures while the block runs."""
    measured = Measured()
    instruments.listen(measured)
    try:
        yield measured
    finally:
        instruments.listen(None)
