"""The messages that engines and external workers exchange: their envelope, kinds, payloads and ids.

The module is also the public import path of the models of graphs and task documents.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.dataclasses import dataclass

from flowkit.core.utils import stable_hash
from flowkit.protocol.documents import DagNode, NodeIO, RetryPolicy, Routing, RunState, TaskDoc

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "FINAL_UID",
    "ActiveRun",
    "CmdTaskCancel",
    "CmdTaskStart",
    "CommandKind",
    "DagNode",
    "Envelope",
    "EvBatchFailed",
    "EvBatchOk",
    "EvCancelled",
    "EvHeartbeat",
    "EvTaskAccepted",
    "EvTaskDone",
    "EvTaskFailed",
    "EvTaskResumed",
    "EvWorkerOffline",
    "EvWorkerOnline",
    "Event",
    "EventKind",
    "Lease",
    "Message",
    "MsgType",
    "NodeIO",
    "QTaskDiscover",
    "QueryKind",
    "RTaskSnapshot",
    "ReplyKind",
    "RetryPolicy",
    "Role",
    "Routing",
    "RunState",
    "SigCancel",
    "TaskDoc",
    "dedup_id",
    "outbox_fingerprint",
    "read_payload",
]

FINAL_UID = "__final__"
"""The `batch_uid` of a node's final metrics."""


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


class Message(BaseModel):
    """A part of a message. It ignores unknown fields and sends null fields, in the order of the protocol."""

    model_config = ConfigDict(extra="ignore")

    def to_json(self) -> bytes:
        """Return the wire format, compact UTF-8 JSON. Raise ValueError for a value that cannot be serialized."""
        return self.model_dump_json().encode()


def _new_id() -> str:
    return str(uuid.uuid4())


class Envelope(Message):
    """One Kafka record. Integers may also arrive as text, as `1.0` or as true; workers accept these too."""

    v: int = 1
    msg_type: MsgType
    role: Role
    """The role of the sender."""
    corr_id: str = Field(default_factory=_new_id)
    """Correlation id. A reply repeats the id of its query."""
    dedup_id: str
    task_id: str
    """The value is `*` in announcements; so are `node_id` and `step_type`."""
    node_id: str
    step_type: str
    """The worker role."""
    attempt_epoch: int
    ts_ms: int
    """Time in milliseconds by the sender's clock."""
    payload: dict[str, Any] = Field(default_factory=dict)
    target_worker_id: str | None = None
    """For signals: the worker that the signal addresses. None means all workers."""

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Parse the value of a Kafka record. Raise pydantic's ValidationError (a ValueError) if it is no envelope."""
        return cls.model_validate_json(text)


class CmdTaskStart(Message):
    """Command to run a node. `input_ref`, `input_inline` and `batching` are copied from its `io`."""

    cmd: Literal[CommandKind.TASK_START]
    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    cancel_token: str


class CmdTaskCancel(Message):
    """Command to stop a run. A busy worker does not read commands, so engines cancel with signals instead."""

    cmd: Literal[CommandKind.TASK_CANCEL]
    reason: str
    cancel_token: str


class SigCancel(Message):
    """Signal to stop a run. It is idempotent."""

    sig: str
    """`CANCEL`; workers ignore its case."""
    reason: str
    cancel_token: str | None = None
    deadline_ts_ms: int | None = None


class Event(Message):
    """Fields of all events that a worker sends."""

    kind: EventKind
    worker_id: str = Field(min_length=1)


class _Leased(Event):
    lease_id: str
    lease_deadline_ts_ms: int


class EvTaskAccepted(_Leased):
    """A worker has accepted the command. This is the first event of a run."""

    kind: Literal[EventKind.TASK_ACCEPTED]


class EvHeartbeat(_Leased):
    """The run is still in progress. A heartbeat may arrive after the end of its run."""

    kind: Literal[EventKind.TASK_HEARTBEAT]


class EvTaskResumed(_Leased):
    """Equivalent to a heartbeat. No known worker sends it."""

    kind: Literal[EventKind.TASK_RESUMED]


class EvBatchOk(Event):
    """A batch succeeded. Its metrics become the `meta` that other nodes pull."""

    kind: Literal[EventKind.BATCH_OK]
    batch_uid: str
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None


class EvBatchFailed(Event):
    """A batch failed. EvTaskFailed follows."""

    kind: Literal[EventKind.BATCH_FAILED]
    batch_uid: str
    reason_code: str
    permanent: bool = False
    error: str | None = None
    artifacts_ref: dict[str, Any] | None = None


class EvTaskDone(Event):
    """The run succeeded."""

    kind: Literal[EventKind.TASK_DONE]
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None
    final_uid: str = FINAL_UID


class EvTaskFailed(Event):
    """The run failed."""

    kind: Literal[EventKind.TASK_FAILED]
    reason_code: str
    permanent: bool = False
    error: str | None = None


class EvCancelled(Event):
    """The run was cancelled, either on request or because its handler raised CancelledError."""

    kind: Literal[EventKind.CANCELLED]
    reason: str = "cancelled"


@dataclass(kw_only=True)
class ActiveRun:
    """The run that an external worker holds, as stored in `worker_state` and sent in its announcement after a restart.

    A restarted worker announces the run but does not continue it.
    """

    task_id: str
    node_id: str
    step_type: str
    attempt_epoch: int
    lease_id: str
    cancel_token: str
    started_at_ms: int
    state: str = "running"
    """`running` or `cancelling`."""
    checkpoint: dict[str, Any] = Field(default_factory=dict)
    """Always an empty object."""


class EvWorkerOnline(Event):
    """A worker is online. Only its first announcement contains `capabilities` and `resume`."""

    kind: Literal[EventKind.WORKER_ONLINE]
    type: str
    """Its roles, joined by commas."""
    capabilities: dict[str, Any] | None = None
    version: str = "2.0.0"
    capacity: dict[str, Any] = Field(default_factory=lambda: {"tasks": 1})
    resume: ActiveRun | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        absent = {"capabilities", "resume"} - self.model_fields_set
        return {name: value for name, value in write(self).items() if name not in absent}


class EvWorkerOffline(Event):
    """A worker shut down gracefully."""

    kind: Literal[EventKind.WORKER_OFFLINE]


class QTaskDiscover(Message):
    """Query for the worker that runs a node. Workers read only the envelope."""

    query: Literal[QueryKind.TASK_DISCOVER]
    want_epoch: int


class Lease(Message):
    """The worker that holds a run, and the end of its lease."""

    worker_id: str
    lease_id: str
    deadline_ts_ms: int


class RTaskSnapshot(Message):
    """A worker's reply. `idle` means that this worker does not run the node; another one may."""

    reply: Literal[ReplyKind.TASK_SNAPSHOT]
    worker_id: str | None = None
    run_state: Literal["running", "cancelling", "finishing", "idle"]
    attempt_epoch: int
    lease: Lease | None = None
    progress: dict[str, Any] | None = None
    artifacts: dict[str, Any] | None = None


_KINDS: dict[tuple[MsgType, str], dict[str, type[Message]]] = {
    (MsgType.cmd, "cmd"): {"TASK_START": CmdTaskStart, "TASK_CANCEL": CmdTaskCancel},
    (MsgType.event, "sig"): {"CANCEL": SigCancel},
    (MsgType.event, "kind"): {
        "WORKER_ONLINE": EvWorkerOnline,
        "WORKER_OFFLINE": EvWorkerOffline,
        "TASK_ACCEPTED": EvTaskAccepted,
        "TASK_HEARTBEAT": EvHeartbeat,
        "TASK_RESUMED": EvTaskResumed,
        "BATCH_OK": EvBatchOk,
        "BATCH_FAILED": EvBatchFailed,
        "TASK_DONE": EvTaskDone,
        "TASK_FAILED": EvTaskFailed,
        "CANCELLED": EvCancelled,
    },
    (MsgType.query, "query"): {"TASK_DISCOVER": QTaskDiscover},
    (MsgType.reply, "reply"): {"TASK_SNAPSHOT": RTaskSnapshot},
}


def read_payload(envelope: Envelope) -> Message | None:
    """Return the payload as its model, or None for an unknown kind, which a newer release may send.

    Raise pydantic's ValidationError (a ValueError) if the kind is known but the payload does not fit its model.
    """
    for (msg_type, key), models in _KINDS.items():
        word = envelope.payload.get(key)
        if envelope.msg_type is msg_type and isinstance(word, str):
            model = models.get(word.upper() if key == "sig" else word)
            return None if model is None else model.model_validate(envelope.payload)
    return None


Hashed = dict[str, Any]


def dedup_id(envelope: Envelope, *, worker_id: str | None = None, hb_interval_ms: int = 20_000) -> str:
    """Return the correct id for `envelope`, ignoring its own `dedup_id`. Raise ValueError for an unknown kind.

    Most ids depend only on task, node and epoch, so two workers with the same run send the same ids. Two kinds of
    message need more: a heartbeat the interval of its worker, and a snapshot the id of the worker that replies.
    """
    payload = envelope.payload
    word = next((payload[key] for key in ("cmd", "query", "sig", "reply", "kind") if key in payload), None)
    if word == "TASK_SNAPSHOT":
        return stable_hash({**_run("snap", envelope), "w": worker_id or payload.get("worker_id")})
    if word == "TASK_HEARTBEAT":
        return stable_hash({**_run("hb", envelope), "t": envelope.ts_ms // max(1, hb_interval_ms)})
    if word not in _HASHED:
        raise ValueError(f"payload kind {word!r} has no dedup id; known: {', '.join(_HASHED)}")
    return stable_hash(_HASHED[word](envelope))


def outbox_fingerprint(topic: str, key: str, dedup: str) -> str:
    """Return the key that identifies one message among all messages of an engine."""
    return stable_hash({"topic": topic, "key": key, "dedup_id": dedup})


def _run(name: str, envelope: Envelope) -> Hashed:
    return {name: envelope.task_id, "n": envelope.node_id, "e": envelope.attempt_epoch}


def _order(key: str, word: str) -> Callable[[Envelope], Hashed]:
    """Return the fields to hash for a command or query. The hash includes the class name before the kind."""
    return lambda envelope: {
        key: word,
        "task_id": envelope.task_id,
        "node_id": envelope.node_id,
        "epoch": envelope.attempt_epoch,
    }


def _signal(envelope: Envelope) -> Hashed:
    return {
        "sig": "CANCEL",
        "task_id": envelope.task_id,
        "node": envelope.node_id,
        "epoch": envelope.attempt_epoch,
        "worker": envelope.target_worker_id,
    }


def _announce(envelope: Envelope) -> Hashed:
    return {
        "announce": envelope.payload["kind"],
        "worker": envelope.payload.get("worker_id"),
        "ts_ms": envelope.ts_ms,
    }


def _event(name: str, **fields: str) -> Callable[[Envelope], Hashed]:
    """Return the fields to hash for an event: the run, and some payload fields under short names."""
    return lambda envelope: {
        **_run(name, envelope),
        **{short: envelope.payload.get(field) for short, field in fields.items()},
    }


_HASHED: dict[str, Callable[[Envelope], Hashed]] = {
    "TASK_START": _order("cmd", "CommandKind.TASK_START"),
    "TASK_CANCEL": _order("cmd", "CommandKind.TASK_CANCEL"),
    "TASK_DISCOVER": _order("query", "QueryKind.TASK_DISCOVER"),
    "CANCEL": _signal,
    "WORKER_ONLINE": _announce,
    "WORKER_OFFLINE": _announce,
    "TASK_ACCEPTED": _event("acc", lease="lease_id"),
    "BATCH_OK": _event("bok", uid="batch_uid"),
    "BATCH_FAILED": _event("bf", uid="batch_uid"),
    "TASK_DONE": _event("td"),
    "TASK_FAILED": _event("tf", r="reason_code", p="permanent"),
    "CANCELLED": _event("c"),
}
