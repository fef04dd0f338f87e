"""What an admission queue reads, writes and keeps: commands to MongoDB, bodies, events and holders."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.admission import queue as queue_module
from flowkit.admission.kafka import AdmissionTopics, EventRelay
from flowkit.admission.models import Door, Kind, Limits, Override, Report, Request, State
from flowkit.admission.queue import AdmissionQueue, Outbox
from flowkit.admission.rules import KEEP_BODY_SEC
from flowkit.admission.store import AdmissionStore, Hold
from flowkit.testing import memory_database
from tests.unit.event_loop import let_other_tasks_run

if TYPE_CHECKING:
    from collections.abc import Callable

WRITES = ("insert_many", "bulk_write", "update_one", "update_many", "find_one_and_update", "delete_many")
READS = ("find", "find_one", "distinct", "count_documents")


class CountingDatabase:
    """Forwards to a database in memory, and counts its commands by name."""

    def __init__(self) -> None:
        self.commands: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        """The changes in bulk writes, by collection."""
        self.projections: list[Any] = []
        """Those of the reads of requests."""
        self._db = memory_database()

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, name: str) -> Any:
        return _CountingCollection(self, name, self._db[name])


class _CountingCollection:
    def __init__(self, database: CountingDatabase, name: str, collection: Any) -> None:
        self._database, self._name, self._collection = database, name, collection

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._collection, name)
        return self._counted(name, method) if name in WRITES + READS else method

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._database.commands[name] += 1
            if name == "bulk_write":
                self._database.changes[self._name] += len(args[0])
            if name in ("find", "find_one") and self._name == "admission_items":
                self._database.projections.append(args[1] if len(args) > 1 else None)
            return method(*args, **options)

        return call


class Producer:
    """Keeps the types of the events that are sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    async def send(self, topic: str, key: str, value: bytes, *, headers: Any = ()) -> None:
        """Keep an event."""
        self.sent.append((key, topic))


class Queue:
    """A queue in memory with a clock of its own, and its side of Kafka."""

    def __init__(self, db: Any = None, **limits: Any) -> None:
        self.db = db or memory_database()
        self.limits = replace(Limits(), **limits)
        self.now = time.time()
        self.queue = AdmissionQueue(AdmissionStore(self.db, queue="q"), clock=lambda: self.now)
        self.producer = Producer()
        producer: Any = self.producer
        self.relay = EventRelay(self.queue, AdmissionTopics(), producer)

    async def prepared(self) -> Queue:
        """Create what the queue needs."""
        await self.queue.store.prepare()
        await self.queue.store.set_limits(self.limits)
        return self

    async def submit(self, id: str, user: str = "dora", script: str = "print(6*7)") -> State:
        """Submit an execution."""
        body = {"script": script, "timeout_seconds": 60}
        who: dict[str, Any] = {"execution_id": id, "user_id": user, "door": Door.KAFKA}
        return (await self.queue.submit(Request(**who, kind=Kind.EXECUTION, body=body))).state

    async def stored(self, id: str) -> Any:
        """Return a request as it is stored."""
        return await self.db.admission_items.find_one({"_id": id})


async def test_an_execution_alone_takes_fourteen_commands() -> None:
    db = CountingDatabase()
    made = await Queue(db).prepared()
    made.queue.dispatches = True
    await made.submit("first")
    db.commands.clear()
    await made.submit("e")
    assert db.commands == {"insert_many": 1, "bulk_write": 2, "find_one_and_update": 1}, "its place"
    db.commands.clear()
    assert [item["_id"] for item in await made.queue.dispatch()] == ["first", "e"]
    assert db.commands == {"find": 1, "find_one_and_update": 1, "bulk_write": 2}, "its slot"
    db.commands.clear()
    assert await made.relay.relay(looks=False) == 10
    assert db.commands == {"bulk_write": 1}, "its events"
    db.commands.clear()
    await made.queue.report("e", Report(state=State.COMPLETED))
    assert db.commands == {"find": 1, "find_one_and_update": 1, "bulk_write": 2}, "its end"
    db.commands.clear()
    await made.queue.report("first", Report(state=State.COMPLETED))
    db.commands.clear()
    assert await made.queue.dispatch() == []
    assert db.commands == {"find_one_and_update": 1}, "the end of the last step"


async def test_polls_of_a_full_queue_read_no_body() -> None:
    db = CountingDatabase()
    made = await Queue(db, max_active=1).prepared()
    for number in range(5):
        await made.submit(f"e{number}")
    assert len(await made.queue.dispatch()) == 1
    await made.queue.dispatch()
    db.commands.clear()
    db.projections.clear()
    await made.queue.dispatch()
    await made.queue.recover()
    await made.queue.take_due()
    await made.queue.find("e3")
    assert all(shown["body"] == 0 for shown in db.projections)
    await made.queue.dispatch()
    assert db.commands["find_one_and_update"] == 0


async def test_an_empty_queue_reads_only_its_counters() -> None:
    db = CountingDatabase()
    made = await Queue(db).prepared()
    await made.queue.dispatch()
    db.commands.clear()
    await made.queue.dispatch()
    assert db.commands == {"find_one": 1}


async def test_rejections_are_written_together() -> None:
    db = CountingDatabase()
    made = await Queue(db, max_per_user=1).prepared()
    made.queue.dispatches = True
    await made.submit("e")
    db.commands.clear()
    states = await asyncio.gather(*(made.submit(f"r{number}") for number in range(65)))
    assert set(states) == {State.REJECTED}
    # The first one goes alone, and the others wait for it.
    assert db.commands.total() <= 2 * 7


async def test_requests_of_one_user_are_added_to_its_list_in_one_change() -> None:
    db = CountingDatabase()
    made = await Queue(db).prepared()
    made.queue.dispatches = True
    await made.submit("e")
    db.changes.clear()
    await asyncio.gather(*(made.submit(f"r{number}") for number in range(65)))
    # The first one goes alone, and the others wait for it.
    assert db.changes["admission_holders"] == 2


@pytest.mark.parametrize(("cap", "fits"), [(None, 5), (7, 5), (3, 2), (1, 0)])
async def test_as_many_requests_of_a_user_are_added_as_fit(cap: int | None, fits: int) -> None:
    made = await Queue().prepared()
    store = made.queue.store

    def hold(entry: str) -> Hold:
        return Hold(holder="u/default/dora", list="held", entry=entry, cap=cap)

    assert await store.hold([hold("first")]) == [True]
    holds = [hold(f"e{number}") for number in range(5)]
    expected = [number < fits for number in range(5)]
    assert await store.hold(holds) == expected
    assert await store.hold(holds) == expected, "a repetition adds nothing"
    [(_, lists)] = [each async for each in store.all_holders()]
    assert lists["held"] == ["first", *(f"e{number}" for number in range(fits))]


async def test_a_new_limit_of_a_tenant_lists_no_more_requests_than_a_document_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "_RECORDED", 20)
    made = await Queue(max_per_user=1_000).prepared()
    store = made.queue.store
    monkeypatch.setattr(store, "open_items", partial(store.open_items, limit=10))
    await asyncio.gather(*(made.submit(f"e{number}") for number in range(40)))
    await store.set_limits(replace(made.limits, tenants={"default": Override(max_total=15)}))

    async def listed() -> int:
        made.now += 61
        await made.queue.keep_records()
        lists = {holder: found["held"] async for holder, found in store.all_holders()}
        return len(lists["t/default"])

    assert await listed() == 20
    assert await made.submit("late") is State.REJECTED
    for id in sorted(f"e{number}" for number in range(40))[:10]:
        await made.queue.cancel(id, reason="r", by="me")
    await made.queue.dispatch(1)
    assert await listed() == 20, "those that were left out come later"


async def test_the_body_of_a_rejected_request_is_not_kept() -> None:
    made = await Queue(max_per_user=1).prepared()
    await made.submit("e")
    assert await made.submit("r", script="x" * 1_000) is State.REJECTED
    assert (await made.stored("r"))["body"] == {}
    assert (await made.stored("e"))["body"]["script"] == "print(6*7)"


async def test_the_body_of_an_ended_request_is_kept_for_a_day() -> None:
    made = await Queue().prepared()
    for id in ("ran", "waits"):
        await made.submit(id)
    await made.queue.dispatch(1)
    await made.queue.report("ran", Report(state=State.FAILED))
    made.now += KEEP_BODY_SEC - 1
    await made.queue.take_due()
    assert await made.queue.body("ran") != {}
    made.now += 1
    await made.queue.take_due()
    assert await made.queue.body("ran") == {}
    assert await made.queue.body("waits") != {}


async def test_ended_requests_do_not_hide_those_that_are_due() -> None:
    made = await Queue(stale_sec=1_000.0).prepared()
    await made.submit("e")
    [item] = [await made.stored("e")]
    await made.queue.cancel("e", reason="r", by="me")
    ended = await made.stored("e")
    others = [{**ended, "_id": f"old{number}"} for number in range(600)]
    await made.db.admission_items.insert_many(others)
    made.now += 900
    await made.submit("late")
    made.now += 1_000
    assert item["due_at"] < made.now
    assert (await made.queue.take_due()).ended == 1
    assert (await made.stored("late"))["state"] == State.EXPIRED


async def test_a_request_that_is_rejected_often_keeps_its_latest_events() -> None:
    made = await Queue(max_pending=0).prepared()
    for _ in range(120):
        await made.submit("e")
    found = await made.stored("e")
    assert len(found["events"]) == 101


async def test_idle_holders_are_deleted_and_created_again() -> None:
    made = await Queue(max_per_user=1).prepared()
    other = Queue(made.db)
    for each, id in ((made, "a"), (other, "b")):
        assert await each.submit(id) is State.QUEUED
        await each.queue.cancel(id, reason="r", by="me")
        await each.queue.dispatch()
    await made.queue.drop_stray_holds()
    assert await made.db.admission_holders.count_documents({}) == 0
    assert await other.submit("c") is State.QUEUED
    assert await made.submit("d") is State.REJECTED


async def test_sweeps_leave_the_holders_of_a_queue_whose_name_begins_like_theirs() -> None:
    made = await Queue().prepared()
    other = AdmissionQueue(AdmissionStore(made.db, queue="q/u"))
    await other.store.prepare()
    body = {"timeout_seconds": 60}
    who: dict[str, Any] = {"user_id": "dora", "door": Door.KAFKA, "kind": Kind.EXECUTION, "body": body}
    await other.submit(Request(execution_id="e", **who))
    assert await made.queue.drop_stray_holds() == 0
    assert [holder async for holder, _ in made.queue.store.all_holders()] == []
    [(holder, lists)] = [each async for each in other.store.all_holders()]
    assert (holder, len(lists["held"])) == ("u/default/dora", 1)


async def test_processes_adapt_once_to_new_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = await Queue().prepared()
    await made.queue.limits()
    await made.queue.store.set_limits(replace(made.limits, tenants={"default": Override(max_total=5)}))
    made.now += 3
    adapted: list[Limits] = []

    async def adapt(old: Limits, new: Limits) -> None:
        await let_other_tasks_run()
        adapted.append(new)

    monkeypatch.setattr(made.queue, "_adapt", adapt)
    await asyncio.gather(*(made.queue.limits() for _ in range(3)))
    assert len(adapted) == 1


async def test_a_holder_that_another_process_creates_again_meanwhile_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await Queue(max_per_user=2).prepared()
    await made.submit("a")
    await made.queue.cancel("a", reason="r", by="me")
    await made.queue.dispatch()
    await made.queue.drop_stray_holds()
    store: Any = made.queue.store
    look, others = store._held_by, [Queue(made.db).submit("b")]

    async def look_late(holders: Any) -> Any:
        while others:
            assert await others.pop() is State.QUEUED
        return await look(holders)

    monkeypatch.setattr(store, "_held_by", look_late)
    assert await made.submit("c") is State.QUEUED
    assert await made.submit("d") is State.REJECTED


async def test_a_request_beyond_the_limit_of_its_user_takes_no_place_of_its_tenant() -> None:
    own = {"flood": Override(max_total=1)}
    made = await Queue(users=own, tenants={"default": Override(max_total=2)}).prepared()
    await made.submit("first", "flood")
    # The first one of several goes alone, and the others together.
    together = [made.submit("f1", "flood"), made.submit("f2", "flood"), made.submit("d", "dora")]
    assert await asyncio.gather(*together) == [State.REJECTED, State.REJECTED, State.QUEUED]


async def test_an_event_is_sent_once_though_the_request_at_hand_is_older() -> None:
    made = await Queue().prepared()
    await made.submit("e")
    await made.relay.relay()
    [started] = await made.queue.dispatch()
    assert started["sent"] == 2
    await made.relay.relay()
    await made.relay.relay()
    kinds = [topic for _, topic in made.producer.sent]
    assert kinds == [
        *("execution_accepted", "execution_queued"),
        *("create_pod_command", "execution_started", "execution_running"),
    ]


@pytest.mark.parametrize("looks", [True, False])
async def test_what_a_process_did_not_send_is_read_by_the_next_look(looks: bool) -> None:
    made = await Queue().prepared()
    await made.submit("e")
    await made.queue.dispatch()
    made.queue.outbox.take()
    assert await made.relay.relay(looks=looks) == (5 if looks else 0)


async def test_status_names_the_users_with_the_most_requests() -> None:
    made = await Queue(max_active=1).prepared()
    for number in range(30):
        await made.submit(f"e{number}", user=f"u{number % 12}")
    await made.queue.dispatch()
    found = (await made.queue.status()).top_users
    assert [each.pending + each.active for each in found] == [3] * 6 + [2] * 4
    assert sum(each.active for each in found) == 1
    assert (await made.queue.status(users=False)).top_users == ()


def test_a_relay_reads_the_events_of_others_once() -> None:
    outbox = Outbox()
    outbox.has_relay = True
    outbox.add_others()
    assert outbox.take() == ([], True)
    assert outbox.take() == ([], False)
