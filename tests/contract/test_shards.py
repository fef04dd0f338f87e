"""Shards of a node that are killed, or frozen and return, at each of their writes: every batch counts once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, begun, documents_of, opened, stored_node
from tests.contract.freezing_database import FreezingDatabase
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.adapters import shards
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.claims import Claim, first_fence
from flowkit.adapters.shards import FAILED, FINISHED, ShardStates
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.supervision import AttemptFailed
from flowkit.core.time import LeaseObserver
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import AttemptInput, FailureKind, NodeIO, Quarantine, SettleBatches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.contract.conftest import Steady

    from flowkit.activities.context import RunContext
    from flowkit.activities.handlers import Batch

UIDS = ("1", "2", "3")
PULL = NodeIO(
    input_inline={"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"], "poll_ms": 50}}
)


@pytest.fixture
async def tasks(db: Any) -> AsyncIterator[TaskStore]:
    """A task in which `a` has finished with three batches, and `w` pulls from it."""
    store, artifacts = TaskStore(db), ArtifactStore(db)
    await store.prepare()
    await artifacts.prepare()
    await opened(store, "a", "w")
    source = attempt("a")
    await begun(store, source)
    for uid in UIDS:
        await artifacts.store_batch(source, uid, {"n": int(uid)}, WORKER, AT)
    await artifacts.mark_complete(TASK, "a", 1, {}, AT)
    await store.attempts.finish(source, RUN, AT)
    yield store


def shard(number: int, epoch: int, **fields: Any) -> AttemptInput:
    given = {"shard": number, "parallel": 3, "io": PULL, "sources": {"a": 1}, **fields}
    return replace(attempt("w", epoch=epoch, index=1), **given)


def closing(epoch: int) -> AttemptInput:
    return shard(0, epoch)


def by(name: str) -> Returning:
    """Return a handler whose results name it."""
    metrics = {"by": name}
    return Returning(BatchResult(success=True, metrics=metrics), final=FinalizeResult(metrics=metrics))


def run(db: Any, given: AttemptInput, handler: Returning) -> asyncio.Task[Any]:
    return asyncio.create_task(role_executor(db, given, handler).run())


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all attempts run in one process, which observes the leases of shards."""
    observer = LeaseObserver()
    monkeypatch.setattr(shards, "LeaseObserver", lambda: observer)


async def expire(tasks: TaskStore, steady: Steady) -> None:
    """Let the process see the leases of all attempts, and then no renewal of them for as long as they last."""
    looking = shard(9, 99)
    await tasks.shards.states(looking)
    steady.forward(looking.lease_ttl_sec)


async def results(db: Any) -> dict[str, str]:
    """Return who has processed each batch. Each has one metrics row and one artifact, with the same content."""
    rows = [
        row for row in await documents_of(db.metrics_raw) if row["node_id"] == "w" and not row.get("final")
    ]
    partials = [
        row for row in await documents_of(db.artifacts) if row["node_id"] == "w" and "batch_uid" in row
    ]
    assert len(rows) == len(partials) == len(UIDS)
    found = {row["batch_uid"]: row["metrics"]["by"] for row in rows}
    assert found == {row["batch_uid"]: row["meta"]["by"] for row in partials}
    assert not any(row["failed"] for row in rows)
    return found


async def test_shards_share_the_batches_and_the_closing_attempt_ends_the_node(
    db: Any, tasks: TaskStore
) -> None:
    first = run(db, shard(1, 1), by("first"))
    while not await db.node_shards.count_documents({}):
        await let_other_tasks_run()
    ends = await asyncio.gather(first, run(db, shard(2, 2), by("second")))
    assert sum(each.batches for each in ends) == len(UIDS)
    await run(db, closing(3), by("closing"))
    assert set((await results(db)).values()) <= {"first", "second"}
    entry = await stored_node(db, 1)
    assert (entry["status"], entry["attempt_epoch"]) == ("finished", 3)
    assert [row["status"] for row in await documents_of(db.node_shards)] == [FINISHED, FINISHED]


AT_EACH_WRITE = pytest.mark.parametrize(
    ("collection", "number"),
    [
        pytest.param("tasks", 1, id="begin"),
        pytest.param("node_shards", 1, id="row of the shard"),
        pytest.param("stream_progress", 1, id="first claim"),
        pytest.param("stream_progress", 2, id="second claim"),
        pytest.param("artifacts", 1, id="first artifact"),
        pytest.param("metrics_raw", 1, id="first metrics"),
        pytest.param("artifacts", 2, id="second artifact"),
        pytest.param("metrics_raw", 2, id="second metrics"),
        pytest.param("artifacts", 3, id="last artifact"),
        pytest.param("metrics_raw", 3, id="last metrics"),
        pytest.param("node_shards", 2, id="end"),
    ],
)


@AT_EACH_WRITE
@pytest.mark.parametrize("successor", [1, 2], ids=["its next attempt", "another shard"])
async def test_batches_of_a_shard_that_stops_at_a_write_are_taken_over_and_count_once(
    db: Any, tasks: TaskStore, steady: Steady, collection: str, number: int, successor: int
) -> None:
    frozen = FreezingDatabase(db, collection, number)
    first = run(frozen, shard(1, 1), by("first"))
    await frozen.reached_by(first)
    assert not first.done()
    await expire(tasks, steady)
    await run(db, shard(successor, 2), by("second"))
    found = await results(db)
    frozen.thaw()
    with suppress(AttemptFailed, EpochTaken, Fenced):
        await first
    assert await results(db) == found
    await run(db, closing(3), by("closing"))
    assert await results(db) == found
    entry = await stored_node(db, 1)
    assert (entry["status"], entry["attempt_epoch"]) == ("finished", 3)


@pytest.mark.parametrize(
    ("collection", "number"),
    [
        ("stream_progress", 1),
        ("stream_progress", 2),
        ("artifacts", 1),
        ("metrics_raw", 2),
        ("node_shards", 2),
    ],
)
async def test_a_take_over_that_stops_is_taken_over_again(
    db: Any, tasks: TaskStore, steady: Steady, collection: str, number: int
) -> None:
    stopped = FreezingDatabase(db, "metrics_raw", 1)
    first = run(stopped, shard(1, 1), by("first"))
    await stopped.reached_by(first)
    await expire(tasks, steady)
    frozen = FreezingDatabase(db, collection, number)
    second = run(frozen, shard(2, 2), by("second"))
    await frozen.reached_by(second)
    await expire(tasks, steady)
    await run(db, shard(3, 3), by("third"))
    found = await results(db)
    for each, database in ((first, stopped), (second, frozen)):
        database.thaw()
        with suppress(AttemptFailed, Fenced):
            await each
    assert await results(db) == found
    claims = await documents_of(db.stream_progress)
    assert max(claim["fence"] for claim in claims) > 1


class Waiting(Returning):
    """Waits in each batch until the test lets it continue."""

    def __init__(self, name: str) -> None:
        super().__init__(BatchResult(success=True, metrics={"by": name}))
        self.reached, self.may_continue = asyncio.Event(), asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the result when the test allows it."""
        self.reached.set()
        await self.may_continue.wait()
        return await super().process_batch(batch, ctx)


async def test_a_shard_that_has_taken_over_and_returns_after_the_end_of_the_node_changes_nothing(
    db: Any, tasks: TaskStore, steady: Steady
) -> None:
    slow, late = Waiting("slow"), Waiting("late")
    first = run(db, shard(1, 1), slow)
    await slow.reached.wait()
    await expire(tasks, steady)
    second = run(db, shard(2, 2), late)
    await late.reached.wait()
    slow.may_continue.set()
    await first
    await run(db, closing(3), by("closing"))
    found = await results(db)
    late.may_continue.set()
    with pytest.raises(AttemptFailed) as fenced:
        await second
    assert fenced.value.failure.kind is FailureKind.FENCED
    assert await results(db) == found == dict.fromkeys(UIDS, "slow")


async def test_shards_try_a_batch_again_that_was_set_aside_before_a_lost_shard_was_fenced_off(
    db: Any, tasks: TaskStore
) -> None:
    quarantine: dict[str, Any] = {"quarantine": Quarantine(attempts=1, most=1)}
    stopped = FreezingDatabase(db, "stream_progress", 1)
    lost = run(stopped, shard(2, 1, **quarantine), by("lost"))
    await stopped.reached_by(lost)
    await run(db, shard(1, 2, **quarantine), Picky(BatchResult(success=True, metrics={"by": "first"})))
    end = replace(closing(3), **quarantine)
    assert (await run(db, end, by("closing"))).failed_batches == 1
    await ArtifactStore(db).forget_quarantined(end, await ArtifactStore(db).choose_quarantined(end, None))
    assert (await run(db, shard(1, 4, kept=True, **quarantine), by("again"))).batches == 1
    stopped.thaw()
    assert (await lost).batches == 0
    assert sorted((await results(db)).values()) == ["again", "first", "first"]


@pytest.mark.parametrize("collection", ["artifacts", "metrics_raw", "tasks"])
async def test_a_closing_attempt_that_stops_is_followed_by_another_one(
    db: Any, tasks: TaskStore, collection: str
) -> None:
    await run(db, shard(1, 1), by("first"))
    number = 2 if collection == "tasks" else 1
    frozen = FreezingDatabase(db, collection, number)
    stopped = run(frozen, closing(2), by("closing"))
    await frozen.reached_by(stopped)
    await run(db, closing(3), by("last"))
    frozen.thaw()
    with suppress(AttemptFailed, Fenced):
        await stopped
    assert set((await results(db)).values()) == {"first"}
    entry = await stored_node(db, 1)
    assert (entry["status"], entry["attempt_epoch"]) == ("finished", 3)
    finals = [row["metrics"] for row in await documents_of(db.metrics_raw) if row.get("final")]
    assert finals == [{"by": "last"}]


async def test_the_next_attempt_of_a_failed_shard_takes_what_it_has_left_and_others_do_not(
    db: Any, tasks: TaskStore
) -> None:
    failing = Returning(BatchResult(success=False, reason_code="flaky"))
    assert (await failure_of(role_executor(db, shard(1, 1), failing))).code == "flaky"
    ended = await run(db, shard(2, 2), by("second"))
    assert ended.batches == len(UIDS) - 1
    ended = await run(db, shard(1, 3), by("again"))
    assert ended.batches == 1
    assert sorted((await results(db)).values()) == ["again", "second", "second"]
    states = await tasks.shards.states(shard(1, 4))
    assert states.finished == {2, 3}
    assert states.failed == {1: 1}


async def test_a_shard_of_an_earlier_generation_changes_nothing(db: Any, tasks: TaskStore) -> None:
    frozen = FreezingDatabase(db, "artifacts", 1)
    first = run(frozen, shard(1, 1), by("first"))
    await frozen.reached_by(first)
    later = {"generation": 1, "first_epoch": 5}
    await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.1.attempt_epoch": 5}})
    await run(db, shard(1, 6, **later), by("later"))
    frozen.thaw()
    with suppress(AttemptFailed, Fenced):
        await first
    assert set((await results(db)).values()) == {"later"}


@pytest.mark.parametrize("ahead_sec", [-300.0, 300.0])
async def test_a_shard_is_lost_when_nobody_renews_its_lease_whatever_the_clock_of_its_worker_says(
    tasks: TaskStore, steady: Steady, ahead_sec: float
) -> None:
    own, other, at = shard(1, 1), shard(2, 2), AT + ahead_sec
    await tasks.shards.begin(own, RUN, WORKER, at)
    await tasks.shards.begin(other, RUN, "w-2", AT)
    for _ in range(4):
        assert (await tasks.shards.states(other)).list_lost(other) == []
        steady.forward(own.lease_ttl_sec / 2)
        at += own.lease_ttl_sec / 2
        await tasks.shards.extend_lease(own, RUN, at + own.lease_ttl_sec)
    assert (await tasks.shards.states(other)).list_lost(other) == []
    steady.forward(own.lease_ttl_sec)
    assert (await tasks.shards.states(other)).list_lost(other) == [1]


def test_states_list_what_may_be_taken_over() -> None:
    states = ShardStates(live=frozenset({2}), finished=frozenset({1}), failed={3: 3, 4: 4}, latest=6)
    assert states.list_lost(shard(4, 7)) == [4, 5, 6]
    assert states.list_lost(shard(2, 6)) == [5]
    assert FAILED != FINISHED


async def test_a_claim_is_taken_over_once_and_each_time_with_a_higher_fence(
    db: Any, tasks: TaskStore
) -> None:
    claims = ArtifactStore(db).claims
    assert await claims.make_new(shard(1, 1), "a", ["1", "2"], AT) == {0, 1}
    assert await claims.make_new(shard(2, 2), "a", ["2", "3"], AT) == {1}
    taken = Claim("a", "1", 1, first_fence(shard(1, 1)))
    assert await claims.take_over(shard(2, 2), taken, AT) == taken.fence + 1
    assert await claims.take_over(shard(2, 2), taken, AT) == taken.fence + 1  # a repetition
    assert await claims.take_over(shard(3, 3), taken, AT) is None
    later = shard(3, 9, generation=1)
    found = await claims.of_attempts(later, [1, 2])
    fences = [await claims.take_over(later, claim, AT) for claim in found]
    assert fences == [first_fence(later)] * 3


class Picky(Returning):
    """Fails for batch 2, in every try."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return the result."""
        if batch.batch_uid == "2":
            return BatchResult(success=False, reason_code="no_such_city", error="as ordered")
        return await super().process_batch(batch, ctx)


class Second(Returning):
    """Fails for the second batch of the source, under whatever uid it receives it."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return the result."""
        if "'n': 2" in str(batch.payload):
            return BatchResult(success=False, reason_code="no_such_city", error="as ordered")
        return await super().process_batch(batch, ctx)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("chunks", [{}, {"size": 1}])
async def test_a_retry_of_batches_leaves_the_claims_so_that_no_source_waits_for_them(
    db: Any, tasks: TaskStore, number: int, chunks: dict[str, int]
) -> None:
    adapter = "pull.from_artifacts.rechunk:size" if chunks else "pull.from_artifacts"
    args = {"from_nodes": ["a"], "poll_ms": 50, **chunks}
    io = NodeIO(input_inline={"input_adapter": adapter, "input_args": args})
    given: dict[str, Any] = {"io": io, "parallel": 3 if number else 1, "quarantine": Quarantine(most=3)}
    result = BatchResult(success=True, metrics={"by": "first"})
    await run(db, shard(number, 1, **given), Second(result))
    settle = SettleBatches(task_id=TASK, index=1, node_id="w", epoch=1, generation=0, first_epoch=0)
    assert await tasks.settle_batches(settle, ArtifactStore(db)) == 0
    assert await ArtifactStore(db).claims.counts(TASK, "a", ["w"]) == {"w": 3}
    again = by("again")
    await run(db, shard(number, 2, kept=True, **given), again)
    assert ["'n': 2" in str(batch.payload) for batch in again.got] == [True]
    assert await ArtifactStore(db).claims.counts(TASK, "a", ["w"]) == {"w": 3}


@AT_EACH_WRITE
async def test_a_batch_is_set_aside_once_although_the_shard_stops_at_a_write(
    db: Any, tasks: TaskStore, steady: Steady, collection: str, number: int
) -> None:
    quarantine: dict[str, Any] = {"quarantine": Quarantine(attempts=1, most=1)}
    frozen = FreezingDatabase(db, collection, number)
    first = run(frozen, shard(1, 1, **quarantine), Picky(BatchResult(success=True, metrics={"by": "first"})))
    await frozen.reached_by(first)
    await expire(tasks, steady)
    handler = Picky(BatchResult(success=True, metrics={"by": "second"}))
    await run(db, shard(2, 2, **quarantine), handler)
    frozen.thaw()
    with suppress(AttemptFailed, EpochTaken, Fenced):
        await first
    ended = await run(db, replace(closing(3), **quarantine), handler)
    assert (ended.failed_batches, (await stored_node(db, 1))["failed_batches"]) == (1, 1)
    rows = {row["batch_uid"]: row for row in await documents_of(db.metrics_raw) if row["node_id"] == "w"}
    artifacts = {
        row["batch_uid"]: row
        for row in await documents_of(db.artifacts)
        if row["node_id"] == "w" and "batch_uid" in row
    }
    assert rows.keys() == artifacts.keys() == {*UIDS}
    assert {uid for uid, row in rows.items() if row["failed"]} == {"2"}
    assert artifacts["2"]["quarantined"] == {"error": "as ordered", "tries": 1}
    assert [artifacts[uid]["status"] for uid in UIDS] == ["partial", "failed", "partial"]


async def test_batches_that_were_set_aside_are_tried_again_in_the_same_generation(
    db: Any, tasks: TaskStore
) -> None:
    quarantine: dict[str, Any] = {"quarantine": Quarantine(attempts=1, most=1)}
    await run(db, shard(1, 1, **quarantine), Picky(BatchResult(success=True, metrics={"by": "first"})))
    artifacts = ArtifactStore(db)
    settle = SettleBatches(task_id=TASK, index=1, node_id="w", epoch=1, generation=0, first_epoch=0)
    assert await tasks.settle_batches(replace(settle, skips=True, batch_uids=["2"]), artifacts) == 0
    assert await artifacts.skipped(shard(1, 2)) == {"2"}
    assert await tasks.settle_batches(settle, artifacts) == 0
    assert await artifacts.skipped(shard(1, 2)) == {"2"}
    assert await tasks.settle_batches(replace(settle, batch_uids=["2"]), artifacts) == 0
    assert await artifacts.quarantined(shard(1, 2)) == set()
    again = Picky(BatchResult(success=True, metrics={"by": "second"}))
    await run(db, shard(2, 3, kept=True, **quarantine), again)
    rows = {row["batch_uid"]: row for row in await documents_of(db.metrics_raw) if row["node_id"] == "w"}
    assert {uid: (row["failed"], row["attempt_epoch"]) for uid, row in rows.items()} == {
        "1": (False, 1),
        "2": (True, 3),
        "3": (False, 1),
    }
    assert await tasks.settle_batches(settle, artifacts) == 1, "a late repetition deletes no newer batch"


async def test_progress_begins_with_the_first_shard_after_the_latest_reset(tasks: TaskStore, db: Any) -> None:
    for number, epoch in ((1, 1), (1, 3), (2, 4)):
        await tasks.shards.begin(shard(number, epoch), RUN, f"w-{epoch}", AT + epoch)
    assert (await TaskQueries(db).shards(TASK))["w"].started_at == AT + 1
    await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.1.first_epoch": 2}})
    progress = (await TaskQueries(db).shards(TASK))["w"]
    assert (progress.started_at, progress.running) == (AT + 3, ["w-3", "w-4"])
