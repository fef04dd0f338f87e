"""Parses Kafka records. Their content is untrusted, because any program may write to the topics. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import ValidationError

from flowkit.limits import ID_CHARS, KAFKA_RECORD_BYTES, LARGEST_EPOCH
from flowkit.protocol.envelope import Envelope
from flowkit.protocol.kinds import MsgType, Role
from flowkit.protocol.payloads import Event, EvWorkerOffline, EvWorkerOnline, RTaskSnapshot, read_payload
from flowkit.text import clean, shorten
from flowkit.validation.values import is_node_id, is_task_id

if TYPE_CHECKING:
    from flowkit.protocol.envelope import Message

ANY = "*"
"""Task, node and role of announcements."""

_SHOWN_CHARS = 300
_LATEST_MS = 2**53
"""Times are below this limit, up to which floating-point numbers are exact."""


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


def bad_event(record: KafkaRecord, role: str, why: Malformed) -> BadEvent | None:
    """Return what a malformed record on the status topic of `role` says about its attempt; None if it says nothing.

    Workers write the payload after the other fields, so these can be read even if the payload cannot. The key of the
    record names task and node, but not the epoch.
    """
    value = (record.value or b"")[:KAFKA_RECORD_BYTES]
    envelope = _envelope(value) or _envelope(value.partition(b',"payload":')[0] + b"}")
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


def _envelope(value: bytes) -> Envelope | None:
    try:
        return Envelope.from_json(value)
    except (ValueError, RecursionError):
        return None


def _nodes_of_key(key: bytes | None) -> tuple[tuple[str, str], ...]:
    """Return each pair of a task id and a node id that the key `T:N` of a record may name."""
    try:
        parts = (key or b"").decode().split(":")
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
        raise Malformed(f"the record has {len(value):,} bytes, more than {KAFKA_RECORD_BYTES:,}")
    try:
        envelope = Envelope.from_json(value)
        payload = read_payload(envelope)
    except (ValueError, RecursionError) as error:
        raise Malformed(_short(error)) from None
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


def _short(error: Exception) -> str:
    """Return the first problem as one line of at most 300 characters, without the value, which may be secret."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        text = ": ".join(part for part in (".".join(map(str, first["loc"])), first["msg"]) if part)
    return shorten(clean(text), _SHOWN_CHARS)
