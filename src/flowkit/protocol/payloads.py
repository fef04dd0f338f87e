"""Payloads of the protocol: one model for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.dataclasses import dataclass

from flowkit.protocol.envelope import Message
from flowkit.protocol.kinds import FINAL_UID, CommandKind, EventKind, MsgType, QueryKind, ReplyKind

if TYPE_CHECKING:
    from flowkit.protocol.envelope import Envelope


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
