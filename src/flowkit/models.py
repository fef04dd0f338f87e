"""Records that clients, workflows, activities and stores exchange.

They are plain dataclasses. Each workflow, activity and signal takes one record and returns one. Add fields, but never
move them, because recorded histories contain them. Times are Unix timestamps in seconds unless the name ends in `_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import dataclasses as wire

from flowkit import reason_codes, temporal_names


class TaskStatus(StrEnum):
    """Status of a task in its task document (spec: task lifecycle)."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    """No node runs, and at least one waits for its retry."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def closed(self) -> bool:
        """Whether the task has ended."""
        return self in {TaskStatus.FINISHED, TaskStatus.FAILED, TaskStatus.CANCELLED}


class NodeStatus(StrEnum):
    """Status of one node."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    """The node waits for its retry."""
    CANCELLING = "cancelling"
    """FlowKit has requested a cancel, and the attempt has not ended yet."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    """The node will not run; `skip_reason` says why."""

    @property
    def ended(self) -> bool:
        """Whether the node has ended."""
        return self in _ENDED


_ENDED = frozenset({NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.CANCELLED, NodeStatus.SKIPPED})

RUNTIME_KEYS = frozenset(
    {"status", "attempt_epoch", "lease", "stats", "streaming", "started_at", "finished_at", "run_id"}
    | {"last_event_recv_ms", "next_retry_at_ms", "last_error", "stats_cached_at", "cancel_requested_at"}
    | {"coordinator", "skip_reason", "applied_generation", "waits_for"}
)
"""Fields of a node that the engine writes. FlowKit ignores them in graphs that were copied from a task document."""

OPEN_NODE_STATUSES = [s.value for s in NodeStatus if s not in _ENDED]
OPEN_TASK_STATUSES = [s.value for s in TaskStatus if not s.closed]


class SkipReason(StrEnum):
    """Why a node was skipped."""

    ROUTING = "routing"
    CONDITION = "condition"
    UPSTREAM_FAILED = "upstream_failed"
    TASK_FAILED = "task_failed"
    TASK_CANCELLED = "task_cancelled"
    USER = "user"


class OnNodeFailure(StrEnum):
    """How the permanent failure of a node affects the rest of its task."""

    FAIL = "fail"
    """Stop the task: cancel running nodes and skip the others."""
    CONTINUE = "continue"
    """Let branches that do not depend on the node finish. The task still ends as `failed`."""


class StartWhen(StrEnum):
    """When a node's gate may open."""

    READY = "ready"
    FIRST_BATCH = "first_batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class FanIn:
    """How many parents must finish before a node starts: mode `all`, `any`, or `count` with a number."""

    mode: str = "all"
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Whether and when FlowKit retries a failed attempt of a node."""

    max: int = 2
    """Retry budget; a node that only fails has `max` + 1 attempts."""
    backoff_sec: float = 300.0
    backoff_coefficient: float = 1.0
    """Factor by which the backoff grows with each retry."""
    max_backoff_sec: float | None = None
    jitter: float = 0.0
    """Largest part of the backoff, from 0 to 1, that FlowKit subtracts at random."""
    permanent_on: tuple[str, ...] = (reason_codes.BAD_INPUT, reason_codes.SCHEMA_MISMATCH)
    """Reason codes that FlowKit never retries."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeIO:
    """The input of a node and, for coordinator functions, the function and its arguments."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    start_when: StartWhen = StartWhen.READY
    fn: str = temporal_names.NOOP
    fn_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One normalized node of a graph."""

    node_id: str
    index: int
    """Position in `graph.nodes`, by which the task document addresses the node."""
    type: str
    depends_on: tuple[str, ...] = ()
    """Ids of the parents, without those that route to this node."""
    fan_in: FanIn = field(default_factory=FanIn)
    io: NodeIO = field(default_factory=NodeIO)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    allow_failure: bool = False
    timeout_sec: float | None = None
    io_bytes: int = 2
    on_success: tuple[str, ...] = ()
    on_failure: tuple[str, ...] = ()
    conditional: bool = False
    """Whether the node starts only if a route leads to it. `on_success` is empty if FlowKit ignores the list."""

    @property
    def is_function(self) -> bool:
        """Whether the engine runs the node as a coordinator function."""
        return self.type == COORDINATOR_FN

    @property
    def pulls(self) -> bool:
        """Whether the node reads artifacts of other nodes."""
        return str((self.io.input_inline or {}).get("input_adapter", "")).startswith("pull.")

    @property
    def pulls_from(self) -> tuple[str, ...]:
        """Ids of the nodes whose artifacts the node reads."""
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
    """The state of one node in the workflow."""

    status: NodeStatus = NodeStatus.QUEUED
    epoch: int = 0
    """Epoch of the latest attempt in any run; 0 if there was none. Each attempt has a higher epoch than the last."""
    generation: int = 0
    """Number of times the node was rerun."""
    failures: int = 0
    losses: int = 0
    yields: int = 0
    """Number of consecutive yields for the same reason; yields use no budget."""
    free: bool = False
    """Whether the last attempt ended in a way that does not use the retry budget."""
    next_retry_at: float | None = None
    last_error: str | None = None
    reason_code: str | None = None
    skip_reason: SkipReason | None = None


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Engine settings that a task keeps until it ends, even if the engine's configuration changes."""

    queue: str = "flowkit"
    lease_ttl_sec: float = 45.0
    cancel_grace_sec: float = 30.0
    function_timeout_sec: float = 300.0
    window: int = 100
    """Largest number of attempts of one role in flight."""
    hold_starts_events: int = 40_000
    hold_starts_bytes: int = 40_000_000
    deployment: str = ""
    """Database id of the engine."""
    search_attributes: tuple[str, ...] = ()
    """Search attributes that are registered in Temporal."""
    local_functions: tuple[str, ...] = ()
    """The engine's built-in functions. Each makes one write and may run as a local activity."""
    function_queue: str = ""
    """Task queue of coordinator functions that are not built in. Empty means the engine's own task queue."""
    max_in_flight: int = 0
    """Largest number of attempts in flight over all roles. 0, for tasks of an earlier release, means no limit."""
    qualify_uids: bool = False
    """Whether batches of several sources get distinct uids (hazard H22). False for tasks of an earlier release."""
    empty_sources: bool = False
    """Whether `from_nodes: []` means no sources. False for tasks of an earlier release, where it meant the parents."""


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
    """Result of `open_task`: the external data that the workflow needs until it ends."""

    run_seq: int
    """Number that grows with each run that opens the document. A close by an older run is rejected."""
    settings: Settings
    created_at: float
    epochs: dict[str, int] = field(default_factory=dict)
    """Highest epoch that an earlier run has used, by node id. A missing node means 0."""


@wire.dataclass(kw_only=True, slots=True)
class StatusChange:
    """One entry of a task's `status_history`."""

    from_: str | None
    to: str
    at: float


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptInput:
    """Input of one attempt. Never change its default values, because they are not sent (see `without_defaults`)."""

    task_id: str
    node_id: str
    index: int
    role: str
    epoch: int
    generation: int = 0
    io: NodeIO = field(default_factory=NodeIO)
    sources: dict[str, int] = field(default_factory=dict)
    """Epochs of the sources that have ended, by node id."""
    lease_ttl_sec: float = 45.0
    cancel_grace_sec: float = 30.0
    deployment: str = ""
    timeout_sec: float | None = None
    """Seconds after which the executor ends the attempt. Time spent waiting for MongoDB does not count."""
    qualify_uids: bool = False
    failed_nodes: list[dict[str, Any]] = field(default_factory=list)
    """The nodes whose failure started this node: `node_id`, `attempt_epoch`, `reason_code`, `error`."""
    signal_first_batch: bool = False
    """Whether the executor signals the workflow when it has stored the first batch of this attempt."""
    max_ahead: int = 0
    """How many batches the attempt may be ahead of the slowest of `followers` that runs; 0 means without a limit."""
    followers: tuple[str, ...] = ()
    """Nodes that pull from this one while it runs, if `max_ahead` is set."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class FirstBatch:
    """Signal to the workflow: an attempt has stored its first batch, so nodes that stream from it may start."""

    node_id: str
    run_id: str
    epoch: int


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """Result of a finished attempt."""

    worker_id: str = ""
    batches: int = 0


class FailureKind(StrEnum):
    """How an attempt ended early, which determines how the workflow continues."""

    FAILURE = "failure"
    """The attempt failed. It uses one retry of the retry budget."""
    LOSS = "loss"
    """The executor disappeared. The loss counts against the budget of losses."""
    HANDOVER = "handover"
    """The worker shuts down. Another worker continues the node immediately, without using any budget."""
    EPOCH_TAKEN = "epoch_taken"
    """Another run has used the epoch. The node continues with a higher epoch, without using any budget."""
    YIELDED = "yielded"
    """The attempt waits for a source or a service. The node is retried later, without using any budget."""
    FENCED = "fenced"
    """A newer attempt has replaced this one, which ends permanently."""


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
    """State of one node to write to the task document. Default values are not sent (see `without_defaults`)."""

    index: int
    node_id: str
    status: NodeStatus
    epoch: int
    next_retry_at: float | None = None
    last_error: str | None = None
    skip_reason: SkipReason | None = None
    marker: bool = False
    """Whether another node pulls from this one, so that its end needs a complete marker."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RecordTask:
    """Input of `record`: state that only the workflow knows. Default values are not sent (see `without_defaults`)."""

    task_id: str
    run_id: str
    run_seq: int
    at: float
    nodes: list[NodeRecord]
    status: TaskStatus
    status_history: list[StatusChange]
    cancel_reason: str | None = None
    """If set, the same write sets the cancel flags of the task."""
    deployment: str = ""
    """Database id of the task document. Empty for tasks of an earlier release."""
    status_history_omitted: int = 0
    """Entries dropped from the middle of `status_history`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CloseTask:
    """Input of `close_task`, with the last two fields as in RecordTask. Default values are not sent (see `without_defaults`)."""

    task_id: str
    run_id: str
    run_seq: int
    at: float
    status: TaskStatus
    status_history: list[StatusChange]
    nodes: list[NodeRecord]
    """Nodes that did not finish. All other nodes finished."""
    handled_failures: list[str] = field(default_factory=list)
    reason: str | None = None
    truncated: bool = False
    """Whether error texts or `handled_failures` were truncated to limit the size of this record."""
    deployment: str = ""
    status_history_omitted: int = 0


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """Result of the workflow."""

    task_id: str
    status: TaskStatus
    handled_failures: list[str] = field(default_factory=list)
    """Ids of the failed nodes whose failures the task tolerates or has handled."""
