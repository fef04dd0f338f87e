"""The messages that bridges and external workers exchange: builds those of the bridge, parses those of workers. Pure.

The content of a Kafka record is untrusted, because any program may write to the topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError

from flowkit.graph.input_adapters import NOOP, parse_pull
from flowkit.limits import ID_CHARS, KAFKA_RECORD_BYTES, LARGEST_EPOCH
from flowkit.protocol.messages import (
    CmdTaskStart,
    CommandKind,
    Envelope,
    Event,
    EvWorkerOffline,
    EvWorkerOnline,
    Message,
    MsgType,
    QTaskDiscover,
    QueryKind,
    Role,
    RTaskSnapshot,
    SigCancel,
    dedup_id,
    read_payload,
)
from flowkit.text import clean, shorten
from flowkit.validation.invalid import describe
from flowkit.validation.values import is_node_id, is_task_id

if TYPE_CHECKING:
    from flowkit.graph.input_adapters import PullArgs
    from flowkit.models import AttemptInput

ANY = "*"
"""Task, node and role of announcements."""

_ADAPTER, _ARGS = "input_adapter", "input_args"
_SHOWN_CHARS = 300
_KEY_BYTES = 2 * 4 * ID_CHARS + 1
"""The longest key that names a task and a node: a character has up to four bytes."""

_LATEST_MS = 2**53
"""Times are below this limit, up to which floating-point numbers are exact."""


def task_start(attempt: AttemptInput, cancel_token: str, at: float) -> Envelope:
    """Return the command that starts an attempt. Its dedup id is the same for every call with the same epoch."""
    payload = CmdTaskStart(
        cmd=CommandKind.TASK_START,
        input_ref=attempt.io.input_ref,
        input_inline=worker_input(attempt),
        batching=attempt.io.batching,
        cancel_token=cancel_token,
    )
    return _envelope(MsgType.cmd, attempt, payload, at)


def cancel_signal(
    attempt: AttemptInput, reason: str, at: float, *, worker_id: str | None, deadline: float | None = None
) -> Envelope:
    """Return the signal that stops one epoch of a node on `worker_id`, or on every worker if it is None.

    Handlers see `deadline`, in seconds since the Unix epoch. Workers do not enforce it.
    """
    payload = SigCancel(
        sig="CANCEL", reason=reason, deadline_ts_ms=None if deadline is None else int(deadline * 1000)
    )
    return _envelope(MsgType.event, attempt, payload, at, target=worker_id)


def task_discover(attempt: AttemptInput, at: float) -> Envelope:
    """Return the query for the worker that runs an attempt. It reaches only one worker, so it may get no reply."""
    payload = QTaskDiscover(query=QueryKind.TASK_DISCOVER, want_epoch=attempt.epoch)
    return _envelope(MsgType.query, attempt, payload, at)


def key_of(attempt: AttemptInput) -> str:
    """Return the record key of a command."""
    return f"{attempt.task_id}:{attempt.node_id}"


def _envelope(
    msg_type: MsgType, attempt: AttemptInput, payload: Message, at: float, *, target: str | None = None
) -> Envelope:
    envelope = Envelope(
        msg_type=msg_type,
        role=Role.coordinator,
        dedup_id="",
        task_id=attempt.task_id,
        node_id=attempt.node_id,
        step_type=attempt.role,
        attempt_epoch=attempt.epoch,
        ts_ms=int(at * 1000),
        payload=payload.model_dump(mode="json"),
        target_worker_id=target,
    )
    return envelope.model_copy(update={"dedup_id": dedup_id(envelope)})


def pull_of(attempt: AttemptInput) -> PullArgs | None:
    """Return the arguments of the attempt's pulling adapter; None if its graph names none. Raise BadInput."""
    inline = attempt.io.input_inline or {}
    return None if inline.get(_ADAPTER) in (None, "", NOOP) else parse_pull(inline)


def worker_input(attempt: AttemptInput) -> dict[str, Any] | None:
    """Return the `input_inline` of TASK_START: as the graph has it, with `failed_nodes` and without the adapter `noop`.

    External workers do not know `noop`. Validation has replaced every alias and rejected every unknown argument.
    """
    inline = attempt.io.inline_with(attempt.failed_nodes)
    if inline is None or inline.get(_ADAPTER) != NOOP:
        return inline
    return {name: value for name, value in inline.items() if name not in (_ADAPTER, _ARGS)}


class Malformed(ValueError):
    """A record that is not a message of the protocol."""


class KafkaRecord(Protocol):
    """A record as a consumer receives it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusEvent:
    """An event of a worker about one attempt."""

    envelope: Envelope
    event: Event
    role: str
    """The role on whose status topic it arrived."""

    @property
    def worker_id(self) -> str:
        """Id of the worker that sent the event."""
        return self.event.worker_id

    @property
    def node(self) -> tuple[str, str]:
        """Task id and node id."""
        return self.envelope.task_id, self.envelope.node_id

    @property
    def epoch(self) -> int:
        """The epoch of the attempt."""
        return self.envelope.attempt_epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class BadEvent:
    """A malformed record of a status topic, and what it still says about its attempt and its sender."""

    record: KafkaRecord
    why: Malformed
    role: str
    """The role on whose status topic it arrived."""
    nodes: tuple[tuple[str, str], ...]
    """Task id and node id. Several pairs if only the record's key names them, because ids may contain its colon."""
    epoch: int | None = None
    """The epoch; None if the record does not name it."""
    worker_id: str | None = None
    """The sender; None if that part of the record cannot be read, and empty if it names no sender."""

    @property
    def node(self) -> tuple[str, str]:
        """Task id and node id, once they are known."""
        return self.nodes[0]


def read_status(value: bytes | None, role: str) -> StatusEvent | None:
    """Return the event of a record on the status topic of `role`. Raise Malformed.

    Return None if its kind is unknown or does not concern an attempt.
    """
    envelope, payload = _read(value, MsgType.event)
    if not isinstance(payload, Event) or isinstance(payload, (EvWorkerOnline, EvWorkerOffline)):
        return None
    if envelope.task_id == ANY:
        return None
    _check_event(payload)
    return StatusEvent(envelope=envelope, event=payload, role=role)


def read_bad_event(record: KafkaRecord, role: str, why: Malformed) -> BadEvent | None:
    """Return what a malformed record on the status topic of `role` says about its attempt; None if it says nothing.

    Workers write the payload after the other fields, so these can be read even if the payload cannot. The key of the
    record names task and node, but not the epoch.
    """
    value = (record.value or b"")[:KAFKA_RECORD_BYTES]
    envelope = _read_envelope(value) or _read_envelope(value.partition(b',"payload":')[0] + b"}")
    if envelope is None:
        nodes = _nodes_of_key(record.key)
        return BadEvent(record=record, why=why, role=role, nodes=nodes) if nodes else None
    if envelope.role is not Role.worker or envelope.msg_type is not MsgType.event:
        return None
    sender = envelope.payload.get("worker_id")
    known = isinstance(sender, str) and len(sender) <= ID_CHARS
    return BadEvent(
        record=record,
        why=why,
        role=role,
        nodes=((envelope.task_id, envelope.node_id),),
        epoch=envelope.attempt_epoch,
        worker_id=(sender if known else "") if envelope.payload else None,
    )


def _read_envelope(value: bytes) -> Envelope | None:
    try:
        return Envelope.from_json(value)
    except (ValueError, RecursionError):
        return None


def _nodes_of_key(key: bytes | None) -> tuple[tuple[str, str], ...]:
    """Return each pair of a task id and a node id that the key `T:N` of a record may name."""
    if key is None or len(key) > _KEY_BYTES:
        return ()  # each colon of a key makes another pair, of its whole length
    try:
        parts = key.decode().split(":")
    except UnicodeDecodeError:
        return ()
    pairs = ((":".join(parts[:at]), ":".join(parts[at:])) for at in range(1, len(parts)))
    return tuple((task, node) for task, node in pairs if is_task_id(task) and is_node_id(node))


def read_announce(value: bytes | None) -> tuple[Envelope, Event] | None:
    """Return the announcement of a record; None for an unknown kind. Raise Malformed."""
    envelope, payload = _read(value, MsgType.event)
    return (envelope, payload) if isinstance(payload, Event) else None


def read_reply(value: bytes | None) -> tuple[Envelope, RTaskSnapshot] | None:
    """Return the reply of a record; None for an unknown kind. Raise Malformed."""
    envelope, payload = _read(value, MsgType.reply)
    return (envelope, payload) if isinstance(payload, RTaskSnapshot) else None


def _read(value: bytes | None, expected: MsgType) -> tuple[Envelope, Message | None]:
    if not value:
        raise Malformed("the record has no value")
    if len(value) > KAFKA_RECORD_BYTES:
        raise Malformed(f"the record has more than {KAFKA_RECORD_BYTES:,} bytes")
    try:
        envelope = Envelope.from_json(value)
        payload = read_payload(envelope)
    except (ValueError, RecursionError) as error:
        raise Malformed(_describe(error)) from None
    _check(envelope, expected)
    return envelope, payload


def _check(envelope: Envelope, expected: MsgType) -> None:
    if envelope.role is not Role.worker:
        raise Malformed(f"role is {envelope.role.value!r}, not 'worker'")
    if envelope.msg_type is not expected:
        raise Malformed(f"msg_type is {envelope.msg_type.value!r}, not {expected.value!r}")
    if envelope.task_id != ANY and not (is_task_id(envelope.task_id) and is_node_id(envelope.node_id)):
        raise Malformed("task_id or node_id is not valid")
    if not 0 <= envelope.attempt_epoch <= LARGEST_EPOCH:
        raise Malformed(f"attempt_epoch is not between 0 and {LARGEST_EPOCH}")
    if not 0 <= envelope.ts_ms < _LATEST_MS:
        raise Malformed("ts_ms is out of range")


def _check_event(event: Event) -> None:
    """Check the fields that dispatch records store. Without limits, one record could exceed MongoDB's limits."""
    for name in ("worker_id", "lease_id"):
        if len(getattr(event, name, "")) > ID_CHARS:
            raise Malformed(f"{name} has more than {ID_CHARS} characters")
    if not 0 <= getattr(event, "lease_deadline_ts_ms", 0) < _LATEST_MS:
        raise Malformed("lease_deadline_ts_ms is out of range")


def _describe(error: Exception) -> str:
    """Return the problems as one line of at most 300 characters, without the values, which may be secret."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = describe(error, hides=lambda path, value: True, quotes=False)
    return shorten(clean(text), _SHOWN_CHARS)
