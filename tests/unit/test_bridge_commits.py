"""What the bridge leaves for later while it handles events: commits, renewals of leases, and the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.errors import KafkaConnectionError
from tests.unit.bridge_records import NOW, event, record

from flowkit.bridge.kafka import consumer
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.consumer import Commits
from flowkit.bridge.rules.fencing import new_lease
from flowkit.bridge.status import Renewals, StatusEventLog
from flowkit.errors import StoreRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

LONG_SEC = 30.0


class Kafka:
    """Records the commits. The first one waits until the test allows it, if `held` is set."""

    def __init__(self, *, held: bool = False) -> None:
        self.commits: list[dict[str, int]] = []
        self.begun, self.allowed = asyncio.Event(), asyncio.Event()
        if not held:
            self.allowed.set()

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        self.begun.set()
        await self.allowed.wait()
        self.commits.append(dict(offsets))


async def test_offsets_of_several_polls_share_one_commit() -> None:
    kafka = Kafka()
    commits = Commits(kafka.commit)
    for offset in (1, 2, 3):
        commits.add({"p0": offset})
    commits.add({"p1": 7})
    await commits.finish(LONG_SEC)
    assert kafka.commits == [{"p0": 3, "p1": 7}]


async def test_offsets_that_arrive_during_a_commit_follow_in_the_next_one() -> None:
    kafka = Kafka(held=True)
    commits = Commits(kafka.commit)
    commits.add({"p0": 1})
    await kafka.begun.wait()
    commits.add({"p0": 2})
    kafka.allowed.set()
    await commits.finish(LONG_SEC)
    assert kafka.commits == [{"p0": 1}, {"p0": 2}]


async def test_failed_commit_is_reported_once() -> None:
    async def refuse(_: object) -> None:
        raise ConnectionError("refused")

    commits = Commits(refuse)
    commits.add({"p0": 1})
    await commits.finish(LONG_SEC)
    with pytest.raises(ConnectionError):
        commits.check()
    commits.check()


async def test_stopped_commits_are_dropped() -> None:
    kafka = Kafka(held=True)
    commits = Commits(kafka.commit)
    commits.add({"p0": 1})
    await kafka.begun.wait()
    await commits.stop()
    assert kafka.commits == []


async def test_failing_commits_are_repeated_and_logged_once_and_the_connection_does_not_count_as_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage, polls can succeed before commits do."""
    monkeypatch.setattr(consumer, "RECONNECT_PAUSE_SEC", 0)
    kafka, failures = Kafka(), [KafkaConnectionError("away"), KafkaConnectionError("away")]

    async def commit(offsets: Mapping[Any, int]) -> None:
        if failures:
            raise failures.pop()
        await kafka.commit(offsets)

    async def handle(_: object) -> None:
        pass

    reader = consumer.RecordConsumer(KafkaConnection("broker:9092"), ["topic"], "group", handle)
    reader.connected = True
    await reader._commit(SimpleNamespace(commit=commit), {"p0": 1})
    assert kafka.commits == [{"p0": 1}]
    assert reader.connected
    assert caplog.text.count("cannot commit the offsets of the group group") == 1


class Bridge:
    """The parts of a bridge that collected writes use. It records what MongoDB stores."""

    def __init__(self) -> None:
        self.renewed: list[dict[str, int]] = []
        self.logged: list[list[tuple[str, float | None]]] = []
        self.refreshed = 0
        self.matches = True
        self.problem: Exception | None = None
        self.begun, self.allowed = asyncio.Event(), asyncio.Event()
        self.allowed.set()
        stores = SimpleNamespace(dispatches=self, events=self)
        self.context: Any = SimpleNamespace(db=self.db, now=lambda: NOW, stores=stores)
        self.supervisor: Any = SimpleNamespace(update_record=lambda _: None, refresh_soon=self.refresh_soon)

    async def db(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self.begun.set()
        await self.allowed.wait()
        if (problem := self.problem) is not None:
            self.problem = None
            raise problem
        return await call()

    async def renew(self, renewals: list[tuple[Any, int]], _: float) -> bool:
        self.renewed.append({record.key: batches for record, batches in renewals})
        return self.matches

    async def append(self, rows: list[Any], _: float) -> None:
        if rows:
            self.logged.append([(row.payload["kind"], row.received_at) for row in rows])

    def refresh_soon(self) -> None:
        self.refreshed += 1


ACCEPTED = record(lease=new_lease(record(), event(), NOW))
OTHER = replace(ACCEPTED, attempt=replace(ACCEPTED.attempt, node_id="other"))


async def test_renewals_of_several_polls_are_written_together() -> None:
    bridge = Bridge()
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    renewals.add(OTHER, 0)
    renewals.add(ACCEPTED, 1)
    await renewals.write()
    await renewals.write()
    assert bridge.renewed == [{ACCEPTED.key: 3, OTHER.key: 0}]


async def test_batches_of_an_ending_attempt_are_counted_once() -> None:
    bridge = Bridge()
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    assert await renewals.take(ACCEPTED.key) == 2
    assert await renewals.take(ACCEPTED.key) == 0
    await renewals.write()
    assert bridge.renewed == []


async def test_an_ending_attempt_waits_for_its_renewal_in_progress() -> None:
    bridge = Bridge()
    bridge.allowed.clear()
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    writing = asyncio.create_task(renewals.write())
    await bridge.begun.wait()
    renewals.add(ACCEPTED, 1)
    taking = asyncio.create_task(renewals.take(ACCEPTED.key))
    bridge.allowed.set()
    assert await taking == 1
    await writing
    assert bridge.renewed == [{ACCEPTED.key: 2}]


async def test_renewals_that_were_not_written_are_written_later() -> None:
    bridge = Bridge()
    bridge.problem = ConnectionError("the test interrupts it")
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    with pytest.raises(ConnectionError):
        await renewals.write()
    renewals.add(ACCEPTED, 1)
    await renewals.write()
    assert bridge.renewed == [{ACCEPTED.key: 3}]


async def test_renewals_that_mongodb_refuses_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise, the role would commit no offset any more. The leases expire."""
    bridge = Bridge()
    bridge.problem = StoreRefused("the test refuses it")
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    await renewals.write()
    await renewals.write()
    assert bridge.renewed == []
    assert "some of 1 leases were not renewed, so they expire: the test refuses it" in caplog.text


async def test_supervisor_reads_the_records_if_another_bridge_has_changed_one() -> None:
    bridge = Bridge()
    bridge.matches = False
    renewals = Renewals(bridge.context, bridge.supervisor)
    renewals.add(ACCEPTED, 2)
    await renewals.write()
    assert bridge.refreshed == 1


async def test_log_keeps_the_time_of_receipt_and_omits_heartbeats() -> None:
    bridge = Bridge()
    log = StatusEventLog(bridge.context)
    log.add([event("TASK_DONE", {"metrics": {}}), event("TASK_HEARTBEAT")], NOW - 2)
    log.add([event("TASK_DONE", {"metrics": {}})], NOW - 1)
    await log.write()
    assert bridge.logged == [[("TASK_DONE", NOW - 2), ("TASK_DONE", NOW - 1)]]
    assert log.unwritten == []


async def test_refused_events_are_logged_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    bridge = Bridge()
    bridge.problem = StoreRefused("the test refuses it")
    log = StatusEventLog(bridge.context)
    log.add([event("TASK_DONE", {"metrics": {}})], NOW)
    await log.write()
    await log.write()
    assert bridge.logged == []
    assert "1 events were not stored" in caplog.text
