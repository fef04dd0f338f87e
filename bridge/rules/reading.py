"""Parses Kafka records. Their content is untrusted, because any program may write to the topics. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.arguments import is_node_id, is_task_id
from flowkit.limits import ID_CHARS, KAFKA_RECORD_BYTES, LARGEST_EPOCH
from flowkit.protocol.envelope import Envelope
from flowkit.protocol.kinds import MsgType, Role
from flowkit.protocol.payloads import Event, EvWorkerOffline, EvWorkerOnline, RTaskSnapshot, read_payload
from flowkit.text import clean

if TYPE_CHECKING:
    from flowkit.protocol.envelope import Message

ANY = "*"
"""Task, node and role of announcements."""

_SHOWN_CHARS = 300
_LATEST_MS = 2**53
"""Times are below this limit, up to which floating-point numbers are exact."""


class Malformed(ValueError):
    """A record that is not a message of the protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusEvent:
    """An event of a worker about one attempt."""

    envelope: Envelope
    event: Event

    @property
    def worker_id(self) -> str:
        """Id of the worker that sent the event; empty if the event does not contain it."""
        return self.event.worker_id or ""

    @property
    def node(self) -> tuple[str, str]:
        """Task id and node id."""
        return self.envelope.task_id, self.envelope.node_id


def read_status(value: bytes | None) -> StatusEvent | None:
    """Return the event of a record; None if its kind is unknown or does not concern an attempt. Raise Malformed."""
    envelope, payload = _read(value, MsgType.event)
    if not isinstance(payload, Event) or isinstance(payload, (EvWorkerOnline, EvWorkerOffline)):
        return None
    if envelope.task_id == ANY:
        return None
    _check_event(payload)
    return StatusEvent(envelope=envelope, event=payload)


def read_announce(value: bytes | None) -> tuple[Envelope, Event] | None:
    """Return the announcement of a record; None for an unknown kind. Raise Malformed."""
    envelope, payload = _read(value, MsgType.event)
    return (envelope, payload) if isinstance(payload, Event) and payload.worker_id else None


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
        raise Malformed(f"attempt_epoch {envelope.attempt_epoch} is not between 0 and {LARGEST_EPOCH}")
    if not 0 <= envelope.ts_ms < _LATEST_MS:
        raise Malformed("ts_ms is out of range")


def _check_event(event: Event) -> None:
    """Check the fields that dispatch records store. Without limits, one record could exceed MongoDB's limits."""
    for name in ("worker_id", "lease_id"):
        if len(getattr(event, name, None) or "") > ID_CHARS:
            raise Malformed(f"{name} has more than {ID_CHARS} characters")
    if not 0 <= getattr(event, "lease_deadline_ts_ms", 0) < _LATEST_MS:
        raise Malformed("lease_deadline_ts_ms is out of range")


def _short(error: Exception) -> str:
    """Return the error as one line of at most 300 characters."""
    text = " ".join(clean(str(error)).split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
