"""A recorder for tests: the numbers that a process measures during a block."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowkit.core import instruments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flowkit.core.instruments import Counter, Gauge, Histogram


class Measured:
    """What was measured, by the instrument and its labels."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], float] = {}
        self._values: dict[tuple[str, ...], list[float]] = {}
        self._gauges: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, instrument: Counter, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a counter."""
        assert len(labels) == len(instrument.labels), instrument.name
        key = (instrument.name, *labels)
        self._sums[key] = self._sums.get(key, 0) + amount

    def observe(self, instrument: Histogram, value: float, labels: tuple[str, ...]) -> None:
        """Note a value."""
        assert len(labels) == len(instrument.labels), instrument.name
        self._values.setdefault((instrument.name, *labels), []).append(value)

    def set(self, instrument: Gauge, values: dict[tuple[str, ...], float]) -> None:
        """Replace the values of a gauge."""
        assert {len(labels) for labels in values} <= {len(instrument.labels)}, instrument.name
        self._gauges[instrument.name] = values

    def counted(self, instrument: Counter) -> dict[tuple[str, ...], float]:
        """Return the numbers of a counter, by its labels."""
        return {key[1:]: value for key, value in self._sums.items() if key[0] == instrument.name}

    def observed(self, instrument: Histogram) -> dict[tuple[str, ...], list[float]]:
        """Return the values of a histogram, by its labels."""
        return {key[1:]: values for key, values in self._values.items() if key[0] == instrument.name}

    def shown(self, instrument: Gauge) -> dict[tuple[str, ...], float]:
        """Return the values of a gauge, by its labels."""
        return self._gauges.get(instrument.name, {})


@contextmanager
def measuring() -> Iterator[Measured]:
    """Measure this process during the block."""
    measured = Measured()
    instruments.listen(measured)
    try:
        yield measured
    finally:
        instruments.listen(None)
