"""Enumerations of the protocol, where the value of each member is its name, and the uid of final metrics."""

from __future__ import annotations

from enum import StrEnum

FINAL_UID = "__final__"
"""The `batch_uid` of a node's final metrics."""


class RunState(StrEnum):
    """State of a task or node in the protocol of external workers and earlier releases. It has no `cancelled`."""

    queued = "queued"
    running = "running"
    deferred = "deferred"
    cancelling = "cancelling"
    finished = "finished"
    failed = "failed"


class MsgType(StrEnum):
    """Type of an envelope."""

    cmd = "cmd"
    event = "event"
    heartbeat = "heartbeat"
    """Never sent: heartbeats are sent as events."""
    query = "query"
    reply = "reply"


class Role(StrEnum):
    """Sender of an envelope."""

    coordinator = "coordinator"
    worker = "worker"


class EventKind(StrEnum):
    """Kind of an event that a worker sends."""

    WORKER_ONLINE = "WORKER_ONLINE"
    WORKER_OFFLINE = "WORKER_OFFLINE"
    TASK_ACCEPTED = "TASK_ACCEPTED"
    TASK_HEARTBEAT = "TASK_HEARTBEAT"
    TASK_RESUMED = "TASK_RESUMED"
    """Equivalent to a heartbeat. Workers of version 2 never send it."""
    BATCH_OK = "BATCH_OK"
    BATCH_FAILED = "BATCH_FAILED"
    TASK_DONE = "TASK_DONE"
    TASK_FAILED = "TASK_FAILED"
    CANCELLED = "CANCELLED"


class CommandKind(StrEnum):
    """Kind of a command that an engine sends. Workers ignore TASK_PAUSE and TASK_RESUME."""

    TASK_START = "TASK_START"
    TASK_CANCEL = "TASK_CANCEL"
    TASK_PAUSE = "TASK_PAUSE"
    TASK_RESUME = "TASK_RESUME"


class QueryKind(StrEnum):
    """Kind of a query that an engine sends."""

    TASK_DISCOVER = "TASK_DISCOVER"


class ReplyKind(StrEnum):
    """Kind of a reply that a worker sends."""

    TASK_SNAPSHOT = "TASK_SNAPSHOT"
