"""What the records of Kafka mean to an admission queue, and which are malformed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import reason_codes
from flowkit.admission.kafka import (
    AdmissionTopics,
    BadRecord,
    CancelEvent,
    Completed,
    Ended,
    Requested,
    TimedOut,
    TopicRights,
    in_order,
    read,
    why_without_effect,
)
from flowkit.admission.models import Kind, State
from flowkit.errors import ConfigError
from flowkit.limits import KAFKA_RECORD_BYTES
from flowkit.models.admission import Priority
from tests.admission.events import REQUESTED, record, requested

if TYPE_CHECKING:
    from collections.abc import Callable

TOPICS = AdmissionTopics()
SHARED = AdmissionTopics(style="shared", prefix="pref")
NEITHER: Any = "both"


def parsed(event: dict[str, Any], topics: AdmissionTopics = TOPICS) -> Any:
    """Return the event of a record on the topic of its type."""
    return read(topics, topics.topic(event["event_type"]), json.dumps(event).encode())


def test_the_documented_request_is_read() -> None:
    event = parsed(REQUESTED)
    assert isinstance(event, Requested)
    request = event.request()
    assert (request.execution_id, request.user_id, request.tenant) == ("ex-7041", "u-dora", "default")
    assert (request.kind, request.priority) == (Kind.EXECUTION, Priority.HIGH)
    envelope = ("event_id", "event_type", "event_version", "timestamp", "aggregate_id", "metadata")
    assert request.body == {name: value for name, value in REQUESTED.items() if name not in envelope}
    assert request.metadata == REQUESTED["metadata"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((each.value, each) for each in Priority),
        *((0, Priority.CRITICAL), (1, Priority.HIGH), (5, Priority.NORMAL), (8, Priority.LOW)),
        *((10, Priority.BACKGROUND), (None, Priority.NORMAL), ("", Priority.NORMAL)),
    ],
)
def test_priorities_are_names_or_the_older_numbers(given: Any, expected: Priority) -> None:
    request = parsed(requested("e", priority=given)).request()
    assert request.priority is expected
    assert request.body["priority"] == expected.value


def test_without_a_priority_a_request_is_normal() -> None:
    event = {name: value for name, value in REQUESTED.items() if name != "priority"}
    assert parsed(event).request().priority is Priority.NORMAL


@pytest.mark.parametrize("metadata", [None, {}, {"user_id": None}, {"user_id": ""}, {"service_name": "x"}])
def test_a_request_without_a_user_is_anonymous(metadata: dict[str, Any] | None) -> None:
    assert parsed(requested("e", metadata=metadata)).request().user_id == "anonymous"


def test_unknown_fields_are_ignored_and_a_tenant_is_read() -> None:
    metadata = {"user_id": "a/b", "tenant": "acme", "trace": {"$deep": [1]}}
    request = parsed(requested("e", metadata=metadata, event_color="red", saga_id="forged")).request()
    assert (request.user_id, request.tenant) == ("a/b", "acme")
    assert request.metadata == {"user_id": "a/b", "tenant": "acme"}
    assert not {"event_color", "saga_id"} & request.body.keys()


INVALID: dict[str, list[Any]] = {
    "execution_id": ["", "x" * 201, "a\nb", "*", 7, None],
    "timeout_seconds": [0, -1, 1.5, "60", 10**9, True, None],
    "priority": ["urgent", 2, True, 5.0, []],
    "metadata": [
        *("x", [], {"user_id": "x" * 201}, {"user_id": 7}, {"user_id": "a\0"}),
        *({"tenant": "a/b"}, {"tenant": "x" * 201}, {"tenant": 7}),
    ],
    "runtime_command": ["python", [1], ["x" * 10_001], None],
    "script": ["x" * ((1 << 20) + 1)],
    "language": ["x" * 1_001],
}


@pytest.mark.parametrize(
    "fields",
    [{name: value} for name, values in INVALID.items() for value in values],
    ids=lambda fields: json.dumps(fields)[:40],
)
def test_invalid_fields_are_named_without_their_value(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRecord) as caught:
        parsed({**requested("e"), **fields})
    assert caught.value.reason == "invalid_field"
    assert str(caught.value).startswith(next(iter(fields)))
    assert len(str(caught.value)) <= 300


def test_a_field_that_is_not_valid_is_named_with_what_it_must_be_and_without_its_value() -> None:
    with pytest.raises(BadRecord, match=r"^runtime_filename is \(hidden\); it must not contain a slash$"):
        parsed({**REQUESTED, "runtime_filename": "s3cret/b"})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadRecord, match="script is missing"):
        parsed({name: value for name, value in REQUESTED.items() if name != "script"})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no_value"),
        (b"", "no_value"),
        (b" " * (KAFKA_RECORD_BYTES + 1), "too_large"),
        (b"{", "not_json"),
        (b"\xff\xfe", "not_json"),
        (b'{"execution_id":"\\ud800"}', "not_json"),
        (b"[" * 10_000, "not_json"),
        (b'{"execution_id":"a","execution_id":"b"}', "not_json"),
        (b'{"timeout_seconds":NaN}', "not_json"),
        (b"[]", "not_an_object"),
        (b'"execution_requested"', "not_an_object"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_records_without_an_object_are_malformed(value: bytes | None, reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        read(TOPICS, "execution_requested", value)
    assert caught.value.reason == reason


def test_a_topic_of_one_type_needs_no_event_type_and_accepts_no_other() -> None:
    event = {"execution_id": "e"}
    assert isinstance(read(TOPICS, "execution_completed", json.dumps(event).encode()), Completed)
    for wrong in ("execution_failed", 7, ["execution_completed"]):
        with pytest.raises(BadRecord) as caught:
            read(TOPICS, "execution_completed", json.dumps({**event, "event_type": wrong}).encode())
        assert caught.value.reason == "wrong_event_type"


def test_a_shared_topic_is_filtered_by_the_event_type() -> None:
    topic = "prefexecution_events"
    assert isinstance(parsed(REQUESTED, SHARED), Requested)
    assert read(SHARED, topic, b'{"event_type":"execution_accepted"}') is None
    assert read(SHARED, topic, b'{"event_type":"pod_created","execution_id":7}') is None
    for event in (b"{}", b'{"event_type":7}', b'{"event_type":null}'):
        with pytest.raises(BadRecord) as caught:
            read(SHARED, topic, event)
        assert caught.value.reason == "no_event_type"


def test_the_topic_of_reports_takes_no_requests() -> None:
    with pytest.raises(BadRecord, match="send requests to execution_events") as caught:
        read(SHARED, "prefexecution_results", json.dumps(REQUESTED).encode())
    assert caught.value.reason == "wrong_event_type"


def ended(kind: str, **fields: Any) -> Ended:
    """Return a report about the execution `e`."""
    found = parsed({"event_type": f"execution_{kind}", "execution_id": "e", **fields})
    assert isinstance(found, Ended)
    return found


USAGE = {
    "execution_time_wall_seconds": 1.5,
    "cpu_time_jiffies": 12,
    "clk_tck_hertz": 100,
    "peak_memory_kb": 2048,
}


def test_reports_have_the_state_and_the_fields_of_their_event() -> None:
    completed = ended("completed", exit_code=0, resource_usage=USAGE, stdout="out", stderr="").report()
    assert (completed.state, completed.fields) == (
        State.COMPLETED,
        {"exit_code": 0, "resource_usage": USAGE},
    )
    failed = ended("failed", exit_code=3, error_type="script_error", error_message="it broke").report()
    assert (failed.state, failed.reason, failed.error) == (State.FAILED, "script_error", "it broke")
    assert failed.fields == {"exit_code": 3, "resource_usage": None}
    timeout = ended("timeout", timeout_seconds=60).report()
    assert (timeout.state, timeout.reason) == (State.TIMEOUT, reason_codes.TIMEOUT)
    assert timeout.error == "the execution took longer than 60 s"
    cancelled = ended("cancelled", reason="not needed", cancelled_by="u-ann").report()
    assert (cancelled.state, cancelled.error) == (State.CANCELLED, "not needed")


def test_reports_of_other_versions_lack_fields() -> None:
    failed = ended("failed", error_type=None, stderr="Traceback").report()
    assert (failed.reason, failed.error, failed.fields["exit_code"]) == (reason_codes.ERROR, "Traceback", 1)
    assert ended("failed").report().error == "exit code 1"
    assert ended("timeout").report().error == "the execution took longer than its time"
    event = ended("cancelled", metadata={"user_id": "u-bo"})
    assert isinstance(event, CancelEvent)
    assert (event.why, event.by) == (reason_codes.USER_REQUEST, "u-bo")


@pytest.mark.parametrize(
    "fields", [{"exit_code": 2**31}, {"exit_code": "0"}, {"resource_usage": {"peak_memory_kb": -1}}]
)
def test_a_report_with_an_invalid_field_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match=next(iter(fields))):
        ended("completed", **fields)


def stored(state: State, **fields: Any) -> dict[str, Any]:
    """Return a request as the queue stores it."""
    return {"_id": "a", "tenant": "default", "state": state.value, "kind": "execution", **fields}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (None, "unknown"),
        (stored(State.RESERVING), "unknown"),
        (stored(State.QUEUED), "not_active"),
        (stored(State.ACTIVE), None),
        (stored(State.ACTIVE, kind="task"), "task"),
        *((stored(state), "ended") for state in (State.REJECTED, State.EXPIRED, State.COMPLETED)),
    ],
)
def test_a_report_ends_only_an_execution_that_runs(item: dict[str, Any] | None, why: str | None) -> None:
    for kind in ("completed", "failed", "timeout"):
        assert why_without_effect(item, ended(kind, event_id="other")) == why


def test_a_cancel_also_concerns_what_waits_and_tasks() -> None:
    cancel = ended("cancelled", event_id="other")
    assert why_without_effect(stored(State.QUEUED), cancel) is None
    assert why_without_effect(stored(State.ACTIVE, kind="task"), cancel) is None
    assert why_without_effect(stored(State.COMPLETED), cancel) == "ended"
    assert isinstance(ended("timeout"), TimedOut)


def test_records_of_several_topics_are_ordered_by_time_and_those_of_one_stay_in_order() -> None:
    places = [("b", 0, 30), ("b", 1, 10), ("a", 0, 20), ("a", 1, 40)]
    polled = [record(topic, offset, timestamp=at) for topic, offset, at in places]
    assert [(each.topic, each.offset) for each in in_order(polled)] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("a", 1),
    ]


def test_each_type_has_a_topic_of_its_own() -> None:
    topics = AdmissionTopics(prefix="prod.")
    assert topics.topic("execution_accepted") == "prod.execution_accepted"
    assert topics.consumed() == (
        *("prod.execution_requested", "prod.execution_completed", "prod.execution_failed"),
        *("prod.execution_timeout", "prod.execution_cancelled"),
    )
    assert topics.produced() == (
        *("prod.execution_accepted", "prod.execution_failed", "prod.execution_timeout"),
        *("prod.execution_cancelled", "prod.execution_queued", "prod.execution_started"),
        *("prod.execution_running", "prod.create_pod_command", "prod.delete_pod_command"),
        "prod.dead_letters",
    )


def test_executions_can_share_their_topics() -> None:
    assert SHARED.topic("delete_pod_command") == "prefsaga_commands"
    assert SHARED.consumed() == ("prefexecution_events", "prefexecution_results")
    assert SHARED.produced() == ("prefexecution_events", "prefsaga_commands", "prefdead_letters")


def test_optional_events_can_be_switched_off() -> None:
    topics = AdmissionTopics(events={"execution_started"})
    assert topics.sends("execution_started")
    assert topics.sends("execution_accepted")
    assert not topics.sends("execution_running")
    assert "execution_running" not in topics.produced()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AdmissionTopics(style=NEITHER),
            "style is 'both'; it must be one of 'per_type', 'shared'",
        ),
        (lambda: AdmissionTopics(prefix="my topic "), "my topic execution_requested.*a Kafka topic"),
        (lambda: AdmissionTopics(prefix="p" * 240), "a Kafka topic"),
        (lambda: AdmissionTopics(dead_letters="execution.failed"), "give the same topic 'execution.failed'"),
        (lambda: AdmissionTopics(style="shared", dead_letters="saga_commands"), "give the same topic"),
        (lambda: AdmissionTopics(group=""), "group is ''"),
        (
            lambda: AdmissionTopics(prefix="p.", rights={"p.execution_failed": TopicRights()}),
            "rights names the topic 'p.execution_failed'; choose from execution_requested, ",
        ),
        (lambda: AdmissionTopics(rights={"execution_accepted": TopicRights()}), "'execution_accepted'"),
        (
            lambda: AdmissionTopics(rights={"execution_requested": TopicRights(max_priority="urgent")}),
            "max_priority of the topic execution_requested is 'urgent'; choose from critical, ",
        ),
        (
            lambda: AdmissionTopics(rights={"execution_requested": TopicRights(tenants=["a/b"])}),
            "a tenant of the topic execution_requested is 'a/b'; it must not contain a slash",
        ),
        (
            lambda: AdmissionTopics(rights={"execution_requested": TopicRights(tenants="shop")}),
            "the tenants of the topic execution_requested are 'shop'; pass a list of names",
        ),
        (lambda: AdmissionTopics(events={"execution_accepted"}), "optional events are execution_queued"),
    ],
)
def test_topics_that_cannot_work_are_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_each_queue_reads_all_records_of_its_topics() -> None:
    assert TOPICS.group_of("a") == "execution-coordinator-a" != TOPICS.group_of("b")
    assert AdmissionTopics(group="mine").group_of("a") == "mine"
