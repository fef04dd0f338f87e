"""Keeps what a process measures, and returns it as families of metrics.

The number of series is bounded, whatever the labels are: labels beyond the bound count as `other`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from flowkit.core.instruments import Gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from flowkit.core.instruments import Counter, Histogram

MAX_VALUES: Final = 200
"""Most values of one label of an instrument."""
MAX_COMBINATIONS: Final = 2_000
"""Most combinations of labels of an instrument, without those with `other`."""
MAX_LABEL_CHARS: Final = 200
"""A longer value of a label is cut."""
OTHER: Final = "other"
"""The value that takes the place of those beyond a bound."""
_MAX_KNOWN: Final = 2 * MAX_COMBINATIONS


class Series:
    """The series of one instrument: a list of numbers for each combination of labels."""

    def __init__(self, labels: int, create: Callable[[], list[float]]) -> None:
        self.cells: dict[tuple[str, ...], list[float]] = {}
        self._create = create
        self._seen: list[set[str]] = [set() for _ in range(labels)]
        self._known: dict[tuple[str, ...], list[float]] = {}

    def find(self, labels: tuple[str, ...]) -> list[float]:
        """Return the numbers of these labels, or of the `other` labels that take their place."""
        cell = self._known.get(labels)
        if cell is None:
            place = self._place(labels)
            cell = self.cells.get(place)
            if cell is None:
                cell = self.cells[place] = self._create()
            if len(self._known) < _MAX_KNOWN and all(len(label) <= MAX_LABEL_CHARS for label in labels):
                self._known[labels] = cell
        return cell

    def _place(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        given = (*labels, *[""] * len(self._seen))[: len(self._seen)]
        bounded = tuple(
            _add_bounded(seen, clean_label(label)) for seen, label in zip(self._seen, given, strict=True)
        )
        if bounded in self.cells or len(self.cells) < MAX_COMBINATIONS:
            return bounded
        return (OTHER,) * len(bounded)


def _add_bounded(seen: set[str], label: str) -> str:
    if label not in seen:
        if len(seen) >= MAX_VALUES:
            return OTHER
        seen.add(label)
    return label


def clean_label(label: str) -> str:
    """Return the value of a label as text that UTF-8 can encode, with at most MAX_LABEL_CHARS characters."""
    return str(label)[:MAX_LABEL_CHARS].encode(errors="replace").decode()


class MetricsRecorder(Collector):
    """Keeps the numbers of a process. All methods can be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, tuple[Any, Series]] = {}

    def add(self, instrument: Counter, amount: float, labels: tuple[str, ...]) -> None:
        """Add to a counter."""
        with self._lock:
            self._find(instrument, 1).find(labels)[0] += amount

    def observe(self, instrument: Histogram, value: float, labels: tuple[str, ...]) -> None:
        """Note one value of a histogram: in its bucket, and in the sum, which comes last."""
        bounds = instrument.buckets
        with self._lock:
            cell = self._find(instrument, len(bounds) + 2).find(labels)
            cell[bisect_left(bounds, value)] += 1
            cell[-1] += value

    def set(self, instrument: Gauge, values: dict[tuple[str, ...], float]) -> None:
        """Replace all values of a gauge, by their labels. Those beyond the bound become one."""
        series = _create_series(instrument, 1)
        for labels, value in values.items():
            cell = series.find(labels)
            cell[0] = max(cell[0], value) if instrument.is_maximum else cell[0] + value
        with self._lock:
            self._series[instrument.name] = (instrument, series)

    def _find(self, instrument: Counter | Histogram, numbers: int) -> Series:
        found = self._series.get(instrument.name)
        if found is None:
            found = self._series[instrument.name] = (instrument, _create_series(instrument, numbers))
        return found[1]

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each instrument that has a value."""
        for name in sorted(self._series):
            with self._lock:
                instrument, series = self._series[name]
                cells = [(labels, tuple(cell)) for labels, cell in series.cells.items()]
            yield _create_family(instrument, cells)


def _create_series(instrument: Counter | Histogram | Gauge, numbers: int) -> Series:
    return Series(len(instrument.labels), lambda: [0] * numbers)


def _create_family(
    instrument: Counter | Histogram | Gauge, cells: list[tuple[tuple[str, ...], tuple[float, ...]]]
) -> Metric:
    name, text, labels = instrument.name, instrument.text, instrument.labels
    if isinstance(instrument, Gauge):
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, numbers in cells:
            gauge.add_metric(values, numbers[0])
        return gauge
    buckets = getattr(instrument, "buckets", None)
    if buckets is None:
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, numbers in cells:
            counter.add_metric(values, numbers[0])
        return counter
    histogram = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*map(floatToGoString, buckets), "+Inf"]
    for values, (*counts, total) in cells:
        histogram.add_metric(values, list(zip(bounds, accumulate(counts), strict=True)), total)
    return histogram
