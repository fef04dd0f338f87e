"""Payloads of the protocol, one model for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.dataclasses import dataclass

from flowkit.protocol.envelope import Message
from flowkit.protocol.kinds import CommandKind, EventKind, MsgType, QueryKind, ReplyKind

if TYPE_CHECKING:
    from flowkit.protocol.envelope import Envelope

FINAL_UID = "__final__"
"""Batch uid under which final metrics are stored."""


class CmdTaskStart(Message):
    """Order to run a node; the first three are its `io`, word for word."""

    cmd: Literal[CommandKind.TASK_START]
    input_ref: dict[str, Any] | None = None
    input_inline: dict[str, Any] | None = None
    batching: dict[str, Any] | None = None
    cancel_token: str


class CmdTaskCancel(Message):
    """Order to stop; a busy worker does not read it, which is why cancels are signals."""

    cmd: Literal[CommandKind.TASK_CANCEL]
    reason: str
    cancel_token: str


class SigCancel(Message):
    """Signal to stop a run; may be repeated freely."""

    sig: str
    """`CANCEL`; workers do not mind its case."""
    reason: str
    cancel_token: str | None = None
    deadline_ts_ms: int | None = None


class Event(Message):
    """What all events of a worker hold."""

    kind: EventKind
    worker_id: str | None = None
    """Workers always send it; the absence of it is no reason to refuse an event."""


class _Leased(Event):
    lease_id: str
    lease_deadline_ts_ms: int


class EvTaskAccepted(_Leased):
    """A worker has taken the order; first event of a run."""

    kind: Literal[EventKind.TASK_ACCEPTED]


class EvHeartbeat(_Leased):
    """The run goes on; may still arrive after its end."""

    kind: Literal[EventKind.TASK_HEARTBEAT]


class EvTaskResumed(_Leased):
    """As a heartbeat; no known worker sends it."""

    kind: Literal[EventKind.TASK_RESUMED]


class EvBatchOk(Event):
    """A batch is done; its metrics become the meta that other nodes pull."""

    kind: Literal[EventKind.BATCH_OK]
    batch_uid: str
    metrics: dict[str, Any] = Field(default_factory=dict)
    artifacts_ref: dict[str, Any] | None = None


class EvBatchFailed(Event):
    """A batch failed; EvTaskFailed follows."""

    kind: Literal[EventKind.BATCH_FAILED]
    batch_uid: str
    reason_code: str
    permanent: bool = False
    error: str | None = None
    artifacts_ref: dict[str, Any] | None = None


class EvTaskDone(Event):
    """The run ended well."""

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
    """The run stopped, because it was asked to or because its handler leaked a cancel."""

    kind: Literal[EventKind.CANCELLED]
    reason: str = "cancelled"


@dataclass(kw_only=True)
class ActiveRun:
    """The run that an external worker holds, as it stands in `worker_state` and in its announce after a restart.

    A restarted worker announces it but does not run it any more.
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
    """Always empty."""


class EvWorkerOnline(Event):
    """A worker is there. Only the announce at its start holds `capabilities` and `resume`."""

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
    """A worker went away gently."""

    kind: Literal[EventKind.WORKER_OFFLINE]


class QTaskDiscover(Message):
    """Who runs this node? Workers read the envelope alone."""

    query: Literal[QueryKind.TASK_DISCOVER]
    want_epoch: int


class Lease(Message):
    """Who holds a run, and for how long."""

    worker_id: str
    lease_id: str
    deadline_ts_ms: int


class RTaskSnapshot(Message):
    """A worker's answer; `idle` means "not me" and not "nobody"."""

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
    """The payload as its model; None when its kind is unknown, which is no error: newer senders know more.

    pydantic's ValidationError (a ValueError) when the kind is known and the rest does not fit it.
    """
    for (msg_type, key), models in _KINDS.items():
        word = envelope.payload.get(key)
        if envelope.msg_type is msg_type and isinstance(word, str):
            model = models.get(word.upper() if key == "sig" else word)
            return None if model is None else model.model_validate(envelope.payload)
    return None
