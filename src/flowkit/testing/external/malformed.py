"""Records that break the protocol, for tests of what an engine does with them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flowkit.testing.external.wire import compact, new_id

if TYPE_CHECKING:
    from collections.abc import Callable

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
