"""Words of the protocol: each member's value is its name."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """State of a task or node as external workers and the earlier system know it; `cancelled` is not among them."""

    queued = "queued"
    running = "running"
    deferred = "deferred"
    cancelling = "cancelling"
    finished = "finished"
    failed = "failed"


class MsgType(StrEnum):
    """What an envelope is."""

    cmd = "cmd"
    event = "event"
    heartbeat = "heartbeat"
    """Never sent: heartbeats travel as events."""
    query = "query"
    reply = "reply"


class Role(StrEnum):
    """Who has sent an envelope."""

    coordinator = "coordinator"
    worker = "worker"


class EventKind(StrEnum):
    """What a worker tells."""

    WORKER_ONLINE = "WORKER_ONLINE"
    WORKER_OFFLINE = "WORKER_OFFLINE"
    TASK_ACCEPTED = "TASK_ACCEPTED"
    TASK_HEARTBEAT = "TASK_HEARTBEAT"
    TASK_RESUMED = "TASK_RESUMED"
    """Never sent by workers of version 2; to be read as a heartbeat."""
    BATCH_OK = "BATCH_OK"
    BATCH_FAILED = "BATCH_FAILED"
    TASK_DONE = "TASK_DONE"
    TASK_FAILED = "TASK_FAILED"
    CANCELLED = "CANCELLED"


class CommandKind(StrEnum):
    """What an engine orders; workers ignore the last two."""

    TASK_START = "TASK_START"
    TASK_CANCEL = "TASK_CANCEL"
    TASK_PAUSE = "TASK_PAUSE"
    TASK_RESUME = "TASK_RESUME"


class QueryKind(StrEnum):
    """What an engine asks."""

    TASK_DISCOVER = "TASK_DISCOVER"


class ReplyKind(StrEnum):
    """What a worker answers."""

    TASK_SNAPSHOT = "TASK_SNAPSHOT"
