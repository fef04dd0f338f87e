"""The actions by which an operator steers a running task: what they take, what they return and what a task keeps of them."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Final

from pydantic import dataclasses as wire

PAUSE: Final = "pause"
RESUME: Final = "resume"
RETRY_NODE: Final = "retry_node"
SKIP_NODE: Final = "skip_node"
COMPLETE_NODE: Final = "complete_node"
FAIL_NODE: Final = "fail_node"
DECIDE: Final = "decide"
SATISFY: Final = "satisfy"
ACTIONS: Final = (PAUSE, RESUME, RETRY_NODE, SKIP_NODE, COMPLETE_NODE, FAIL_NODE, DECIDE, SATISFY)
"""The names of the actions, which are also the names of the updates of the workflow."""

RERUN: Final = "rerun"
"""How the audit names the start of a new run of an ended task."""

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


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RetryNode:
    """Input of `retry_node`: start a new generation of a node that has ended or is held, and of what depends on it."""

    node_id: str = ""
    input_inline: dict[str, Any] | None = None
    """Keys of the node's `input_inline` to replace. None as the value of a key removes it."""
    input_ref: dict[str, Any] | None = None
    timeout_sec: float | None = None
    retry_policy: dict[str, Any] | None = None
    """Keys of the node's `retry_policy` to replace."""
    interrupt: bool = False
    """Whether descendants that run are stopped."""
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SkipNode:
    """Input of `skip_node`: end a node as skipped by the user."""

    node_id: str = ""
    interrupt: bool = False
    """Whether attempts are stopped: of the node, and of descendants that have to start again."""
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CompleteNode:
    """Input of `complete_node`: end a node as finished, with these results."""

    node_id: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The final metrics of the node."""
    artifacts_ref: dict[str, Any] | None = None
    batches: tuple[dict[str, Any], ...] = ()
    """What nodes that pull from the node find: objects with `batch_uid`, `metrics` and optionally `artifacts_ref`."""
    interrupt: bool = False
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class FailNode:
    """Input of `fail_node`: end a node as failed. Routes and `allow_failure` apply as to any failure."""

    node_id: str = ""
    interrupt: bool = False
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Decide:
    """Input of `decide`: approve or reject at a node of the type `approval`."""

    node_id: str = ""
    decision: str = ""
    """`approve` or `reject`."""
    comment: str = ""
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Satisfy:
    """Input of `satisfy`: fulfil a prerequisite, for all nodes of the task that name it."""

    prerequisite: str = ""
    reason: str = ""
    by: str = ""
    if_revision: int | None = None


Action = Pause | Resume | RetryNode | SkipNode | CompleteNode | FailNode | Decide | Satisfy


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

    applied: list[AppliedAction] = field(default_factory=list)
    paused: list[PausedScope] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    """The paused scopes in which no attempt runs any more."""
