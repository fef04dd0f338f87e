"""What has become of the nominal times of a schedule, and how far back Temporal is asked for them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.client import ScheduleActionExecutionStartWorkflow, ScheduleActionResult
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.queries import TaskQueries, TimedTask
from flowkit.attempt.workflows import WorkflowState
from flowkit.graph.scheduled import format_nominal
from flowkit.schedules import history, nominal_times
from flowkit.schedules.client import _free_second
from flowkit.schedules.history import Described, RecentStart, merge_times
from flowkit.schedules.nominal_times import NominalTimes, find_past
from flowkit.schedules.times import ScheduleTimes
from flowkit.schedules.views import NominalStatus, NominalTime, ScheduleView
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from temporalio.client import ScheduleHandle

HOUR = timedelta(hours=1)
NOW = datetime(2026, 11, 26, 12, 30, tzinfo=UTC)
NOON = NOW.replace(minute=0)


def hours(*ago: float) -> list[datetime]:
    """Return times so many hours before noon."""
    return [NOON - each * HOUR for each in ago]


def task(ago: float, status: str = "finished", reason: str | None = None) -> TimedTask:
    """Return the task of such a time."""
    (at,) = hours(ago)
    return TimedTask(task_id=f"s-{format_nominal(at)}", at=at, status=status, reason=reason)


def merge(
    *tasks: TimedTask,
    past: Sequence[datetime],
    buffered: int = 0,
    running: Sequence[datetime] = (),
    started: Mapping[datetime, datetime] | None = None,
    paused: bool = False,
    count: int = 60,
    jitter: timedelta = timedelta(0),
    taken: Mapping[datetime, WorkflowState] | None = None,
) -> list[str]:
    """Return the statuses of a schedule that is due at each hour."""
    view = ScheduleView(
        name="s",
        times=ScheduleTimes(every=HOUR, jitter=jitter),
        paused=paused,
        next_times=hours(-1, -2, -3, -4),
    )
    starts = {
        nominal: RecentStart(f"s-{format_nominal(nominal)}", at) for nominal, at in (started or {}).items()
    }
    others = {f"s-{format_nominal(at)}": state for at, state in (taken or {}).items()}
    described = Described(past=past, started=starts, buffered=buffered, since=NOW, taken=others)
    ids = frozenset(f"s-{format_nominal(at)}" for at in running)
    found = merge_times(view, described, tasks, ids, NOW, count)
    assert [each.at for each in found] == sorted(each.at for each in found)
    return [str(each.status) for each in found]


def test_each_time_has_the_status_of_its_task_or_says_that_there_is_none() -> None:
    found = merge(
        task(4, "failed", "invalid_graph: unknown function"),
        task(3, "failed", "node a failed"),
        task(1, "cancelled"),
        past=hours(5, 4, 3, 2, 1, 0),
        running=hours(0),
    )
    due = ["due"] * history.NEXT_TIMES
    assert found == ["no_task", "refused", "failed", "no_task", "cancelled", "started", *due]


def test_only_the_latest_times_count_and_triggered_and_earlier_tasks_are_among_them() -> None:
    found = merge(task(7), task(1.5, "running"), task(0), past=hours(2, 1, 0), count=4)
    assert found[:4] == ["no_task", "running", "no_task", "finished"]
    assert merge(task(7), past=hours(0), paused=True) == ["finished", "no_task"]


def test_times_after_the_latest_task_wait_if_temporal_keeps_them() -> None:
    past = hours(3, 2, 1, 0)
    assert merge(task(3), past=past, buffered=2)[:4] == ["finished", "waiting", "waiting", "no_task"]
    assert merge(past=past, buffered=1)[:2] == ["waiting", "no_task"]


def test_a_task_that_temporal_has_just_started_is_not_missing() -> None:
    noon = {NOON: NOW - timedelta(seconds=59)}
    assert merge(past=hours(1, 0), started=noon, paused=True) == ["no_task", "started"]
    purged = {NOON: NOW - timedelta(seconds=61)}
    assert merge(past=hours(1, 0), started=purged, paused=True) == ["no_task", "no_task"]


def test_a_time_whose_id_something_else_has_is_taken_unless_its_task_has_run_or_will() -> None:
    noon, one, two, three = hours(0, -1, -2, -3)
    others = {noon: WorkflowState.CLOSED, one: WorkflowState.OPEN, two: WorkflowState.CLOSED}
    assert merge(past=hours(1, 0), taken=others) == ["no_task", "taken", "taken", "due", "due"]
    assert merge(past=hours(1, 0), running=[noon], taken=others)[:2] == ["no_task", "taken"]
    assert merge(task(0), past=hours(1, 0), taken=others)[:2] == ["no_task", "finished"]
    assert merge(past=hours(2, 1, 0), buffered=1, taken=others)[2:] == ["taken", "taken", "due", "due"]
    assert three not in others


def test_a_time_is_due_while_its_task_may_still_start() -> None:
    assert merge(past=hours(1, 0), jitter=HOUR)[:2] == ["no_task", "due"]
    assert merge(past=hours(1, 0), jitter=HOUR, paused=True) == ["no_task", "no_task"]


@pytest.mark.parametrize(
    ("every", "guess", "found", "looks"),
    [
        (HOUR, HOUR, 60, 1),
        (HOUR, HOUR / 60, 60, 4),  # the next times are closer together than the past ones were
        (HOUR / 3600, HOUR, 60, 5),  # more than Temporal returns at once
        (HOUR * 24 * 100, HOUR * 24, 3, 4),  # there are no more since the schedule was created
    ],
)
async def test_the_window_of_past_times_fits_their_density(
    every: timedelta, guess: timedelta, found: int, looks: int
) -> None:
    since, asked = NOW - timedelta(days=365), 0

    async def matching(start: datetime, end: datetime) -> list[datetime]:
        nonlocal asked
        asked += 1
        first = -((since - start) // every) if start > since else 0
        times = [since + place * every for place in range(first, (end - since) // every + 1)]
        return times[: nominal_times.MOST_TIMES]

    past = await find_past(matching, since, NOW, guess, 60)
    assert past == sorted(past)
    assert past[-1] > NOW - every
    assert found <= len(past) <= 60
    assert asked <= looks


class Listing:
    """Temporal with schedules that are due at each hour. It counts those that are created."""

    namespace = "default"

    def __init__(self) -> None:
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.workflow_service = self

    async def create_schedule(self, name: str, _: object, **options: object) -> None:
        """Create a schedule."""
        self.created.append(name)

    def get_schedule_handle(self, name: str) -> SimpleNamespace:
        """Return a handle that can delete the schedule."""

        async def delete() -> None:
            self.deleted.append(name)

        return SimpleNamespace(id=name, delete=delete)

    async def list_schedule_matching_times(self, request: Any, *, retry: bool) -> SimpleNamespace:
        """Return the hours between two times."""
        start, end = request.start_time.ToDatetime(UTC), request.end_time.ToDatetime(UTC)
        first = start.replace(minute=0, second=0, microsecond=0) + HOUR
        count = (end - first) // HOUR + 1
        return SimpleNamespace(start_time=list(map(as_timestamp, (first + n * HOUR for n in range(count)))))


def as_timestamp(at: datetime) -> Timestamp:
    """Return a time as Temporal sends it."""
    found = Timestamp()
    found.FromDatetime(at)
    return found


async def test_the_next_nominal_times_are_those_before_the_jitter_and_are_read_once() -> None:
    temporal = Listing()
    times, spec = NominalTimes(cast("Any", temporal)), ScheduleTimes(every=HOUR, jitter=HOUR).spec()
    starts = [
        at + timedelta(minutes=minute) for at, minute in zip(hours(0, -1, -2), (31, 5, 59), strict=True)
    ]
    looks = [times.coming(name, spec, starts) for name in ("s", "another with the same times")]
    assert await asyncio.gather(*looks) == [hours(0, -1, -2)] * 2
    assert await times.latest("s", spec, NOW, HOUR, 60) == hours(*range(59, -1, -1))
    later = [at + 80 * HOUR for at in starts]
    assert await times.coming("s", spec, later) == hours(-80, -81, -82)
    assert len(temporal.created) == 1
    assert await times.coming("s", spec, [at + 200 * HOUR for at in starts]) == hours(-200, -201, -202)
    assert len(temporal.created) == 2
    assert temporal.deleted == temporal.created
    plain = ScheduleTimes(every=HOUR).spec()
    assert await times.coming("s", plain, starts) == starts
    assert len(temporal.created) == 2


async def test_a_schedule_that_is_asked_for_its_times_is_deleted_if_the_caller_is_cancelled() -> None:
    temporal, reached = Listing(), asyncio.Event()

    async def create(name: str, _: object, **options: object) -> None:
        temporal.created.append(name)
        reached.set()
        await asyncio.Event().wait()

    temporal.create_schedule = create  # type: ignore[method-assign]
    call = asyncio.create_task(NominalTimes(cast("Any", temporal)).preview(ScheduleTimes(every=HOUR)))
    await reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert temporal.deleted == temporal.created != []


@pytest.mark.parametrize(
    ("task_id", "at"),
    [
        ("s-2026-11-26T12:00:00Z", NOON),
        ("edited in the Web UI", NOON + timedelta(minutes=7)),
        ("s-2026-99-26T12:00:00Z", NOON + timedelta(minutes=7)),
    ],
)
def test_the_nominal_time_of_a_task_is_that_of_its_id(task_id: str, at: datetime) -> None:
    action = ScheduleActionExecutionStartWorkflow(workflow_id=task_id, first_execution_run_id="r")
    jittered = NOON + timedelta(minutes=7, milliseconds=123)
    result = ScheduleActionResult(scheduled_at=jittered, started_at=jittered, action=action)
    assert history.nominal_time_of(result) == at


async def test_tasks_of_schedules_are_found_by_their_ids_alone() -> None:
    db = memory_database()
    queries = TaskQueries(db)
    for name in ("s", "s-2026", "other"):
        for ago in range(5):
            nominal = format_nominal(NOON - ago * HOUR)
            await db.tasks.insert_one(
                {"id": f"{name}-{nominal}", "scheduled_at": nominal, "status": "finished"}
            )
    await db.tasks.insert_one({"id": "s-2026-11-26T11:30:00Z", "status": "running"})
    spans = {name: (NOON - 3 * HOUR, NOON) for name in ("s", "s-2026")}
    for most in (60, 1):
        found = await queries.timed_tasks(spans, most)
        assert {name: max(each.at for each in tasks) for name, tasks in found.items()} == dict.fromkeys(
            spans, NOON
        )
        assert all(
            each.task_id == f"{name}-{format_nominal(each.at)}" for name in found for each in found[name]
        )
    assert {name: len(tasks) for name, tasks in (await queries.timed_tasks(spans, 60)).items()} == {
        "s": 4,
        "s-2026": 4,
    }
    assert await queries.timed_tasks({}, 60) == {}


async def test_only_old_temporary_schedules_are_deleted_which_killed_processes_have_left() -> None:
    temporal = Listing()
    times = NominalTimes(cast("Any", temporal))
    for memo in ({}, {"flowkit_preview": time.time() - 600}, {"flowkit_preview": "x"}):
        await times.remove_leftover("kept", memo)
    await times.remove_leftover("old", {"flowkit_preview": time.time() - 7_200})
    assert temporal.deleted == ["old"]


def test_a_time_is_json() -> None:
    at = NominalTime(at=NOON, status=NominalStatus.NO_TASK)
    assert at.as_json() == {
        "at": "2026-11-26T12:00:00Z",
        "status": "no_task",
        "task_id": None,
        "reason": None,
    }


async def test_a_description_that_the_server_loses_is_asked_for_again() -> None:
    limits: list[timedelta | None] = []

    class Handle:
        async def describe(self, *, rpc_timeout: timedelta | None = None) -> str:
            limits.append(rpc_timeout)
            if len(limits) == 1:
                raise RPCError("Timeout expired", RPCStatusCode.CANCELLED, b"")
            return "found"

    assert cast("str", await nominal_times.look(cast("ScheduleHandle", Handle()))) == "found"
    assert len(limits) == 2
    assert None not in limits


class Found:
    """A schedule of weekdays as Temporal describes it on a Sunday, changed the day before."""

    id = "s"
    raw_description = SimpleNamespace(info=SimpleNamespace(buffer_size=0))
    schedule = SimpleNamespace(spec=ScheduleTimes(every=HOUR).spec())

    def __init__(self, coming: Sequence[datetime]) -> None:
        changed = datetime.now(UTC) - timedelta(days=1)
        self.info = SimpleNamespace(
            next_action_times=coming, created_at=changed, last_updated_at=None, recent_actions=[]
        )


class NoTasks:
    """MongoDB without tasks. It keeps what it is asked for."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[datetime, datetime]] = {}

    async def timed_tasks(self, spans: Any, most: int) -> dict[str, list[TimedTask]]:
        """Return no tasks."""
        self.spans = spans
        return {name: [] for name in spans}

    async def foreign_workflows(self, task_ids: Sequence[str]) -> dict[str, WorkflowState]:
        """Return none."""
        return {}


async def read(coming: Sequence[datetime], past: Sequence[datetime] | Exception) -> tuple[Any, NoTasks]:
    """Read the history of a schedule that has these times."""

    async def find(name: str) -> Any:
        return Found(coming)

    class Temporal(Listing):
        async def list_schedule_matching_times(self, request: Any, *, retry: bool) -> SimpleNamespace:
            if isinstance(past, Exception):
                raise past
            start, end = request.start_time.ToDatetime(UTC), request.end_time.ToDatetime(UTC)
            return SimpleNamespace(start_time=[as_timestamp(at) for at in past if start <= at <= end])

    tasks = NoTasks()
    nominal = NominalTimes(cast("Any", Temporal()))
    histories = history.Histories(cast("Any", None), cast("Any", tasks), find, nominal)
    view = ScheduleView(name="s", times=ScheduleTimes(every=HOUR), paused=False)
    return await histories.read([view], 60), tasks


async def test_tasks_are_found_that_are_older_than_the_last_change_and_a_pause_between_times() -> None:
    now = datetime.now(UTC)
    friday = [now - timedelta(days=2, minutes=minute) for minute in range(60, 0, -1)]
    found, tasks = await read([now + HOUR, now + HOUR + timedelta(minutes=1)], friday)
    assert found == {"s": ()}
    assert tasks.spans["s"][0] == friday[0]


async def test_times_that_are_centuries_apart_have_a_history() -> None:
    now = datetime.now(UTC)
    _, tasks = await read([now, now + timedelta(days=365 * 40)], [])
    assert tasks.spans["s"][0] == datetime(1970, 1, 1, tzinfo=UTC)


async def test_a_schedule_that_is_deleted_while_it_is_read_is_absent() -> None:
    found, _ = await read([], RPCError("schedule not found", RPCStatusCode.NOT_FOUND, b""))
    assert found == {}


@pytest.mark.parametrize("apart", [0.0, 0.2, 0.5, 1.0, 3.0])
def test_triggers_take_no_second_twice_although_temporal_lists_only_the_latest_ten(apart: float) -> None:
    coming = [NOW + timedelta(seconds=7)]
    taken: list[datetime] = []
    for number in range(40):
        taken.append(_free_second(taken[-10:], coming, NOW + number * timedelta(seconds=apart)))
    assert len({*taken, *coming}) == 41
