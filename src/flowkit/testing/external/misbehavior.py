"""Switches for everything that a worker can do wrong (the hazards H1 to H34 of the protocol)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.testing.external.malformed import Malformed


@dataclass(kw_only=True)
class Misbehavior:
    """What a worker does wrong. All switches are off by default, and a test can change them while the worker runs.

    A correct worker already has many hazards of the protocol: it drops commands while it is busy (H2), forgets its
    pause at a rebalance, ends a command loop at an invalid record (H1), sends no terminal event when it stops (H14),
    and announces a stored run after a restart without executing it (H9). These need no switch.
    """

    drop_commands: int = 0
    """H2: how many of the next TASK_START commands the worker commits and drops without an event. It counts down."""
    never_pause: bool = False
    """H2: the worker keeps reading commands while it is busy, so it commits and drops every command that arrives. A
    correct worker does so after a rebalance."""
    crash_after_accepted: Literal["", "before_commit", "after_commit"] = ""
    """The worker crashes after TASK_ACCEPTED and sends no other event. `after_commit` is H6: Kafka does not redeliver
    the command. `before_commit` is H7: after the session timeout another worker accepts the same epoch."""
    crash_after: str = ""
    """H6: the worker crashes as soon as the broker has acknowledged an event of this kind, for example `BATCH_OK`."""
    second_owner: bool = False
    """H7, H16: the worker reads commands in a consumer group of its own, so it accepts every command that another
    worker also accepts. Takes effect at the next start."""
    epoch_shift: int = 0
    """H3: number to add to the epoch of every event; -1 sends the events of a stale epoch."""
    heartbeats_on: str = ""
    """H15: role on whose status topic, and with whose `step_type`, the worker sends its heartbeats."""
    silence: bool = False
    """H33: the worker sends no heartbeats."""
    fail_accepted: bool = False
    """H28: sending TASK_ACCEPTED fails. The worker stays busy, sends nothing, and its command loop has ended."""
    no_terminal: bool = False
    """H34: the worker sends no terminal event, and is free again."""
    leak_cancel_at: int | None = None
    """H13: before the batch with this number (from 0), CancelledError occurs without a request: the worker sends
    CANCELLED."""
    after_end: Sequence[str] = ()
    """H17: kinds of events that the worker sends again after the terminal event: TASK_HEARTBEAT, BATCH_OK,
    TASK_DONE, TASK_FAILED (transient) or CANCELLED."""
    partial_refused: bool = False
    """H18: the write of partial artifacts fails, as on a real MongoDB, so that only the complete marker exists.
    Stand-ins for MongoDB accept this write."""
    duplicate_events: int = 0
    """H16: how many additional copies of every status event the worker sends."""
    reorder_events: int = 0
    """The worker collects this number of status events and sends them in reverse order. A terminal event ends a
    collection early, so it overtakes the events before it. TASK_ACCEPTED and heartbeats count, too."""
    delay_sec: float = 0
    """Seconds to wait before sending each status event; the event keeps its time of creation."""
    hold: Sequence[str] = ()
    """Kinds of events that the worker keeps back until `ExternalWorker.release()`, for delays without a clock."""
    malformed: Sequence[Malformed] = ()
    """Malformed records to send on the status topic before every status event."""

    @classmethod
    def parse(cls, switches: Sequence[str]) -> Misbehavior:
        """Return the switches given as `name=value` on a command line; values are JSON, or else text.

        Raise ValueError for an unknown name.
        """
        known = {each.name for each in fields(cls)}
        given = dict(switch.partition("=")[::2] for switch in switches)
        if unknown := given.keys() - known:
            raise ValueError(f"unknown misbehavior {sorted(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**{name: _value(text) for name, text in given.items()})

    def reset(self) -> None:
        """Turn all switches off."""
        for name, value in dataclasses.asdict(Misbehavior()).items():
            setattr(self, name, value)


def _value(text: str) -> Any:
    try:
        return json.loads(text or "true")
    except ValueError:
        return text
