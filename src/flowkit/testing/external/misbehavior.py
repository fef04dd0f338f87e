"""Everything that a worker can do wrong (the hazards H1 to H34 of the protocol): its switches, and
malformed records."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from flowkit.testing.external.protocol import compact, new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(kw_only=True)
class Misbehavior:
    """What a worker does wrong. All switches are off by default, and a test can change them while the worker runs.

    A correct worker already has many hazards of the protocol: it drops commands while it is busy (H2), forgets its
    pause at a rebalance, ends a command loop at an invalid record (H1), sends no terminal event when it stops (H14),
    and announces a stored run after a restart without executing it (H9). These need no switch.
    """

    drop_commands: int = 0
    """H2: how many of the next TASK_START commands the worker commits and drops without an event. It counts down."""
    never_pause: bool = False
    """H2: the worker keeps reading commands while it is busy, so it commits and drops every command that arrives. A
    correct worker does so after a rebalance."""
    crash_after_accepted: Literal["", "before_commit", "after_commit"] = ""
    """The worker crashes after TASK_ACCEPTED and sends no other event. `after_commit` is H6: Kafka does not redeliver
    the command. `before_commit` is H7: after the session timeout another worker accepts the same epoch."""
    crash_after: str = ""
    """H6: the worker crashes as soon as the broker has acknowledged an event of this kind, for example `BATCH_OK`."""
    second_owner: bool = False
    """H7, H16: the worker reads commands in a consumer group of its own, so it accepts every command that another
    worker also accepts. Takes effect at the next start."""
    epoch_shift: int = 0
    """H3: number to add to the epoch of every event; -1 sends the events of a stale epoch."""
    heartbeats_on: str = ""
    """H15: role on whose status topic, and with whose `step_type`, the worker sends its heartbeats."""
    silence: bool = False
    """H33: the worker sends no heartbeats."""
    fail_accepted: bool = False
    """H28: sending TASK_ACCEPTED fails. The worker stays busy, sends nothing, and its command loop has ended."""
    no_terminal: bool = False
    """H34: the worker sends no terminal event, and is free again."""
    leak_cancel_at: int | None = None
    """H13: before the batch with this number (from 0), CancelledError occurs without a request: the worker sends
    CANCELLED."""
    after_end: Sequence[str] = ()
    """H17: kinds of events that the worker sends again after the terminal event: TASK_HEARTBEAT, BATCH_OK,
    TASK_DONE, TASK_FAILED (transient) or CANCELLED."""
    partial_refused: bool = False
    """H18: the write of partial artifacts fails, so that only the complete marker exists. This happens to workers that
    name the path `status` in two operators of one update, which MongoDB rejects."""
    duplicate_events: int = 0
    """H16: how many additional copies of every status event the worker sends."""
    reorder_events: int = 0
    """The worker collects this number of status events and sends them in reverse order. A terminal event ends a
    collection early, so it overtakes the events before it. TASK_ACCEPTED and heartbeats count, too."""
    delay_sec: float = 0
    """Seconds to wait before sending each status event; the event keeps its time of creation."""
    hold: Sequence[str] = ()
    """Kinds of events that the worker keeps back until `ExternalWorker.release()`, for delays without a clock."""
    malformed: Sequence[Malformed] = ()
    """Malformed records to send on the status topic before every status event."""

    @classmethod
    def parse(cls, switches: Sequence[str]) -> Misbehavior:
        """Return the switches given as `name=value` on a command line; values are JSON, or else text.

        Raise ValueError for an unknown name.
        """
        known = {each.name for each in fields(cls)}
        given = dict(switch.partition("=")[::2] for switch in switches)
        if unknown := given.keys() - known:
            raise ValueError(f"unknown misbehavior {sorted(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**{name: _value(text) for name, text in given.items()})

    def reset(self) -> None:
        """Turn all switches off."""
        for name, value in dataclasses.asdict(Misbehavior()).items():
            setattr(self, name, value)


def _value(text: str) -> Any:
    try:
        return json.loads(text or "true")
    except ValueError:
        return text


HUGE_BYTES = 900_000
"""The size of the text in a huge record, just below the record limit of clients and brokers (1 MiB)."""
DEPTH = 50_000


class Malformed(StrEnum):
    """A kind of malformed record."""

    not_json = "not_json"
    invalid_utf8 = "invalid_utf8"
    empty = "empty"
    """A value of zero bytes."""
    tombstone = "tombstone"
    """A record without a value."""
    array = "array"
    """JSON, but not an object."""
    deep = "deep"
    """JSON arrays nested deeper than parsers recurse."""
    wrong_types = "wrong_types"
    """An envelope whose ids are numbers and whose epoch is text."""
    missing_fields = "missing_fields"
    """An envelope without its required fields."""
    unknown_msg_type = "unknown_msg_type"
    unknown_kind = "unknown_kind"
    """A valid envelope with a kind that the protocol does not have."""
    no_kind = "no_kind"
    """A valid envelope with an empty payload."""
    payload_null = "payload_null"
    payload_wrong_types = "payload_wrong_types"
    """A BATCH_OK whose payload fields have the wrong types."""
    payload_missing_fields = "payload_missing_fields"
    """A TASK_ACCEPTED without its lease."""
    nul_character = "nul_character"
    """A BATCH_OK whose metrics hold a NUL character in a key, which MongoDB cannot store."""
    huge_integer = "huge_integer"
    """A BATCH_OK with an integer beyond 64 bits, which MongoDB cannot store."""
    huge = "huge"
    """A valid BATCH_OK of nearly 1 MiB."""


def malformed(kind: Malformed, like: dict[str, Any] | None = None) -> bytes | None:
    """Return the value of a malformed record.

    `like` is a message, such as a `Sent.message`, whose task, node, epoch and worker the record repeats.
    """
    return _MAKERS[kind](_template(like or {}))


def _template(like: dict[str, Any]) -> dict[str, Any]:
    envelope = {
        "v": 1,
        "msg_type": "event",
        "role": "worker",
        "corr_id": new_id(),
        "dedup_id": new_id(),
        "task_id": "unknown-task",
        "node_id": "unknown-node",
        "step_type": "unknown-role",
        "attempt_epoch": 1,
        "ts_ms": 1_764_000_000_000,
        "payload": {},
        "target_worker_id": None,
    }
    copied = ("task_id", "node_id", "step_type", "attempt_epoch", "ts_ms")
    worker = like.get("payload", {}).get("worker_id", "w-unknown")
    return {
        **envelope,
        **{name: like[name] for name in copied if name in like},
        "payload": {"worker_id": worker},
    }


def _batch_ok(metrics: Any, **changes: Any) -> Callable[[dict[str, Any]], bytes]:
    fields = {
        "kind": "BATCH_OK",
        "batch_uid": "malformed",
        "metrics": metrics,
        "artifacts_ref": None,
        **changes,
    }
    return lambda envelope: compact({**envelope, "payload": {**envelope["payload"], **fields}})


def _changed(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda envelope: compact({**envelope, **changes})


def _kind(kind: str) -> Callable[[dict[str, Any]], bytes]:
    return lambda envelope: compact({**envelope, "payload": {**envelope["payload"], "kind": kind}})


_MAKERS: dict[Malformed, Callable[[dict[str, Any]], bytes | None]] = {
    Malformed.not_json: lambda _: b"this is not JSON",
    Malformed.invalid_utf8: lambda _: b'{"v":1,"msg_type":"\xff\xfe"}',
    Malformed.empty: lambda _: b"",
    Malformed.tombstone: lambda _: None,
    Malformed.array: lambda envelope: compact([envelope]),
    Malformed.deep: lambda _: b"[" * DEPTH + b"]" * DEPTH,
    Malformed.wrong_types: _changed(task_id=1, node_id=["a"], attempt_epoch="first", ts_ms=1.5),
    Malformed.missing_fields: lambda envelope: compact({"v": 1, "payload": envelope["payload"]}),
    Malformed.unknown_msg_type: _changed(msg_type="rumor"),
    Malformed.unknown_kind: _kind("TASK_TELEPORTED"),
    Malformed.no_kind: _changed(payload={}),
    Malformed.payload_null: _changed(payload=None),
    Malformed.payload_wrong_types: _batch_ok([1, 2], batch_uid=7, artifacts_ref="text"),
    Malformed.payload_missing_fields: _kind("TASK_ACCEPTED"),
    Malformed.nul_character: _batch_ok({"a\x00b": 1}),
    Malformed.huge_integer: _batch_ok({"count": 2**80}),
    Malformed.huge: _batch_ok({"text": "x" * HUGE_BYTES}),
}
