"""What a task keeps and shows of the actions that were applied to it."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Final

from pydantic import dataclasses as wire

RERUN: Final = "rerun"
"""How the audit names the start of a new run of an ended task."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class PausedScope:
    """A scope in which a task starts nothing new."""

    scope: str
    since: float
    by: str = ""
    reason: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AppliedAction:
    """An entry of the audit of a task: an action that was applied."""

    revision: int
    action: str
    at: float
    by: str = ""
    reason: str = ""
    what: str = ""
    """What the action was about, for people."""
    names: list[str] = field(default_factory=list)
    """The scopes of a pause or of its end, or the prerequisite that became satisfied; empty if they are too long."""
    affected: int = 0
    """Number of affected nodes."""
    update_id: str = ""
    """Id of the update. A repeated request with the same id is not applied again."""


@wire.dataclass(kw_only=True, slots=True)
class ActionState:
    """What a task keeps of the actions that were applied to it."""

    applied: list[AppliedAction] = field(default_factory=list)
    """The latest of these actions."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The results of the latest of them, by the id of their update, which returns the same when it is repeated."""
    paused: list[PausedScope] = field(default_factory=list)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node id, the fields of nodes that actions have changed."""
    satisfied: list[str] = field(default_factory=list)
    """The prerequisites that are satisfied."""
    stopped_at: float | None = None
    """Since when the deadline of the task stands still; None while it counts."""
    stopped_sec: float = 0.0
    """How long the deadline of the task has stood still before."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ActionRecord:
    """What the task document shows of the actions on a task."""

    revision: int = 0
    """Number of actions that were applied; 0 in a record that changes nothing about actions."""
    applied: list[AppliedAction] = field(default_factory=list)
    """Those actions that no earlier record has."""
    paused: list[PausedScope] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    """The paused scopes in which no attempt runs any more."""
    satisfied: list[str] = field(default_factory=list)
    """The satisfied prerequisites that no earlier record of the run has."""
