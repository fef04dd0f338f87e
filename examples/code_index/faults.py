"""Fault injection: failures that the demo causes on purpose, to show how FlowKit handles them. Pure."""

from __future__ import annotations

from enum import StrEnum

REASON_CODE = "flaky_disk"

KILL_TIMEOUT_SEC = 15.0
"""How long an attempt waits for its kill before it continues."""


class Fault(StrEnum):
    """The kinds of faults; the graph names one of them."""

    FLAKY_DISK = "flaky_disk"
    """Two attempts fail, with one batch each. Each of them uses one retry."""
    KILL = "kill"
    """A worker is killed while it processes a batch. Another worker takes the batch over, which uses no retry."""


def should_fail(fault: str, *, attempt: int, number: int, total: int) -> bool:
    """Return whether batch `number` (from 1) of `total` batches fails in this attempt of its node.

    The first attempt fails with its first batch after a third of them, the second attempt after two thirds. Both may
    run at the same time, as shards. If there is only one batch, it fails once.
    """
    return fault == Fault.FLAKY_DISK and number >= _failing_batches(total).get(attempt, total + 1)


def _failing_batches(total: int) -> dict[int, int]:
    """Return the number of the first batch that fails, by attempt."""
    first, second = (total + 2) // 3, (2 * total + 2) // 3
    return {1: first, 2: second} if first < second else {1: first}


def should_wait_for_kill(fault: str, *, attempt: int, number: int, total: int) -> bool:
    """Return whether the attempt waits at batch `number`, so that the kill interrupts it even if it is fast."""
    return fault == Fault.KILL and attempt == 1 and number > batches_before_kill(total)


def batches_before_kill(total: int) -> int:
    """Return the number of finished batches at which the worker is killed: half of `total`."""
    return total // 2
