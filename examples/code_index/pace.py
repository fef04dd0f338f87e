"""How fast nodes go, and how long they will still take. Pure but for the samples that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW_SECONDS = 10.0
"""A rate is that of the last seconds: what was long ago says little of what comes."""


SETTLED_SECONDS = 1.0
"""Before that, a rate says more about the moment of the look than about the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a node had done at a moment."""

    at: float
    batches: int
    files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Done in a second."""

    batches: float
    files: float


def rate_between(first: Sample, last: Sample) -> Rate | None:
    """The rate from one sample to a later one; None when nothing was done, or no time has passed."""
    seconds = last.at - first.at
    if seconds <= 0 or last.batches <= first.batches:
        return None
    return Rate(batches=(last.batches - first.batches) / seconds, files=(last.files - first.files) / seconds)


def recent_rate(samples: Sequence[Sample], window: float = WINDOW_SECONDS) -> Rate | None:
    """The rate of the last `window` seconds; None while that is anybody's guess."""
    if not samples or samples[-1].at - samples[0].at < SETTLED_SECONDS:
        return None
    last = samples[-1]
    recent = [*takewhile(lambda sample: sample.at >= last.at - window, reversed(samples))]
    return rate_between(recent[-1], last)


def seconds_left(done: int, total: int | None, rate: Rate | None) -> float | None:
    """How long what is not done will take at this rate; None when that cannot be told."""
    if total is None or done > total:
        return None
    if done == total:
        return 0.0
    return (total - done) / rate.batches if rate else None


def percent(done: int, total: int | None) -> int | None:
    """Whole percents, 100 only when all is done; None when there is nothing to do or nobody knows how much."""
    return min(100, 100 * done // total) if total else None


def told_seconds(seconds: float) -> str:
    """A time as people say it: `7 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


class Pace:
    """Remembers what one node had done when."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._ended = False

    def seen(self, sample: Sample, *, begun: bool, ended: bool) -> Rate | None:
        """Take a sample; answers the rate of late, and that of the whole node once it has ended."""
        if not begun:
            self._samples = [sample]
            return None
        if not self._ended:
            self._samples.append(sample)
            self._ended = ended
        if self._ended:
            return rate_between(self._samples[0], self._samples[-1])
        return recent_rate(self._samples)
