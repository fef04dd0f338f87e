"""What people see of a schedule: when it starts tasks next, and what has become of the last ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from flowkit.graph.scheduled import format_nominal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from flowkit.schedules.times import ScheduleTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRun:
    """A task that a schedule has started."""

    task_id: str
    scheduled_at: datetime
    """The nominal time, in UTC. That of a triggered task is the time of the trigger."""
    status: str
    """`running`, `finished`, `failed`, `cancelled`, or `unknown` if neither Temporal nor MongoDB has the task."""
    reason: str | None = None
    """Why the task has failed, or was cancelled."""
    code: str | None = None
    """The reason code of a task that has failed."""

    def as_json(self) -> dict[str, Any]:
        """Return the run in JSON types."""
        own = {
            "task_id": self.task_id,
            "scheduled_at": format_nominal(self.scheduled_at),
            "status": self.status,
        }
        return {**own, "reason": self.reason, "code": self.code}


class NominalStatus(StrEnum):
    """What has become of a nominal time, if it is not the status of a task that an engine has begun."""

    REFUSED = "refused"
    """The engine refused the task: its graph or params were not valid."""
    TAKEN = "taken"
    """A workflow that was not started for this time has its id: the time has no task, or will have none."""
    NO_TASK = "no_task"
    """No task has this time: an earlier one ran, Temporal was down, the schedule was paused, or it was purged."""
    STARTED = "started"
    """Temporal has started the task, and no engine has begun it yet."""
    WAITING = "waiting"
    """The task starts when an earlier one has ended."""
    DUE = "due"
    """The time is to come, or has just come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NominalTime:
    """A nominal time of a schedule."""

    at: datetime
    """In UTC."""
    status: str
    """The status of the task, or a NominalStatus."""
    task_id: str | None = None
    """The id of its task; that of the workflow that has taken it, for the status `taken`."""
    reason: str | None = None
    """Why the task has failed, was cancelled or was refused, and what helps if its id is taken."""

    def as_json(self) -> dict[str, Any]:
        """Return the time in JSON types."""
        return {
            "at": format_nominal(self.at),
            "status": self.status,
            "task_id": self.task_id,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleView:
    """A schedule as Temporal describes it."""

    name: str
    times: ScheduleTimes
    paused: bool
    note: str = ""
    """Why it is paused, or was resumed."""
    next_times: Sequence[datetime] = ()
    """The nominal times of the next tasks, in UTC: at most ten, and none of a paused schedule is due.

    With `jitter`, the first may have passed: its task starts later.
    """
    last_task: str | None = None
    """The id of the latest task that it has started; if it has started none, of the latest one of a backfill."""
    runs: Sequence[ScheduledRun] = ()
    """The latest tasks, at most ten, newest first. Only `show` reads them."""
    task: dict[str, Any] = field(default_factory=dict)
    """The `graph` and `params` of its tasks. Only `show` reads them."""
    started: int = 0
    """Number of tasks that it has started."""
    missed: int = 0
    """Number of nominal times that passed during an outage of Temporal, and were too old for `catchup` after it."""
    skipped: int = 0
    """Number of nominal times without a task, because an earlier one still ran."""
    problem: str | None = None
    """Why the engine refuses its tasks: it has refused the latest one, or MongoDB has lost their graph."""
    taken: Sequence[NominalTime] = ()
    """The latest and next nominal times whose id something else has taken. Only `show` reads them."""
    revision: int | None = None
    """A number that rises with each change, pause and resume; `update(if_revision=…)` takes it. None in lists."""

    def as_json(self) -> dict[str, Any]:
        """Return the schedule in JSON types, without `overlap`, which Temporal does not list."""
        return {
            "name": self.name,
            **self.times.as_json(),
            "timezone": self.times.timezone,
            "paused": self.paused,
            "note": self.note,
            "next": [format_nominal(each) for each in self.next_times],
            "last_task": self.last_task,
            **({} if self.revision is None else {"revision": self.revision}),
        }

    def details_as_json(self) -> dict[str, Any]:
        """Return the schedule with its latest tasks in JSON types."""
        return {
            **self.as_json(),
            "overlap": self.times.overlap,
            "started": self.started,
            "missed": self.missed,
            "skipped": self.skipped,
            "problem": self.problem,
            "taken": [each.as_json() for each in self.taken],
            "params": self.task.get("params", {}),
            "runs": [each.as_json() for each in self.runs],
        }
