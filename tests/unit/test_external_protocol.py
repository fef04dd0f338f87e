"""The external worker's messages: the hashes and records of the protocol, byte for byte."""

from __future__ import annotations

import ast
import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.protocol.messages import Envelope, dedup_id, read_payload
from flowkit.testing.external.messages import MessageBuilder, Outgoing
from flowkit.testing.external.misbehavior import Malformed, malformed
from flowkit.testing.external.protocol import Incoming, StartPayload, compact, jsonable, read, stable_hash
from flowkit.testing.external.runs import Run
from flowkit.testing.external.settings import Clock, ExternalSettings

if TYPE_CHECKING:
    from collections.abc import Callable

EXTERNAL = Path(__file__).parents[2] / "src/flowkit/testing/external"
RECORDS = (Path(__file__).parent / "external_records.txt").read_text(encoding="utf-8").splitlines()
"""The records of the protocol's examples that workers send: the topic, then the exact value."""

WORKER = "w-1a2b3c4d"


class Times(Clock):
    """A clock that returns given times, the last one forever."""

    def __init__(self, *times: int) -> None:
        self._times = list(times)

    def now_ms(self) -> int:
        """Return the next time."""
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]


def example(kind: str, number: int = 0) -> tuple[str, str]:
    """The topic and value of an example record."""
    found = [line.split(maxsplit=1) for line in RECORDS if f'"{kind}"' in line]
    topic, value = found[number]
    return topic, value


def run_of(message: dict[str, Any], **changes: Any) -> Run:
    """The run of which an example tells."""
    fields = {
        "task_id": message["task_id"],
        "node_id": message["node_id"],
        "step_type": message["step_type"],
        "attempt_epoch": 1,
        "lease_id": "c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11",
        "cancel_token": "6513270e-269e-4d37-b2a7-4de452e6b438",
        "started_at_ms": 1764000000480,
        "state": "running",
        "checkpoint": {},
    }
    return Run(**{**fields, **changes})


def written(
    kind: str, number: int, write: Callable[[MessageBuilder, Run, dict[str, Any]], Outgoing]
) -> Outgoing:
    """Write an example's message again, at its times and with its random id."""
    message = json.loads(example(kind, number)[1])
    deadline = message["payload"].get("lease_deadline_ts_ms")
    lease = message["payload"].get("lease") or {}
    deadline = deadline or lease.get("deadline_ts_ms")
    before = [deadline - 60_000] if deadline else []
    bucket = [message["ts_ms"]] if kind == "TASK_HEARTBEAT" else []
    clock = Times(*bucket, *before, message["ts_ms"])
    messages = MessageBuilder(WORKER, ExternalSettings(), clock, new_corr_id=lambda: str(message["corr_id"]))
    return write(messages, run_of(message), message)


def query(message: dict[str, Any]) -> Incoming:
    """The query to which an example replies."""
    return Incoming.model_validate({**message, "msg_type": "query", "role": "coordinator", "payload": {}})


FAILURE = {"reason_code": "unexpected_error", "permanent": False, "error": "connection reset"}
WRITERS: list[tuple[str, int, Callable[[MessageBuilder, Run, dict[str, Any]], Outgoing]]] = [
    ("TASK_ACCEPTED", 0, lambda messages, run, _: messages.accepted(run)),
    ("TASK_HEARTBEAT", 0, lambda messages, run, _: messages.heartbeat(run, "indexer")),
    (
        "BATCH_OK",
        0,
        lambda messages, run, _: messages.batch_ok(
            run, "b1", {"count": 2, "skus": ["sku-0", "sku-1"]}, {"batch_uid": "b1"}
        ),
    ),
    ("BATCH_FAILED", 0, lambda messages, run, _: messages.batch_failed(run, "b2", FAILURE)),
    ("TASK_FAILED", 0, lambda messages, run, _: messages.failed(run, FAILURE)),
    ("TASK_DONE", 0, lambda messages, run, _: messages.done(run, {"total": 2}, None)),
    ("CANCELLED", 0, lambda messages, run, _: messages.cancelled(run)),
    (
        "WORKER_ONLINE",
        0,
        lambda messages, run, message: messages.online(
            ["indexer"], run_of(message["payload"]["resume"]).stored(), first=True
        ),
    ),
    ("WORKER_ONLINE", 1, lambda messages, run, _: messages.online(["indexer"], None, first=False)),
    ("WORKER_OFFLINE", 0, lambda messages, run, _: messages.offline()),
    (
        "TASK_SNAPSHOT",
        0,
        lambda messages, run, message: messages.snapshot(query(message), run, complete=False),
    ),
    (
        "TASK_SNAPSHOT",
        1,
        lambda messages, run, message: messages.snapshot(query(message), None, complete=True),
    ),
]


@pytest.mark.parametrize(("kind", "number", "write"), WRITERS, ids=[f"{kind}-{n}" for kind, n, _ in WRITERS])
def test_messages_equal_the_examples_of_the_protocol(
    kind: str, number: int, write: Callable[[MessageBuilder, Run, dict[str, Any]], Outgoing]
) -> None:
    topic, value = example(kind, number)
    sent = written(kind, number, write)
    if '"run_state":"idle"' in value:  # another worker replied, whose id only the hash contains
        value = value.replace(json.loads(value)["dedup_id"], str(sent.message["dedup_id"]))
    assert sent.value.decode() == value
    assert sent.topic == topic
    assert sent.kind == kind


@pytest.mark.parametrize(("kind", "number", "write"), WRITERS, ids=[f"{kind}-{n}" for kind, n, _ in WRITERS])
def test_the_engine_reads_every_message_of_a_worker(
    kind: str, number: int, write: Callable[[MessageBuilder, Run, dict[str, Any]], Outgoing]
) -> None:
    value = written(kind, number, write).value
    envelope = Envelope.from_json(value)
    assert envelope.to_json() == value
    assert read_payload(envelope) is not None
    assert dedup_id(envelope, worker_id=WORKER) == envelope.dedup_id


def test_the_examples_cover_every_record_of_a_worker() -> None:
    assert len(WRITERS) == len(RECORDS)


def test_keys_name_the_node_for_events_the_task_for_replies_and_nothing_for_announcements() -> None:
    sent = {kind: written(kind, number, write) for kind, number, write in WRITERS}
    task = "7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90"
    assert sent["BATCH_OK"].key == f"{task}:extract"
    assert sent["TASK_SNAPSHOT"].key == task
    assert sent["WORKER_OFFLINE"].key is None


def test_stable_hash_equals_the_vectors_of_the_protocol() -> None:
    task = {"n": "extract", "e": 1, "td": "7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90"}
    assert stable_hash(task) == "66bb98b308392a419eb9aa348dc96402f46a8e40"
    assert stable_hash({"src": "u", "parent": "b1", "idx": 0}) == "ad2b7bfd0ae8f741de96ce46937202d382868d69"


def test_values_of_handlers_become_json_as_the_protocol_describes() -> None:
    moment = datetime(2026, 1, 31, 12, 0, 0, 250, UTC)
    made = jsonable(
        {
            "at": moment,
            "id": uuid.UUID(int=1),
            "price": Decimal("1.50"),
            "raw": b"ab",
            "pair": (1, 2),
            "odd": [float("nan"), float("inf")],
            5: {True: "é"},
        }
    )
    assert compact(made).decode() == (
        '{"at":"2026-01-31T12:00:00.000250Z","id":"00000000-0000-0000-0000-000000000001","price":"1.50",'
        '"raw":"ab","pair":[1,2],"odd":[null,null],"5":{"true":"é"}}'
    )


def envelope(**changes: Any) -> bytes:
    """A valid command, changed."""
    message = json.loads(example("TASK_DONE")[1])
    command = {**message, "msg_type": "cmd", "role": "coordinator", "payload": {"cmd": "TASK_START"}}
    return compact({**command, **changes})


@pytest.mark.parametrize("epoch", [1, "1", 1.0, True])
def test_integers_may_arrive_in_other_forms(epoch: object) -> None:
    assert read(envelope(attempt_epoch=epoch)).attempt_epoch == 1


def test_invalid_envelopes_are_errors() -> None:
    invalid: list[dict[str, Any]] = [
        {"attempt_epoch": 1.5},
        {"attempt_epoch": None},
        {"v": None},
        {"task_id": 7},
        {"payload": None},
        {"payload": []},
        {"msg_type": "rumor"},
        {"corr_id": None},
    ]
    for changes in invalid:
        with pytest.raises(ValueError, match="validation error"):
            read(envelope(**changes))


@pytest.mark.parametrize("value", [None, b"", b"no JSON", b'{"v":'], ids=str)
def test_values_without_json_are_errors(value: bytes | None) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read(value)


def test_a_start_without_cancel_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="cancel_token"):
        StartPayload.model_validate({"cmd": "TASK_START"})


def test_every_malformed_record_fits_the_record_limit() -> None:
    for kind in list(Malformed):
        value = malformed(kind, json.loads(example("TASK_ACCEPTED")[1]))
        assert value is None or len(value) < 2**20


def test_malformed_records_repeat_the_ids_of_a_message() -> None:
    like = json.loads(example("TASK_ACCEPTED")[1])
    made = json.loads(malformed(Malformed.unknown_kind, like) or b"")
    assert (made["task_id"], made["payload"]["worker_id"]) == (like["task_id"], WORKER)


def test_the_external_worker_shares_no_code_with_the_rest_of_flowkit() -> None:
    imported = {
        node.module or ""
        for path in EXTERNAL.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    }
    own = {name for name in imported if name.startswith("flowkit")}
    assert {name for name in own if not name.startswith("flowkit.testing.external")} == set()
