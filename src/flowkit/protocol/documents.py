"""Models of graphs and task documents, for programs that build or read them (spec: graph schema, task document)."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flowkit import models

_POLICY = models.RetryPolicy()
_IO = models.NodeIO()


class RunState(StrEnum):
    """State of a task or node in the protocol of external workers and earlier releases. It has no `cancelled`."""

    queued = "queued"
    running = "running"
    deferred = "deferred"
    cancelling = "cancelling"
    finished = "finished"
    failed = "failed"


NodeState = RunState | Literal[models.NodeStatus.CANCELLED, models.NodeStatus.SKIPPED]
TaskState = RunState | Literal[models.TaskStatus.CANCELLED]


class _Document(BaseModel):
    """Part of a document. It keeps unknown fields."""

    model_config = ConfigDict(extra="allow")


class RetryPolicy(_Document):
    """When FlowKit retries a failed attempt of a node. For further fields, see docs/graphs/failures.md."""

    max: int = _POLICY.max
    """Maximum number of retries; the number of attempts is `max` + 1."""
    backoff_sec: float | int = int(_POLICY.backoff_sec)
    permanent_on: list[str] = Field(default_factory=lambda: list(_POLICY.permanent_on))
    """Reason codes that are never retried."""


class NodeIO(_Document):
    """The input of a node or, for coordinator functions, the function to call."""

    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    start_when: str = _IO.start_when.value
    max_ahead: int | None = None
    fn: str = _IO.fn
    fn_args: dict[str, Any] = Field(default_factory=dict)


class Routing(_Document):
    """Nodes that run only if this node succeeds or fails."""

    on_success: list[str] = Field(default_factory=list)
    on_failure: list[str] = Field(default_factory=list)


class DagNode(_Document):
    """A node of a graph. Only engines write the fields from `status` on."""

    node_id: str
    type: str
    depends_on: list[str] = Field(default_factory=list)
    fan_in: str = "all"
    io: NodeIO = Field(default_factory=NodeIO)
    retry_policy: RetryPolicy = Field(default_factory=RetryPolicy)
    routing: Routing = Field(default_factory=Routing)
    status: NodeState = RunState.queued
    attempt_epoch: int = 0
    lease: dict[str, Any] = Field(default_factory=dict)
    stats: dict[str, Any] = Field(default_factory=dict)
    streaming: dict[str, Any] = Field(default_factory=dict)
    started_at: datetime | None = None
    finished_at: datetime | None = None
    last_event_recv_ms: int = 0
    next_retry_at_ms: int | None = None
    last_error: str | None = None


class TaskDoc(_Document):
    """A document of the collection `tasks`. Each item of `graph["nodes"]` fits DagNode."""

    id: str
    pipeline_id: str
    status: TaskState = RunState.queued
    params: dict[str, Any] = Field(default_factory=dict)
    graph: dict[str, Any] = Field(default_factory=dict)
    result: dict[str, Any] | None = None
    status_history: list[dict[str, Any]] = Field(default_factory=list)
    coordinator: dict[str, Any] = Field(default_factory=lambda: {"liveness": {"state": "ok"}})
    next_retry_at_ms: int | None = None
    started_at: str | datetime | None = None
    finished_at: datetime | None = None
    last_event_recv_ms: int = 0
