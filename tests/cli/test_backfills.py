"""The commands of backfills on real servers: what they print, and their exit codes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from flowkit.adapters.tasks.fields import new_task
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.cli.conftest import Program, ProgramOutput
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

DAY = ("--from", "2026-11-01", "--to", "2026-11-02")


async def call(program: Program, harness: Harness, *arguments: str) -> ProgramOutput:
    """Run a command, and return its output."""
    return await program.call(*arguments, env=harness.environment)


async def new_schedule(harness: Harness) -> str:
    """Create a paused schedule that fires each hour in Berlin, and return its name, which a shell has to quote."""
    name, schedules = f"it's {harness.queue}", await harness.coordinator.schedules()
    await schedules.create(name, graph={"nodes": [node("a")]}, cron="0 * * * *", timezone="Europe/Berlin")
    await schedules.pause(name)
    return name


async def test_a_backfill_is_created_shown_cancelled_and_deleted(harness: Harness, program: Program) -> None:
    name = await new_schedule(harness)
    planned = await call(program, harness, "backfill", "create", name, *DAY, "--dry-run")
    assert planned.out.splitlines()[:2] == [
        f"would start 24 tasks of {name}",
        f"  {name}-2026-10-31T23:00:00Z",
    ]
    assert planned.out.splitlines()[-2:] == ["  …", f"  {name}-2026-11-01T22:00:00Z"]
    made = await call(program, harness, "backfill", "create", name, *DAY, "--id", "lost day")
    assert (made.code, made.out) == (0, f"created backfill lost day: 24 nominal times of {name}\n")
    assert made.err == "  follow it  flowkit backfill status 'lost day' --follow\n"
    listed = await call(program, harness, "backfill", "list", "--schedule", name)
    assert f"lost day  {name}  running" in listed.out.splitlines()[1]
    assert listed.out.splitlines()[1].endswith("0 %   24 pending")
    shown = json.loads((await call(program, harness, "backfill", "status", "lost day", "--json")).out)
    assert (shown["counts"]["pending"], shown["left_sec"]) == (24, None)
    assert (shown["is_driven"], shown["has_engine"]) == (True, False)

    cancelled = await call(program, harness, "backfill", "cancel", "lost day")
    assert cancelled.out == (
        "lost day: cancelled, 100 % of 24 nominal times: 24 cancelled; none of the pending ones will start\n"
    )
    followed = await call(program, harness, "backfill", "status", "lost day", "--follow")
    assert (followed.code, followed.out.splitlines()[0]) == (
        5,
        "lost day: cancelled, 100 % of 24 nominal times: 24 cancelled",
    )
    assert await harness.db.tasks.count_documents({}) == 0
    nothing = await call(program, harness, "backfill", "retry-failed", "lost day")
    assert (nothing.code, "has no failed nominal time" in nothing.err) == (2, True)
    assert "of 24 cancelled, another backfill with existing failed or all starts tasks again" in nothing.err
    again = await call(program, harness, "backfill", "create", name, *DAY, "--id", "lost day")
    exists = f"backfill lost day exists, with 24 nominal times of {name}: it is cancelled\n"
    assert (again.code, again.out) == (0, exists)
    listed = await call(program, harness, "schedule", "list")
    assert listed.out.splitlines()[1].rstrip().endswith(" -")
    nominal = "2026-10-31T23:00:00Z"
    started = new_task(f"{name}-{nominal}", {}, {"nodes": [node("a")]}, 0.0, scheduled_at=nominal)
    await harness.db.tasks.insert_one(started)
    listed = await call(program, harness, "schedule", "list")
    assert listed.out.splitlines()[1].endswith(f" {name}-{nominal}"), (
        "a task that only a backfill has started"
    )
    await harness.db.backfills.update_many({}, {"$set": {"ended_at": datetime(2026, 1, 1, tzinfo=UTC)}})
    purged = await call(program, harness, "purge", "--older-than", "1m", "--json")
    assert [json.loads(purged.out)[name] for name in ("backfills", "backfill_runs")] == [1, 24]
