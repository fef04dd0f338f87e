"""Servers stop in the middle of a task, or of a schedule, and start again. Only these tests use them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.local import MongoServer, TemporalServer
from flowkit.models import TaskStatus
from tests.integration.chaos.backfills import Nemesis, drawn
from tests.integration.chaos.faults import FREEZE_MONGO, KILL_TEMPORAL, STOP_ENGINE
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node, wait_seconds
from tests.servers import copy_logs, stoppable_mongo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from flowkit.schedules import ScheduleView

pytestmark = pytest.mark.server

OUTAGE_SEC = 9.0
NO_RETRIES = {"retry_policy": {"max": 0}}
EVERY = timedelta(seconds=2)
ONE: dict[str, Any] = {"nodes": [node("a")]}
GRAPH: dict[str, Any] = {"nodes": [node("a", inline={"at": {"$cel": "task.scheduled_at"}})]}


@pytest.fixture(scope="module")
def frail_servers(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[TemporalServer, MongoServer]]:
    """Servers that a test may stop and restart. A test leaves them running."""
    folder: Path = tmp_path_factory.mktemp("frail-servers")
    with stoppable_mongo(folder) as mongo, TemporalServer(folder) as temporal:
        yield temporal, mongo
        if request.session.testsfailed:
            copy_logs(folder)


@pytest.fixture
async def own(
    frail_servers: tuple[TemporalServer, MongoServer], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Harness, TemporalServer, MongoServer]]:
    """A harness on servers that its test may stop."""
    temporal, mongo = frail_servers
    monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
    monkeypatch.setenv("MONGO_URL", mongo.url)
    harness = Harness(temporal=temporal.address, mongo=mongo.url)
    monkeypatch.setenv("MONGO_DATABASE", harness.database)
    yield harness, temporal, mongo
    await harness.close()


async def started(harness: Harness) -> str:
    """Start a task and wait until its first node runs."""
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(
        node("a", "paced", inline={"batches": 8, "pause": 0.3}, **NO_RETRIES),
        node("b", "quick", "a", inline={"batches": 3}, **NO_RETRIES),
        node("c", "quick", "b", **NO_RETRIES),
    )
    await harness.until_batches(task_id, "a", 2)
    return task_id


async def assert_finished_once(harness: Harness, task_id: str) -> None:
    """Check that every node finished and every batch counts once."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert set((await harness.statuses(task_id)).values()) == {"finished"}
    for node_id, batches in (("a", 8), ("b", 3), ("c", 1)):
        uids = Counter(row["batch_uid"] for row in await harness.rows(task_id, node_id))
        assert uids == {f"b{i}": 1 for i in range(batches)}


async def test_task_survives_a_kill_of_temporal(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, temporal, _ = own
    task_id = await started(harness)
    await asyncio.to_thread(temporal.kill)
    await asyncio.to_thread(temporal.start)
    await assert_finished_once(harness, task_id)


async def test_task_without_retries_survives_an_outage_of_temporal_longer_than_its_lease(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, temporal, _ = own
    harness.settings["lease_ttl_sec"] = 2
    task_id = await started(harness)
    await asyncio.to_thread(temporal.stop)
    await wait_seconds(4.0)
    await asyncio.to_thread(temporal.start)
    await assert_finished_once(harness, task_id)
    # The server may hear from the attempt before its timer finds it silent: then the attempt continues.
    assert (await harness.node(task_id, "a"))["attempt_epoch"] in (1, 2)


@pytest.mark.slow
async def test_task_waits_for_mongodb(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, _, mongo = own
    task_id = await started(harness)
    await asyncio.to_thread(mongo.stop)
    await wait_seconds(OUTAGE_SEC)
    await asyncio.to_thread(mongo.start)
    await assert_finished_once(harness, task_id)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 1


@pytest.mark.slow
async def test_time_without_mongodb_does_not_count_towards_timeout_sec(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, _, mongo = own
    harness.settings["function_timeout_sec"] = 6

    async def plain(task_id: str) -> None:
        await wait_seconds(1.0)

    await harness.engine(plain=plain)
    await harness.worker()
    task_id = await harness.create(
        node("role", "paced", inline={"batches": 4, "pause": 0.5}, timeout_sec=8, **NO_RETRIES),
        node("function", "coordinator_fn", io={"fn": "plain"}, **NO_RETRIES),
    )
    await harness.until_batches(task_id, "role", 1)
    await asyncio.to_thread(mongo.stop)
    await wait_seconds(OUTAGE_SEC)
    await asyncio.to_thread(mongo.start)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert {n["attempt_epoch"] for n in (await harness.document(task_id))["graph"]["nodes"]} == {1}


async def test_task_created_without_mongodb_runs_when_it_returns(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, _, mongo = own
    await harness.engine()
    await harness.worker()
    await asyncio.to_thread(mongo.stop)
    task_id = await harness.create(node("a"))

    async def waits_for_mongodb() -> bool:
        description = await (await harness.handle(task_id)).describe()
        pending = description.raw_description.pending_activities
        return any(activity.last_failure.message.startswith("MongoDB is unavailable") for activity in pending)

    await eventually(waits_for_mongodb)
    await asyncio.to_thread(mongo.start)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED


async def started_tasks(harness: Harness, name: str) -> list[dict[str, Any]]:
    """Return the documents of the tasks of a schedule, by nominal time."""
    found = harness.db.tasks.find({"id": {"$regex": f"^{name}-"}}).sort("scheduled_at", 1)
    return [document async for document in found]


@pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(60.0, marks=pytest.mark.nightly)], ids=["Temporal", "Temporal and engines"]
)
async def test_each_nominal_time_starts_one_task_under_kills(
    own: tuple[Harness, TemporalServer, MongoServer], seconds: float
) -> None:
    harness, temporal, _ = own
    await harness.worker()
    engines = [harness.engine_process()] if seconds else []
    if not seconds:
        await harness.engine()
    name, chance = f"every-two-{harness.queue}", random.Random(harness.queue)
    schedules = await harness.coordinator.schedules()
    await schedules.create(
        name, graph=GRAPH, params={"at": {"$cel": "task.scheduled_at"}}, every=EVERY, overlap="allow"
    )
    await eventually(lambda: started_tasks(harness, name))
    until = time.monotonic() + seconds
    while True:
        for engine in engines:
            engine.kill()
        await asyncio.to_thread(temporal.kill)
        await wait_seconds(chance.uniform(2.0, 3.0))
        await asyncio.to_thread(temporal.start)
        engines = [harness.engine_process() for _ in engines]
        if time.monotonic() > until:
            break
        await wait_seconds(chance.uniform(0.5, 2.5))
    await schedules.pause(name)
    view = await schedules.show(name)
    await harness.release_tasks()

    async def all_ended() -> list[dict[str, Any]] | None:
        tasks = await started_tasks(harness, name)
        ended = [each for each in tasks if each["status"] == TaskStatus.FINISHED]
        return tasks if len(ended) >= view.started else None

    tasks = await eventually(all_ended)
    found = [each["scheduled_at"] for each in tasks]
    first, last = (datetime.fromisoformat(found[place]) for place in (0, -1))
    expected = {first + number * EVERY for number in range((last - first) // EVERY + 1)}
    assert [datetime.fromisoformat(each) for each in found] == sorted(expected)
    assert all(each["id"] == f"{name}-{each['scheduled_at']}" for each in tasks)
    assert all(each["params"] == {"at": each["scheduled_at"]} for each in tasks)
    assert (view.missed, view.skipped) == (0, 0)
    for each in tasks:
        assert len(await harness.rows(each["id"], "a")) == 1
    await schedules.delete(name)


@pytest.mark.nightly
async def test_times_that_are_too_old_after_an_outage_are_missed_and_counted(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, temporal, _ = own
    await harness.engine()
    await harness.worker()
    name, schedules = f"late-{harness.queue}", await harness.coordinator.schedules()
    await schedules.create(name, graph=ONE, every=EVERY, overlap="allow", catchup="10s")
    await eventually(lambda: started_tasks(harness, name))
    down_at = datetime.now(UTC)
    await asyncio.to_thread(temporal.kill)
    await wait_seconds(20.0)
    await asyncio.to_thread(temporal.start)

    async def caught_up() -> ScheduleView | None:
        view = await schedules.show(name)
        return view if view.missed and view.runs[0].scheduled_at > datetime.now(UTC) - 2 * EVERY else None

    await eventually(caught_up)
    [listed] = [each for each in await eventually(schedules.list_schedules) if each.name == name]
    await schedules.pause(name)
    times = (await schedules.history([listed]))[name]
    missed = [each.at for each in times if each.status == "no_task"]
    view = await schedules.show(name)
    assert (len(missed), view.skipped) == (view.missed, 0)
    assert missed == [missed[0] + place * EVERY for place in range(len(missed))]
    assert missed[0] > down_at - EVERY
    await schedules.delete(name)


@pytest.mark.slow(5)
async def test_backfills_are_exact_while_engines_stop_temporal_is_killed_and_mongodb_freezes(
    own: tuple[Harness, TemporalServer, MongoServer], tmp_path: Path
) -> None:
    harness, temporal, mongo = own
    nemesis = Nemesis(
        harness=harness,
        temporal=temporal,
        mongo=mongo,
        folder=tmp_path,
        seed=2691,
        kinds=(STOP_ENGINE, KILL_TEMPORAL, FREEZE_MONGO),
    )
    plans = drawn(nemesis.seed, harness.queue, 3, 8, within_sec=4)
    await nemesis.run(plans, 6.0, EVENT_TIMEOUT_SEC)
    assert await nemesis.problems(plans) == []
    assert nemesis.injected[KILL_TEMPORAL]
