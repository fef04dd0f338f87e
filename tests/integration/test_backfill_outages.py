"""A backfill under crashes: engines and Temporal are killed, and each nominal time has one task that ran once."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.backfills import BackfillState
from flowkit.graph.scheduled import format_nominal
from tests.integration.harness import Harness, eventually, node, wait_seconds
from tests.integration.test_server_restarts import frail_servers, own

if TYPE_CHECKING:
    from flowkit.backfills import BackfillView
    from flowkit.local import MongoServer, TemporalServer

__all__ = ["frail_servers", "own"]

pytestmark = [pytest.mark.server, pytest.mark.nightly, pytest.mark.timeout(900)]

GRAPH: dict[str, Any] = {"nodes": [node("a", inline={"at": {"$cel": "task.scheduled_at"}})]}
TIMES = 500


async def test_a_backfill_of_500_nominal_times_is_exact_under_kills(
    own: tuple[Harness, TemporalServer, MongoServer],
) -> None:
    harness, temporal, _ = own
    await harness.worker(concurrency=20)
    engines = [harness.engine_process(), harness.engine_process()]
    name, chance = f"hourly-{harness.queue}", random.Random(harness.queue)
    schedules = await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params={"at": {"$cel": "task.scheduled_at"}}, every="10m")
    await schedules.pause(name)
    backfills = await harness.coordinator.backfills()
    made = await backfills.create(
        name, start="2026-11-01T00:00Z", end="2026-11-04T11:20Z", max_active=10, backfill_id=harness.queue
    )
    assert made.backfill.total == TIMES

    async def look() -> BackfillView | None:
        view = await backfills.status(harness.queue)
        return view if view.backfill.state.ended else None

    until = time.monotonic() + 60
    while time.monotonic() < until and await look() is None:
        await wait_seconds(chance.uniform(1.0, 4.0))
        victim = chance.choice([None, *engines])
        if victim is None:
            await asyncio.to_thread(temporal.kill)
            await wait_seconds(chance.uniform(0.2, 2.0))
            await asyncio.to_thread(temporal.start)
        else:
            victim.kill()
            engines.remove(victim)
            engines.append(harness.engine_process())
    await harness.release_tasks()
    view = await eventually(look, 600)
    assert (view.backfill.state, view.counts.text) == (BackfillState.FINISHED, f"{TIMES} succeeded")
    tasks = [each async for each in harness.db.tasks.find({}).sort("scheduled_at", 1)]
    planned = await backfills.plan(name, start="2026-11-01T00:00Z", end="2026-11-04T11:20Z")
    nominal = [format_nominal(run.at) for run in planned.runs]
    assert [each["scheduled_at"] for each in tasks] == nominal
    assert all(each["params"] == {"at": each["scheduled_at"]} for each in tasks)
    assert {(each["status"], each["run_seq"]) for each in tasks} == {("finished", 1)}
    assert {each["id"] for each in tasks} == {run.task_id for run in planned.runs}
    await schedules.delete(name)
