"""Schedules on real servers: tasks know their nominal times, and every nominal time starts one task."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from temporalio.client import ScheduleActionStartWorkflow, ScheduleIntervalSpec, ScheduleRange, ScheduleUpdate

from flowkit import limits
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.workflows import look_up
from flowkit.cli.options import DeploymentOptions
from flowkit.cli.retention import purging
from flowkit.cli.retention.purging import PurgeOptions, purge_tasks
from flowkit.client import TaskClient
from flowkit.errors import ActionRejected, ConfigError, GraphError
from flowkit.graph.scheduled import format_nominal
from flowkit.models import TaskStatus
from flowkit.schedules import ScheduleDefinition, Schedules, ScheduleTimes, client
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext
from tests.integration.harness import Harness, eventually, node
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_pause import Gated

if TYPE_CHECKING:
    from temporalio.client import ScheduleUpdateInput

    from flowkit.schedules import ScheduleOptions, ScheduleView

pytestmark = pytest.mark.server

GRAPH: dict[str, Any] = {
    "nodes": [node("a", "clock", inline={"at": {"$cel": "task.scheduled_at"}})],
    "params_schema": {"properties": {"at": {"type": "string"}}, "required": ["at"]},
}
GATED: dict[str, Any] = {"nodes": [node("a", "gated")]}
AT = {"at": {"$cel": "task.scheduled_at"}}


class Clock(RoleHandler):
    """Returns what a handler knows of the nominal time."""

    role = "clock"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the time from the context, the input and the params."""
        at = ctx.scheduled_at
        shown = None if at is None else at.strftime("%Y-%m-%dT%H:%M:%SZ")
        seen = [shown, (ctx.input_inline or {})["at"], ctx.params["at"]]
        return BatchResult(success=True, metrics={"seen": seen})


async def seen(harness: Harness, task_id: str) -> list[Any]:
    """Return what the handler of a finished task has seen, in each of its runs."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    return [row["metrics"]["seen"] for row in await harness.rows(task_id, "a")]


def new_name() -> str:
    """Return a name that no other test uses."""
    return f"nightly-{uuid.uuid4().hex[:8]}"


async def ended_runs(schedules: Schedules, name: str, count: int) -> ScheduleView:
    """Wait until a schedule has started so many tasks, and all that it shows have ended."""

    async def look() -> ScheduleView | None:
        view = await schedules.show(name)
        ended = [each for each in view.runs if each.status != "running"]
        return view if len(ended) >= count and len(ended) == len(view.runs) else None

    return await eventually(look)


async def test_tasks_have_the_id_and_the_values_of_their_nominal_time_after_a_rerun_and_a_reset_too(
    harness: Harness,
) -> None:
    await harness.engine()
    await harness.worker({"clock": Clock()})
    name, schedules = new_name(), await harness.coordinator.schedules()
    view = await schedules.create(name, graph=GRAPH, params=AT, every="1s")
    assert (view.times.text, view.paused, len(view.next_times)) == ("every 1s", False, 10)
    await ended_runs(schedules, name, 2)
    await schedules.pause(name, note="enough")
    view = await ended_runs(schedules, name, 2)
    assert (view.paused, view.note, view.problem) == (True, "enough", None)
    for run in view.runs:
        nominal = run.scheduled_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (run.task_id, run.status) == (f"{name}-{nominal}", "finished")
        assert await seen(harness, run.task_id) == [[nominal] * 3]
        document = await harness.document(run.task_id)
        assert (document["scheduled_at"], document["params"]) == (nominal, {"at": nominal})

    [listed] = [each for each in await schedules.list_schedules() if each.name == name]
    history = {each.task_id: each.status for each in (await schedules.history([listed]))[name]}
    assert history.items() >= {(run.task_id, "finished") for run in view.runs}

    task_id, nominal = view.runs[0].task_id, view.runs[0].scheduled_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    await harness.coordinator.rerun(task_id, ["a"])
    assert await seen(harness, task_id) == [[nominal] * 3]
    task_id, nominal = view.runs[1].task_id, view.runs[1].scheduled_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    await reset(harness, task_id, "a")
    assert await seen(harness, task_id) == [[nominal] * 3]

    await schedules.delete(name)
    assert await (await harness.coordinator.schedules()).history([listed]) == {}
    assert (await harness.document(task_id))["scheduled_at"] == nominal
    with pytest.raises(ConfigError, match=f"there is no schedule {name!r}"):
        await schedules.show(name)


async def test_a_stored_graph_belongs_to_the_schedule_and_each_task_has_a_copy(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 0)
    await harness.engine()
    await harness.worker({"clock": Clock()})
    name, schedules = new_name(), await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *")
    owners = [row async for row in harness.db.stored_graphs.find({}, {"data": 0})]
    assert [(row.get("task_id"), row["schedule_id"]) for row in owners] == [(None, name)]
    task_id = await schedules.trigger(name)
    assert task_id is not None
    nominal = task_id.removeprefix(f"{name}-")
    assert await seen(harness, task_id) == [[nominal] * 3]
    assert await harness.db.stored_graphs.count_documents({"task_id": task_id}) == 1
    view = await schedules.update(name, timezone="Europe/Berlin")
    assert (view.times.text, view.task["params"]) == ("0 2 * * * Europe/Berlin", AT)
    assert (await schedules.plan({name: definition(timezone="Europe/Berlin")}))[0].step == "keep"
    assert await purge_all(harness) == 0
    await schedules.update(name, params={"at": "x"})
    assert await harness.db.stored_graphs.count_documents({"schedule_id": name}) == 2
    assert await purge_all(harness) == 0
    monkeypatch.setattr(purging, "SETTLES", timedelta(0))
    assert await purge_all(harness) == 1
    await schedules.delete(name)
    assert await purge_all(harness) == 2


async def purge_all(harness: Harness) -> int:
    """Return how many rows with graphs `flowkit purge` would delete if all of them were old."""
    long_ago = datetime(2026, 1, 1, tzinfo=UTC)
    await harness.db.stored_graphs.update_many({}, {"$set": {"created_at": long_ago}})
    options = PurgeOptions(older_than_sec=86_400, statuses=("finished",), dry_run=True)
    where = DeploymentOptions(mongo_url=harness.environment["MONGO_URL"], database=harness.database)
    return (await purge_tasks(where, options, quiet=True)).rows["stored_graphs"]


def definition(params: dict[str, Any] = AT, **options: Any) -> ScheduleDefinition:
    """Return a schedule of a file."""
    times = ScheduleTimes.read({"cron": "0 2 * * *"}).changed(cast("ScheduleOptions", options))
    return ScheduleDefinition(graph=GRAPH, params=params, times=times)


async def test_apply_creates_updates_and_deletes_what_differs_and_a_second_call_changes_nothing(
    harness: Harness, other_harness: Harness
) -> None:
    schedules = await harness.coordinator.schedules()
    one, two = new_name(), new_name()
    assert [each.step for each in await schedules.apply({one: definition(), two: definition()})] == [
        "create",
        "create",
    ]
    wanted = {one: definition({"at": "x"}, timezone="Europe/Berlin", overlap="allow", catchup="1h")}

    async def listed() -> bool:
        return {each.name for each in await schedules.list_schedules()} == {one, two}

    await eventually(listed)
    planned = await schedules.plan(wanted)
    assert [(each.name, each.step) for each in planned] == [(one, "update"), (two, "unlisted")]
    assert planned[0].differences == (
        'timezone: (default) → "Europe/Berlin"',
        'overlap: (default) → "allow"',
        'catchup: (default) → "1h"',
        'params.at: {"$cel": "task.scheduled_at"} → "x"',
    )
    others = await other_harness.coordinator.schedules()
    assert await others.list_schedules() == []
    with pytest.raises(ConfigError, match="belongs to another database"):
        await others.delete(one)
    assert [each.step for each in await schedules.apply(wanted, prune=True)] == ["update", "delete"]
    assert [each.step for each in await schedules.plan(wanted)] == ["keep"]
    await schedules.delete(one)


async def test_tasks_that_an_engine_refuses_are_shown_with_the_reason(harness: Harness) -> None:
    await harness.engine()
    name, schedules = new_name(), await harness.coordinator.schedules()
    function = {"nodes": [{"node_id": "a", "type": "coordinator_fn", "io": {"fn": "missing.one"}}]}
    await schedules.create(name, graph=function, cron="0 2 * * *", pause_on_failure=True)
    assert await schedules.trigger(name) is not None
    view = await ended_runs(schedules, name, 1)
    assert (view.runs[0].status, view.runs[0].code) == ("failed", "invalid_graph")
    assert "missing.one" in (view.problem or "")
    [listed] = [each for each in await eventually(schedules.list_schedules) if each.name == name]
    history = (await schedules.history([listed]))[name]
    refused = [each for each in history if each.status == "refused"]
    assert [(each.task_id, "missing.one" in (each.reason or "")) for each in refused] == [
        (view.runs[0].task_id, True)
    ]

    async def paused() -> bool:
        return (await schedules.show(name)).paused

    await eventually(paused)
    again = await harness.coordinator.rerun(view.runs[0].task_id)
    assert (again["run_seq"], [each["from"] for each in again["affected"]]) == (2, ["skipped"])
    await schedules.delete(name)


SPRING_AND_AUTUMN = [
    # A time that does not exist: no task starts in Berlin and New York; one does on Lord Howe, which skips 30 minutes.
    ("Europe/Berlin", "0 2 * * *", "2026-03-28", "03-28 01:00, 03-30 00:00"),
    ("America/New_York", "30 2 * * *", "2026-03-07", "03-07 07:30, 03-09 06:30"),
    ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03", "10-02 15:45, 10-03 15:45, 10-04 15:15, 10-05 15:15"),
    # A time that comes twice: one task starts in Berlin and on Lord Howe, two start in New York.
    ("Europe/Berlin", "30 2 * * *", "2026-10-24", "10-24 00:30, 10-25 01:30, 10-26 01:30"),
    ("America/New_York", "30 1 * * *", "2026-10-31", "10-31 05:30, 11-01 05:30, 11-01 06:30, 11-02 06:30"),
    ("Australia/Lord_Howe", "45 1 * * *", "2026-04-04", "04-03 14:45, 04-04 15:15, 04-05 15:15, 04-06 15:15"),
    # Other times come once each day, and UTC does not change.
    ("Europe/Berlin", "0 3 * * *", "2026-03-28", "03-28 02:00, 03-29 01:00, 03-30 01:00"),
    ("Europe/Berlin", "0 4 * * *", "2026-10-24", "10-24 02:00, 10-25 03:00, 10-26 03:00"),
    ("UTC", "0 2 * * *", "2026-03-28", "03-28 02:00, 03-29 02:00, 03-30 02:00"),
]


async def test_nominal_times_around_a_change_of_the_clocks_for_a_paused_schedule(
    harness: Harness,
) -> None:
    schedules = await harness.coordinator.schedules()
    name = new_name()
    found = []
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *")
    await schedules.pause(name)
    for zone, cron, day, _ in SPRING_AND_AUTUMN:
        await schedules.update(name, cron=cron, timezone=zone)
        start = datetime.fromisoformat(f"{day}T00:00:00+00:00") - timedelta(hours=12)
        times = await schedules.times(name, start, start + timedelta(days=3, hours=4))
        found.append((zone, cron, day, ", ".join(f"{at:%m-%d %H:%M}" for at in times)))
    assert (await schedules.show(name)).paused
    await schedules.resume(name, note="again")
    view = await schedules.show(name)
    assert (view.paused, view.note, view.started) == (False, "again", 0)
    await schedules.delete(name)
    assert found == SPRING_AND_AUTUMN


async def test_times_that_temporal_refuses_show_the_right_form(harness: Harness) -> None:
    schedules = await harness.coordinator.schedules()
    with pytest.raises(ConfigError) as caught:
        await schedules.preview(ScheduleTimes(cron=("@daily",), timezone="Mars/Olympus"))
    assert "cron is '@daily': " in str(caught.value)
    assert "'0 2 * * *' fires at" in str(caught.value)


async def test_cron_expressions_are_several_calendars_and_edits_in_temporal_stay(harness: Harness) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    crons = ["0 4 L-1 * *", "0 5 13W * *", "0 6 1,15 * MON", "0 7 * * fri#2", "0 8 L FEB *"]
    view = await schedules.create(name, graph=GRAPH, params=AT, cron=crons)
    assert (view.times.cron, view.times.edited) == (tuple(crons), False)
    february = [datetime(2028, month, 1, tzinfo=UTC) for month in (2, 3)]
    times = await schedules.times(name, *february)
    first, fifteenth = (1, 6), (15, 6)
    mondays = [(day, 6) for day in (7, 14, 21, 28)]
    wanted = [
        first,
        mondays[0],
        (11, 7),
        (14, 5),
        mondays[1],
        fifteenth,
        *mondays[2:3],
        (28, 4),
        mondays[3],
        (29, 8),
    ]
    assert [(at.day, at.hour) for at in times] == wanted

    def edit(given: ScheduleUpdateInput) -> ScheduleUpdate:
        schedule = given.description.schedule
        schedule.spec.calendars = [
            replace(each, hour=[ScheduleRange(9)]) if each.comment == crons[-1] else each
            for each in schedule.spec.calendars
        ]
        schedule.spec.intervals = [ScheduleIntervalSpec(every=timedelta(days=9), offset=timedelta(hours=1))]
        return ScheduleUpdate(schedule=schedule)

    handle = (await harness.client()).get_schedule_handle(name)
    await handle.update(edit)
    edited = (await handle.describe()).schedule.spec
    changes: list[dict[str, Any]] = [
        {"catchup": "6h"},
        {"params": {"at": "x"}},
        {"timezone": "Europe/Berlin"},
    ]
    for change in changes:
        view = await schedules.update(name, **change)
        assert (view.times.cron, view.times.edited) == (tuple(crons[:-1]), True)
    kept = (await handle.describe()).schedule.spec
    assert (kept.calendars, kept.intervals) == (edited.calendars, edited.intervals)
    assert (await schedules.update(name, cron="@daily")).times.text == "@daily Europe/Berlin"
    await schedules.delete(name)


async def test_a_taken_name_and_params_that_do_not_fit_are_refused(harness: Harness) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    with pytest.raises(GraphError, match=r"params: 'at' is a required property"):
        await schedules.create(name, graph=GRAPH, cron="@daily")
    await schedules.create(name, graph=GRAPH, params=AT, cron="@daily")
    with pytest.raises(ConfigError, match="exists already; change it with update or apply"):
        await schedules.create(name, graph=GRAPH, params=AT, every="1h")
    assert (await schedules.show(name)).times.cron == ("@daily",)
    await schedules.delete(name)


async def test_a_schedule_whose_stored_graph_is_lost_says_so_and_takes_a_new_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 0)
    name, schedules = new_name(), await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *")
    await harness.db.stored_graphs.delete_many({})
    assert "stored_graphs of this database; update" in ((await schedules.show(name)).problem or "")
    for given in (None, GRAPH):
        with pytest.raises(ConfigError, match="update the schedule with its graph and its params"):
            await schedules.update(name, graph=given)
    assert [each.step for each in await schedules.apply({name: definition()})] == ["update"]
    assert (await schedules.show(name)).problem is None
    await schedules.update(name, graph=GRAPH, params=AT)


async def test_triggers_within_a_second_start_one_task_each(harness: Harness) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *", overlap="allow")
    started = [await schedules.trigger(name) for _ in range(3)]
    assert None not in started
    assert len({*started}) == 3


async def test_a_trigger_whose_start_is_seen_late_returns_its_own_task(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *", overlap="allow")
    first = await schedules.trigger(name)

    async def late(given: Any, task_id: str) -> Any:
        await eventually(lambda: seen_by_temporal(given, task_id))
        return await look_up(given, task_id)

    async def seen_by_temporal(given: Any, task_id: str) -> bool:
        return (await look_up(given, task_id)).description is not None

    monkeypatch.setattr(client, "_TRIGGER_SEC", 0.0)
    monkeypatch.setattr(client, "look_up", late)
    second = await schedules.trigger(name)
    assert second is not None
    assert second != first


async def test_purge_keeps_the_graph_of_a_deleted_schedule_while_a_task_waits_for_an_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INPUT_NODES", 0)
    name, schedules = f"nächtlich 'x\" {uuid.uuid4().hex[:8]}", await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *")
    task_id = await schedules.trigger(name)
    await schedules.delete(name)
    query = "ExecutionStatus = 'Running' AND TemporalScheduledById IS NOT NULL"
    client = await harness.client()

    async def listed() -> bool:
        return task_id in [each.id async for each in client.list_workflows(query)]

    await eventually(listed)
    assert await purge_all(harness) == 0


async def test_apply_changes_nothing_if_one_of_the_schedules_is_invalid(harness: Harness) -> None:
    good, bad, schedules = new_name(), new_name(), await harness.coordinator.schedules()
    nowhere = replace(definition(), times=ScheduleTimes(cron=("@daily",), timezone="Mars/Olympus"))
    with pytest.raises(ConfigError, match="cron is '@daily'") as caught:
        await schedules.apply({good: definition(), bad: nowhere})
    assert caught.value.__notes__ == [f"this is schedule {bad!r}"]
    with pytest.raises(GraphError, match="'at' is a required property") as refused:
        await schedules.apply({good: definition(), bad: definition(params={})})
    assert refused.value.__notes__ == [f"this is schedule {bad!r}"]
    with pytest.raises(
        ConfigError, match="name is .* the name of a schedule: a string of 1 to 179 characters"
    ):
        await schedules.plan({good: definition(), "x" * 180: definition()})
    with pytest.raises(ConfigError, match=f"there is no schedule {good!r}"):
        await schedules.show(good)


async def test_updates_at_once_are_all_kept_as_is_what_flowkit_does_not_own(harness: Harness) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    await schedules.create(name, graph=GRAPH, params=AT, cron="0 2 * * *")
    client, end = await harness.client(), datetime(2126, 1, 1, tzinfo=UTC)

    def end_it(given: ScheduleUpdateInput) -> ScheduleUpdate:
        given.description.schedule.spec.end_at = end
        return ScheduleUpdate(schedule=given.description.schedule)

    await client.get_schedule_handle(name).update(end_it)
    tasks = TaskClient(client, TaskStore(harness.db), queue="another")
    other = Schedules(client, tasks, queue="another")
    options: list[ScheduleOptions] = [
        {"catchup": "1h"},
        {"overlap": "allow"},
        {"jitter": "5s"},
        {"timezone": "Europe/Berlin"},
    ]
    await asyncio.gather(
        *(schedules.update(name, **each) for each in options), other.update(name, params={"at": "x"})
    )
    view = await schedules.show(name)
    assert (
        view.times == definition(catchup="1h", overlap="allow", jitter="5s", timezone="Europe/Berlin").times
    )
    assert view.task["params"] == {"at": "x"}
    found = (await client.get_schedule_handle(name).describe()).schedule
    assert found.spec.end_at == end
    assert isinstance(found.action, ScheduleActionStartWorkflow)
    assert found.action.task_queue == harness.queue
    await schedules.delete(name)


async def test_calls_at_once_end_as_if_one_came_after_the_other(
    harness: Harness, other_harness: Harness
) -> None:
    await harness.engine()
    one, two = [await harness.coordinator.schedules() for _ in range(2)]
    wanted = [{f"{new_name()}": definition() for _ in range(4)}]
    wanted.append({name: definition(timezone="Europe/Berlin") for name in wanted[0]})
    for each in wanted[:1] * 2, wanted:
        await asyncio.gather(one.apply(each[0]), two.apply(each[1]))
        zones = {(await one.show_definition(name)).times.timezone for name in wanted[0]}
        assert len(zones) == 1
    name = next(iter(wanted[0]))
    with pytest.raises(ConfigError, match="belongs to another database"):
        await (await other_harness.coordinator.schedules()).create(
            name, graph=GRAPH, params=AT, cron="@daily"
        )

    for value in range(3):
        given = [{key: value} for key in ("a", "b", "c")]
        await asyncio.gather(*(one.update(name, single_params=each) for each in given))
        params = (await one.show_definition(name)).task["params"]
        assert params == {**AT, "a": value, "b": value, "c": value}

    await one.update(name, graph={"nodes": [node("a", "nobody")]}, overlap="allow")
    triggered = await asyncio.gather(*(each.trigger(name) for each in (one, two, one, two)))
    assert len({*triggered} - {None}) == 4
    assert (await one.show(name)).started == 4

    async def listed() -> bool:
        return {each.name for each in await one.list_schedules()} >= {*wanted[0]}

    await eventually(listed)
    await asyncio.gather(one.apply({}, prune=True), two.apply({}, prune=True))
    assert not any([await one.exists(each) for each in wanted[0]])


async def test_an_update_is_refused_if_the_schedule_has_another_revision(harness: Harness) -> None:
    name, schedules = new_name(), await harness.coordinator.schedules()
    before = (await schedules.create(name, graph=GRAPH, params=AT, cron="@daily")).revision
    assert before is not None
    assert before < 2**53, "JSON readers keep larger numbers inexactly"
    after = (await schedules.update(name, catchup="6h", if_revision=before)).revision
    assert after is not None
    assert after > before
    with pytest.raises(
        ActionRejected, match=f"if_revision is {before}, and schedule {name!r} has revision {after}"
    ):
        await schedules.update(name, catchup="7h", if_revision=before)
    refused = await harness.command(
        "schedule", "update", name, "--catchup", "7h", "--if-revision", str(before)
    )
    assert "it was changed meanwhile; look at it again" in refused
    shown = await schedules.show(name)
    assert (shown.revision, shown.times.text, shown.times.catchup) == (
        after,
        "@daily UTC",
        timedelta(hours=6),
    )
    await schedules.delete(name)


async def started(schedules: Schedules, name: str, count: int) -> ScheduleView:
    """Wait until a schedule has started so many tasks."""

    async def look() -> ScheduleView | None:
        view = await schedules.show(name)
        return view if view.started >= count else None

    return await eventually(look)


def is_even(at: datetime) -> bool:
    """Return whether a time is a nominal one of each second second, and not one with jitter."""
    return at.timestamp() % 2 == 0


async def test_overlap_cancel_cancels_the_earlier_task_and_buffer_all_starts_each_time_later(
    harness: Harness,
) -> None:
    gated, schedules = Gated(), await harness.coordinator.schedules()
    await harness.engine()
    await harness.worker({"gated": gated})
    cancel, buffer = new_name(), new_name()
    created = await schedules.create(cancel, graph=GATED, every="2s", overlap="cancel", jitter="2s")
    assert [{is_even(at) for at in created.next_times}, len(created.next_times)] == [{True}, 10]
    await schedules.create(buffer, graph=GATED, every="1s", overlap="buffer-all")
    await started(schedules, cancel, 3)
    await schedules.pause(cancel)
    views = {each.name: each for each in await schedules.list_schedules()}
    listed = views[buffer]
    jittered = (await schedules.history([views[cancel]]))[cancel]
    assert {is_even(at) for at in (*(each.at for each in jittered), *views[cancel].next_times)} == {True}
    assert len([each for each in jittered if each.task_id == f"{cancel}-{format_nominal(each.at)}"]) >= 3

    async def statuses() -> dict[datetime, str]:
        history = await (await harness.coordinator.schedules()).history([listed])
        return {each.at: each.status for each in history[buffer] if each.status != "due"}

    before = await statuses()
    gated.gate("a").set()
    ended = await ended_runs(schedules, cancel, 3)
    assert {run.status for run in ended.runs[1:]} == {"cancelled"}
    assert all(run.task_id == f"{cancel}-{format_nominal(run.scheduled_at)}" for run in ended.runs)

    async def all_finished() -> bool:
        after = await statuses()
        return {after.get(at) for at in before} == {"finished"}

    assert [*before.values()] == ["running"] + ["waiting"] * (len(before) - 1)
    await eventually(all_finished)
    assert (await schedules.show(buffer)).skipped == 0
    for name in (cancel, buffer):
        await schedules.delete(name)
