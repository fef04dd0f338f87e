"""The actions by which an operator steers a running task: what they take, what they return and what a task keeps of them."""

from __future__ import annotations

from dataclasses import field
from typing import Final

from pydantic import dataclasses as wire

PAUSE: Final = "pause"
RESUME: Final = "resume"
ACTIONS: Final = (PAUSE, RESUME)
"""The names of the actions, which are also the names of the updates of the workflow."""

PREVIEW_QUERY: Final = "preview"
"""Query that returns what an action would affect."""

TASK_SCOPE: Final = "task"
"""The scope of a pause that covers the whole task."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Input of `pause`: start nothing new in these scopes. Running attempts finish."""

    scopes: tuple[str, ...] = (TASK_SCOPE,)
    """What to pause: `task`, `node:ID`, `below:ID` (all nodes below a node) or `role:NAME`."""
    interrupt: bool = False
    """Whether running attempts are stopped. They run again after the pause, which uses no retry."""
    reason: str = ""
    by: str = ""
    """Who requests the action."""
    if_revision: int | None = None
    """Reject the action unless the task has this revision."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Input of `resume`: end the pause of these scopes, or of all if none is given."""

    scopes: tuple[str, ...] = ()
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


Action = Pause | Resume


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
    """What the action was about, such as the scopes of a pause."""
    affected: int = 0
    """Number of affected nodes."""
    update_id: str = ""
    """Id of the update. A repeated request with the same id is not applied again."""


@wire.dataclass(kw_only=True, slots=True)
class ActionState:
    """What a task keeps of the actions that were applied to it."""

    applied: list[AppliedAction] = field(default_factory=list)
    """The latest of these actions."""
    paused: list[PausedScope] = field(default_factory=list)
    stopped_at: float | None = None
    """Since when the deadline of the task stands still; None while it counts."""
    stopped_sec: float = 0.0
    """How long the deadline of the task has stood still before."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ActionRecord:
    """What the task document shows of the actions on a task."""

    applied: list[AppliedAction] = field(default_factory=list)
    paused: list[PausedScope] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    """The paused scopes in which no attempt runs any more."""
