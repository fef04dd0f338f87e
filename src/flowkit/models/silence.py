"""What the sweep reports to a workflow about attempts that send no heartbeats."""

from __future__ import annotations

from dataclasses import field

from pydantic import dataclasses as wire


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SilentAttempt:
    """A running attempt that has sent no heartbeat for a while."""

    node_id: str
    epoch: int
    silent_sec: float = 0.0
    """Seconds since its last heartbeat."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SilenceReport:
    """Update of the workflow: all of its attempts that are silent now. An empty list means that none is."""

    run_id: str
    silent: list[SilentAttempt] = field(default_factory=list)
    """Attempts without a heartbeat for `heartbeat_soft_sec`, in the order of their nodes' ids."""
    hard_sec: float = 0.0
    """The engine's `heartbeat_hard_sec`: attempts that are silent for longer fail. 0 means never."""
