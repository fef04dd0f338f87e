"""Servers stop in the middle of a task and start again. Each test has its own servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from flowkit.local import MongoServer, TemporalServer
from flowkit.models import TaskStatus
from tests.conftest import keep_logs
from tests.integration.world import World, eventually, node, wait_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.server

AWAY_SEC = 10.0
NO_RETRIES = {"retry_policy": {"max": 0}}


@pytest.fixture
async def own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[World, TemporalServer, MongoServer]]:
    """A World on servers that only this test uses, so that it can stop them."""
    with TemporalServer(tmp_path) as temporal, MongoServer(tmp_path) as mongo:
        monkeypatch.setenv("TEMPORAL_ADDRESS", temporal.address)
        monkeypatch.setenv("MONGO_URL", mongo.url)
        world = World(temporal=temporal.address, mongo=mongo.url)
        monkeypatch.setenv("MONGO_DATABASE", world.database)
        yield world, temporal, mongo
        await world.close()
        if request.session.testsfailed:
            keep_logs(tmp_path)


async def started(world: World) -> str:
    """Start a task and wait until its first node runs."""
    await world.engine()
    await world.worker()
    task_id = await world.create(
        node("a", "paced", inline={"batches": 8, "pause": 0.3}, **NO_RETRIES),
        node("b", "quick", "a", inline={"batches": 3}, **NO_RETRIES),
        node("c", "quick", "b", **NO_RETRIES),
    )
    await world.until_batches(task_id, "a", 2)
    return task_id


async def assert_finished_once(world: World, task_id: str) -> None:
    """Check that every node finished and every batch counts once."""
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert set((await world.statuses(task_id)).values()) == {"finished"}
    for node_id, batches in (("a", 8), ("b", 3), ("c", 1)):
        uids = Counter(row["batch_uid"] for row in await world.rows(task_id, node_id))
        assert uids == {f"b{i}": 1 for i in range(batches)}


async def test_a_task_outlives_a_restart_of_temporal(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, temporal, _ = own
    task_id = await started(world)
    await asyncio.to_thread(temporal.restart)
    await assert_finished_once(world, task_id)


async def test_a_task_outlives_a_temporal_that_is_killed(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, temporal, _ = own
    task_id = await started(world)
    await asyncio.to_thread(temporal.kill)
    await asyncio.to_thread(temporal.start)
    await assert_finished_once(world, task_id)


async def test_what_ran_when_temporal_went_for_longer_than_a_lease_runs_again_at_no_charge(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, temporal, _ = own
    world.settings["lease_ttl_sec"] = 2
    task_id = await started(world)
    await asyncio.to_thread(temporal.stop)
    await wait_seconds(4.0)
    await asyncio.to_thread(temporal.start)
    await assert_finished_once(world, task_id)
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 2


async def test_a_task_waits_for_a_mongodb_that_is_away(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, _, mongo = own
    task_id = await started(world)
    await asyncio.to_thread(mongo.stop)
    await wait_seconds(AWAY_SEC)
    await asyncio.to_thread(mongo.start)
    await assert_finished_once(world, task_id)
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 1


async def test_time_without_mongodb_does_not_count_towards_timeout_sec(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, _, mongo = own
    world.settings["function_timeout_sec"] = 3

    async def plain(task_id: str) -> None:
        await wait_seconds(1.0)

    await world.engine(plain=plain)
    await world.worker()
    task_id = await world.create(
        node("role", "paced", inline={"batches": 4, "pause": 0.5}, timeout_sec=4, **NO_RETRIES),
        node("function", "coordinator_fn", io={"fn": "plain"}, **NO_RETRIES),
    )
    await world.until_batches(task_id, "role", 1)
    await asyncio.to_thread(mongo.stop)
    await wait_seconds(AWAY_SEC)
    await asyncio.to_thread(mongo.start)
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert {n["attempt_epoch"] for n in (await world.document(task_id))["graph"]["nodes"]} == {1}


async def test_a_task_created_while_mongodb_is_away_runs_when_it_is_back(
    own: tuple[World, TemporalServer, MongoServer],
) -> None:
    world, _, mongo = own
    await world.engine()
    await world.worker()
    await asyncio.to_thread(mongo.stop)
    task_id = await world.create(node("a"))

    async def waits_for_mongodb() -> bool:
        description = await (await world.handle(task_id)).describe()
        pending = description.raw_description.pending_activities
        return any(activity.last_failure.message.startswith("MongoDB is unavailable") for activity in pending)

    await eventually(waits_for_mongodb)
    await asyncio.to_thread(mongo.start)
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
