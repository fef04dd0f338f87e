"""A run: one execution of a node by an external worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, fields
from typing import Any

from flowkit.testing.external.protocol import Incoming, StartPayload, new_id


@dataclass(kw_only=True)
class ActiveRun:
    """What a worker stores about its run in `worker_state`, and announces as `resume` after a restart."""

    task_id: str
    node_id: str
    step_type: str
    attempt_epoch: int
    lease_id: str
    cancel_token: str
    started_at_ms: int
    state: str
    checkpoint: dict[str, Any]


_STORED = tuple(each.name for each in fields(ActiveRun))


@dataclass(kw_only=True)
class Run(ActiveRun):
    """A run that the worker holds: in progress, or restored from `worker_state` and not executed."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    cancel_flag: asyncio.Event = field(default_factory=asyncio.Event)
    cancel_reason: str | None = None
    cancel_deadline_ts_ms: int | None = None
    restored: bool = False
    """Whether the run comes from `worker_state` after a restart; nothing executes it."""
    outcome: str | None = None
    """The kind of the terminal event that the worker decided on, even if a misbehavior suppressed the event."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker has cleaned up after the run."""

    @classmethod
    def accepted(cls, command: Incoming, start: StartPayload, now_ms: int) -> Run:
        """Return the new run of a TASK_START command, with a lease of its own."""
        return cls(
            task_id=command.task_id,
            node_id=command.node_id,
            step_type=command.step_type,
            attempt_epoch=command.attempt_epoch,
            lease_id=new_id(),
            cancel_token=start.cancel_token,
            started_at_ms=now_ms,
            state="running",
            checkpoint={},
            input_ref=start.input_ref,
            input_inline=start.input_inline,
        )

    @classmethod
    def from_state(cls, stored: dict[str, Any]) -> Run:
        """Return a stored run. Raise TypeError if a field is unknown or missing."""
        return cls(**vars(ActiveRun(**stored)), restored=True)

    def stored(self) -> dict[str, Any]:
        """Return the fields that the worker stores and announces."""
        return {name: getattr(self, name) for name in _STORED}

    def is_node(self, task_id: str, node_id: str) -> bool:
        """Return whether this run executes that node."""
        return (self.task_id, self.node_id) == (task_id, node_id)

    def request_cancel(self, reason: str, deadline_ts_ms: int | None = None) -> bool:
        """Set the cancel flag. An earlier reason is kept; return whether this request was the first."""
        if self.cancel_flag.is_set():
            return False
        self.cancel_reason, self.cancel_deadline_ts_ms = reason, deadline_ts_ms
        self.state = "cancelling"
        self.cancel_flag.set()
        return True
