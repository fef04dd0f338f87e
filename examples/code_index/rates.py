"""Processing rates of nodes, and the time they still need. Pure, except for RateMeter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_SECONDS = 10.0
"""Length of the sliding window: a rate covers the last seconds, which predict the next ones best."""


WARM_UP_SECONDS = 1.0
"""There is no rate before this time: it would depend on the moment of the sample, not on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The totals of a node at one moment."""

    at: float
    batches: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Batches and files per second."""

    batches: float
    files: float


def rate_between(first: Sample, last: Sample) -> Rate | None:
    """Return the rate between two samples; None without progress, or if no time has passed."""
    seconds = last.at - first.at
    if seconds <= 0 or last.batches <= first.batches:
        return None
    return Rate(batches=(last.batches - first.batches) / seconds, files=(last.files - first.files) / seconds)


def recent_rate(samples: Sequence[Sample], window: float = WINDOW_SECONDS) -> Rate | None:
    """Return the rate of the last `window` seconds; None during the warm-up."""
    if not samples or samples[-1].at - samples[0].at < WARM_UP_SECONDS:
        return None
    last = samples[-1]
    recent = [*takewhile(lambda sample: sample.at >= last.at - window, reversed(samples))]
    return rate_between(recent[-1], last)


def seconds_left(done: int, total: int | None, rate: Rate | None) -> float | None:
    """Return the seconds that the remaining batches take at this rate; None if they are unknown."""
    if total is None or done > total:
        return None
    if done == total:
        return 0.0
    return (total - done) / rate.batches if rate else None


def percent(done: int, total: int | None) -> int | None:
    """Return whole percents, 100 only if everything is done; None if the total is zero or unknown."""
    return min(100, 100 * done // total) if total else None


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable unit: `7 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def pluralize(number: int, what: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {what if number == 1 else plural or what + 's'}"


class RateMeter:
    """Measures the rate of one node from samples."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._ended = False

    def update(self, sample: Sample, *, started: bool, ended: bool) -> Rate | None:
        """Add a sample; returns the recent rate, or the average rate once the node has ended."""
        if not started:
            self._samples = [sample]
            return None
        if not self._ended:
            self._samples.append(sample)
            self._ended = ended
        if self._ended:
            return rate_between(self._samples[0], self._samples[-1])
        return recent_rate(self._samples)
