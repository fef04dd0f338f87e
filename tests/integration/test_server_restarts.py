"""Servers stop in the middle of a task and start again. Only these tests use them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from flowkit.local import MongoServer, TemporalServer
from flowkit.models import TaskStatus
from tests.integration.harness import Harness, eventually, node, wait_seconds
from tests.servers import copy_logs, stoppable_mongo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.server

OUTAGE_SEC = 9.0
NO_RETRIES = {"retry_policy": {"max": 0}}


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
