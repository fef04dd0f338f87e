"""The states of a task and its nodes, and what the workflow exchanges with the engine about them."""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any

from pydantic import dataclasses as wire

from flowkit.limits import CONDITIONS_SEC
from flowkit.models.actions import ActionRecord, AppliedAction
from flowkit.models.graphs import NodeStatus, SkipReason
from flowkit.models.waits import FIELDS as WAIT_FIELDS
from flowkit.models.waits import NodeWait


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


RUNTIME_KEYS = frozenset(
    {"status", "attempt_epoch", "lease", "stats", "streaming", "started_at", "finished_at", "run_id"}
    | {"last_event_recv_ms", "next_retry_at_ms", "last_error", "stats_cached_at", "cancel_requested_at"}
    | {"coordinator", "skip_reason", "applied_generation", "vars_write", "liveness", "failures", *WAIT_FIELDS}
    | {"generation", "first_epoch", "reset_by", "reason_code", "held_until_ms", "failed_batches", "paused"}
    | {"attempt_ended_at"}
)
"""Fields of a node that the engine writes. FlowKit ignores them in graphs that were copied from a task document."""

OPEN_NODE_STATUSES = [s.value for s in NodeStatus if not s.ended]
OPEN_TASK_STATUSES = [s.value for s in TaskStatus if not s.closed]


_STOPPED = frozenset({SkipReason.TASK_FAILED, SkipReason.TASK_CANCELLED})


@wire.dataclass(kw_only=True, slots=True)
class NodeState:
    """The state of one node in the workflow."""

    status: NodeStatus = NodeStatus.QUEUED
    epoch: int = 0
    """Epoch of the latest attempt in any run; 0 if there was none. Each attempt has a higher epoch than the last."""
    generation: int = 0
    """Number of times the node was reset, by an action or a rerun of the task."""
    first_epoch: int = 0
    """The epoch that the latest reset of the node has reserved: its attempts have higher ones. 0 without a reset."""
    failures: int = 0
    losses: int = 0
    """Number of losses since the last one before which the generation had settled further batches."""
    settled: int = 0
    """Largest number of batches that the generation had stored or set aside, as its failed attempts report it."""
    yields: int = 0
    """Number of consecutive yields for the same reason; yields use no budget."""
    free: bool = False
    """Whether the last attempt ended in a way that does not use the retry budget."""
    next_retry_at: float | None = None
    last_error: str | None = None
    reason_code: str | None = None
    skip_reason: SkipReason | None = None
    streamed: bool = False
    """Whether an attempt of this run of the task has stored a batch. Noted only if another node streams
    from this one."""
    condition: bool | None = None
    """The result of the node's own condition; None if it has none or was not evaluated."""
    edges: dict[int, bool] = field(default_factory=dict)
    """The results of the conditions of edges to this node, by the index of the parent."""
    deadline_at: float | None = None
    """When the node must have ended. Set when its gate opens, if the node has a `deadline_sec`."""
    retry_left: float | None = None
    """Seconds of the wait for a retry that remain after a pause. Set while the node is paused."""
    deadline_left: float | None = None
    """Seconds that remain until the deadline of the node after a pause. Set while it is paused and runs no attempt."""
    evaluated: bool = False
    """Whether the values by expression of this generation are evaluated and stored."""
    kept: bool = False
    """Whether the node has started again in its generation, so that it keeps its values by expression."""
    failed_batches: int = 0
    """Number of batches that the node has set aside."""
    ordinary: bool = False
    """Whether the attempts of the node stay ordinary activities, although an engine hosts its role inline."""
    held_until: float | None = None
    """When the node fails if no operator decides before; None unless it has failed and is held."""
    waits_since: float | None = None
    """Since when the node waits for somebody outside the task, as the document shows it; None if it does not."""
    wait: NodeWait | None = None
    """What the node waits for before its next attempt. Only for display: the next run of the task sets it again."""

    @property
    def was_stopped(self) -> bool:
        """Whether the end of the task has kept the node from ending by itself."""
        return self.status is NodeStatus.CANCELLED or self.skip_reason in _STOPPED


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
    """Id of the engine's database, a slash, and its name."""
    search_attributes: tuple[str, ...] = ()
    """Search attributes that are registered in Temporal."""
    local_functions: tuple[str, ...] = ()
    """The engine's built-in functions. Each makes one write and may run as a local activity."""
    function_queue: str = ""
    """Task queue of coordinator functions that are not built in. Empty means the engine's own task queue."""
    max_in_flight: int = 1_000
    """Largest number of attempts in flight over all roles."""
    limits: bool = False
    """Whether attempts of the task need a concurrency slot. The engine reads the numbers live."""
    inline_roles: tuple[str, ...] = ()
    """Roles whose attempts the engine that opened the task runs itself, as local activities."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class StoredGraph:
    """Refers to the graph and params of a task that `create_task` stored because they are too large for Temporal."""

    graph_id: str
    """SHA-256 of the content."""
    parts: int
    size: int
    """Bytes of all parts together."""
    deployment: str
    """Database id of the database that holds the parts."""
    schedule_id: str = ""
    """The schedule to which the parts belong; empty if they belong to the task itself."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ReadStoredGraph:
    """Input of `read_stored_graph`: one part of the stored graph of a task."""

    task_id: str
    stored: StoredGraph
    part: int


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Rerun:
    """Which run of an ended task a new run continues, and which nodes start again."""

    run_seq: int
    closed_run_id: str | None
    """The `run_seq` of the task document and the run that has closed it. The new run opens no document with others.

    A task that no run has opened has been closed without one.
    """
    nodes: list[str]
    """The nodes that start again, with those that depend on them."""
    keeps: list[str] = field(default_factory=list)
    """Those of these nodes that keep their batches, and try those again that they have set aside."""
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node id, the fields of nodes that change (`actions.changes_of`)."""
    reason: str = ""
    by: str = ""
    replaces: bool = False
    """Whether the new run has another graph, and starts all of it: nothing of the earlier runs counts any more."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """What a new run of an ended task takes over from the task document: lists with one entry for each node."""

    statuses: str
    """The statuses as one letter each (`columns.status_column`)."""
    epochs: list[int]
    first_epochs: list[int]
    generations: list[int]
    skip_reasons: dict[int, str] = field(default_factory=dict)
    reason_codes: dict[int, str] = field(default_factory=dict)
    failed_batches: dict[int, int] = field(default_factory=dict)
    applied: list[AppliedAction] = field(default_factory=list)
    """The actions that were applied to the task in its earlier runs, as far as the document lists them."""
    satisfied: list[str] = field(default_factory=list)
    """The prerequisites that were satisfied in its earlier runs."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class OpenTask:
    """Input of `open_task`."""

    task_id: str
    first_run_id: str
    run_id: str
    at: float
    graph: dict[str, Any]
    params: dict[str, Any]
    stored: StoredGraph | None = None
    """Where to read graph and params, which are then empty here."""
    rerun: Rerun | None = None
    """Set if the run continues an ended task."""
    scheduled_at: str | None = None
    """The nominal time at which a schedule has started the task, as RFC 3339 text in UTC."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """Result of `open_task`: the external data that the workflow needs until it ends."""

    run_seq: int
    """Number that grows with each run that opens the document. A close by an older run is rejected."""
    settings: Settings
    created_at: float
    earlier: EarlierRun | None = None
    """Set if the run continues an ended task."""
    epochs: list[int] = field(default_factory=list)
    """Highest epoch that an earlier run has used, of each node in graph order; empty if all are 0."""
    document_bytes: int = 0
    """Size of the document, as an estimate; 0 if it is small (LARGE_DOCUMENT_BYTES)."""
    params: dict[str, Any] | None = None
    """The params of a task of a schedule, with the values of their expressions; None if they have none.

    Of a task whose graph is stored, only those that the workflow reads.
    """
    stored: StoredGraph | None = None
    """Where the task has its own copy of the graph that a schedule has stored."""


@wire.dataclass(kw_only=True, slots=True)
class StatusChange:
    """One entry of a task's `status_history`."""

    from_: str | None
    to: str
    at: float


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
    after_finish: bool = False
    """Whether the attempt has finished, but the workflow has decided that the node failed."""
    cancel_reason: str | None = None
    """Why the workflow stops only this node. The same write sets the node's own cancel flag."""
    wait: NodeWait | None = None
    """What it waits for that only somebody outside the task can bring about."""
    held_until: float | None = None
    reason_code: str | None = None
    decided: bool = False
    """Whether the node no longer waits for anything that the document may say that it waits for."""
    paused: bool | None = None
    """Whether the node is paused and runs no attempt; None unless a source with `max_ahead` asks for it."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    """The results with which an operator completes a node."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The final metrics."""
    artifacts_ref: dict[str, Any] | None = None
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Objects with `batch_uid`, `metrics` and optionally `artifacts_ref`."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class NodeReset:
    """A node that starts a new generation."""

    index: int
    node_id: str
    epoch: int
    """The epoch to reserve, or a higher one if an attempt has taken it meanwhile."""
    generation: int
    outcome: NodeOutcome | None = None
    """Set if the node ends at once, as finished."""
    io: dict[str, Any] | None = None
    """The fields of `io` that change; None if none does."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The other fields of the node that change."""
    keeps: bool = False
    """Whether the node stays in its generation, and keeps its batches."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class SettleBatches:
    """Input of `check_batches` and `settle_batches`: what to do with batches that a node has set aside."""

    task_id: str
    index: int
    node_id: str
    epoch: int
    """The epoch of the latest attempt. Batches that later ones set aside stay."""
    generation: int
    first_epoch: int
    batch_uids: list[str] = field(default_factory=list)
    """Empty for all batches that are not skipped."""
    skips: bool = False
    """Whether to skip the batches, instead of forgetting that they failed."""
    deployment: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class BatchesSettled:
    """Result of `settle_batches`: how many batches the node has still set aside."""

    left: int = 0


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class BatchesChecked:
    """Result of `check_batches`: those of the named batches that the node has not set aside."""

    unknown: list[str] = field(default_factory=list)


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ResetNodes:
    """Input of `reset_nodes`. `run_id` and `revision` identify the reset, so that a repetition changes nothing."""

    task_id: str
    run_id: str
    run_seq: int
    revision: int
    at: float
    nodes: list[NodeReset]
    deployment: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ResetDone:
    """Result of `reset_nodes`: the epochs that it has reserved, in the order of the input."""

    epochs: list[int]


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ChangedNode:
    """A node that changes before it starts."""

    index: int
    node: dict[str, Any]
    """The whole node, in the form in which a graph contains it."""
    generation: int


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class GraphChange:
    """Input of `change_graph`. `run_id` and `revision` identify the change, so that a repetition changes nothing."""

    task_id: str
    run_id: str
    run_seq: int
    revision: int
    at: float
    task: dict[str, Any] = field(default_factory=dict)
    """The present graph and params of the task, packed; empty if they are `stored`."""
    stored: StoredGraph | None = None
    added: dict[str, Any] = field(default_factory=dict)
    """The new `nodes`, with their `edges` and `edges_ex`."""
    changed: list[ChangedNode] = field(default_factory=list)
    deployment: str = ""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class GraphChanged:
    """Result of `change_graph`."""

    epochs: list[int] = field(default_factory=list)
    """The epochs after which the attempts of the new nodes begin: 0, unless a *Reset* of the workflow
    repeats the change."""
    stored: StoredGraph | None = None
    """Where the changed graph is stored; None if the workflow carries it."""
    document_bytes: int = 0
    """The same as in `Opened`."""


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
    reason: str | None = None
    """Why the task fails, if `status` says so already."""
    deployment: str = ""
    """Database id of the task document. Empty for tasks of an earlier release."""
    status_history_omitted: int = 0
    """Entries dropped from the middle of `status_history`."""
    silent: dict[int, str] = field(default_factory=dict)
    """Ids by index of the nodes to show as silent."""
    heard: list[int] = field(default_factory=list)
    """Indexes of the nodes that are no longer silent."""
    actions: ActionRecord = field(default_factory=ActionRecord)
    """The actions that were applied, and the paused scopes; empty if they have not changed."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class CloseTask:
    """Input of `close_task`, with `deployment` and `status_history_omitted` as in RecordTask.

    Default values are not sent (see `without_defaults`).
    """

    task_id: str
    run_id: str
    run_seq: int
    at: float
    status: TaskStatus
    status_history: list[StatusChange]
    nodes: list[NodeRecord]
    """Nodes that did not finish. All other nodes finished, except those in `unfinished`."""
    unfinished: dict[NodeStatus, list[int]] = field(default_factory=dict)
    """Indexes, by status, of the nodes that did not finish, if they are too many for `nodes`.

    The workflow has written their records before.
    """
    handled_failures: list[str] = field(default_factory=list)
    handled_failures_omitted: int = 0
    failed_batches: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    deployment: str = ""
    status_history_omitted: int = 0
    dead: bool = False
    """Whether the task failed because an attempt sent no heartbeats."""
    applied: list[AppliedAction] = field(default_factory=list)
    """The latest actions that were applied."""
    admitted_as: str | None = None
    """The try of a request for admission that has started the task; None if something else has started it."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """Result of the workflow."""

    task_id: str
    status: TaskStatus
    handled_failures: list[str] = field(default_factory=list)
    """Ids of the failed nodes whose failures the task tolerates or has handled."""
    handled_failures_omitted: int = 0
    """Number of further ids, which exceed HANDLED_FAILURES_BYTES."""
    failed_batches: dict[str, int] = field(default_factory=dict)
    """How many batches were set aside, by node id. Nodes that have set none aside are absent."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConditions:
    """Input of `evaluate_conditions`. Default values are not sent (see `without_defaults`)."""

    task_id: str
    texts: list[str]
    """The expressions, each once."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """What the expressions can read of nodes, packed; empty if they read none. The task document may be older.

    Each row is a status, a reason code if the status is `failed`, and the ids of the nodes that have both.
    """
    seconds: float = CONDITIONS_SEC
    """Most time that the evaluation may take."""
    deployment: str = ""
    node_id: str = ""
    """The node whose values by expression to evaluate and to store; empty for conditions."""
    generation: int = 0
    """The generation of this node."""
    keeps: bool = False
    """Whether the node runs again in this generation, so that the values that it has stored stay as they are."""
    map_over: str = ""
    """The expression of this node whose value is a list, to be stored in batches; empty for a node without `map`."""
    map_batch_size: int = 1


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class ConditionResults:
    """Result of `evaluate_conditions`, in the order of the input."""

    results: list[bool | str]
    """The result of each expression. A text says why the expression cannot be evaluated.

    The result of a value by expression is true, because the value itself is stored only in MongoDB.
    """
