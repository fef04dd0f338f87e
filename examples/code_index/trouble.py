"""What goes wrong on purpose, so that a run shows how FlowKit copes. Pure."""

from __future__ import annotations

from enum import StrEnum

REASON = "flaky_disk"


class Trouble(StrEnum):
    """The kinds of trouble; the graph names one of them."""

    FLAKY_DISK = "flaky_disk"
    """Two batches fail once each: attempts that fail are charged and tried again."""
    KILL = "kill"
    """A worker is killed in the middle of its work: an attempt that is lost is not charged, and goes on elsewhere."""


def fails(trouble: str, *, attempt: int, number: int, of: int) -> bool:
    """Whether batch `number` (from 1) of `of` batches fails in this attempt of its node.

    One batch fails in the first attempt and another one in the second, each once; a single batch fails once in all.
    """
    return trouble == Trouble.FLAKY_DISK and number == _unlucky(of).get(attempt)


def _unlucky(of: int) -> dict[int, int]:
    """The batch that fails, by attempt."""
    first, second = (of + 2) // 3, (2 * of + 2) // 3
    return {1: first, 2: second} if first < second else {1: first}


def waits_to_be_killed(trouble: str, *, attempt: int, number: int, of: int) -> bool:
    """Whether the attempt waits at batch `number`, so that the kill meets it at work however quick it is."""
    return trouble == Trouble.KILL and attempt == 1 and number == done_before_kill(of) + 1


def done_before_kill(of: int) -> int:
    """How many of `of` batches are done when the kill comes: half of them."""
    return of // 2
