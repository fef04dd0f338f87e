"""Records from Kafka are untrusted: reading returns a message or None, or raises Malformed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.bridge_side import kafka_record
from tests.unit.bridge_records import NODE, NOW, PAYLOADS, TASK, event, message, record, value
from tests.unit.property_examples import examples

from flowkit.adapters.dispatches import Outcome
from flowkit.bridge.announcements import announced_fields
from flowkit.bridge.rules.fencing import TERMINAL, document_deadline_ms, judge, new_lease, renewed
from flowkit.bridge.rules.messages import (
    Malformed,
    StatusEvent,
    read_announce,
    read_bad_event,
    read_reply,
    read_status,
)
from flowkit.bridge.rules.outcomes import outcome_of
from flowkit.bridge.status import log_rows
from flowkit.limits import ID_CHARS, KAFKA_RECORD_BYTES, LARGEST_EPOCH
from flowkit.protocol.messages import EvWorkerOnline
from flowkit.testing.external import misbehavior as hostile

if TYPE_CHECKING:
    from collections.abc import Callable


def read_event(given_value: bytes | None) -> StatusEvent | None:
    """Return the event of a record on the status topic of the role `indexer`."""
    return read_status(given_value, "indexer")


READERS: list[Callable[[bytes | None], object]] = [read_event, read_announce, read_reply]
RECORDS = (Path(__file__).parent / "external_records.txt").read_text(encoding="utf-8").splitlines()
UNKNOWN = {hostile.Malformed.unknown_kind, hostile.Malformed.no_kind}
"""Records that are valid messages of a kind that the bridge does not know."""

VALID = {hostile.Malformed.nul_character, hostile.Malformed.huge_integer, hostile.Malformed.huge}
"""Records that are valid messages with metrics that MongoDB may not be able to store."""


def result_of(read: Callable[[bytes | None], object], given_value: bytes | None) -> object:
    """Return what a reader returns, or Malformed."""
    try:
        return read(given_value)
    except Malformed as error:
        assert 0 < len(str(error)) <= 300
        assert "\n" not in str(error)
        return Malformed


# --- valid records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", RECORDS)
def test_every_record_of_a_worker_is_read_from_its_own_topic(line: str) -> None:
    topic, text = line.split(maxsplit=1)
    read = dict(zip(("status", "workers", "reply"), READERS, strict=True))[topic.split(".")[0]]
    assert read(text.encode()) is not None


@pytest.mark.parametrize("kind", PAYLOADS)
def test_every_kind_of_event_is_read(kind: str) -> None:
    found = event(kind)
    assert (found.event.kind, found.worker_id) == (kind, "w1")
    assert found.node == (found.envelope.task_id, found.envelope.node_id)


def test_unknown_fields_and_absent_optional_fields_are_accepted() -> None:
    given_message = message("TASK_FAILED", {"new": 1}, new=[2])
    for name in ("v", "corr_id", "target_worker_id"):
        del given_message[name]
    found = read_event(json.dumps(given_message).encode())
    assert found is not None
    assert found.worker_id == "w1"


@pytest.mark.parametrize("kind", ["NEW_KIND", "TASK_PAUSED", 7, None])
def test_an_unknown_kind_is_ignored(kind: object) -> None:
    assert read_event(value(payload={"kind": kind})) is None


@pytest.mark.parametrize(
    "kind", [("WORKER_ONLINE", {"type": "indexer"}), ("WORKER_OFFLINE", {})], ids=lambda kind: kind[0]
)
def test_an_announcement_is_no_event_of_an_attempt(kind: tuple[str, dict[str, Any]]) -> None:
    assert read_event(value(*kind)) is None
    assert read_event(value(*kind, task_id="*", node_id="*")) is None


@pytest.mark.parametrize("kind", PAYLOADS)
def test_an_event_about_any_task_is_ignored(kind: str) -> None:
    assert read_event(value(kind, task_id="*", node_id="*")) is None


def test_a_signal_in_the_status_topic_is_ignored() -> None:
    assert read_event(value(payload={"kind": 0, "sig": "CANCEL", "reason": "r"})) is None


# --- malformed records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READERS)
def test_every_kind_of_malformed_record_is_recognized(read: Callable[[bytes | None], object]) -> None:
    for kind in list(hostile.Malformed):
        found = result_of(read, hostile.malformed(kind, message()))
        if kind in VALID and read is read_event:
            assert isinstance(found, StatusEvent)
        elif kind in UNKNOWN and read is not read_reply:
            assert found is None
        elif kind not in VALID:
            assert found is Malformed


@pytest.mark.parametrize("read", READERS)
def test_a_value_without_an_envelope_is_malformed(read: Callable[[bytes | None], object]) -> None:
    for given_value in [None, b"", b"null", b"[]", b"0", b'"x"', b"{}", b"\xff", b"{", b"NaN"]:
        assert result_of(read, given_value) is Malformed


@pytest.mark.parametrize(
    "given_value", [b"[" * 100_000, b'{"payload":' * 100_000, b"[" * 1_000 + b"]" * 1_000], ids=len
)
def test_deep_nesting_is_malformed(given_value: bytes) -> None:
    assert result_of(read_event, given_value) is Malformed


def test_deeply_nested_metrics_are_malformed() -> None:
    deep: Any = 0
    for _ in range(500):
        deep = [deep]
    assert result_of(read_event, value("BATCH_OK", {"metrics": {"x": deep}})) is Malformed


def test_a_record_beyond_the_limit_is_malformed() -> None:
    largest = value("BATCH_OK").ljust(KAFKA_RECORD_BYTES)
    assert isinstance(read_event(largest), StatusEvent)
    assert result_of(read_event, largest + b" ") is Malformed


def test_an_invalid_envelope_is_malformed() -> None:
    invalid: list[dict[str, Any]] = [
        {"role": "coordinator"},
        {"role": "boss"},
        {"msg_type": "heartbeat"},
        {"msg_type": "reply"},
        {"msg_type": "cmd"},
        {"task_id": ""},
        {"task_id": 7},
        {"task_id": "t" * (ID_CHARS + 1)},
        {"node_id": "*"},
        {"node_id": ""},
        {"node_id": "a\nb"},
        {"node_id": "n[3]"},
        {"node_id": "n" * (ID_CHARS + 1)},
        {"attempt_epoch": -1},
        {"attempt_epoch": LARGEST_EPOCH + 1},
        {"attempt_epoch": 2**100},
        {"attempt_epoch": 1e308},
        {"attempt_epoch": 1.5},
        {"attempt_epoch": float("nan")},
        {"attempt_epoch": float("inf")},
        {"attempt_epoch": "9" * 5_000},
        {"attempt_epoch": None},
        {"ts_ms": -1},
        {"ts_ms": 2**53},
        {"ts_ms": 10**400},
        {"dedup_id": None},
        {"task_id": "\ud800"},
    ]
    for changes in invalid:
        assert result_of(read_event, value(**changes)) is Malformed


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("TASK_HEARTBEAT", {"lease_deadline_ts_ms": 10**400}),
        ("TASK_HEARTBEAT", {"lease_deadline_ts_ms": -1}),
        ("TASK_HEARTBEAT", {"lease_deadline_ts_ms": float("nan")}),
        ("TASK_ACCEPTED", {"lease_id": None}),
        ("TASK_ACCEPTED", {"lease_id": "l" * (ID_CHARS + 1)}),
        ("TASK_ACCEPTED", {"worker_id": "w" * (ID_CHARS + 1)}),
        ("TASK_ACCEPTED", {"worker_id": "\udfff"}),
        ("BATCH_OK", {"batch_uid": None}),
        ("BATCH_OK", {"batch_uid": 7}),
        ("BATCH_OK", {"metrics": []}),
        ("BATCH_OK", {"metrics": "text"}),
        ("BATCH_OK", {"artifacts_ref": 7}),
        ("TASK_DONE", {"metrics": None}),
        ("TASK_FAILED", {"reason_code": None}),
        ("TASK_FAILED", {"permanent": "perhaps"}),
        ("TASK_FAILED", {"error": {"a": 1}}),
        ("CANCELLED", {"reason": None}),
    ],
    ids=lambda each: str(each)[:40],
)
def test_an_invalid_payload_is_malformed(kind: str, payload: dict[str, Any]) -> None:
    assert result_of(read_event, value(kind, payload)) is Malformed


@pytest.mark.parametrize("kind", [*PAYLOADS, "WORKER_OFFLINE"])
def test_a_record_without_a_worker_is_malformed(kind: str) -> None:
    for worker_id in [None, "", 7]:
        read = read_announce if kind == "WORKER_OFFLINE" else read_event
        assert result_of(read, value(kind, {"worker_id": worker_id})) is Malformed


# --- whose malformed record it is ---------------------------------------------------------------------------------


def bad(given_value: bytes | None, key: str | None = f"{TASK}:{NODE}") -> tuple[Any, ...] | None:
    """Return the nodes, the epoch and the worker that a malformed record names."""
    found = read_bad_event(kafka_record("status", given_value, key), "indexer", Malformed("odd"))
    return None if found is None else (found.nodes, found.epoch, found.worker_id)


OWN = ((TASK, NODE),)


def test_a_malformed_record_is_attributed_by_its_envelope() -> None:
    assert bad(value("BATCH_OK", {"metrics": []}, attempt_epoch=3), key=None) == (OWN, 3, "w1")
    assert bad(value("BATCH_OK", {"worker_id": None})) == (OWN, 1, "")
    assert bad(value("BATCH_OK", {"worker_id": "w" * (ID_CHARS + 1)})) == (OWN, 1, "")


def test_a_payload_that_cannot_be_read_does_not_hide_the_fields_before_it() -> None:
    compact = json.dumps(message("BATCH_OK", attempt_epoch=3), separators=(",", ":")).encode()
    assert bad(compact.replace(b'{"count":2}', b"[" * 300 + b"]" * 300), key=None) == (OWN, 3, None)
    assert bad(compact[:-60], key=None) == (OWN, 3, None)
    assert bad(compact.replace(b"2}", b"2" * KAFKA_RECORD_BYTES + b"}"), key=None) == (OWN, 3, None)


@pytest.mark.parametrize("given_value", [None, b"", b"odd", b"[" * 300])
def test_a_record_without_an_envelope_is_attributed_by_its_key(given_value: bytes | None) -> None:
    assert bad(given_value) == (OWN, None, None)
    assert bad(given_value, "a:b:c") == ((("a", "b:c"), ("a:b", "c")), None, None)
    assert [bad(given_value, key) for key in (None, "", "task", ":", "t:*")] == [None] * 5


def test_a_key_that_is_too_long_for_two_ids_is_not_split() -> None:
    """Each of its colons would make two copies of it: a key of 2 MB would take many minutes."""
    longest = "\U0001f600" * ID_CHARS
    assert bad(b"odd", f"{longest}:{longest}") == (((longest, longest),), None, None)
    assert bad(b"odd", ":" * 2_000_000) is None


@pytest.mark.parametrize("changes", [{"role": "coordinator"}, {"msg_type": "reply"}])
def test_what_no_worker_reports_about_an_attempt_is_not_attributed(changes: dict[str, Any]) -> None:
    assert bad(value("BATCH_OK", **changes)) is None


# --- any record ---------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 2**53, 10**400, "9" * 5_000, "x" * 300, "*", "\x00", "\ud800"])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed_records(draw: st.DrawFn) -> bytes:
    """Return an event in which some fields have arbitrary values or are missing."""
    made = message(draw(st.sampled_from([*PAYLOADS, "WORKER_ONLINE", "WORKER_OFFLINE"])))
    for part in (made, made["payload"]):
        for name in draw(st.lists(st.sampled_from(sorted(part)), max_size=2, unique=True)):
            if draw(st.booleans()):
                part[name] = draw(JSON)
            else:
                part.pop(name)
    return json.dumps(made).encode()


def use(found: StatusEvent) -> None:
    """Do with an event what the bridge does, except for the writes."""
    held = record(lease=new_lease(record(), found, NOW))
    judge(record(), found)
    judge(held, found)
    assert held.lease is not None
    document_deadline_ms(found, renewed(held.lease, found, NOW))
    log_rows([found], 1.0)
    if found.event.kind in TERMINAL:
        assert isinstance(outcome_of(held, found, NOW), Outcome)


@given(given_value=st.binary(max_size=50) | JSON.map(lambda given_json: json.dumps(given_json).encode()))
@settings(max_examples=examples(60))
@pytest.mark.parametrize("read", READERS)
def test_any_value_is_read_or_malformed(read: Callable[[bytes | None], object], given_value: bytes) -> None:
    assert result_of(read, given_value) in (None, Malformed)


@given(given_value=changed_records())
@settings(max_examples=examples(100))
def test_any_event_is_used_ignored_or_malformed(given_value: bytes) -> None:
    found = result_of(read_event, given_value)
    if isinstance(found, StatusEvent):
        use(found)
    else:
        assert found in (None, Malformed)


@given(given_value=changed_records())
@settings(max_examples=examples(60))
def test_any_announcement_is_used_ignored_or_malformed(given_value: bytes) -> None:
    found: Any = result_of(read_announce, given_value)
    if found not in (None, Malformed) and isinstance(found[1], EvWorkerOnline):
        announced_fields(found[1], len(given_value))
