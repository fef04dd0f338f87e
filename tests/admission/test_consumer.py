"""What records of Kafka may do to the requests of others, on a database in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.admission.kafka import OWN_HEADER, AdmissionConsumer, AdmissionTopics, TopicRights
from flowkit.admission.models import Door, Kind, Limits, Request, State
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.store import AdmissionStore
from flowkit.models.admission import Priority
from flowkit.testing import memory_database
from tests.admission.events import record, refuse_inserts, requested

if TYPE_CHECKING:
    from aiokafka import ConsumerRecord

REQUESTS, ENDS, CANCELS = "execution_requested", "execution_completed", "execution_cancelled"


class Producer:
    """Keeps what is sent: topic, value and headers."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    async def send(self, topic: str, key: object, value: bytes, *, headers: Any = ()) -> None:
        """Keep a record."""
        shown = {name: text.decode() for name, text in headers}
        self.sent.append((topic, json.loads(value), shown))


class Kafka:
    """The side of Kafka of a queue, whose records are passed to it in the test."""

    def __init__(self, queue: AdmissionQueue, topics: AdmissionTopics) -> None:
        self.queue = queue
        self.producer = Producer()
        made: Any = self.producer
        self._consumer = AdmissionConsumer(queue, topics, made)

    async def read(self, *records: ConsumerRecord[bytes, bytes]) -> None:
        """Read records, as one poll has them."""
        await self._consumer.handle(records)

    async def state(self, id: str) -> State:
        """Return the state of a request."""
        found = await self.queue.find(id)
        assert found is not None
        return found.state

    async def script_and_band(self, id: str) -> tuple[str, str]:
        """Return the script of a request, and the band that its executor gets."""
        found = await self.queue.body(id)
        assert found is not None
        return found["script"], found["priority"]

    @property
    def reasons(self) -> list[str]:
        """Why records are dead letters, the only ones that the tests expect."""
        assert {topic for topic, _, _ in self.producer.sent} <= {"dead_letters"}
        return [headers["reason"] for _, _, headers in self.producer.sent]


async def kafka(topics: AdmissionTopics | None = None) -> Kafka:
    """Return the side of Kafka of an empty queue."""
    store = AdmissionStore(memory_database(), queue="q")
    await store.prepare()
    return Kafka(AdmissionQueue(store), topics or AdmissionTopics())


def event(topic: str, id: str, offset: int = 0, **fields: Any) -> ConsumerRecord[bytes, bytes]:
    """Return a record about an execution."""
    value = requested(id, **fields) if topic == REQUESTS else {"execution_id": id, **fields}
    return record(topic, offset, value=json.dumps(value).encode())


async def submit(queue: AdmissionQueue, id: str, door: Door = Door.HTTP, tenant: str = "default") -> None:
    """Submit an execution of the user `u-dora`, whom the documented record names as well."""
    who: dict[str, Any] = {"execution_id": id, "user_id": "u-dora", "door": door, "tenant": tenant}
    await queue.submit(Request(**who, kind=Kind.EXECUTION, body={"script": "x", "priority": "normal"}))


async def test_a_record_does_not_take_the_id_of_a_request_of_another_door() -> None:
    made = await kafka()
    await submit(made.queue, "e")
    await made.read(event(REQUESTS, "e"))
    assert made.reasons == ["id_taken"]
    assert await made.script_and_band("e") == ("x", "normal")


async def test_a_request_that_mongodb_refuses_says_nothing_about_one_of_its_id_and_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await kafka()
    await submit(made.queue, "e")
    await submit(made.queue, "taken")
    refuse_inserts(monkeypatch, made.queue.store, "e")
    await made.read(*(event(REQUESTS, id, offset) for offset, id in enumerate(("e", "taken", "new"))))
    assert sorted(made.reasons) == ["id_taken", "refused"]
    assert [await made.state(id) for id in ("e", "taken", "new")] == [State.QUEUED] * 3


SHOP = AdmissionTopics(
    rights={
        REQUESTS: TopicRights(max_priority="normal", tenants=["shop", "mill"]),
        ENDS: TopicRights(tenants=["shop"]),
        CANCELS: TopicRights(tenants=["shop"]),
    }
)


@pytest.mark.parametrize(("given", "got"), [(None, "shop"), ("", "shop"), ("shop", "shop"), ("mill", "mill")])
async def test_a_request_is_that_of_a_tenant_of_its_topic(given: str | None, got: str) -> None:
    made = await kafka(SHOP)
    await made.read(event(REQUESTS, "e", metadata={"user_id": "7", "tenant": given}))
    found = await made.queue.find("e")
    assert found is not None
    assert (found.tenant, found.door) == (got, Door.KAFKA)


async def test_writers_of_a_topic_submit_nothing_for_another_tenant() -> None:
    made = await kafka(SHOP)
    await made.read(event(REQUESTS, "e", metadata={"user_id": "7", "tenant": "default"}))
    assert made.reasons == ["tenant_not_permitted"]
    assert await made.queue.find("e") is None


@pytest.mark.parametrize(
    ("asked", "got"), [("critical", Priority.NORMAL), (0, Priority.NORMAL), ("low", Priority.LOW)]
)
async def test_a_request_gets_at_most_the_band_of_its_topic(asked: object, got: Priority) -> None:
    made = await kafka(SHOP)
    await made.read(event(REQUESTS, "e", priority=asked))
    found = await made.queue.find("e")
    assert found is not None
    assert found.priority is got
    assert (await made.script_and_band("e"))[1] == got


@pytest.mark.parametrize("topic", [ENDS, CANCELS])
async def test_writers_of_a_topic_end_nothing_of_another_tenant(topic: str) -> None:
    made = await kafka(SHOP)
    await submit(made.queue, "own", tenant="shop")
    await submit(made.queue, "foreign")
    await made.queue.dispatch()
    ends = {"force_terminated": True}
    await made.read(event(topic, "own", **ends), event(topic, "foreign", 1, **ends))
    assert (await made.state("own")) in (State.COMPLETED, State.CANCELLED)
    assert (await made.state("foreign")) is State.ACTIVE
    assert made.queue.counts["ignored", "tenant_not_permitted"] == 1
    assert made.reasons == []


async def test_only_the_header_of_the_queue_itself_makes_a_record_its_own() -> None:
    made = await kafka()
    for id in ("a", "b", "c"):
        await submit(made.queue, id)
    await made.queue.dispatch()
    headers = {"a": b"q", "b": b"q2", "c": b""}
    for offset, (id, value) in enumerate(headers.items()):
        plain = event(ENDS, id, offset)
        fields = {**vars(plain), "headers": ((OWN_HEADER, value),)}
        await made.read(type(plain)(**fields))
    assert [await made.state(id) for id in headers] == [State.ACTIVE, State.COMPLETED, State.COMPLETED]
    assert made.queue.counts["ignored", "own_event"] == 1


async def test_reports_about_unknown_ids_and_those_of_another_deployment_change_nothing() -> None:
    here, there = await kafka(), await kafka()
    await submit(there.queue, "e")
    await there.queue.dispatch()
    await here.read(event(ENDS, "e"), event(CANCELS, "e", 1), event(CANCELS, "guessed", 2))
    assert here.queue.counts["ignored", "unknown"] == 3
    assert await there.state("e") is State.ACTIVE


async def test_a_late_report_changes_nothing() -> None:
    made = await kafka()
    await submit(made.queue, "e")
    await made.queue.dispatch()
    await made.read(event(ENDS, "e"), event(CANCELS, "e", 1), event(ENDS, "e", 2))
    assert await made.state("e") is State.COMPLETED
    assert made.queue.counts["ignored", "ended"] == 2


async def running_execution() -> Kafka:
    """Return a queue with one slot, whose execution `e` runs, while `next` waits. Its clock stands still."""
    made = await kafka()
    set_clock(made, made.queue.clock())
    await made.queue.store.set_limits(Limits(max_active=1))
    await made.queue.store.send_events()
    for id in ("e", "next"):
        await submit(made.queue, id)
    await made.queue.dispatch()
    return made


def set_clock(made: Kafka, now: float) -> None:
    """Let the clock of a queue stand at a time."""
    made.queue.clock = lambda: now


async def test_a_cancel_of_a_running_execution_keeps_its_slot_until_the_next_report() -> None:
    made = await running_execution()
    await made.read(event(CANCELS, "e", reason="enough"))
    await made.queue.dispatch()
    assert [await made.state(id) for id in ("e", "next")] == [State.ACTIVE, State.QUEUED]
    assert await commands(made, "e") == ["create_pod_command", "delete_pod_command"]
    found = await made.queue.find("e")
    assert found is not None
    assert found.cancel_requested
    await made.read(event(CANCELS, "e", 1, reason="it has stopped"))
    await made.queue.dispatch()
    assert [await made.state(id) for id in ("e", "next")] == [State.CANCELLED, State.ACTIVE]
    assert await commands(made, "e") == ["create_pod_command", "delete_pod_command"]


@pytest.mark.parametrize("fields", [{}, {"event_id": "c-1"}], ids=["by its place", "by its event_id"])
async def test_a_cancel_that_arrives_twice_is_no_report(fields: dict[str, Any]) -> None:
    made = await running_execution()
    again = 7 if fields else 0
    await made.read(event(CANCELS, "e", 0, **fields), event(CANCELS, "e", again, **fields))
    await made.read(event(CANCELS, "e", again, **fields))
    assert await made.state("e") is State.ACTIVE


async def test_another_end_of_an_execution_that_was_cancelled_counts() -> None:
    made = await running_execution()
    await made.read(event(CANCELS, "e"), event(ENDS, "e", 1))
    assert await made.state("e") is State.COMPLETED


async def test_a_cancel_without_a_report_frees_the_slot_after_30_seconds() -> None:
    made = await running_execution()
    await made.read(event(CANCELS, "e", reason="enough"))
    began = made.queue.clock()
    for later, state in ((29.0, State.ACTIVE), (30.0, State.CANCELLED)):
        set_clock(made, began + later)
        await made.queue.take_due()
        assert await made.state("e") is state
    found = await made.queue.find("e")
    assert found is not None
    assert (found.reason, found.error) == ("user_request", "enough")
    assert await commands(made, "e") == ["create_pod_command", "delete_pod_command"]


@pytest.mark.parametrize("was_cancelled", [False, True])
async def test_what_its_executor_has_terminated_frees_its_slot_at_once(*, was_cancelled: bool) -> None:
    made = await running_execution()
    if was_cancelled:
        await made.read(event(CANCELS, "e"))
    await made.read(event(CANCELS, "e", 1, force_terminated=True))
    await made.queue.dispatch()
    assert [await made.state(id) for id in ("e", "next")] == [State.CANCELLED, State.ACTIVE]
    assert await commands(made, "e") == ["create_pod_command", "delete_pod_command"]


async def commands(made: Kafka, id: str) -> list[str]:
    """Return the commands about an execution, in their order."""
    types = [each["event_type"] for each in await made.queue.events(id)]
    return [each for each in types if each.endswith("_command")]
