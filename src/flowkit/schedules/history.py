"""What has become of the nominal times of schedules: one entry for each time.

Temporal lists the nominal times, and MongoDB has the tasks. What decides is pure, and `Histories` reads both.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from temporalio.client import ScheduleActionExecutionStartWorkflow
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.attempt.workflows import WorkflowState
from flowkit.core.loops import gather_some
from flowkit.graph.scheduled import Nominal, nominal_time_in
from flowkit.models import TaskStatus, temporal_names
from flowkit.models.ownership import unowned_problem
from flowkit.schedules.nominal_times import FIRST, step_between
from flowkit.schedules.views import NominalStatus, NominalTime

if TYPE_CHECKING:
    from temporalio.client import Client, ScheduleActionResult, ScheduleDescription

    from flowkit.adapters.tasks.queries import TimedTask
    from flowkit.client import TaskClient
    from flowkit.schedules.nominal_times import NominalTimes
    from flowkit.schedules.views import ScheduleView

Find = Callable[[str], Awaitable["ScheduleDescription | None"]]
"""Describes a schedule; None if there is none."""

NEXT_TIMES = 3
"""Number of coming times in a history."""
REFUSED = frozenset({reason_codes.INVALID_GRAPH, reason_codes.CONDITIONS_TOO_LARGE})
"""Codes of tasks that an engine has not begun."""
_CONCURRENT = 10
_REUSE_SEC = 30.0
"""How long a description is reused while the list of schedules shows no change."""
_GRACE = timedelta(seconds=10)
"""How long a task may take to start, and to be visible, before its time counts as one without a task."""
_UNLISTED = timedelta(minutes=1)
"""How long after its start a task may be absent from the running ones that Temporal lists."""
_AHEAD = timedelta(minutes=1)
"""How far the nominal time of a triggered task may be ahead."""
_OPEN_TASKS = 1_000


class RecentStart(NamedTuple):
    """A task that Temporal has started."""

    task_id: str
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """What Temporal says of the times of a schedule."""

    past: Sequence[datetime]
    """The latest nominal times that have come."""
    started: Mapping[datetime, RecentStart]
    """The latest tasks, also those that were triggered, by nominal time."""
    buffered: int
    """Number of tasks that wait for the end of an earlier one."""
    since: datetime
    """How far a history goes back: times before the last change of the schedule are those of tasks."""
    taken: Mapping[str, WorkflowState] = field(default_factory=dict)
    """The workflows with the ids of past or next times that were not started for them."""


def task_id_of(result: ScheduleActionResult) -> str:
    """Return the id of the task that a schedule has started."""
    started = result.action
    return started.workflow_id if isinstance(started, ScheduleActionExecutionStartWorkflow) else ""


def nominal_time_of(result: ScheduleActionResult) -> datetime:
    """Return the nominal time of the task that a schedule has started, from its id.

    Temporal reports the time with its jitter.
    """
    return nominal_time_in(task_id_of(result)) or result.scheduled_at.replace(microsecond=0)


def merge_times(
    view: ScheduleView,
    described: Described,
    tasks: Sequence[TimedTask],
    running: frozenset[str],
    now: datetime,
    count: int,
) -> tuple[NominalTime, ...]:
    """Return the latest `count` nominal times, oldest first, and then the next ones.

    `tasks` are those that MongoDB has. `running` are the ids of those that run according to Temporal: an engine may
    not have begun them. Temporal lists a task some time after its start.
    """
    begun = running | {each.task_id for each in described.started.values() if each.at > now - _UNLISTED}
    entries = {
        at: _without_document(at, task_id, begun, described.taken)
        for at, task_id in _ids(view.name, described).items()
    }
    entries |= {each.at: _with_document(each) for each in tasks}
    found = [entries[at] for at in sorted(entries)]
    lacking = {place for place, each in enumerate(found) if each.status == NominalStatus.NO_TASK}
    latest = max((place for place in range(len(found)) if place not in lacking), default=-1)
    waiting = range(latest + 1, latest + 1 + described.buffered)
    late = now - _GRACE - view.times.jitter
    for place in lacking:
        if place in waiting:
            found[place] = replace(found[place], status=NominalStatus.WAITING)
        elif found[place].at > late and not view.paused:
            found[place] = replace(found[place], status=NominalStatus.DUE)
    coming = [] if view.paused else [at for at in view.next_times if at not in entries][:NEXT_TIMES]
    return (*found[-count:], *(_coming(view.name, at, described.taken) for at in coming))


def _ids(name: str, described: Described) -> dict[datetime, str]:
    """Return the id that the task of each nominal time has, or would have."""
    started = {at: each.task_id for at, each in described.started.items()}
    return {**{at: Nominal(schedule=name, at=at).task_id for at in described.past}, **started}


def _without_document(
    at: datetime, task_id: str, begun: frozenset[str], taken: Collection[str]
) -> NominalTime:
    if task_id in taken:
        return _taken(at, task_id)
    if task_id in begun:
        return NominalTime(at=at, status=NominalStatus.STARTED, task_id=task_id)
    return NominalTime(at=at, status=NominalStatus.NO_TASK)


def _coming(name: str, at: datetime, taken: Mapping[str, WorkflowState]) -> NominalTime:
    """Return a time to come. A workflow that has ended does not keep its task from starting."""
    task_id = Nominal(schedule=name, at=at).task_id
    if taken.get(task_id) is WorkflowState.OPEN:
        return _taken(at, task_id)
    return NominalTime(at=at, status=NominalStatus.DUE)


def _taken(at: datetime, task_id: str) -> NominalTime:
    return NominalTime(at=at, status=NominalStatus.TAKEN, task_id=task_id, reason=unowned_problem(task_id))


def _with_document(task: TimedTask) -> NominalTime:
    refused = task.status == TaskStatus.FAILED and (task.reason or "").partition(":")[0] in REFUSED
    status = NominalStatus.REFUSED if refused else task.status
    return NominalTime(at=task.at, status=status, task_id=task.task_id, reason=task.reason)


@dataclass(frozen=True, slots=True)
class _Known:
    view: ScheduleView
    described: Described
    until: float


class Histories:
    """Reads histories. What Temporal says of a schedule is kept for a while, as long as the list shows no change."""

    def __init__(self, client: Client, tasks: TaskClient, find: Find, nominal: NominalTimes) -> None:
        self._client = client
        self._tasks = tasks
        self._find = find
        self._nominal = nominal
        self._known: dict[tuple[str, int], _Known] = {}

    async def read(self, views: Sequence[ScheduleView], count: int) -> dict[str, tuple[NominalTime, ...]]:
        """Return the history of each schedule by name. One that was deleted meanwhile is absent."""
        now = datetime.now(UTC)
        self._known = {key: known for key, known in self._known.items() if known.until > time.monotonic()}
        described = await gather_some(lambda view: self._describe(view, count, now), views, _CONCURRENT)
        known = [(view, each) for view, each in zip(views, described, strict=True) if each is not None]
        spans = {view.name: (each.since, now + _AHEAD) for view, each in known}
        tasks = await self._tasks.timed_tasks(spans, count)
        stored = {each.task_id for some in tasks.values() for each in some}
        ids = {task_id for view, each in known for task_id in _ids(view.name, each).values()}
        running = await self._running() if ids - stored else frozenset[str]()
        return {
            view.name: merge_times(view, each, tasks[view.name], running, now, count) for view, each in known
        }

    async def _running(self) -> frozenset[str]:
        """Return the ids of the newest running tasks that schedules have started."""
        query = f"ExecutionStatus = 'Running' AND {temporal_names.SCHEDULED_BY_ID} IS NOT NULL"
        return frozenset([each.id async for each in self._client.list_workflows(query, limit=_OPEN_TASKS)])

    async def _describe(self, view: ScheduleView, count: int, now: datetime) -> Described | None:
        known = self._known.get((view.name, count))
        if known is not None and known.view == view:
            return known.described
        found = await self._find(view.name)
        if found is None:
            return None
        info = found.info
        changed = info.last_updated_at or info.created_at
        step = step_between(info.next_action_times)
        try:
            times = await self._nominal.latest(found.id, found.schedule.spec, now, step, count)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return None
        past = [at for at in times if at >= changed]
        own = [Nominal(schedule=view.name, at=at).task_id for at in (*past, *view.next_times[:NEXT_TIMES])]
        described = Described(
            past=past,
            taken=await self._tasks.foreign_workflows(own),
            started={
                nominal_time_of(each): RecentStart(task_id_of(each), each.started_at)
                for each in info.recent_actions
            },
            buffered=found.raw_description.info.buffer_size,
            since=min([now - min(step * count, now - FIRST), *times[:1]]),
        )
        self._known[view.name, count] = _Known(view, described, time.monotonic() + _REUSE_SEC)
        return described
