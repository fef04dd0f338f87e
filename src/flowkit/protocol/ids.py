"""The `dedup_id` of each message, computed as earlier engines and their workers do (protocol: identifiers)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowkit.hashing import stable_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.protocol.envelope import Envelope

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
