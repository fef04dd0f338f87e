"""The records that travel between client, workflow, activities and store.

Plain dataclasses: a workflow, an activity and a signal each take one record and return one. Fields are added, never
moved, because recorded histories hold them. Times are seconds since the epoch in UTC unless the name ends in `_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import dataclasses as wire


class TaskStatus(StrEnum):
    """Status of a task as its document shows it (spec: task lifecycle)."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    """Nothing runs and at least one node waits for its retry."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def closed(self) -> bool:
        """Whether the task has ended for good."""
        return self in {TaskStatus.FINISHED, TaskStatus.FAILED, TaskStatus.CANCELLED}


class NodeStatus(StrEnum):
    """Status of one node."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    """Waits for its retry."""
    CANCELLING = "cancelling"
    """Was asked to stop and has not answered yet."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    """Never ran; `skip_reason` says why."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to the node."""
        return self in _ENDED


_ENDED = frozenset({NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.SKIPPED})

RUNTIME_KEYS = frozenset(
    {"status", "attempt_epoch", "lease", "stats", "streaming", "started_at", "finished_at", "run_id"}
    | {"last_event_recv_ms", "next_retry_at_ms", "last_error", "stats_cached_at", "cancel_requested_at"}
    | {"coordinator", "skip_reason", "applied_generation"}
)
"""Fields of a node that an engine writes; a graph taken from a task document may hold them, and they are ignored."""

OPEN_NODE_STATUSES = [s.value for s in NodeStatus if s not in _ENDED]
OPEN_TASK_STATUSES = [s.value for s in TaskStatus if not s.closed]


class SkipReason(StrEnum):
    """Why a node never ran."""

    ROUTING = "routing"
    CONDITION = "condition"
    UPSTREAM_FAILED = "upstream_failed"
    TASK_FAILED = "task_failed"
    TASK_CANCELLED = "task_cancelled"
    USER = "user"


class OnNodeFailure(StrEnum):
    """What the permanent failure of one node does to the rest of its task."""

    FAIL = "fail"
    """Stop the task: running nodes are cancelled, the others skipped."""
    CONTINUE = "continue"
    """Let branches that do not depend on the node finish; the task ends `failed` all the same."""


class StartWhen(StrEnum):
    """When a node's gate may open."""

    READY = "ready"
    FIRST_BATCH = "first_batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """How many finished parents open a node's gate."""

    mode: str = "all"
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """When a failed attempt of a node is tried again."""

    max: int = 2
    """Retries; attempts = max + 1."""
    backoff_sec: float = 300.0
    backoff_coefficient: float = 1.0
    """Each further retry waits this many times longer."""
    max_backoff_sec: float | None = None
    jitter: float = 0.0
    """Part of the wait (0…1) that is taken off by chance."""
    permanent_on: tuple[str, ...] = ("bad_input", "schema_mismatch")
    """Reason codes that are never retried."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeIO:
    """A node's input and, for coordinator functions, what to call."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    start_when: StartWhen = StartWhen.READY
    fn: str = "noop"
    fn_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One normalised node of a graph."""

    node_id: str
    index: int
    """Place in `graph.nodes`; documents address the node by it."""
    type: str
    depends_on: tuple[str, ...] = ()
    fan_in: FanIn = field(default_factory=FanIn)
    io: NodeIO = field(default_factory=NodeIO)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    allow_failure: bool = False
    timeout_sec: float | None = None
    io_bytes: int = 2

    @property
    def is_function(self) -> bool:
        """Whether the engine itself runs the node as a coordinator function."""
        return self.type == COORDINATOR_FN

    @property
    def pulls(self) -> bool:
        """Whether the node reads artifacts of other nodes."""
        return str((self.io.input_inline or {}).get("input_adapter", "")).startswith("pull.")

    @property
    def pulls_from(self) -> tuple[str, ...]:
        """The nodes whose artifacts it reads."""
        args = (self.io.input_inline or {}).get("input_args") or {}
        return tuple(args.get("from_nodes") or ()) if self.pulls else ()


COORDINATOR_FN = "coordinator_fn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph that passed validation."""

    nodes: tuple[Node, ...]
    name: str | None = None
    on_node_failure: OnNodeFailure = OnNodeFailure.FAIL
    warnings: tuple[str, ...] = ()


@wire.dataclass(kw_only=True, slots=True)
class NodeState:
    """What the workflow has decided about one node so far."""

    status: NodeStatus = NodeStatus.QUEUED
    epoch: int = 0
    """Attempts begun so far; every attempt has its own."""
    generation: int = 0
    """Reruns of the node."""
    failures: int = 0
    losses: int = 0
    yields: int = 0
    """Times in a row that the node gave its slot back for the same reason, at no charge."""
    free: bool = False
    """Whether the last attempt ended in a way that does not count against the node's retries."""
    next_retry_at: float | None = None
    last_error: str | None = None
    reason_code: str | None = None
    skip_reason: SkipReason | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The part of the engine's settings that a task keeps for its whole life."""

    queue: str = "flowkit"
    lease_ttl_sec: float = 45.0
    cancel_grace_sec: float = 30.0
    function_timeout_sec: float = 300.0
    window: int = 100
    """Attempts of one role in flight at once."""
    hold_starts_events: int = 40_000
    hold_starts_bytes: int = 40_000_000
    deployment: str = ""
    """Id of the engine's database."""
    search_attributes: tuple[str, ...] = ()
    """Search attributes known to be registered."""
    local_functions: tuple[str, ...] = ()
    """Built-in coordinator functions of the engine: each is one write, tried without a round trip through the server."""
    function_queue: str = ""
    """Task queue of coordinator functions that are not built in; empty: the engine's own queue."""
    max_in_flight: int = 0
    """Attempts of one task in flight at once, over all roles; 0 (tasks opened by an earlier release): no limit."""
    qualify_uids: bool = False
    """Whether batches of several sources get uids of their own (hazard H22); off for tasks of an earlier release."""
    empty_sources: bool = False
    """Whether `from_nodes: []` means no sources; off for tasks of an earlier release, where it meant the parents."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class OpenTask:
    """Input of `open_task`."""

    task_id: str
    first_run_id: str
    run_id: str
    at: float
    graph: dict[str, Any]
    params: dict[str, Any]


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """Result of `open_task`: what the workflow needs from outside for its whole life."""

    run_seq: int
    """Grows with every run that opened the document; an older run's close is refused."""
    settings: Settings
    created_at: float
    epochs: dict[str, int] = field(default_factory=dict)
    """Epochs that an earlier run has used, by node id; absent means 0."""


@wire.dataclass(kw_only=True, slots=True)
class StatusChange:
    """One entry of a task's `status_history`."""

    from_: str | None
    to: str
    at: float


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptInput:
    """What an executor gets for one attempt. Default values are not sent (`slim`), so they never change."""

    task_id: str
    node_id: str
    index: int
    role: str
    epoch: int
    generation: int = 0
    io: NodeIO = field(default_factory=NodeIO)
    sources: dict[str, int] = field(default_factory=dict)
    """Epochs of the parents that have ended, by node id."""
    lease_ttl_sec: float = 45.0
    cancel_grace_sec: float = 30.0
    deployment: str = ""
    timeout_sec: float | None = None
    """Seconds after which the executor ends the attempt; time spent waiting for MongoDB does not count."""
    qualify_uids: bool = False
    """`Settings.qualify_uids` of the task."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """What a finished attempt tells the workflow."""

    worker_id: str = ""
    batches: int = 0


class FailureKind(StrEnum):
    """How the workflow treats a failed attempt."""

    FAILURE = "failure"
    """Counts against the node's retries."""
    LOSS = "loss"
    """The executor went away: counts against the losses."""
    HANDOVER = "handover"
    """A worker stopped gently: goes on elsewhere at once, at no charge."""
    EPOCH_TAKEN = "epoch_taken"
    """The epoch was used by another run: goes on behind it, at no charge."""
    YIELDED = "yielded"
    """Nothing to pull and no source at work: goes on when one is, at no charge."""
    FENCED = "fenced"
    """A newer attempt has taken over; ends this one for good."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailure:
    """Why an attempt failed."""

    kind: FailureKind
    code: str
    message: str = ""
    permanent: bool = False
    current_epoch: int = 0


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """One node as the workflow wants its document to show it. Default values are not sent (`slim`)."""

    index: int
    node_id: str
    status: NodeStatus
    epoch: int
    next_retry_at: float | None = None
    last_error: str | None = None
    skip_reason: SkipReason | None = None
    marker: bool = False
    """Whether somebody pulls from the node, so that its end needs a complete marker."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RecordTask:
    """Input of `record`: transitions that only the workflow knows. Default values are not sent (`slim`)."""

    task_id: str
    run_id: str
    run_seq: int
    at: float
    nodes: list[NodeRecord]
    status: TaskStatus
    status_history: list[StatusChange]
    cancel_reason: str | None = None
    """Set: the task's cancel flags go up in the same write."""
    deployment: str = ""
    """Id of the database that holds the document; empty for tasks of an earlier release."""
    status_history_omitted: int = 0
    """Entries dropped from the middle of `status_history`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CloseTask:
    """Input of `close_task`. Default values are not sent (`slim`)."""

    task_id: str
    run_id: str
    run_seq: int
    at: float
    status: TaskStatus
    status_history: list[StatusChange]
    nodes: list[NodeRecord]
    """Nodes that did not finish; all the others did."""
    handled_failures: list[str] = field(default_factory=list)
    reason: str | None = None
    truncated: bool = False
    """Whether error texts or `handled_failures` were cut to keep this record small."""
    deployment: str = ""
    """Id of the database that holds the document; empty for tasks of an earlier release."""
    status_history_omitted: int = 0
    """Entries dropped from the middle of `status_history`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """What the workflow returns when its task finished."""

    task_id: str
    status: TaskStatus
    handled_failures: list[str] = field(default_factory=list)
    """Nodes that failed although nobody minds (`allow_failure`)."""
