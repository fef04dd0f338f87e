"""Admission over Kafka: requests and reports come from topics, and the events about requests go to topics."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import reason_codes
from flowkit.admission.kafka import DEAD_LETTER_BYTES, AdmissionTopics, EventRelay
from flowkit.admission.models import Door as Via
from flowkit.admission.models import Kind, Limits, Request, State
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.errors import KafkaUnavailable, StoreUnavailable
from tests.admission.events import REQUESTED, record, refuse_inserts, requested
from tests.integration.admission.conftest import Door
from tests.integration.harness import eventually
from tests.kafka_batches import Codec, good_large_good, peak_memory_mb, reset_peak_memory, send_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.server

BOTH_STYLES = pytest.mark.parametrize("door", ["per_type", "shared"], indirect=True)
ENVELOPE = ("event_id", "event_type", "event_version", "timestamp", "aggregate_id", "metadata")


def without_envelope(event: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an event beyond its envelope."""
    return {name: value for name, value in event.items() if name not in ENVELOPE}


async def submit(door: Door, *ids: str, **body: Any) -> None:
    """Submit requests, one after the other."""
    for id in ids:
        fields = {"execution_id": id, "timeout_seconds": 60, **body}
        await door.queue.submit(
            Request(execution_id=id, user_id="u", door=Via.PYTHON, kind=Kind.EXECUTION, body=fields)
        )


async def until_state(door: Door, id: str, state: State) -> None:
    """Wait until a request has a state."""

    async def look() -> bool:
        found = await door.queue.find(id)
        return found is not None and found.state is state

    await eventually(look)


async def test_a_full_queue_rejects_a_request_with_the_documented_event(door: Door) -> None:
    full = {"$set": {"pending": 10_000, "bands": {"3": 10_000}}}
    await door.db.admission_queues.update_one({"_id": "q"}, full)
    async with door.running():
        await door.produce("execution_requested", requested("ex-7042"))
        [event] = await door.events("execution_failed", 1)
    assert without_envelope(event) == {
        "execution_id": "ex-7042",
        "exit_code": -1,
        "error_type": "resource_limit",
        "error_message": "Queue is full",
        "resource_usage": None,
        "stdout": "",
        "stderr": "Queue full: Queue is full. Queue size: 10000",
    }
    assert event["metadata"] == REQUESTED["metadata"]


async def test_the_request_of_a_user_after_a_hundred_is_rejected_with_the_documented_event(
    door: Door,
) -> None:
    async with door.running():
        await door.produce("execution_requested", *(requested(f"ex-{number}") for number in range(100)))
        await door.events("execution_accepted", 100)
        await door.produce("execution_requested", requested("ex-7042"))
        [event] = await door.events("execution_failed", 1)
    assert without_envelope(event) == {
        "execution_id": "ex-7042",
        "exit_code": -1,
        "error_type": "resource_limit",
        "error_message": "User execution limit exceeded (100)",
        "resource_usage": None,
        "stdout": "",
        "stderr": "Queue full: User execution limit exceeded (100). Queue size: 100",
    }


@BOTH_STYLES
async def test_a_request_is_accepted_started_and_completed(door: Door) -> None:
    shared = door.topics.style == "shared"
    inputs = "execution_events" if shared else "execution_requested"
    await door.queue.store.set_limits(Limits(max_active=1))
    await submit(door, "first", "second")
    async with door.running():
        await door.produce(inputs, REQUESTED)
        await until_state(door, "ex-7041", State.QUEUED)
        assert [item["_id"] for item in await door.queue.dispatch()] == ["ex-7041"]
        door.relay.notify()
        [command] = await door.events("saga_commands" if shared else "create_pod_command", 1)
        ended = {"event_type": "execution_completed", "execution_id": "ex-7041", "exit_code": 0}
        await door.produce("execution_results" if shared else "execution_completed", ended)
        await until_state(door, "ex-7041", State.COMPLETED)
        assert await next_popped(door) == ["first"]
        if not shared:
            accepted = await door.events("execution_accepted", 3)
            check_accepted(next(event for event in accepted if event["execution_id"] == "ex-7041"))
    check_command(command)


async def next_popped(door: Door) -> list[str]:
    """Return the ids of the requests that get the next slots; wait until some do."""
    popped: list[str] = []

    async def look() -> bool:
        popped.extend([item["_id"] for item in await door.queue.dispatch()])
        return bool(popped)

    await eventually(look)
    return popped


def check_accepted(event: dict[str, Any]) -> None:
    """Check the documented form of an accepted request, which two others precede in a lower band."""
    assert without_envelope(event) == {
        "execution_id": "ex-7041",
        "queue_position": 1,
        "estimated_wait_seconds": None,
        "priority": "high",
    }
    assert (event["event_version"], event["aggregate_id"]) == ("1.0", "ex-7041")
    assert event["timestamp"].endswith("Z")
    assert event["metadata"] == REQUESTED["metadata"]


def check_command(event: dict[str, Any]) -> None:
    """Check the documented form of the command that starts an execution."""
    fields = without_envelope(event)
    assert fields.pop("saga_id")
    assert fields == without_envelope(REQUESTED)
    assert event["metadata"] == {
        "service_name": "execution-coordinator",
        "service_version": "1.0.0",
        "user_id": "u-dora",
        "environment": "test",
    }


async def test_malformed_records_become_dead_letters_and_block_nothing(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    bad = [b"{", json.dumps(requested("e", timeout_seconds=-1)).encode(), b"[]", b"{ "]
    async with door.running():
        await door.produce("execution_requested", *bad, requested("good"), key=b"\xff")
        await until_state(door, "good", State.QUEUED)
        letters = await door.records("dead_letters", 4)
        await door.until_read()
    assert {letter.key for letter in letters} == {b"\xff"}
    assert sorted(letter.value for letter in letters) == sorted(bad)
    by_offset = {headers["offset"]: headers for headers in map(headers_of, letters)}
    assert by_offset["1"] == {
        "topic": door.topics.topic("execution_requested"),
        "partition": "0",
        "offset": "1",
        "reason": "invalid_field",
        "error": "timeout_seconds is (hidden); it must be at least 1",
    }
    counts = {
        name: door.queue.counts["dead_letter", name]
        for name in ("not_json", "invalid_field", "not_an_object")
    }
    assert counts == {"not_json": 2, "invalid_field": 1, "not_an_object": 1}
    assert caplog.text.count("a malformed record was set aside") == 3, "once for each reason"


def headers_of(record: Any) -> dict[str, str]:
    """Return the headers of a record as text."""
    return {name: value.decode() for name, value in record.headers}


async def test_a_dead_letter_has_the_beginning_of_its_record(door: Door) -> None:
    long = record(door.topics.topic("execution_failed"), 7, value=b" " * (DEAD_LETTER_BYTES + 1))
    await door.consumer.handle([long])
    [letter] = await door.records("dead_letters", 1)
    assert letter.value == b" " * DEAD_LETTER_BYTES


async def test_a_dead_letter_of_a_record_of_300_mb_has_no_value(door: Door) -> None:
    topic = door.topics.topic("execution_requested")
    raw = good_large_good(Codec.zstd, good=lambda number: json.dumps(requested(f"e{number}")).encode())
    reset_peak_memory()
    before = peak_memory_mb()
    await send_batch(door.bootstrap, topic, raw)
    async with door.running():
        await door.until_read()
    assert peak_memory_mb() - before < 100
    [letter] = await door.records("dead_letters", 1)
    found = headers_of(letter)
    assert (found["reason"], found["offset"]) == ("too_large", "1")
    assert found["error"] == "the record has more than 4,000,000 bytes"
    assert (letter.key, letter.value) == (b"k", b"")
    assert [await door.queue.find(each) is not None for each in ("e0", "e2")] == [True, True]


async def test_a_record_that_cannot_become_a_dead_letter_is_dropped(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise KafkaUnavailable("Kafka has no topic dead_letters")

    monkeypatch.setattr(door.producer, "send", refuse)
    topic = door.topics.topic("execution_requested")
    good = json.dumps(requested("good")).encode()
    await door.consumer.handle([record(topic, 0, value=b"{"), record(topic, 1, value=good)])
    assert door.queue.counts["dropped", ""] == 1
    assert await door.queue.find("good") is not None


async def test_a_request_that_mongodb_refuses_takes_no_other_with_it(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_inserts(monkeypatch, door.queue.store, "poison")
    topic, ids = door.topics.topic("execution_requested"), ["a", "b", "poison", "c"]
    values = [json.dumps(requested(id)).encode() for id in ids]
    await door.consumer.handle([record(topic, offset, value=value) for offset, value in enumerate(values)])
    [letter] = await door.records("dead_letters", 1)
    assert headers_of(letter)["reason"] == "refused"
    assert json.loads(letter.value)["execution_id"] == "poison"
    [event] = await door.events("execution_failed", 1)
    assert (event["execution_id"], event["error_type"]) == ("poison", "system_error")
    assert event["stderr"] == "Failed to queue execution: MongoDB cannot store this value"
    assert [id for id in ids if await door.queue.find(id)] == ["a", "b", "c"]


async def test_a_shared_topic_needs_the_type_and_passes_others_by(door: Door) -> None:
    topics = AdmissionTopics(style="shared", prefix=door.topics.prefix, group=door.topics.group)
    shared = Door(door.db, door.bootstrap, topics, door.producer)
    await shared.prepare()
    untyped = {name: value for name, value in REQUESTED.items() if name != "event_type"}
    async with shared.running():
        await shared.produce("execution_events", untyped, {"event_type": "pod_created"}, requested("good"))
        await until_state(shared, "good", State.QUEUED)
        [letter] = await shared.records("dead_letters", 1)
        # Those that the queue has sent itself return: accepted and queued.
        await shared.until_counted("other_event_type", 3)
    assert headers_of(letter)["reason"] == "no_event_type"


async def test_events_of_an_execution_are_sent_in_order_and_again_after_a_crash_with_their_ids(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(
        door.db, door.bootstrap, AdmissionTopics(style="shared", prefix=door.topics.prefix), door.producer
    )
    await door.prepare()
    await submit(door, "a", "b")
    await door.queue.dispatch()

    async def crash(_: object) -> None:
        raise StoreUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(door.queue.store, "mark_sent", crash)
        with pytest.raises(StoreUnavailable):
            await door.relay.relay()
    successor = Door(door.db, door.bootstrap, door.topics, door.producer)
    assert await successor.relay.relay() == 0, "their own process may still send them"
    successor.queue.clock = lambda: time.time() + 5
    assert await successor.relay.relay() == 10
    assert await door.relay.relay() == await successor.relay.relay() == 0
    assert (await door.queue.status()).unsent_events == 0
    records = await door.records("execution_events", 16)
    assert {record.key for record in records} == {b"a", b"b"}
    for id in ("a", "b"):
        sent = [json.loads(record.value) for record in records if record.key == id.encode()]
        kinds = ["execution_accepted", "execution_queued", "execution_started", "execution_running"]
        assert [event["event_type"] for event in sent] == kinds * 2
        assert [event["event_id"] for event in sent[:4]] == [event["event_id"] for event in sent[4:]]
    commands = await door.events("saga_commands", 4)
    assert len({event["event_id"] for event in commands}) == 2


async def test_an_own_rejection_does_not_end_a_later_try(door: Door) -> None:
    await door.queue.store.set_limits(Limits(max_pending=1))
    await submit(door, "first", "e")
    await door.queue.cancel("first", reason="makes room", by="u")
    await door.queue.dispatch(most=0)
    await door.queue.dispatch(most=0)
    await submit(door, "e")
    await door.queue.dispatch()
    async with door.running():
        [record] = await door.records("execution_failed", 1)
        event = json.loads(record.value)
        assert (event["execution_id"], event["exit_code"]) == ("e", -1)
        assert list(record.headers) == [("flowkit-queue", b"q")]
        await door.until_counted("own_event", 2)
        [command] = await door.records("create_pod_command", 1)
        assert not command.headers
    found = await door.queue.find("e")
    assert found is not None
    assert found.state is State.ACTIVE


async def test_reports_about_requests_that_do_not_run_are_counted_only(door: Door) -> None:
    await submit(door, "waits")
    failed = {"exit_code": -1, "error_type": "resource_limit"}
    async with door.running():
        await door.produce(
            "execution_failed", *({"execution_id": id, **failed} for id in ("waits", "nobody"))
        )
        await door.until_counted("not_active")
        await door.until_counted("unknown")
    found = await door.queue.find("waits")
    assert found is not None
    assert found.state is State.QUEUED


async def test_failures_and_timeouts_end_executions_and_a_cancel_also_what_waits(door: Door) -> None:
    await submit(door, "failed", "timeout", "stopped", "waits")
    await door.queue.dispatch(most=3)
    async with door.running():
        await door.produce("execution_failed", {"execution_id": "failed", "error_type": "script_error"})
        await door.produce("execution_timeout", {"execution_id": "timeout", "timeout_seconds": 60})
        cancels = [
            {"execution_id": id, "reason": "enough", "cancelled_by": "u"} for id in ("stopped", "waits")
        ]
        await door.produce("execution_cancelled", *cancels)
        await until_state(door, "failed", State.FAILED)
        await until_state(door, "timeout", State.TIMEOUT)
        await until_state(door, "waits", State.CANCELLED)
        [command] = await door.events("delete_pod_command", 1)
        await until_state(door, "stopped", State.ACTIVE)
        await door.produce("execution_cancelled", {"execution_id": "stopped"})
        await until_state(door, "stopped", State.CANCELLED)
    assert (command["execution_id"], command["reason"]) == ("stopped", "enough")


async def test_while_mongodb_is_away_nothing_is_committed_and_then_each_record_counts_once(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = door.queue.store.insert
    offsets: list[dict[int, int | None]] = []

    async def away(items: Sequence[dict[str, Any]]) -> set[str]:
        offsets.append(await committed(door))
        if len(offsets) == 1:
            raise StoreUnavailable
        return await insert(items)

    monkeypatch.setattr(door.queue.store, "insert", away)
    async with door.running():
        await door.produce("execution_requested", b"{", requested("e"))
        await until_state(door, "e", State.QUEUED)
        await door.until_read()
    assert offsets == [{0: None, 1: None}] * 2
    assert door.queue.counts["dead_letter", "not_json"] == 1, "the dead letter is not sent again"


async def committed(door: Door) -> dict[int, int | None]:
    """Return the offsets that the group has committed for the requests."""
    offsets = Offsets(door.connection)
    try:
        return await offsets.read_committed(
            door.topics.group_of("q"), door.topics.topic("execution_requested")
        )
    finally:
        await offsets.close()


async def test_an_execution_whose_command_is_too_large_fails(door: Door) -> None:
    await submit(door, "large", script="x" * (1 << 20))
    await submit(door, "small")
    await door.queue.dispatch()
    await door.relay.relay()
    await door.relay.relay()
    [command] = await door.events("create_pod_command", 1)
    assert command["execution_id"] == "small"
    [event] = await door.events("execution_failed", 1)
    assert (event["execution_id"], event["error_type"], event["exit_code"]) == ("large", "system_error", -1)
    assert event["stderr"].startswith("Failed to schedule execution: a record for the topic ")
    found = await door.queue.find("large")
    assert found is not None
    assert (found.state, found.reason) == (State.FAILED, reason_codes.START_FAILED)
    [started] = await door.events("execution_started", 1)
    assert started["execution_id"] == "small", "nothing says that the other one has started"


async def test_events_that_are_switched_off_are_skipped(door: Door) -> None:
    topics = AdmissionTopics(prefix=door.topics.prefix, events=set())
    await submit(door, "e")
    await door.queue.dispatch()
    assert await EventRelay(door.queue, topics, door.producer).relay() == 5
    await door.produce("execution_queued", {"the": "first"})
    assert await door.events("execution_queued", 1) == [{"the": "first"}]
    assert (await door.queue.status()).unsent_events == 0


async def test_topics_are_created_with_their_partitions(door: Door) -> None:
    offsets = Offsets(door.connection)
    counts = {topic: len(await offsets.list_partitions(topic)) for topic in door.topics.produced()}
    await offsets.close()
    dead = door.topics.dead_letter_topic
    assert counts.pop(dead) == 1
    assert set(counts.values()) == {2}


async def test_the_relay_reports_an_outage_once_and_continues(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unsent, calls = door.queue.store.unsent, 0

    async def away(limit: int) -> list[dict[str, Any]]:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise StoreUnavailable("MongoDB is away")
        return await unsent(limit)

    monkeypatch.setattr(door.queue.store, "unsent", away)
    monkeypatch.setattr("flowkit.admission.kafka.POLL_SEC", 0.05)
    await submit(door, "e")
    door.queue.outbox.take()
    running = asyncio.create_task(door.relay.run())
    await door.events("execution_accepted", 1)
    assert door.relay.health.running
    assert door.relay.health.last_error == "MongoDB is away"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert caplog.text.count("cannot send the events of admission") == 1
