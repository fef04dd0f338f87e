"""Records that a bridge cannot handle: for each topic and kind, a valid message with one defect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.contract.bridge_side import kafka_record
from tests.unit.bridge_records import PAYLOADS, TASK, message

from flowkit.limits import ID_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokafka import ConsumerRecord
    from tests.contract.bridge_side import BridgeSide

Sent = dict[str, Any]
Make = Callable[[Sent], "bytes | None"]
Defects = dict[str, tuple[Make, str]]
BAD = "bad_metrics"
SKIPPED = "open"
"""The bridge cannot say that the owner of the run has sent the record, so the attempt continues."""


@dataclass(frozen=True, kw_only=True)
class Poison:
    """One record, and what becomes of the attempt that it names."""

    topic: str
    kind: str
    defect: str
    value: bytes | None
    code: str

    @property
    def name(self) -> str:
        """The node that the record names, or the worker."""
        return f"{self.topic} {self.kind} {self.defect}"


def nested(levels: int) -> Any:
    """Return an object with so many levels."""
    made: Any = 1
    for _ in range(levels):
        made = {"k": made}
    return made


def text(sent: Sent) -> bytes:
    """Return a message as workers write it: compact, with the fields in the order of the protocol."""
    return json.dumps(sent, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _with(sent: Sent, **changes: Any) -> bytes:
    return text({**sent, **changes})


def _payload(sent: Sent, **changes: Any) -> bytes:
    return text({**sent, "payload": {**sent["payload"], **changes}})


def _without(sent: Sent, name: str) -> bytes:
    return text({field: value for field, value in sent.items() if field != name})


def _raw(sent: Sent, field: str, value: bytes) -> bytes:
    """Return a message in whose payload a field has a value that `json` does not write."""
    return text({**sent, "payload": {**sent["payload"], field: "@"}}).replace(b'"@"', value)


DEEP = b'{"k":' * 300 + b"1" + b"}" * 300
ANY: Defects = {
    "not JSON": (lambda _: b"this is not JSON", BAD),
    "no value": (lambda _: None, BAD),
    "empty value": (lambda _: b"", BAD),
    "invalid UTF-8": (lambda sent: text(sent).replace(b'"payload":{', b'"payload":{"x":"\xff\xfe",'), BAD),
    "cut off": (lambda sent: text(sent)[:-40], BAD),
    "list": (lambda sent: text([sent]), BAD),  # type: ignore[arg-type]
    "300 levels": (lambda sent: _raw(sent, "more", DEEP), BAD),
    "lone surrogate": (lambda sent: _raw(sent, "more", b'"\\ud800"'), BAD),
    "payload is a list": (lambda sent: _with(sent, payload=[1]), BAD),
    "payload is null": (lambda sent: _with(sent, payload=None), BAD),
    "no epoch": (lambda sent: _without(sent, "attempt_epoch"), BAD),
    "epoch is text": (lambda sent: _with(sent, attempt_epoch="first"), BAD),
    "time beyond 2^53": (lambda sent: _with(sent, ts_ms=2**53), BAD),
    "unknown msg_type": (lambda sent: _with(sent, msg_type="rumor"), BAD),
    "a reply": (lambda sent: _with(sent, msg_type="reply"), SKIPPED),
    "of a coordinator": (lambda sent: _with(sent, role="coordinator"), SKIPPED),
    "node id is *": (lambda sent: _with(sent, node_id="*"), SKIPPED),
    "long worker id": (partial(_payload, worker_id="w" * (ID_CHARS + 1)), SKIPPED),
    "worker id is a number": (partial(_payload, worker_id=7), SKIPPED),
}
"""Defects of any kind of message: the record's value, and how the attempt ends."""

_METRICS: Defects = {
    "metrics of 185 levels": (partial(_payload, metrics=nested(185)), BAD),
    "metrics of 99 levels": (partial(_payload, metrics=nested(99)), BAD),
    "metrics with NUL in a key": (partial(_payload, metrics={"a\0b": 1}), BAD),
    "metrics with a large integer": (partial(_payload, metrics={"n": 2**80}), BAD),
    "metrics are a list": (partial(_payload, metrics=[1]), BAD),
    "reference of 185 levels": (partial(_payload, artifacts_ref=nested(185)), BAD),
    "reference is text": (partial(_payload, artifacts_ref="text"), BAD),
}
_LEASE: Defects = {
    "no lease": (partial(_payload, lease_id=None), BAD),
    "long lease id": (partial(_payload, lease_id="l" * (ID_CHARS + 1)), BAD),
    "deadline beyond 2^53": (partial(_payload, lease_deadline_ts_ms=10**400), BAD),
}
_UID: Defects = {
    "uid is a number": (partial(_payload, batch_uid=7), BAD),
    "uid of 501 characters": (partial(_payload, batch_uid="u" * 501), "bad_batch_uid"),
    "uid of the final metrics": (partial(_payload, batch_uid="__final__"), "bad_batch_uid"),
    "uid with NUL": (partial(_payload, batch_uid="a\0b"), "bad_batch_uid"),
    "uid of 900,000 characters": (partial(_payload, batch_uid="u" * 900_000), "bad_batch_uid"),
}
_REASON: Defects = {
    "no reason": (partial(_payload, reason_code=None), BAD),
    "permanent is text": (partial(_payload, permanent="perhaps"), BAD),
    "error is an object": (partial(_payload, error={}), BAD),
}
OWN: dict[str, Defects] = {
    "TASK_ACCEPTED": _LEASE,
    "TASK_HEARTBEAT": _LEASE,
    "TASK_RESUMED": _LEASE,
    "BATCH_OK": {**_METRICS, **_UID},
    "BATCH_FAILED": {**_REASON, **_UID},
    "TASK_DONE": _METRICS,
    "TASK_FAILED": _REASON,
    "CANCELLED": {"no reason": (partial(_payload, reason=None), BAD)},
}
"""Defects of single kinds of events."""

ONLINE: Sent = {"type": "indexer", "version": "2", "capacity": {"tasks": 1}}
_ANNOUNCED: dict[str, Make] = {
    "capabilities of 185 levels": partial(_payload, capabilities=nested(185)),
    "capabilities of 99 levels": partial(_payload, capabilities=nested(99)),
    "capabilities with NUL in a key": partial(_payload, capabilities={"\0": 1}),
    "capabilities of 900,000 bytes": partial(_payload, capabilities={"text": "x" * 900_000}),
    "capacity of 185 levels": partial(_payload, capacity=nested(185)),
    "capacity with a large integer": partial(_payload, capacity={"tasks": 2**80}),
    "no type": partial(_payload, type=None),
    "resume is text": partial(_payload, resume="run"),
}
SNAPSHOT: Sent = {
    "reply": "TASK_SNAPSHOT",
    "run_state": "running",
    "attempt_epoch": 1,
    "lease": {"worker_id": "w1", "lease_id": "l1", "deadline_ts_ms": 1},
}


def of_status() -> Iterator[Poison]:
    """Yield the records of the status topic."""
    for kind in PAYLOADS:
        for defect, (make, code) in {**ANY, **OWN[kind]}.items():
            made = Poison(topic="status", kind=kind, defect=defect, value=None, code=code)
            sent = message(kind, node_id=made.name)
            yield Poison(topic="status", kind=kind, defect=defect, value=make(sent), code=code)


def of_announcements() -> Iterator[Poison]:
    """Yield the records of the announcement topic."""
    of_any = {defect: make for defect, (make, _) in ANY.items()}
    kinds = {"WORKER_ONLINE": (ONLINE, {**of_any, **_ANNOUNCED}), "WORKER_OFFLINE": ({}, of_any)}
    for kind, (fields, defects) in kinds.items():
        for defect, make in defects.items():
            sent = message(kind, {**fields, "worker_id": "w9"}, task_id="*", node_id="*", attempt_epoch=0)
            yield Poison(topic="announce", kind=kind, defect=defect, value=make(sent), code="")


def of_replies() -> Iterator[Poison]:
    """Yield the records of the reply topic."""
    for defect, (make, _) in ANY.items():
        sent = message("", node_id="n", msg_type="reply", payload={"worker_id": "w1", **SNAPSHOT})
        yield Poison(topic="reply", kind="TASK_SNAPSHOT", defect=defect, value=make(sent), code="")


POISON = [*of_status(), *of_announcements(), *of_replies()]


async def mixed(side: BridgeSide) -> list[ConsumerRecord[bytes, bytes]]:
    """Open an attempt for each record about one and for each good record. Return each record before its good one."""
    made = []
    for number, each in enumerate(POISON):
        topic = _topic(side, each)
        if each.topic == "status":
            await side.open(each.name, accepted=each.kind != "TASK_ACCEPTED")
        made.append(
            kafka_record(topic, each.value, f"{TASK}:{each.name}" if each.topic == "status" else None)
        )
        made.append(await _good(side, topic, each.topic, f"good {number}"))
    return made


def _topic(side: BridgeSide, each: Poison) -> str:
    topics = side.topics
    return {"status": topics.status("indexer"), "announce": topics.announce, "reply": topics.reply}[
        each.topic
    ]


async def _good(side: BridgeSide, topic: str, name: str, good: str) -> ConsumerRecord[bytes, bytes]:
    if name == "announce":
        online = message("WORKER_ONLINE", {**ONLINE, "worker_id": good}, task_id="*", node_id="*")
        return kafka_record(topic, text(online))
    await side.open(good, lease_id=good)
    if name == "status":
        return side.event("TASK_DONE", good)
    snapshot = {**SNAPSHOT, "lease": {**SNAPSHOT["lease"], "lease_id": good}}
    return kafka_record(topic, text(message("", node_id=good, msg_type="reply", payload=snapshot)), TASK)


async def unhandled(side: BridgeSide) -> list[str]:
    """Return the records before good ones that have no effect yet: no end, no renewed lease, no row of a worker."""
    names = {f"good {number}": each.name for number, each in enumerate(POISON)}
    handled = {row["worker_id"] async for row in side.db.worker_registry.find({"status": "online"})}
    async for row in side.db.dispatches.find({"node_id": {"$in": [*names]}}):
        opened = side.opened[row["node_id"]].lease
        assert opened is not None
        if row["state"] != "open" or row["lease"]["expires_at"] > opened.expires_at:
            handled.add(row["node_id"])
    return [name for good, name in names.items() if good not in handled]
