"""A schedule under crashes: engines and Temporal are killed, and each nominal time starts one task."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.harness import Harness, eventually, node, wait_seconds
from tests.integration.test_server_restarts import frail_servers, own

if TYPE_CHECKING:
    from flowkit.local import MongoServer, TemporalServer
    from flowkit.schedules import ScheduleView

__all__ = ["frail_servers", "own"]

pytestmark = pytest.mark.server

EVERY = timedelta(seconds=2)
ONE: dict[str, Any] = {"nodes": [node("a")]}
GRAPH: dict[str, Any] = {"nodes": [node("a", inline={"at": {"$cel": "task.scheduled_at"}})]}


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
