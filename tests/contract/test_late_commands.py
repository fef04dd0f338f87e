"""An attempt waits while a worker may still run an earlier one, which was cancelled before a worker had
read its command."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.bridge_side import BridgeSide
from tests.contract.bridges import UNUSED, context_of
from tests.contract.builders import AT, attempt
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.adapters.dispatches import Dispatch, DispatchState, Outcome, OutcomeKind, WorkerLease
from flowkit.bridge import commands
from flowkit.bridge.commands import LateCommands
from flowkit.bridge.rules.outcomes import cancelled, lease_lost

OFFSET = 5
TTL_SEC = 10.0


class Kafka:
    """A topic of commands whose command at OFFSET is unread, and a status topic that is processed."""

    def __init__(self) -> None:
        self.committed = OFFSET
        self.begin = 0
        self.status_processed = True
        self.reads = 0

    def status(self, role: str) -> str:
        """Return the name of a topic."""
        return role

    async def read_begins(self, _: str) -> dict[int, int]:
        """Return the begin of the partition."""
        return {0: self.begin}

    async def read_ends(self, _: str) -> dict[int, int]:
        """Return the end of the partition."""
        return {0: OFFSET + 1}

    async def read_committed(self, *_: str) -> dict[int, int]:
        """Return the position of the workers' group."""
        self.reads += 1
        return {0: self.committed}

    async def has_caught_up(self, *_: Any) -> bool:
        """Return whether the bridges have processed the status topic."""
        self.reads += 1
        return self.status_processed


class Signals:
    """Records which workers were signalled."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stop_owner(self, record: Dispatch) -> None:
        """Signal the worker to stop."""
        assert record.lease is not None
        self.stopped.append(record.lease.worker_id)


class World:
    """The first attempt of a node, which was cancelled, and the second one, which waits for it."""

    def __init__(self, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commands, "_RETRY_SEC", 0.0)
        self.kafka, self.signals = Kafka(), Signals()
        self.context = context_of(db, UNUSED, AT)
        kafka: Any = self.kafka
        self.context.at, self.context.offsets, self.context.topics = AT, kafka, kafka
        self.store = self.context.stores.dispatches
        self.key = ""

    async def start(self) -> asyncio.Task[None]:
        """Store the first attempt, and let the second one wait."""
        record = Dispatch(
            attempt=attempt(),
            run_id="run",
            queue="flowkit",
            topic="cmd",
            partition=0,
            end_offset=0,
            dedup_id="d",
            cancel_token="t",
            owner="",
            created_at=AT,
            offset=OFFSET,
            state=DispatchState.REPORTED,
            outcome=Outcome(kind=OutcomeKind.CANCELLED, at=AT),
        )
        self.key = record.key
        await self.store.insert(record)
        signals: Any = self.signals
        late = LateCommands(self.context, signals)
        waiting = asyncio.ensure_future(late.settle(replace(attempt(), epoch=2)))
        await self.look()
        assert not waiting.done()
        return waiting

    async def look(self) -> None:
        """Let the waiting attempt look some times."""
        reads = self.kafka.reads + len(self.signals.stopped)
        async with asyncio.timeout(EVENT_TIMEOUT_SEC):
            while self.kafka.reads + len(self.signals.stopped) < reads + 3:
                await let_other_tasks_run()

    async def begin(self) -> None:
        """Let a worker run the first attempt."""
        lease = WorkerLease(worker_id="w", lease_id="l", ttl_sec=TTL_SEC, expires_at=AT, worker_ts_ms=1)
        await self.store.note_late_run(self.key, lease)


@pytest.fixture
async def world(db: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    """A node whose first attempt was cancelled."""
    return World(db, monkeypatch)


@pytest.mark.parametrize(
    "change", [{"committed": OFFSET + 1}, {"begin": OFFSET + 1}], ids=["read", "deleted"]
)
async def test_a_command_that_is_gone_without_an_acceptance_ends_the_wait(
    world: World, change: dict[str, int]
) -> None:
    waiting = await world.start()
    world.kafka.status_processed = False
    vars(world.kafka).update(change)
    await world.look()
    assert not waiting.done()
    world.kafka.status_processed = True
    await asyncio.wait_for(waiting, EVENT_TIMEOUT_SEC)
    assert await world.store.find_late(attempt().task_id, "a", 2) == []


async def test_a_worker_that_has_begun_is_stopped_and_ends_the_wait_with_its_own_end(world: World) -> None:
    waiting = await world.start()
    world.kafka.committed = OFFSET + 1
    world.kafka.status_processed = False
    await world.begin()
    world.kafka.status_processed = True
    await world.look()
    assert set(world.signals.stopped) == {"w"}
    assert not waiting.done()
    await world.store.settle(world.key)
    await asyncio.wait_for(waiting, EVENT_TIMEOUT_SEC)


async def test_a_worker_that_loses_its_lease_ends_the_wait(world: World) -> None:
    waiting = await world.start()
    await world.begin()
    await world.look()
    assert not waiting.done()
    world.context.at += 2 * TTL_SEC
    await asyncio.wait_for(waiting, EVENT_TIMEOUT_SEC)


async def test_events_of_a_cancelled_attempt_show_who_runs_it_and_that_it_has_ended(db: Any) -> None:
    side = await BridgeSide.create(db)
    unread = await side.open("n", accepted=False)
    await side.dispatches.end(unread.key, cancelled(AT))
    node = (unread.attempt.task_id, "n", 2)
    await side.handle(side.event("TASK_ACCEPTED", "n"))
    (late,) = await side.dispatches.find_late(*node)
    assert late.lease is not None
    assert [signal.target_worker_id for signal in side.signals] == [late.lease.worker_id]
    await side.handle(side.event("CANCELLED", "n"))
    assert await side.dispatches.find_late(*node) == []


async def test_an_outdated_worker_overwrites_the_artifact_of_a_later_attempt_only_until_its_event(
    db: Any,
) -> None:
    side = await BridgeSide.create(db)
    lost = await side.open("n")
    await side.dispatches.end(lost.key, lease_lost(lost, AT))
    later, artifacts = replace(lost.attempt, epoch=2), side.bridge.context.stores.artifacts
    await artifacts.store_batch(later, "b0", {"from": 2}, "w2", AT)
    await db.artifacts.update_one({"batch_uid": "b0"}, {"$set": {"meta": {"from": 1}}})
    await side.handle(side.event("BATCH_OK", "n", {"batch_uid": "b0"}))
    assert [row["meta"] async for row in db.artifacts.find({})] == [{"from": 2}]
