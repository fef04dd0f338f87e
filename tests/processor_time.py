"""Judges how much processor time something takes. The time on the wall also depends on what else the machine does."""

from __future__ import annotations

import time
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_RATIO = 8.0
"""Largest ratio of the processor times for four times as much. That of a quadratic step is 16."""

NOISE_SEC = 0.03
"""A shorter time says nothing about the ratio, and is short enough."""

TRIES = 4
"""How often short times are compared, before long ones are: other processes share the caches of the processor."""

SAMPLE_SEC = 1.0
"""Shortest processor time by which growth is judged."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the block takes more processor time. It is a second at least, and ten times what the block needs."""
    assert seconds >= SAMPLE_SEC
    began = time.process_time()
    yield
    taken = time.process_time() - began
    assert taken < seconds, f"it took {taken:.1f} s of processor time"


def growth_problem(measure: Callable[[int], float], size: int) -> str | None:
    """Return that the time grows faster than the size, or None. `measure` returns the seconds for a size.

    Short times acquit, and only long ones condemn.
    """
    if _seems_linear(measure, size):
        return None
    small, large = list[float](), list[float]()
    while not large or min(sum(small), sum(large)) < SAMPLE_SEC:
        small += [measure(size // 4) for _ in range(4)]
        large.append(measure(size))
    ratio = mean(large) / mean(small)
    times = f"{mean(large):.2f} s, {ratio:.1f} times as long as for a quarter of the size"
    return times if ratio > MOST_RATIO else None


def _seems_linear(measure: Callable[[int], float], size: int) -> bool:
    small = large = float("inf")
    for _ in range(TRIES):
        small, large = min(small, measure(size // 4)), min(large, measure(size))
        if large <= NOISE_SEC or large <= MOST_RATIO * small:
            return True
    return False
