"""Creates, shows, cancels and repeats the backfills of one deployment."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError

from flowkit import limits, products
from flowkit.adapters.backfills import BackfillStore
from flowkit.adapters.tasks.stored_graphs import pack_task
from flowkit.attempt.pollers import recent_pollers
from flowkit.attempt.workflows import WorkflowState, look_up, read_marker
from flowkit.backfills.ranges import check_range, empty_range, list_times, read_bound
from flowkit.backfills.rules import estimate_left_sec, same_problem
from flowkit.backfills.views import BackfillView
from flowkit.connection import Namespace
from flowkit.errors import ConfigError
from flowkit.graph.scheduled import Nominal, format_nominal
from flowkit.models import temporal_names
from flowkit.models.backfills import (
    BackfillCounts,
    BackfillRun,
    BackfillRunStatus,
    BackfillState,
    Existing,
    Order,
    RunBackfill,
    StoredBackfill,
)
from flowkit.models.ownership import Owner, OwnerKind
from flowkit.text import count_of, printed, truncate
from flowkit.validation.arguments import new_name_problem, require, text_problem, whole_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.client import TaskClient
    from flowkit.models.admission import Admission
    from flowkit.schedules import Schedules, ScheduleView

_ID_CHARS = 200
_LISTED = 100
_SHOWN = 100
_LATEST = 50
_MAX_ACTIVE = 4
_AROUND = (timedelta(days=1), timedelta(days=40), timedelta(days=400))
"""How far an error about an empty range looks for nominal times before and after it."""
_CANCEL_REASON = "the backfill was cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillPlan:
    """A backfill that is not created yet."""

    backfill: StoredBackfill
    runs: Sequence[BackfillRun]
    """Its nominal times, the oldest first."""
    task: bytes
    """The packed graph and params of its tasks."""

    def as_json(self) -> dict[str, Any]:
        """Return the nominal times in JSON types."""
        own = BackfillView(
            backfill=self.backfill, counts=BackfillCounts(pending=self.backfill.total)
        ).as_json()
        kept = {
            key: own[key] for key in ("schedule", "from", "to", "order", "max_active", "existing", "total")
        }
        return {**kept, "tasks": [each.task_id for each in self.runs]}


class Backfills:
    """The backfills of one deployment: each starts the tasks of a schedule for a range of past nominal times.

    Methods raise ConfigError for invalid arguments and for schedules and backfills that do not exist, StoreUnavailable
    if MongoDB does not respond, and RPCError if Temporal does not.
    """

    def __init__(self, client: Client, tasks: TaskClient, schedules: Schedules, *, queue: str) -> None:
        self._client = client
        self._tasks = tasks
        self._schedules = schedules
        self._queue = queue
        self._store = BackfillStore(tasks.database)
        self._namespace = Namespace(client)

    async def create(
        self,
        schedule: str,
        *,
        start: str | datetime,
        end: str | datetime,
        order: str = Order.OLDEST.value,
        max_active: int = _MAX_ACTIVE,
        existing: str = Existing.NONE.value,
        admission: Admission | None = None,
        backfill_id: str | None = None,
    ) -> BackfillView:
        """Start the tasks of a schedule for its nominal times from `start` to before `end`.

        Both are dates, which begin at midnight in the time zone of the schedule, or times with an offset. Times that
        have not come yet are left to the schedule. At most `max_active` tasks run at once. Of the times that have a
        task already, none start again, or those whose task has `failed` or was cancelled, or `all` whose task has
        ended.

        Graph and params are the present ones of the schedule, whatever becomes of it. With `admission`, the tasks are
        submitted to the admission queue. A second call with the same arguments and `backfill_id` returns the first
        backfill, and continues a creation that was interrupted.
        """
        self._check(order, max_active, existing, admission)
        plan = partial(
            self.plan,
            schedule,
            start=start,
            end=end,
            order=order,
            max_active=max_active,
            existing=existing,
            admission=admission,
            backfill_id=backfill_id,
        )
        planned = None
        found = None if backfill_id is None else await self._store.find(_checked_id(backfill_id))
        if found is None:
            planned = await plan()
            # Its workflow comes first: nothing is stored for an id that is taken in Temporal, and what a killed call
            # leaves has a workflow, which completes it.
            await self._start(planned.backfill)
            await self._store.prepare()
            times = [each.at for each in planned.runs]
            await self._store.insert(planned.backfill, planned.task, times)
            found = await self._store.find(planned.backfill.backfill_id) or planned.backfill
        asked = {
            "schedule": schedule,
            "from": read_bound(start, "from", found.timezone),
            "to": read_bound(end, "to", found.timezone),
            "order": Order(order),
            "max_active": max_active,
            "existing": Existing(existing),
            "admission": admission,
        }
        require(same_problem(found, await self._namespace.id(), asked))
        if found.state is BackfillState.CREATING:
            await self._store.complete(found)
        return replace(await self._continue(found.backfill_id), is_new=planned is not None)

    async def _continue(self, backfill_id: str) -> BackfillView:
        """Start the workflow of a backfill that has not ended, unless it runs."""
        backfill = await self._find(backfill_id)
        if not backfill.state.ended:
            await self._start(backfill)
        return await self._view(backfill)

    async def plan(
        self,
        schedule: str,
        *,
        start: str | datetime,
        end: str | datetime,
        order: str = Order.OLDEST.value,
        max_active: int = _MAX_ACTIVE,
        existing: str = Existing.NONE.value,
        admission: Admission | None = None,
        backfill_id: str | None = None,
    ) -> BackfillPlan:
        """Return what `create` would create. Nothing is changed."""
        self._check(order, max_active, existing, admission)
        if backfill_id is not None:
            require(new_name_problem(backfill_id, "backfill_id", "the id of a backfill", _ID_CHARS))
        view = await self._schedules.show_definition(schedule)
        zone = view.times.timezone
        begin, stop = read_bound(start, "from", zone), read_bound(end, "to", zone)
        check_range(begin, stop)
        times = await self._times(schedule, begin, stop)
        now = datetime.now(UTC).replace(microsecond=0)
        backfill = StoredBackfill(
            backfill_id=backfill_id or f"{schedule}-{uuid.uuid4().hex[:8]}",
            schedule=schedule,
            start=begin,
            end=stop,
            timezone=zone,
            order=Order(order),
            max_active=max_active,
            existing=Existing(existing),
            total=len(times),
            queue=self._queue,
            namespace_id=await self._namespace.id(),
            state=BackfillState.RUNNING,
            created_at=now,
            admission=admission,
        )
        nominal = [Nominal(schedule=schedule, at=at) for at in times]
        runs = [
            BackfillRun(at=each.at, task_id=each.task_id, status=BackfillRunStatus.PENDING)
            for each in nominal
        ]
        return BackfillPlan(backfill=backfill, runs=runs, task=await _pack(view))

    def _check(self, order: str, max_active: int, existing: str, admission: Admission | None) -> None:
        require(
            _choice_problem(order, "order", [each.value for each in Order]),
            whole_problem(max_active, "max_active", 1, limits.BACKFILL_ACTIVE),
            _choice_problem(existing, "existing", [each.value for each in Existing]),
        )
        if admission is None:
            return
        if not self._tasks.has_admission:
            raise products.missing("the admission queue", "admission")
        if existing != Existing.NONE:
            raise ConfigError(
                f"existing is {printed(existing)}, but the admission queue starts no task again whose request has "
                "ended; leave out admission, or use existing none"
            )

    async def _times(self, schedule: str, start: datetime, end: datetime) -> list[datetime]:
        """Return the past nominal times of a range. Raise ConfigError, which names those around it, for none."""
        past = min(end, datetime.now(UTC))
        found = (
            await list_times(partial(self._schedules.times, schedule), start, past) if start < past else []
        )
        if found:
            return found
        before = await self._nearest(schedule, start, -1)
        after = await self._nearest(schedule, max(start, past), 1)
        if after is not None and start <= after < end:
            raise ConfigError(
                f"no nominal time from {format_nominal(start)} to before {format_nominal(end)} has come yet: the first "
                f"is {format_nominal(after)}, and the schedule starts its task itself"
            )
        raise empty_range(start, end, before, after)

    async def _nearest(self, schedule: str, at: datetime, sign: int) -> datetime | None:
        """Return the last nominal time before `at`, or the first one from `at` on; None if none is near."""
        for width in _AROUND:
            first, last = (at - width, at) if sign < 0 else (at - timedelta(seconds=1), at + width)
            found = [
                each
                for each in await self._schedules.times(schedule, first, last)
                if (each < at) is (sign < 0)
            ]
            if found:
                return found[-1 if sign < 0 else 0]
        return None

    async def _start(self, backfill: StoredBackfill) -> None:
        """Start the workflow of a backfill, or wake the one that runs.

        Raise ConfigError if something else has a workflow with its id.
        """
        marker = await self._marker(backfill.backfill_id)
        workflow_id = temporal_names.backfill_workflow_id(backfill.backfill_id)
        await self._check_workflow(workflow_id, marker)
        given = RunBackfill(
            backfill_id=backfill.backfill_id,
            schedule=backfill.schedule,
            total=backfill.total,
            deployment=marker.deployment,
        )
        title = f"backfill of {backfill.schedule}: {count_of(backfill.total, 'nominal time')}"
        try:
            await self._client.start_workflow(
                temporal_names.BACKFILL,
                given,
                id=workflow_id,
                task_queue=temporal_names.backfill_queue(backfill.queue),
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                start_signal=temporal_names.WAKE_BACKFILL,
                memo=marker.as_memo(),
                static_summary=truncate(title, 100),
            )
        except WorkflowAlreadyStartedError:
            pass
        await self._check_workflow(workflow_id, marker)  # Another one may have started since the first check.

    async def _check_workflow(self, workflow_id: str, marker: Owner) -> None:
        """Raise ConfigError if something else has a workflow with the id of that of a backfill."""
        found = await look_up(self._client, workflow_id)
        if found.description is not None and await read_marker(found.description) != marker:
            raise ConfigError(
                f"workflow {workflow_id!r} belongs to another deployment or program in this namespace, so there can be "
                "no backfill of this id here; create it with another id"
            )

    async def list_backfills(self, schedule: str | None = None) -> list[BackfillView]:
        """Return the newest backfills, at most 100; with `schedule`, only those of this schedule."""
        found = await self._store.newest(await self._namespace.id(), _LISTED, schedule=schedule)
        return [await self._view(each) for each in found]

    async def status(self, backfill_id: str) -> BackfillView:
        """Return a backfill with the nominal times that run, have failed, or were skipped."""
        backfill = await self._find(backfill_id)
        view = await self._view(backfill)
        running = await self._store.runs(backfill_id, BackfillRunStatus.RUNNING)
        left = view.counts.pending + view.counts.running
        latest = await self._store.latest(backfill_id, _LATEST)
        seconds = [
            (run.ended_at - run.started_at).total_seconds()
            for run in latest
            if run.ended_at is not None and run.started_at is not None
        ]
        return replace(
            view,
            running=running,
            failed=await self._store.runs(backfill_id, BackfillRunStatus.FAILED, _SHOWN),
            skipped=await self._store.runs(backfill_id, BackfillRunStatus.SKIPPED, _SHOWN),
            left_sec=None if backfill.state.ended else estimate_left_sec(seconds, left, backfill.max_active),
            is_driven=backfill.state.ended or await self._is_driven(backfill_id),
            has_engine=backfill.state.ended or await self._has_engine(backfill),
        )

    async def _is_driven(self, backfill_id: str) -> bool:
        """Return whether the own workflow of a backfill runs."""
        found = await look_up(self._client, temporal_names.backfill_workflow_id(backfill_id))
        if found.description is None or found.state is not WorkflowState.OPEN:
            return False
        return await read_marker(found.description) == await self._marker(backfill_id)

    async def _marker(self, backfill_id: str) -> Owner:
        """Return the marker of the workflow of a backfill."""
        deployment = await self._tasks.deployment()
        return Owner(kind=OwnerKind.BACKFILL, deployment=deployment, id=backfill_id)

    async def _has_engine(self, backfill: StoredBackfill) -> bool:
        return bool(await recent_pollers(self._client, temporal_names.backfill_queue(backfill.queue)))

    async def cancel(self, backfill_id: str, *, running: bool = False) -> BackfillView:
        """Start no more tasks of a backfill. When this returns, none of its pending nominal times will start.

        Tasks that run continue, and requests that wait for admission are cancelled. With `running`, request that the
        tasks that run stop, too. Raise ConfigError if the backfill has ended.
        """
        backfill = await self._find(backfill_id)
        if backfill.state.ended:
            raise ConfigError(f"backfill {backfill_id!r} has ended: it is {backfill.state.value}")
        await self._store.cancel(backfill_id, running=running)
        runs = await self._store.runs(backfill_id, BackfillRunStatus.RUNNING)
        await asyncio.gather(*(self._cancel_run(backfill, run, running=running) for run in runs))
        if not runs:
            await self._store.close(await self._find(backfill_id))
        elif not await self._is_driven(backfill_id):  # Something must notice the ends of those that run.
            await self._start(backfill)
        return await self.status(backfill_id)

    async def _cancel_run(self, backfill: StoredBackfill, run: BackfillRun, *, running: bool) -> None:
        """Request that the task of a nominal time stop: with `running`, or if it waits for admission."""
        if backfill.admission is not None:
            if not run.submitted:  # Something else may have submitted a task with its id.
                return
            pending = await self._tasks.find_pending(run.task_id)
            if pending is not None and not pending.decided:
                await self._tasks.cancel_task(run.task_id, reason=_CANCEL_REASON)
                return
        if running and backfill.admission is not None:
            await self._tasks.cancel_task(run.task_id, reason=_CANCEL_REASON)
        elif running:
            deployment = await self._tasks.deployment()
            owner = Owner(kind=OwnerKind.BACKFILL, deployment=deployment, id=backfill.owner_id(run))
            await self._tasks.cancel_workflow(run.task_id, reason=_CANCEL_REASON, owner=owner)

    async def retry_failed(self, backfill_id: str) -> tuple[BackfillView, int]:
        """Start the failed tasks of a backfill again. Return the backfill, and their number.

        They have the present graph and params of the schedule; those of the backfill if the schedule no longer exists.
        A backfill that is open without a workflow continues, too.
        """
        backfill = await self._find(backfill_id)
        if backfill.state is BackfillState.CREATING:
            raise ConfigError(
                f"backfill {backfill_id!r} is being created: an engine, or a second create with the same id, completes "
                "it; try again then, or cancel it"
            )
        if backfill.admission is not None:
            raise ConfigError(
                f"backfill {backfill_id!r} submits its tasks to the admission queue, which starts no task again whose "
                "request has ended; rerun the tasks, or create a backfill without admission, with existing failed"
            )
        failed = (await self._store.counts(backfill_id)).failed
        if not failed and (backfill.state.ended or await self._is_driven(backfill_id)):
            raise ConfigError(_nothing_failed(await self._view(backfill)))
        count = (
            await self._store.retry_failed(backfill_id, await self._present_task(backfill)) if failed else 0
        )
        again = await self._find(backfill_id)
        await self._start(again)
        return await self._view(again), count

    async def _present_task(self, backfill: StoredBackfill) -> bytes:
        if await self._schedules.exists(backfill.schedule):
            return await _pack(await self._schedules.show_definition(backfill.schedule))
        return await self._store.task(backfill.backfill_id) or b""

    async def _find(self, backfill_id: str) -> StoredBackfill:
        found = await self._store.find(_checked_id(backfill_id))
        if found is None or found.namespace_id != await self._namespace.id():
            raise ConfigError(
                f"there is no backfill {printed(backfill_id)}; `flowkit backfill list` shows the backfills"
            )
        return found

    async def _view(self, backfill: StoredBackfill) -> BackfillView:
        return BackfillView(backfill=backfill, counts=await self._store.counts(backfill.backfill_id))


def _nothing_failed(view: BackfillView) -> str:
    """Return why `retry_failed` starts nothing, and what starts the tasks again that were cancelled or skipped."""
    name, counts = view.backfill.backfill_id, view.counts
    others = {"cancelled": counts.cancelled, "skipped": counts.skipped}
    shown = [f"{count:,} {status}" for status, count in others.items() if count]
    rest = (
        f"; of {', '.join(shown)}, another backfill with existing failed or all starts tasks again"
        if shown
        else ""
    )
    return f"backfill {name!r} has no failed nominal time, so there is nothing to start again{rest}"


def _checked_id(backfill_id: str) -> str:
    require(text_problem(backfill_id, "backfill_id", _ID_CHARS))
    return backfill_id


async def _pack(view: ScheduleView) -> bytes:
    if view.problem is not None:
        raise ConfigError(view.problem)
    return await asyncio.to_thread(pack_task, view.task)


def _choice_problem(value: object, name: str, known: Sequence[str]) -> str | None:
    good = isinstance(value, str) and value in known
    return None if good else f"{name} is {printed(value)}; use {', '.join(known)}"
