"""What a queue does about what other processes, or earlier tries, have left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from flowkit.admission.models import Changed, Door, Kind, Limits, Report, Request, State
from flowkit.admission.queue import SESSION_SEC, AdmissionQueue
from flowkit.errors import StoreUnavailable
from flowkit.models.admission import Priority
from tests.admission.memory import MemoryStore, Outage, Shared

REQUEST = Request(execution_id="e", user_id="dora", door=Door.PYTHON, kind=Kind.EXECUTION, body={})


class Killed(MemoryStore):
    """The store of a process that is killed after it has stored its request."""

    async def hold(self, holds: Any) -> list[bool]:
        """End."""
        raise Outage


async def test_a_rejection_is_reported_even_if_a_repeated_request_is_cut_off() -> None:
    shared, now = Shared(), 0.0
    shared.limits = Limits(max_per_user=0)
    queues = []
    for number, kind in enumerate((MemoryStore, Killed)):
        store: Any = kind(shared)
        queues.append(
            AdmissionQueue(store, clock=lambda: now, steady=lambda: now, new_id=f"s{number}".format)
        )
    queue, killed = queues
    assert (await queue.submit(REQUEST)).state is State.REJECTED
    with pytest.raises(Outage):
        await killed.submit(REQUEST)
    await queue.recover()  # sees the sessions for the first time
    now += SESSION_SEC + 1
    await queue.recover()
    assert [event["type"] for event in shared.items["e"]["events"]] == ["execution_failed"]
    del shared.items["e"]["unsent"]
    await queue.recover()
    assert "e" not in shared.items


class EndsMeanwhile(MemoryStore):
    """A store in which a request ends while a process takes over its start."""

    other: AdmissionQueue

    async def due(self, *given: Any) -> list[dict[str, Any]]:
        """Return the requests as they were before."""
        found = await super().due(*given)
        for item in found:
            await self.other.report(item["_id"], Report(state=State.COMPLETED))
        return found


async def test_a_task_that_ends_while_its_start_is_repeated_is_not_started_again() -> None:
    shared, now = Shared(), 0.0
    plain: Any = MemoryStore(shared)
    store: Any = EndsMeanwhile(shared)
    queue = AdmissionQueue(store, clock=lambda: now, steady=lambda: now)
    store.other = AdmissionQueue(plain, clock=lambda: now, steady=lambda: now)
    await queue.submit(Request(execution_id="t", user_id="dora", door=Door.PYTHON, kind=Kind.TASK, body={}))
    [item] = await queue.dispatch()
    await queue.try_again(item, "Temporal was away, but has started it")
    now += 60
    assert (await queue.take_due()).starts == []
    assert shared.items["t"]["state"] == State.COMPLETED


class DiesAfterUpdate(MemoryStore):
    """The store of a process that is killed after it has changed requests in a step of one kind."""

    def __init__(self, shared: Shared, marker: str) -> None:
        super().__init__(shared)
        self._marker = marker

    async def update(self, updates: Any, marker: tuple[str, Any]) -> set[str]:
        """End after a change of that kind."""
        done = await super().update(updates, marker)
        if marker[0] == self._marker:
            raise Outage
        return done


async def test_the_place_of_an_expired_request_is_given_back_before_its_id_is_used_again() -> None:
    shared, now = Shared(), 0.0
    shared.limits = Limits(stale_sec=10.0)
    stores: list[Any] = [MemoryStore(shared), DiesAfterUpdate(shared, "settled"), MemoryStore(shared)]
    queue, killed, other = (AdmissionQueue(store, clock=lambda: now, steady=lambda: now) for store in stores)
    await queue.submit(REQUEST)
    now += 11
    assert (await killed.take_due()).ended == 1
    with pytest.raises(Outage):
        await killed.dispatch()
    assert (await queue.submit(REQUEST)).state is State.EXPIRED
    await other.recover()  # sees the sessions for the first time
    now += SESSION_SEC + 1
    assert await other.recover() == 1
    assert (await other.submit(REQUEST)).state is State.QUEUED
    assert shared.counters["pending"] == 1


class Slow(MemoryStore):
    """The store of a process whose last call arrives when its request has been forgotten, and submitted again."""

    async def update(self, updates: Any, marker: tuple[str, Any]) -> set[str]:
        """Fail now, and make the call later."""
        self._shared.late.append(lambda: [self._apply(each) for each in updates])
        raise Outage


class Meets(MemoryStore):
    """A store at which the late calls of others arrive directly after the next request is stored."""

    async def insert(self, items: Any) -> set[str]:
        """Store requests, and let the late calls arrive."""
        known = await super().insert(items)
        while self._shared.late:
            self._shared.late.pop()()
        return known


async def test_a_late_call_about_a_forgotten_request_does_not_change_a_later_one_of_its_id() -> None:
    shared, now = Shared(), 0.0
    stores: list[Any] = [Slow(shared), MemoryStore(shared), Meets(shared)]
    slow, other, later = (AdmissionQueue(store, clock=lambda: now, steady=lambda: now) for store in stores)
    with pytest.raises(Outage):
        await slow.submit(REQUEST)
    await other.recover()  # sees the sessions for the first time
    now += SESSION_SEC + 1
    assert await other.recover() == 1
    assert shared.items == {}
    assert (await later.submit(REQUEST)).state is State.QUEUED
    assert shared.counters["pending"] == 1


class Waits(MemoryStore):
    """A store that does not respond any more once a request has its place."""

    reached: asyncio.Event

    async def update(self, updates: Any, marker: tuple[str, Any]) -> set[str]:
        """Wait until the caller gives up."""
        self.reached.set()
        await asyncio.Event().wait()
        return await super().update(updates, marker)


async def test_the_place_of_a_submission_that_is_given_up_becomes_free_while_its_process_lives() -> None:
    shared = Shared()
    store: Any = Waits(shared)
    store.reached = asyncio.Event()
    queue = AdmissionQueue(store)
    submission = asyncio.create_task(queue.submit(REQUEST))
    await store.reached.wait()
    submission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submission
    assert shared.counters["pending"] == 1
    assert await queue.recover() == 1
    assert (shared.counters["pending"], shared.items) == (0, {})


async def test_a_request_moves_again_only_when_its_last_move_has_ended() -> None:
    shared, now = Shared(), 0.0
    stores: list[Any] = [MemoryStore(shared), DiesAfterUpdate(shared, "moved")]
    queue, killed = (AdmissionQueue(store, clock=lambda: now, steady=lambda: now) for store in stores)
    await queue.submit(REQUEST)
    with pytest.raises(Outage):
        await killed.set_priority(REQUEST.execution_id, Priority.HIGH)
    with pytest.raises(StoreUnavailable):
        await queue.set_priority(REQUEST.execution_id, Priority.LOW)
    await queue.recover()  # sees the sessions for the first time
    now += SESSION_SEC + 1
    assert await queue.recover() == 1
    assert (await queue.set_priority(REQUEST.execution_id, Priority.LOW)).outcome is Changed.DONE
    await queue.session.end_due()
    assert {rank: count for rank, count in shared.counters["bands"].items() if count} == {"4": 1}


async def test_a_process_that_was_idle_for_long_submits_without_an_error() -> None:
    shared, now = Shared(), 0.0
    stores: list[Any] = [MemoryStore(shared), MemoryStore(shared)]
    idle, other = (AdmissionQueue(store, clock=lambda: now, steady=lambda: now) for store in stores)
    await idle.submit(REQUEST)
    await other.recover()  # sees the sessions for the first time
    now += SESSION_SEC + 1
    await other.recover()
    assert (await idle.submit(replace(REQUEST, execution_id="later"))).state is State.QUEUED


@pytest.mark.parametrize("ahead_sec", [-300.0, 300.0])
async def test_a_session_is_closed_when_nobody_renews_it_whatever_the_clock_of_its_process_says(
    ahead_sec: float,
) -> None:
    shared, now = Shared(), 0.0
    stores: list[Any] = [MemoryStore(shared), MemoryStore(shared)]
    own = AdmissionQueue(stores[0], clock=lambda: now + ahead_sec, steady=lambda: now)
    other = AdmissionQueue(stores[1], clock=lambda: now, steady=lambda: now)
    await own.submit(REQUEST)
    for _ in range(4):
        await other.recover()
        now += SESSION_SEC / 2
        await own.session.end_due()
    assert own.session.id in shared.counters["sessions"]
    await other.recover()
    now += SESSION_SEC + 1
    await other.recover()
    assert own.session.id not in shared.counters["sessions"]


async def test_an_event_that_was_not_sent_keeps_its_content_when_the_request_is_submitted_again() -> None:
    shared = Shared()
    shared.limits = Limits(max_pending=0)
    store: Any = MemoryStore(shared)
    queue = AdmissionQueue(store, clock=lambda: 0.0)
    await queue.submit(replace(REQUEST, metadata={"service_name": "first"}))
    [before] = await queue.events("e")
    await queue.submit(replace(REQUEST, metadata={"service_name": "second"}))
    after, latest = await queue.events("e")
    assert after == before
    assert [each["metadata"]["service_name"] for each in (before, latest)] == ["first", "second"]


class CountsTries(MemoryStore):
    """The store of a process that tries again and again to submit a request."""

    tries = 0

    async def insert(self, items: Any) -> set[str]:
        """Count the try."""
        self.tries += 1
        return await super().insert(items)


async def test_a_submission_waits_a_minute_for_an_earlier_one_of_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowkit.admission.queue._POLL_SEC", 0)
    shared = Shared()
    stores: list[Any] = [Killed(shared), CountsTries(shared)]
    with pytest.raises(Outage):
        await AdmissionQueue(stores[0], clock=lambda: 0.0).submit(REQUEST)
    queue = AdmissionQueue(stores[1], clock=lambda: 20.0 * stores[1].tries)
    with pytest.raises(StoreUnavailable, match="the request 'e' could not be changed in time"):
        await queue.submit(REQUEST)
    assert stores[1].tries == 4
