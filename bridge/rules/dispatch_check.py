"""Decides whether a worker has read a command that no worker has accepted. Pure.

See docs/protocol.md, "Commands that no worker accepts".
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowkit.adapters.dispatches.record import Dispatch

SKIPPED_AFTER_SEC = 10.0
"""Age at which a command counts as skipped if the group has members but no committed offset (H4)."""


class CommandState(Enum):
    """The state of a command that no worker has accepted."""

    QUEUED = auto()
    """No worker has read it: the worker that its partition is assigned to is busy, or there is none."""
    READ = auto()
    """A worker has read it. Without an acceptance in the status topic, the worker dropped it (H2)."""


def command_state(record: Dispatch, committed: int | None, *, members: int, age_sec: float) -> CommandState:
    """Return the state of the command of `record`, whose offset is known.

    `committed` is the offset that the workers' group has committed for the partition, `members` the number of its
    members, and `age_sec` the time since the command was sent.
    """
    assert record.offset is not None
    if committed is None:
        skipped = members > 0 and age_sec >= SKIPPED_AFTER_SEC
        return CommandState.READ if skipped else CommandState.QUEUED
    return CommandState.READ if committed > record.offset else CommandState.QUEUED


def queue_position(record: Dispatch, committed: int | None) -> int:
    """Return the number of commands ahead of this one in its partition."""
    if record.offset is None or committed is None:
        return 0
    return max(0, record.offset - committed)
