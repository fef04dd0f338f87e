"""A disk that fails twice, so that the demo shows retries. Pure."""

from __future__ import annotations

REASON = "flaky_disk"


def fails(*, attempt: int, number: int, of: int) -> bool:
    """Whether batch `number` (from 1) of `of` batches fails in this attempt of its node.

    One batch fails in the first attempt and another one in the second, each once; a single batch fails once in all.
    """
    return number == _unlucky(of).get(attempt)


def _unlucky(of: int) -> dict[int, int]:
    """The batch that fails, by attempt."""
    first, second = (of + 2) // 3, (2 * of + 2) // 3
    return {1: first, 2: second} if first < second else {1: first}
