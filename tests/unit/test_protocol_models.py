"""The wire protocol: its examples pass through the models unchanged, and its ids are recomputed."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from flowkit.adapters.tasks.fields import new_task
from flowkit.graph.validation import parse_graph
from flowkit.models import NodeStatus, TaskStatus
from flowkit.protocol import messages
from flowkit.protocol.messages import (
    ActiveRun,
    CmdTaskStart,
    CommandKind,
    DagNode,
    Envelope,
    EventKind,
    EvTaskFailed,
    EvWorkerOnline,
    MsgType,
    QueryKind,
    ReplyKind,
    RetryPolicy,
    Role,
    RTaskSnapshot,
    RunState,
    SigCancel,
    TaskDoc,
    dedup_id,
    outbox_fingerprint,
    read_payload,
)

if TYPE_CHECKING:
    import enum

EXAMPLES = """\
{"v":1,"msg_type":"cmd","role":"coordinator","corr_id":"d23f0824-128b-4f33-8c5c-7fd0a6a3a450","dedup_id":"13638a9d603e3925eb7b28867a925497e2affb44","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000000000,"payload":{"cmd":"TASK_START","input_ref":null,"input_inline":{"source":"database","batch_size":5},"batching":null,"cancel_token":"6513270e-269e-4d37-b2a7-4de452e6b438"},"target_worker_id":null}
{"v":1,"msg_type":"cmd","role":"coordinator","corr_id":"36f675cc-81e7-4ef5-a8e2-5d940ed90475","dedup_id":"cd14eaf7904d3fdbe0f60beebc2080daf26bd0df","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"transform","step_type":"enricher","attempt_epoch":1,"ts_ms":1764000006100,"payload":{"cmd":"TASK_START","input_ref":null,"input_inline":{"input_adapter":"pull.from_artifacts.rechunk:size","input_args":{"from_nodes":["extract"],"size":3,"poll_ms":50,"meta_list_key":"skus"}},"batching":null,"cancel_token":"9531985d-5d9d-49f8-9818-e811892f902b"},"target_worker_id":null}
{"v":1,"msg_type":"cmd","role":"coordinator","corr_id":"6b0d549b-6f03-475a-9600-a35a099950d8","dedup_id":"85ece5f576c344f0a10d4ef21476ca1bbf3cb5cf","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000030000,"payload":{"cmd":"TASK_CANCEL","reason":"user_request","cancel_token":"6513270e-269e-4d37-b2a7-4de452e6b438"},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"90c192cf-d3ac-44af-8f21-ddb66cad4a26","dedup_id":"64605e54e6017746e7756fcb998be0e9bd0ddcd9","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000000481,"payload":{"kind":"TASK_ACCEPTED","worker_id":"w-1a2b3c4d","lease_id":"c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11","lease_deadline_ts_ms":1764000060480},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"a170b338-3926-4059-b28c-105d1fb17c23","dedup_id":"4edb9727a5b75f32bb4fff955d08f4495de751ff","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000000500,"payload":{"kind":"TASK_HEARTBEAT","worker_id":"w-1a2b3c4d","lease_id":"c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11","lease_deadline_ts_ms":1764000060500},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"0fd630f1-f29d-4da9-953f-48f1a09f76b5","dedup_id":"34692dd4c04ca30c0e0943e91ac6a785019a6d43","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000001200,"payload":{"kind":"BATCH_OK","worker_id":"w-1a2b3c4d","batch_uid":"b1","metrics":{"count":2,"skus":["sku-0","sku-1"]},"artifacts_ref":{"batch_uid":"b1"}},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"0cb1e29c-658c-4a14-95e6-0af593bd04cf","dedup_id":"0f46281fa1b08aba79f542be95f975d3294d0444","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000002000,"payload":{"kind":"BATCH_FAILED","worker_id":"w-1a2b3c4d","batch_uid":"b2","reason_code":"unexpected_error","permanent":false,"error":"connection reset","artifacts_ref":{"batch_uid":"b2"}},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"8e81973e-0bec-47b0-b898-d190f9ebdacc","dedup_id":"6bba9302a43e43b2cb7c3470625bd13ecd7a902d","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000002003,"payload":{"kind":"TASK_FAILED","worker_id":"w-1a2b3c4d","reason_code":"unexpected_error","permanent":false,"error":"connection reset"},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"6b4cb242-4a23-4596-a217-beaddbc496cb","dedup_id":"66bb98b308392a419eb9aa348dc96402f46a8e40","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000002500,"payload":{"kind":"TASK_DONE","worker_id":"w-1a2b3c4d","metrics":{"total":2},"artifacts_ref":{"task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract"},"final_uid":"__final__"},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"92276658-1e27-41c0-8a6a-63ec24ede6a4","dedup_id":"6f4fa8562c60afe0a6d77ddd6fe7606a873d1298","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000031900,"payload":{"kind":"CANCELLED","worker_id":"w-1a2b3c4d","reason":"cancelled"},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"923a7369-94e3-4f91-9a61-dbe22e44158b","dedup_id":"560005ad09cc077364d22bec3badf82ca9c8c690","task_id":"*","node_id":"*","step_type":"*","attempt_epoch":0,"ts_ms":1764000090000,"payload":{"kind":"WORKER_ONLINE","worker_id":"w-1a2b3c4d","type":"indexer","capabilities":{"roles":["indexer"]},"version":"2.0.0","capacity":{"tasks":1},"resume":{"task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"lease_id":"c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11","cancel_token":"6513270e-269e-4d37-b2a7-4de452e6b438","started_at_ms":1764000000480,"state":"running","checkpoint":{}}},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"18f135d2-5f55-4203-b018-50c5a38fd547","dedup_id":"ee4cda8e72809d9f5305b59b48f0eec98c1cfe35","task_id":"*","node_id":"*","step_type":"*","attempt_epoch":0,"ts_ms":1764000050000,"payload":{"kind":"WORKER_ONLINE","worker_id":"w-1a2b3c4d","type":"indexer","version":"2.0.0","capacity":{"tasks":1}},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"worker","corr_id":"907a70c3-1012-4037-b64c-e4228c38fb29","dedup_id":"be6ac96988f3bf0214237edba6fc58a6096e9870","task_id":"*","node_id":"*","step_type":"*","attempt_epoch":0,"ts_ms":1764000900000,"payload":{"kind":"WORKER_OFFLINE","worker_id":"w-1a2b3c4d"},"target_worker_id":null}
{"v":1,"msg_type":"query","role":"coordinator","corr_id":"7f150524-34b9-45df-9e77-69b10f4205b4","dedup_id":"07a4d87e9e5408949efb65405b4b6cbfe3639b86","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":2,"ts_ms":1764000095000,"payload":{"query":"TASK_DISCOVER","want_epoch":2},"target_worker_id":null}
{"v":1,"msg_type":"reply","role":"worker","corr_id":"7f150524-34b9-45df-9e77-69b10f4205b4","dedup_id":"83b2ac3116de308a4030c5699baf65c11b70ce74","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":2,"ts_ms":1764000095031,"payload":{"reply":"TASK_SNAPSHOT","worker_id":"w-1a2b3c4d","run_state":"running","attempt_epoch":1,"lease":{"worker_id":"w-1a2b3c4d","lease_id":"c6a1f0d2-58a5-4d0c-8f2b-1f3a9f4a7b11","deadline_ts_ms":1764000155031},"progress":{},"artifacts":null},"target_worker_id":null}
{"v":1,"msg_type":"reply","role":"worker","corr_id":"7f150524-34b9-45df-9e77-69b10f4205b4","dedup_id":"c384e685213dacabc76fab59ab81d723f0224073","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":2,"ts_ms":1764000095040,"payload":{"reply":"TASK_SNAPSHOT","worker_id":null,"run_state":"idle","attempt_epoch":0,"lease":null,"progress":null,"artifacts":{"complete":true}},"target_worker_id":null}
{"v":1,"msg_type":"event","role":"coordinator","corr_id":"c6f87718-6d76-407e-881e-d162ae2eb154","dedup_id":"862bfe415da479b77f9a5621e1882c084d1bedc1","task_id":"7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90","node_id":"extract","step_type":"indexer","attempt_epoch":1,"ts_ms":1764000030000,"payload":{"sig":"CANCEL","reason":"user_request","cancel_token":null,"deadline_ts_ms":1764000060000},"target_worker_id":"w-1a2b3c4d"}
""".splitlines()
"""One encoded record of each kind, with hashes computed by the protocol's rules."""


def envelope(payload: dict[str, Any], msg_type: str = "event", **fields: Any) -> Envelope:
    """Return an envelope with defaults for all other fields."""
    given = {
        "dedup_id": "d",
        "task_id": "t",
        "node_id": "n",
        "step_type": "s",
        "attempt_epoch": 1,
        "ts_ms": 1,
        **fields,
    }
    return Envelope(msg_type=MsgType(msg_type), role=Role.worker, payload=payload, **given)


def word(text: str) -> str:
    """Return the kind of a record, as the name of a test."""
    payload = json.loads(text)["payload"]
    return str(next(payload[key] for key in ("cmd", "query", "sig", "reply", "kind") if key in payload))


# --- examples and vectors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", EXAMPLES, ids=word)
def test_envelope_round_trips_byte_for_byte(text: str) -> None:
    assert Envelope.from_json(text).to_json() == text.encode()


@pytest.mark.parametrize("text", EXAMPLES, ids=word)
def test_payload_round_trips_byte_for_byte(text: str) -> None:
    found = Envelope.from_json(text)
    payload = read_payload(found)
    assert payload is not None
    assert payload.to_json().decode() == json.dumps(found.payload, separators=(",", ":"))


@pytest.mark.parametrize("text", EXAMPLES, ids=word)
def test_message_id_is_derived_from_the_message(text: str) -> None:
    found = Envelope.from_json(text)
    if found.payload.get("run_state") == "idle":  # by another worker, which the record does not name
        return
    assert dedup_id(found.model_copy(update={"dedup_id": ""})) == found.dedup_id


def test_every_kind_has_an_example() -> None:
    kinds = {*EventKind, CommandKind.TASK_START, CommandKind.TASK_CANCEL, *QueryKind, *ReplyKind, "CANCEL"}
    assert {word(text) for text in EXAMPLES} == kinds - {EventKind.TASK_RESUMED}


def test_snapshot_id_contains_the_responding_worker() -> None:
    idle = envelope({"reply": "TASK_SNAPSHOT", "worker_id": None}, "reply")
    busy = envelope({"reply": "TASK_SNAPSHOT", "worker_id": "w"}, "reply")
    assert dedup_id(idle, worker_id="w") == dedup_id(busy) != dedup_id(idle, worker_id="v")


def test_heartbeats_of_one_interval_share_an_id() -> None:
    beats = [envelope({"kind": "TASK_HEARTBEAT"}, ts_ms=ms) for ms in (40_000, 59_999, 60_000)]
    first, same, next_one = (dedup_id(beat) for beat in beats)
    assert first == same != next_one
    assert dedup_id(beats[0], hb_interval_ms=5_000) != dedup_id(beats[1], hb_interval_ms=5_000)
    assert dedup_id(beats[0], hb_interval_ms=0) != dedup_id(beats[1], hb_interval_ms=0)


@pytest.mark.parametrize("payload", [{}, {"kind": "TASK_RESUMED"}, {"cmd": "TASK_PAUSE"}, {"kind": "NEW"}])
def test_error_names_a_message_kind_without_an_id(payload: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no dedup id"):
        dedup_id(envelope(payload))


def test_fingerprint_distinguishes_topic_key_and_id() -> None:
    parts = [("a", "b", "c"), ("b", "a", "c"), ("a", "b", "d"), ("x", "b", "c")]
    assert len({outbox_fingerprint(*each) for each in parts}) == 4


# --- enums --------------------------------------------------------------------------------------------------------

WORDS: dict[type[enum.Enum], str] = {
    RunState: "queued running deferred cancelling finished failed",
    MsgType: "cmd event heartbeat query reply",
    Role: "coordinator worker",
    CommandKind: "TASK_START TASK_CANCEL TASK_PAUSE TASK_RESUME",
    QueryKind: "TASK_DISCOVER",
    ReplyKind: "TASK_SNAPSHOT",
    EventKind: "WORKER_ONLINE WORKER_OFFLINE TASK_ACCEPTED TASK_HEARTBEAT TASK_RESUMED BATCH_OK BATCH_FAILED "
    "TASK_DONE TASK_FAILED CANCELLED",
}


@pytest.mark.parametrize("kind", WORDS)
def test_enum_members_are_those_of_the_protocol_and_equal_their_names(kind: type[enum.Enum]) -> None:
    assert [member.name for member in kind] == WORDS[kind].split()
    assert all(member.name == member.value == str(member.value) for member in kind)


# --- envelope -----------------------------------------------------------------------------------------------------

REQUIRED = ("msg_type", "role", "dedup_id", "task_id", "node_id", "step_type", "attempt_epoch", "ts_ms")


def test_optional_fields_have_the_documented_defaults() -> None:
    given = {name: json.loads(EXAMPLES[0])[name] for name in REQUIRED}
    one, other = Envelope.model_validate(given), Envelope.model_validate(given)
    assert (one.v, one.payload, one.target_worker_id) == (1, {}, None)
    assert str(uuid.UUID(one.corr_id, version=4)) == one.corr_id != other.corr_id


@pytest.mark.parametrize("missing", REQUIRED)
def test_missing_required_field_is_rejected(missing: str) -> None:
    given = {name: value for name, value in json.loads(EXAMPLES[0]).items() if name != missing}
    with pytest.raises(ValidationError, match=missing):
        Envelope.from_json(json.dumps(given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("v", None),
        ("v", 1.5),
        ("corr_id", None),
        ("msg_type", "order"),
        ("role", "boss"),
        ("task_id", 7),
        ("task_id", None),
        ("attempt_epoch", 1.5),
        ("attempt_epoch", None),
        ("payload", None),
        ("payload", []),
        ("target_worker_id", 7),
    ],
)
def test_value_that_external_workers_reject_is_rejected(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Envelope.from_json(json.dumps(json.loads(EXAMPLES[0]) | {name: value}))


@pytest.mark.parametrize(("value", "read"), [("12", 12), (1.0, 1), (True, 1), (-3, -3)])
def test_integers_are_parsed_like_external_workers_parse_them(value: object, read: int) -> None:
    text = json.dumps(json.loads(EXAMPLES[0]) | {"attempt_epoch": value, "v": value, "ts_ms": value})
    found = Envelope.from_json(text)
    assert (found.attempt_epoch, found.v, found.ts_ms) == (read, read, read)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff"])
def test_invalid_envelope_raises_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        Envelope.from_json(text)


def test_unknown_fields_are_ignored() -> None:
    text = json.dumps(json.loads(EXAMPLES[0]) | {"new": 1})
    assert Envelope.from_json(text).to_json() == EXAMPLES[0].encode()
    payload = {"kind": "TASK_FAILED", "worker_id": "w", "reason_code": "x", "new": 1}
    assert "new" not in EvTaskFailed.model_validate(payload).model_dump()


def test_handler_values_are_encoded_as_json() -> None:
    values = {
        "at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        "id": uuid.UUID(int=1),
        "price": Decimal("1.50"),
        "raw": b"ab",
        "pair": (1, 2),
        "set": {1},
        "nan": float("nan"),
        "inf": float("-inf"),
        "deep": {1: {2: None}},
        "role": Role.worker,
        "name": "жук",
    }
    text = envelope(values).to_json().decode()
    assert json.loads(text)["payload"] == {
        "at": "2026-01-02T03:04:05.000006Z",
        "id": "00000000-0000-0000-0000-000000000001",
        "price": "1.50",
        "raw": "ab",
        "pair": [1, 2],
        "set": [1],
        "nan": None,
        "inf": None,
        "deep": {"1": {"2": None}},
        "role": "worker",
        "name": "жук",
    }
    assert "жук" in text
    with pytest.raises(ValueError, match="object"):
        envelope({"x": object()}).to_json()


# --- payloads -----------------------------------------------------------------------------------------------------


def test_command_contains_null_for_missing_fields() -> None:
    order = CmdTaskStart(cmd=CommandKind.TASK_START, cancel_token="c")
    expected = '{"cmd":"TASK_START","input_ref":null,"input_inline":null,"batching":null,"cancel_token":"c"}'
    assert order.to_json().decode() == expected


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (CmdTaskStart, {"cmd": "TASK_START"}),
        (CmdTaskStart, {"cancel_token": "c"}),
        (CmdTaskStart, {"cmd": "TASK_START", "cancel_token": 7}),
        (CmdTaskStart, {"cmd": "TASK_START", "cancel_token": "c", "input_inline": []}),
        (messages.CmdTaskCancel, {"cmd": "TASK_CANCEL", "cancel_token": "c"}),
        (SigCancel, {"sig": "CANCEL"}),
        (SigCancel, {"sig": 7, "reason": "r"}),
        (messages.EvBatchOk, {"kind": "BATCH_OK"}),
        (messages.EvHeartbeat, {"kind": "TASK_ACCEPTED", "lease_id": "l", "lease_deadline_ts_ms": 1}),
        (messages.EvTaskAccepted, {"kind": "TASK_ACCEPTED", "worker_id": "w"}),
        (messages.EvTaskFailed, {"kind": "TASK_FAILED", "reason_code": "x"}),
        (messages.EvTaskFailed, {"kind": "TASK_FAILED", "reason_code": "x", "worker_id": None}),
        (messages.EvTaskFailed, {"kind": "TASK_FAILED", "reason_code": "x", "worker_id": ""}),
        (RTaskSnapshot, {"reply": "TASK_SNAPSHOT", "run_state": "asleep", "attempt_epoch": 0}),
    ],
)
def test_payload_that_does_not_match_its_kind_is_rejected(
    model: type[messages.Message], given: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(given)


def test_resumed_run_is_parsed_as_its_own_kind() -> None:
    payload = {"kind": "TASK_RESUMED", "worker_id": "w", "lease_id": "l", "lease_deadline_ts_ms": 1}
    assert isinstance(read_payload(envelope(payload)), messages.EvTaskResumed)


@pytest.mark.parametrize(
    ("payload", "msg_type"),
    [
        ({"kind": "TASK_PONDERED"}, "event"),
        ({"kind": 7}, "event"),
        ({}, "event"),
        ({"kind": "TASK_DONE"}, "heartbeat"),
        ({"cmd": "TASK_PAUSE"}, "cmd"),
        ({"cmd": "TASK_START"}, "event"),
        ({"sig": "PAUSE"}, "event"),
    ],
)
def test_unknown_kind_is_not_an_error(payload: dict[str, Any], msg_type: str) -> None:
    assert read_payload(envelope(payload, msg_type)) is None


def test_signal_is_case_insensitive() -> None:
    assert isinstance(read_payload(envelope({"sig": "cancel", "reason": "r"})), SigCancel)


def test_announcement_contains_resume_only_at_the_start_of_its_worker() -> None:
    online = EvWorkerOnline(kind=EventKind.WORKER_ONLINE, worker_id="w", type="a,b")
    assert list(json.loads(online.to_json())) == ["kind", "worker_id", "type", "version", "capacity"]
    first = online.model_copy(update={"capabilities": {"roles": ["a", "b"]}, "resume": None})
    assert json.loads(first.to_json())["resume"] is None


def test_resume_of_a_worker_is_an_active_run() -> None:
    online = next(text for text in EXAMPLES if '"resume"' in text)
    payload = read_payload(Envelope.from_json(online))
    assert isinstance(payload, EvWorkerOnline)
    assert isinstance(payload.resume, ActiveRun)
    assert payload.resume.attempt_epoch == 1


# --- documents ----------------------------------------------------------------------------------------------------


def test_retry_policy_has_the_documented_defaults() -> None:
    expected = {"max": 2, "backoff_sec": 300, "permanent_on": ["bad_input", "schema_mismatch"]}
    assert RetryPolicy().model_dump() == expected
    assert RetryPolicy(backoff_sec=0.05).backoff_sec == 0.05


def test_node_has_the_documented_defaults_and_is_valid_in_a_graph() -> None:
    node = DagNode(node_id="a", type="x")
    assert (node.fan_in, node.status, node.attempt_epoch, node.depends_on) == ("all", "queued", 0, [])
    assert (node.io.start_when, node.io.fn, node.lease, node.stats) == ("ready", "noop", {}, {})
    (parsed,) = parse_graph({"nodes": [node.model_dump(mode="json")]}, params={}).nodes
    assert (parsed.node_id, parsed.retry_policy.max) == ("a", 2)


def test_new_task_document_round_trips() -> None:
    written = new_task("t", {"p": 1}, {"nodes": [{"node_id": "a", "type": "x"}]}, 1_000.0)
    read = TaskDoc.model_validate(written)
    assert (read.status, read.started_at) == (RunState.queued, "1970-01-01T00:16:40+00:00")
    assert read.model_dump() == written
    assert DagNode.model_validate(read.graph["nodes"][0]).status is RunState.queued


@pytest.mark.parametrize("status", TaskStatus)
def test_every_task_status_is_parsed(status: TaskStatus) -> None:
    assert (
        TaskDoc.model_validate({"id": "t", "pipeline_id": "t", "status": status.value}).status == status.value
    )


def test_every_node_status_is_parsed() -> None:
    for status in NodeStatus:
        assert (
            DagNode.model_validate({"node_id": "a", "type": "x", "status": status.value}).status
            == status.value
        )
