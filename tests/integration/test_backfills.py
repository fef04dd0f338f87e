"""Backfills on real servers: each nominal time starts one task, whatever crashes, and a slot is used at once."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError

from flowkit.adapters.backfills import BackfillStore
from flowkit.backfills import BackfillState
from flowkit.errors import ConfigError
from flowkit.graph.scheduled import Nominal
from flowkit.models import temporal_names
from flowkit.models.admission import Admission
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext
from tests.integration.harness import Harness, eventually, node

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.backfills import Backfills, BackfillView
    from flowkit.schedules import ScheduleView

pytestmark = pytest.mark.server

GRAPH: dict[str, Any] = {"nodes": [node("a", "hourly")]}
AT = {"at": {"$cel": "task.scheduled_at"}}
DAY: Any = {"start": "2026-11-01T00:00:00Z", "end": "2026-11-01T06:00:00Z"}
MORNING: Any = {"start": "2026-11-01T00:00:00Z", "end": "2026-11-01T03:00:00Z"}


class Hourly(RoleHandler):
    """Notes the nominal times of its tasks, and does with each what a test wants."""

    role = "hourly"

    def __init__(self, work: Callable[[int], Any] | None = None) -> None:
        self.hours: list[int] = []
        self._work = work

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the nominal time from the context and the params."""
        assert ctx.scheduled_at is not None
        self.hours.append(ctx.scheduled_at.hour)
        if self._work is not None and (waits := self._work(ctx.scheduled_at.hour)) is not None:
            await waits
        return BatchResult(success=True, metrics={"seen": [ctx.scheduled_at.isoformat(), ctx.params["at"]]})


async def hourly(harness: Harness, **options: Any) -> tuple[str, Backfills]:
    """Create a paused schedule that fires each hour, and return its name with the backfills."""
    name, schedules = f"hourly-{uuid.uuid4().hex[:8]}", await harness.coordinator.schedules()
    await schedules.create(name, **{"graph": GRAPH, "params": AT, "cron": "0 * * * *", **options})
    await schedules.pause(name)
    return name, await harness.coordinator.backfills()


async def ended(backfills: Backfills, backfill_id: str) -> BackfillView:
    """Wait for the end of a backfill."""

    async def look() -> BackfillView | None:
        view = await backfills.status(backfill_id)
        return view if view.backfill.state.ended else None

    return await eventually(look)


async def test_each_nominal_time_gets_a_task_with_its_values_and_a_second_backfill_leaves_them(
    harness: Harness,
) -> None:
    handler = Hourly()
    await harness.engine()
    await harness.worker({"hourly": handler})
    name, backfills = await hourly(harness)
    made = await backfills.create(name, **MORNING, order="newest", max_active=1)
    view = await ended(backfills, made.backfill.backfill_id)
    assert (view.backfill.state, view.counts.text) == (BackfillState.FINISHED, "3 succeeded")
    assert handler.hours == [2, 1, 0]
    for hour in range(3):
        task_id = f"{name}-2026-11-01T0{hour}:00:00Z"
        [row] = await harness.rows(task_id, "a")
        assert row["metrics"]["seen"] == [f"2026-11-01T0{hour}:00:00+00:00", f"2026-11-01T0{hour}:00:00Z"]
        assert (await harness.document(task_id))["scheduled_at"] == f"2026-11-01T0{hour}:00:00Z"
    again = await backfills.create(name, **MORNING)
    view = await ended(backfills, again.backfill.backfill_id)
    assert (view.counts.text, view.skipped[0].reason) == ("3 skipped", "its task has finished already")


DEFAULTS: dict[str, Any] = {
    **GRAPH,
    "params_schema": {
        "properties": {
            "at": {"type": "string"},
            "window": {"$ref": "#/$defs/window"},
            "limit": {"default": 10},
        },
        "$defs": {"window": {"properties": {"start": {}, "days": {"default": 7}}}},
    },
}


async def test_tasks_get_the_same_default_values_from_a_client_a_schedule_and_a_backfill(
    harness: Harness,
) -> None:
    await harness.engine()
    await harness.worker({"hourly": Hourly()})
    given = {**AT, "window": {"start": {"$cel": "task.scheduled_at"}}}
    name, backfills = await hourly(harness, graph=DEFAULTS, params=given)
    made = await backfills.create(name, start="2026-11-01T00:00Z", end="2026-11-01T01:00Z")
    triggered = await (await harness.coordinator.schedules()).trigger(name)
    assert triggered is not None
    plain = {"at": "x", "window": {"start": "x"}}
    created = await harness.coordinator.create_task(params=plain, graph=DEFAULTS)
    await ended(backfills, made.backfill.backfill_id)
    await harness.result(triggered)
    for task_id in (f"{name}-2026-11-01T00:00:00Z", triggered, created):
        found = await harness.document(task_id)
        at = found.get("scheduled_at", "x")
        assert found["params"] == {"at": at, "window": {"start": at, "days": 7}, "limit": 10}


async def test_two_backfills_of_the_same_times_at_once_start_each_task_once(harness: Harness) -> None:
    handler = Hourly()
    await harness.engine()
    await harness.worker({"hourly": handler})
    name, backfills = await hourly(harness)
    made = await asyncio.gather(
        *(backfills.create(name, **DAY, order=order) for order in ("oldest", "newest"))
    )
    views = [await ended(backfills, each.backfill.backfill_id) for each in made]
    assert sum(view.counts.succeeded for view in views) == 6
    assert sum(view.counts.skipped for view in views) == 6
    assert sorted(handler.hours) == [*range(6)]


async def test_a_refused_graph_fails_each_time_with_its_reason_until_it_is_corrected(
    harness: Harness,
) -> None:
    await harness.engine()
    unknown = {"nodes": [{"node_id": "a", "type": "coordinator_fn", "io": {"fn": "nope"}}]}
    name, backfills = await hourly(harness, graph=unknown)
    made = await backfills.create(name, start="2026-11-01", end="2026-11-01T02:00Z")
    view = await ended(backfills, made.backfill.backfill_id)
    assert (view.counts.text, {each.code for each in view.failed}) == ("2 failed", {"invalid_graph"})
    assert "'nope'" in (view.failed[0].reason or "")
    schedules = await harness.coordinator.schedules()
    await schedules.update(name, graph={"nodes": [{"node_id": "a", "type": "coordinator_fn"}]})
    await backfills.retry_failed(made.backfill.backfill_id)
    assert (await ended(backfills, made.backfill.backfill_id)).counts.text == "2 succeeded"


async def test_a_slot_is_used_as_soon_as_one_task_ends_and_a_cancel_leaves_nothing_queued(
    harness: Harness,
) -> None:
    harness.settings["cancel_grace_sec"] = 0.2
    slowest = asyncio.Event()
    handler = Hourly(lambda hour: slowest.wait() if hour in {0, 3} else None)
    await harness.engine()
    await harness.worker({"hourly": handler})
    name, backfills = await hourly(harness)
    made = await backfills.create(name, start="2026-11-01", end="2026-11-02", max_active=2)
    backfill_id = made.backfill.backfill_id

    async def both_slots_are_held() -> bool:
        return sorted(handler.hours) == [*range(4)]

    await eventually(both_slots_are_held)
    workflow = (await harness.client()).get_workflow_handle(f"backfill:{backfill_id}")
    await workflow.cancel()

    async def is_cancelling() -> bool:
        view = await backfills.status(backfill_id)
        return view.counts.text == "2 running, 2 succeeded, 20 cancelled"

    await eventually(is_cancelling)
    view = await backfills.cancel(backfill_id, running=True)
    assert (view.backfill.state, view.counts.pending) == (BackfillState.CANCELLING, 0)
    view = await ended(backfills, backfill_id)
    assert (view.backfill.state, view.counts.text) == (BackfillState.CANCELLED, "2 succeeded, 22 cancelled")
    with pytest.raises(WorkflowFailureError) as caught:
        await workflow.result()
    assert isinstance(caught.value.cause, CancelledError)
    assert await harness.db.tasks.count_documents({}) == 4


async def test_an_engine_continues_where_another_one_has_stopped(harness: Harness) -> None:
    first, rest = asyncio.Event(), asyncio.Event()
    handler = Hourly(lambda hour: (first if hour < 3 else rest).wait())
    await harness.worker({"hourly": handler})
    engine = await harness.engine()
    name, backfills = await hourly(harness)
    made = await backfills.create(name, **DAY, max_active=3)

    async def slots_are_held(hours: int) -> bool:
        return len(handler.hours) == hours

    await eventually(lambda: slots_are_held(3))
    await engine.stop()
    first.set()
    await harness.engine()
    await eventually(lambda: slots_are_held(6))
    assert (await backfills.status(made.backfill.backfill_id)).counts.text == "3 running, 3 succeeded"
    rest.set()
    view = await ended(backfills, made.backfill.backfill_id)
    assert (view.counts.text, sorted(handler.hours)) == ("6 succeeded", [*range(6)])
    assert await harness.db.tasks.count_documents({"run_seq": 1}) == 6


async def test_the_id_of_a_backfill_of_another_deployment_leaves_nothing_behind(
    harness: Harness, other_harness: Harness
) -> None:
    name, backfills = await hourly(harness)
    made = await backfills.create(name, **MORNING)
    other, theirs = await hourly(other_harness)
    backfill_id = made.backfill.backfill_id
    for _ in range(2):
        with pytest.raises(ConfigError, match="belongs to another deployment or program"):
            await theirs.create(other, **MORNING, backfill_id=backfill_id)
        assert await theirs.list_backfills() == []
        assert await other_harness.db.backfill_runs.count_documents({}) == 0
        if (await backfills.status(backfill_id)).is_driven:
            await (await harness.client()).get_workflow_handle(f"backfill:{backfill_id}").terminate()
    await backfills.cancel(backfill_id)
    assert (await backfills.status(backfill_id)).counts.text == "3 cancelled"


class _Killed(BaseException):
    """Ends a call at once, as the end of its process does."""


async def test_an_engine_completes_the_backfill_of_a_killed_creator(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Hourly()
    await harness.worker({"hourly": handler})
    name, backfills = await hourly(harness)

    async def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(BackfillStore, "complete", killed)
        await backfills.create(name, **MORNING, backfill_id=name)
    assert (await backfills.status(name)).backfill.state is BackfillState.CREATING
    await harness.engine()
    assert (await ended(backfills, name)).counts.text == "3 succeeded"


async def test_a_foreign_workflow_with_the_id_of_a_nominal_time_is_reported_and_never_counts_as_its_task(
    harness: Harness,
) -> None:
    handler = Hourly()
    await harness.engine()
    await harness.worker({"hourly": handler})
    name, backfills = await hourly(harness)
    client, schedules = await harness.client(), await harness.coordinator.schedules()
    ids = [f"{name}-2026-11-01T0{hour}:00:00Z" for hour in range(3)]
    given = {"graph": GRAPH, "params": {"at": "x"}}
    refused = await client.start_workflow(temporal_names.TASK, given, id=ids[0], task_queue=harness.queue)
    with pytest.raises(WorkflowFailureError) as caught:
        await refused.result()
    assert "are reserved for the tasks of schedules; choose another id" in str(caught.value.cause)
    foreign = await client.start_workflow("Foreign", id=ids[1], task_queue=f"{harness.queue}.other")

    made = await backfills.create(name, **MORNING)
    view = await ended(backfills, made.backfill.backfill_id)
    assert (view.counts.text, sorted(handler.hours)) == ("2 succeeded, 1 failed", [0, 2])
    [failed] = view.failed
    assert (failed.task_id, failed.code) == (ids[1], "task_id_taken")
    assert f"workflow {ids[1]!r} has the id of a nominal time" in (failed.reason or "")

    coming = (await schedules.show(name)).next_times[0]
    taken = Nominal(schedule=name, at=coming).task_id
    await client.start_workflow("Foreign", id=taken, task_queue=f"{harness.queue}.other")
    await schedules.resume(name)

    async def reported() -> ScheduleView | None:
        view = await schedules.show(name)
        return view if view.taken else None

    assert [(each.at, each.task_id) for each in (await eventually(reported)).taken] == [(coming, taken)]
    assert await schedules.count_taken() == {name: 1}
    shown = await harness.command("schedule", "show", name)
    assert f"workflow {taken!r} has the id of a nominal time, but neither its schedule" in shown
    await client.get_workflow_handle(taken).terminate()
    await foreign.terminate()
    await backfills.retry_failed(made.backfill.backfill_id)
    assert (await ended(backfills, made.backfill.backfill_id)).counts.text == "3 succeeded"
    assert (await harness.document(ids[1]))["scheduled_at"] == "2026-11-01T01:00:00Z"
    await schedules.delete(name)


async def test_a_range_without_past_times_names_those_around_it(harness: Harness) -> None:
    name, backfills = await hourly(harness, timezone="Europe/Berlin")
    for start, end, text in (
        (
            "2026-11-01T02:10Z",
            "2026-11-01T02:20Z",
            "the one before is 2026-11-01T02:00:00Z and the one after is 2026-11-01T03:00:00Z",
        ),
        ("2090-01-01", "2090-01-02", "has come yet: the first is 2089-12-31T23:00:00Z"),
        ("2020-01-01", "2026-01-01", "more than 10,000 nominal times"),
    ):
        with pytest.raises(ConfigError, match=text):
            await backfills.plan(name, start=start, end=end)
    for options, text in (
        ({"max_active": 0}, "max_active is 0"),
        ({"order": "x"}, "order is 'x'; use oldest, newest"),
        (
            {"existing": "all", "admission": Admission(user_id="ada")},
            "the admission queue starts no task again",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            await backfills.plan(name, **{**DAY, **options})
    with pytest.raises(ConfigError, match="there is no schedule 'none'"):
        await backfills.plan("none", **DAY)


async def test_only_failed_tasks_start_again_with_the_present_graph_and_supersede_the_old_rows(
    harness: Harness,
) -> None:
    broken = {1, 2}

    def work(hour: int) -> None:
        if hour in broken:
            raise ValueError("no data yet")

    handler = Hourly(work)
    await harness.engine()
    await harness.worker({"hourly": handler})
    graph = {"nodes": [node("before", "hourly"), node("a", "hourly", "before")]}
    name, backfills = await hourly(harness, graph=graph)
    made = await backfills.create(name, **MORNING)
    backfill_id = made.backfill.backfill_id
    view = await ended(backfills, backfill_id)
    assert (view.counts.text, [each.at.hour for each in view.failed]) == ("1 succeeded, 2 failed", [1, 2])
    assert "no data yet" in (view.failed[0].reason or "")

    broken.clear()
    handler.hours.clear()
    schedules = await harness.coordinator.schedules()
    await schedules.update(name, graph={"nodes": [node("a", "hourly"), node("after", "hourly", "a")]})
    _, count = await backfills.retry_failed(backfill_id)
    view = await ended(backfills, backfill_id)
    assert (count, view.counts.text, sorted(handler.hours)) == (2, "3 succeeded", [1, 1, 2, 2])
    task_id = f"{name}-2026-11-01T02:00:00Z"
    document = await harness.document(task_id)
    assert {each["node_id"]: each["status"] for each in document["graph"]["nodes"]} == {
        "a": "finished",
        "after": "finished",
    }
    assert (document["status"], document["run_seq"]) == ("finished", 2)
    assert len(await harness.rows(task_id, "a")) == 1
    assert await harness.db.artifacts.count_documents({"task_id": task_id, "node_id": "before"}) == 0

    handler.hours.clear()
    everything = await backfills.create(name, **MORNING, existing="all")
    view = await ended(backfills, everything.backfill.backfill_id)
    assert (view.counts.text, len(handler.hours)) == ("3 succeeded", 6)
    none = await backfills.create(name, **MORNING, existing="failed")
    assert (await ended(backfills, none.backfill.backfill_id)).counts.text == "3 skipped"
