"""Creates, shows and changes the schedules of one deployment. Each is a schedule of Temporal."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.common.v1 import Payloads
from temporalio.api.schedule.v1 import SchedulePatch, TriggerImmediatelyRequest
from temporalio.api.schedule.v1 import message_pb2 as schedule_pb
from temporalio.api.workflowservice.v1 import (
    PatchScheduleRequest,
    UpdateScheduleRequest,
)
from temporalio.client import (
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
)
from temporalio.service import RPCError, RPCStatusCode

from flowkit import limits
from flowkit.adapters.turns import Turns
from flowkit.attempt.background import new_owner
from flowkit.attempt.workflows import WorkflowState, look_up
from flowkit.connection import Namespace
from flowkit.core.loops import gather_some
from flowkit.errors import (
    ActionRejected,
    ConfigError,
    FlowKitError,
    GraphError,
    RejectionCause,
    TaskCancelled,
    TaskFailed,
    TaskIdTaken,
    UnknownTask,
)
from flowkit.graph.scheduled import Nominal
from flowkit.models import temporal_names
from flowkit.models.ownership import MEMO, Owner, OwnerKind, read_owner, task_owner, unowned_problem
from flowkit.schedules.history import (
    REFUSED,
    Histories,
    nominal_time_of,
    task_id_of,
)
from flowkit.schedules.nominal_times import FIRST, NominalTimes, look
from flowkit.schedules.plan import ScheduleChange, ScheduleDefinition, ScheduleStep, plan_changes
from flowkit.schedules.times import ScheduleOptions, ScheduleTimes, times_of
from flowkit.schedules.views import NominalStatus, NominalTime, ScheduledRun, ScheduleView
from flowkit.text import one_line, truncate
from flowkit.validation.arguments import (
    datetime_problem,
    require,
    schedule_name_problem,
    whole_problem,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence

    from temporalio.client import (
        Client,
        ScheduleActionResult,
        ScheduleDescription,
        ScheduleHandle,
        ScheduleListInfo,
        ScheduleListSchedule,
    )

    from flowkit.client import TaskClient

_NOTE_CHARS = 1_000
_RESULT_SEC = 5.0
_TRIGGER_SEC = 10.0
_TRIGGER_LOOK_SEC = 0.1
_CONCURRENT = 10
"""Number of schedules that are read or written at once."""
_UPDATES = 10
"""How often an update is tried that meets changes of others."""
_LARGEST_REVISION = 2**64 - 1
_SHOWN_TIMES = 10
"""Of how many past times a schedule is shown whose ids are taken."""
_TURN_SEC = 15.0
"""How long the turn of a killed process lasts."""
_TURN_WAIT_SEC = 60.0
_TURN_LOOK_SEC = 0.1
_WRITTEN = frozenset({ScheduleStep.CREATE, ScheduleStep.UPDATE})


class _Listed(NamedTuple):
    name: str
    schedule: ScheduleListSchedule
    info: ScheduleListInfo


class Schedules:
    """The schedules of one deployment: each starts a task at its nominal times.

    The id of a task is the name of the schedule, a dash and the nominal time: `nightly-2026-11-26T02:00:00Z`. Methods
    raise ConfigError for invalid arguments and for schedules that do not exist, GraphError for an invalid graph or
    params, and RPCError if Temporal does not respond.
    """

    def __init__(self, client: Client, tasks: TaskClient, *, queue: str) -> None:
        self._client = client
        self._tasks = tasks
        self._queue = queue
        self._nominal = NominalTimes(client)
        self._histories = Histories(client, tasks, self._find_own, self._nominal)
        self._turns = Turns(tasks.database)
        self._namespace = Namespace(client)

    async def create(
        self,
        name: str,
        *,
        graph: dict[str, Any],
        params: dict[str, Any] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleView:
        """Create a schedule, and return it with its next nominal times.

        Params may hold expressions that read `task.scheduled_at`; each task gets their values. Raise ConfigError if the
        name is taken.
        """
        definition = ScheduleDefinition(graph=graph, params=params or {}, times=ScheduleTimes.read(options))
        await self._create(name, definition, await self._prepare(name, definition))
        return await self._view(await self._describe(name))

    async def _create(self, name: str, definition: ScheduleDefinition, given: dict[str, Any]) -> None:
        deployment = await self._tasks.deployment()
        action = ScheduleActionStartWorkflow(
            temporal_names.TASK,
            given,
            id=name,
            task_queue=self._queue,
            memo=task_owner(name, deployment).as_memo(),
            static_summary=definition.title,
        )
        marker = Owner(kind=OwnerKind.SCHEDULE, deployment=deployment, id=name)
        try:
            await self._client.create_schedule(name, definition.times.schedule(action), memo=marker.as_memo())
        except ScheduleAlreadyRunningError:
            await self._find(name)  # It raises an error for a schedule that nothing here can change.
            raise _Exists(
                f"schedule {name!r} exists already; change it with update or apply, or choose another name"
            ) from None

    async def _prepare(
        self, name: str, definition: ScheduleDefinition, at: datetime | None = None
    ) -> dict[str, Any]:
        """Return the input of the tasks. Raise ConfigError or GraphError if the definition is not valid.

        `at` is one of the nominal times, if it is known.
        """
        require(schedule_name_problem(name))
        at = at or (await self.preview(definition.times))[0]
        return await self._tasks.prepare_scheduled(
            name, params=definition.params, graph=definition.graph, at=at
        )

    async def preview(self, times: ScheduleTimes) -> Sequence[datetime]:
        """Return the next nominal times, at most ten, as Temporal computes them. Nothing is started.

        Raise ConfigError, which shows the right form, if Temporal refuses the times or they never come.
        """
        return await self._nominal.preview(times)

    async def list_schedules(self) -> list[ScheduleView]:
        """Return the schedules of the deployment by name. A new one may be missing for a moment."""
        views = await gather_some(self._listed_view, await self._listed(), _CONCURRENT)
        return await self._with_backfilled(views)

    async def _listed(self) -> list[_Listed]:
        """Return the schedules of the deployment as Temporal lists them."""
        own, found = await self._tasks.deployment(), list[_Listed]()
        async for each in await self._client.list_schedules():
            memo = await each.memo()
            await self._nominal.remove_leftover(each.id, memo)
            owner = read_owner(memo.get(MEMO))
            if each.schedule is None or each.info is None or owner is None:
                continue
            if owner.kind is OwnerKind.SCHEDULE and owner.deployment == own:
                found.append(_Listed(each.id, each.schedule, each.info))
        return sorted(found, key=lambda listed: listed.name)

    async def _listed_view(self, listed: _Listed) -> ScheduleView:
        name, schedule, info = listed
        return ScheduleView(
            name=name,
            times=times_of(schedule.spec),
            paused=schedule.state.paused,
            note=schedule.state.note or "",
            next_times=await self._nominal.coming(name, schedule.spec, info.next_action_times),
            last_task=task_id_of(info.recent_actions[-1]) if info.recent_actions else None,
        )

    async def _with_backfilled(self, views: Sequence[ScheduleView]) -> list[ScheduleView]:
        """Return schedules with their latest tasks, also if only backfills have started some: Temporal lists those of
        schedules.
        """
        spans = {view.name: (FIRST, datetime.now(UTC)) for view in views if view.last_task is None}
        tasks = await self._tasks.timed_tasks(spans, 1) if spans else {}
        latest = {name: max(found, key=lambda task: task.at) for name, found in tasks.items() if found}
        return [
            replace(view, last_task=latest[view.name].task_id) if view.name in latest else view
            for view in views
        ]

    async def show(self, name: str) -> ScheduleView:
        """Return a schedule with its latest tasks, and what has become of them."""
        description = await self._describe(name)
        view = await self._view(description)
        runs = await asyncio.gather(*(self._run(each) for each in reversed(description.info.recent_actions)))
        last = runs[0] if runs else None
        refused = last.reason if last is not None and last.code in REFUSED else None
        times = (await self._histories.read([view], _SHOWN_TIMES)).get(name, ())
        taken = tuple(each for each in times if each.status == NominalStatus.TAKEN)
        return replace(view, runs=runs, problem=view.problem or refused, taken=taken)

    async def count_taken(self) -> dict[str, int]:
        """Return by name how many of the latest and the next times of a schedule have an id that is taken: those that
        `history` shows as `taken`. Schedules without such times are absent.
        """
        history = await self.history(await self.list_schedules(), count=_SHOWN_TIMES)
        counts = {
            name: sum(each.status == NominalStatus.TAKEN for each in times) for name, times in history.items()
        }
        return {name: count for name, count in counts.items() if count}

    async def show_definition(self, name: str) -> ScheduleView:
        """Return a schedule with its graph and params, and without its latest tasks."""
        return await self._view(await self._describe(name))

    async def exists(self, name: str) -> bool:
        """Return whether this deployment has a schedule of this name."""
        return await self._find(name) is not None

    async def times(self, name: str, start: datetime, end: datetime) -> list[datetime]:
        """Return the nominal times of a schedule after `start` and until `end`, in UTC: at most 1,000."""
        require(datetime_problem(start, "start"), datetime_problem(end, "end"))
        spec = (await self._describe(name)).schedule.spec
        return await self._nominal.between(name, spec, start, end)

    async def history(
        self, views: Sequence[ScheduleView], *, count: int = 60
    ) -> dict[str, tuple[NominalTime, ...]]:
        """Return by name the latest `count` nominal times of these schedules, with what has become of each.

        The oldest comes first, and three coming times of each schedule that is not paused are the last ones. Times
        without a task are known since the last change of a schedule. `views` are some that `list_schedules` has
        returned; those that were deleted since are absent. Raise StoreUnavailable if MongoDB does not respond.
        """
        require(whole_problem(count, "count", 1, limits.SCHEDULE_HISTORY))
        return await self._histories.read(views, count)

    async def pause(self, name: str, *, note: str = "") -> None:
        """Stop starting tasks, until `resume`. Tasks that run continue, and times that pass start nothing."""
        async with self._handle(name) as handle:
            await handle.pause(note=truncate(note, _NOTE_CHARS) or "paused")

    async def resume(self, name: str, *, note: str = "") -> None:
        """Start tasks again, from the next nominal time on."""
        async with self._handle(name) as handle:
            await handle.unpause(note=truncate(note, _NOTE_CHARS) or "resumed")

    async def trigger(self, name: str) -> str | None:
        """Start a task now, also if the schedule is paused, and return its id.

        Its nominal time is the present second, or the next one without a task. Return None if it does not start now,
        because an earlier one runs, and the schedule skips or delays a task that overlaps with it. Several calls at
        once start one task after the other. Raise StoreUnavailable if MongoDB does not respond.
        """
        async with self._turn(f"trigger {name}"):
            return await self._trigger(name)

    async def _trigger(self, name: str) -> str | None:
        description = await self._describe(name)
        before, spec = description.info, description.schedule.spec
        coming = await self._nominal.coming(name, spec, before.next_action_times)
        started = [nominal_time_of(each) for each in before.recent_actions]
        at = _free_second(started, coming, datetime.now(UTC))
        wanted = Nominal(schedule=name, at=at).task_id
        async with self._handle(name) as handle:
            await self._trigger_at(name, at)
            until = time.monotonic() + _TRIGGER_SEC
            while time.monotonic() < until:
                info = (await look(handle)).info
                if wanted in map(task_id_of, info.recent_actions):
                    return wanted
                if info.num_actions_skipped_overlap > before.num_actions_skipped_overlap:
                    return None
                await asyncio.sleep(_TRIGGER_LOOK_SEC)
        if (await look_up(self._client, wanted)).description is None:
            return None
        if (await self._tasks.look_up(wanted)).description is None:
            raise TaskIdTaken(unowned_problem(wanted))
        return wanted  # Temporal has started it only now.

    async def _trigger_at(self, name: str, at: datetime) -> None:
        """Start a task with this nominal time now. The SDK's `trigger` takes no time."""
        nominal = Timestamp()
        nominal.FromDatetime(at)
        patch = SchedulePatch(trigger_immediately=TriggerImmediatelyRequest(scheduled_time=nominal))
        request = PatchScheduleRequest(
            namespace=self._client.namespace,
            schedule_id=name,
            patch=patch,
            identity=self._client.identity,
            request_id=str(uuid.uuid4()),
        )
        await self._client.workflow_service.patch_schedule(request, retry=True)

    async def update(
        self,
        name: str,
        *,
        graph: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        single_params: Mapping[str, Any] | None = None,
        if_revision: int | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleView:
        """Change what is given, and nothing else. Tasks that have started keep their graph and params.

        `params` replaces all params, and `single_params` those that it names. `cron` replaces `every`, and the other
        way round. With `if_revision`, raise ActionRejected with the cause `outdated` if the schedule has another
        revision, because it was changed, paused or resumed meanwhile.
        """
        if if_revision is not None:
            require(whole_problem(if_revision, "if_revision", 0, _LARGEST_REVISION))

        def change(before: ScheduleDefinition) -> ScheduleDefinition:
            if before.is_lost and (graph is None or params is None):
                raise ConfigError(_lost(name))
            return ScheduleDefinition(
                graph=before.graph if graph is None else graph,
                params={**(before.params if params is None else params), **(single_params or {})},
                times=before.times.changed(options),
            )

        return await self._view(await self._update(name, change, if_revision=if_revision))

    async def _update(
        self,
        name: str,
        change: Callable[[ScheduleDefinition], ScheduleDefinition],
        given: dict[str, Any] | None = None,
        *,
        if_revision: int | None = None,
    ) -> ScheduleDescription:
        """Change a schedule, and return it. `given` is the input of its tasks, if it is prepared.

        What others change meanwhile stays, unless it is the same option. Temporal drops an update without an error if
        the schedule has changed since it was described.
        """
        for _ in range(_UPDATES):
            present = await self._describe(name)
            _check_revision(name, present, if_revision)
            before = await self._definition(present)
            after = change(before)
            if after.starts_same(before) and after.times == before.times:
                return present
            schedule = await self._changed(present, before, after, given)
            async with self._existing(name):
                await self._client.workflow_service.update_schedule(
                    UpdateScheduleRequest(
                        namespace=self._client.namespace,
                        schedule_id=name,
                        schedule=schedule,
                        conflict_token=present.raw_description.conflict_token,
                        identity=self._client.identity,
                        request_id=str(uuid.uuid4()),
                    ),
                    retry=True,
                )
            found = await self._describe(name)
            if _has(found, schedule, after.times):
                return found
        raise ConfigError(_unsettled(name))

    async def _changed(
        self,
        present: ScheduleDescription,
        before: ScheduleDefinition,
        after: ScheduleDefinition,
        given: dict[str, Any] | None,
    ) -> schedule_pb.Schedule:
        """Return the schedule with what differs. The rest stays, such as its queue and its end."""
        schedule = schedule_pb.Schedule()
        schedule.CopyFrom(present.raw_description.schedule)
        after.times.write_into(schedule, before.times)
        if not after.starts_same(before):
            action, converter = schedule.action.start_workflow, self._client.data_converter
            content = given or await self._prepare(present.id, after, _next_time(present, after.times))
            action.input.CopyFrom(Payloads(payloads=await converter.encode([content])))
            action.user_metadata.ClearField("summary")
            if after.title is not None:
                action.user_metadata.summary.CopyFrom((await converter.encode([after.title]))[0])
        elif before.times != after.times and not after.times.edited:
            await self.preview(after.times)
        return schedule

    async def delete(self, name: str) -> None:
        """Delete a schedule. Its tasks stay as they are, also those that run."""
        await self._describe(name)
        async with self._handle(name) as handle:
            await handle.delete()

    async def plan(
        self, wanted: Mapping[str, ScheduleDefinition], *, prune: bool = False
    ) -> list[ScheduleChange]:
        """Return what `apply` would change. Nothing is changed."""
        names = {each.name for each in await self._listed()} | {*wanted}
        found = await gather_some(self._find, sorted(names), _CONCURRENT)
        present = {each.id: await self._definition(each) for each in found if each is not None}
        return plan_changes(wanted, present, prune=prune)

    async def apply(
        self, wanted: Mapping[str, ScheduleDefinition], *, prune: bool = False
    ) -> list[ScheduleChange]:
        """Create and update schedules so that they are the wanted ones, and return what has changed.

        A second call changes nothing. Only with `prune`, delete those that are not wanted. If one of them is not valid,
        change none. Calls at once are applied one after the other. Raise StoreUnavailable if MongoDB does not respond,
        and ConfigError if another call takes longer than a minute.
        """
        async with self._turn("apply"):
            return await self._apply(wanted, prune=prune)

    async def _apply(self, wanted: Mapping[str, ScheduleDefinition], *, prune: bool) -> list[ScheduleChange]:
        changes = await self.plan(wanted, prune=prune)
        changed = [each.name for each in changes if each.step in _WRITTEN]
        given = await self._prepare_all({name: wanted[name] for name in changed})

        async def write(change: ScheduleChange) -> None:
            match change.step:
                case ScheduleStep.CREATE | ScheduleStep.UPDATE:
                    await self._write(change.name, wanted[change.name], given[change.name])
                case ScheduleStep.DELETE:
                    with suppress(_Unknown):
                        await self.delete(change.name)

        await gather_some(write, changes, _CONCURRENT)
        return changes

    async def _write(self, name: str, definition: ScheduleDefinition, given: dict[str, Any]) -> None:
        """Create or update a schedule, also if another call has just created or deleted it."""
        for _ in range(_UPDATES):
            with suppress(_Unknown):
                await self._update(name, lambda _: definition, given)
                return
            with suppress(_Exists):
                await self._create(name, definition, given)
                return
        raise ConfigError(_unsettled(name))

    @asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        """Wait until no other call for this deployment does `what`, also of another process, and keep others waiting.

        Raise ConfigError if another one takes longer than a minute. The turn of a process that was killed expires.
        """
        name, owner = f"schedules:{await self._namespace.id()}:{what}", new_owner()
        until = time.monotonic() + _TURN_WAIT_SEC
        while not await self._turns.take(name, owner, _TURN_SEC):
            if time.monotonic() > until:
                raise ConfigError(
                    f"another call to {what} has not ended within {_TURN_WAIT_SEC:.0f} s; try again after it"
                )
            await asyncio.sleep(_TURN_LOOK_SEC)
        keeping = asyncio.create_task(self._keep_turn(name, owner))
        try:
            yield
        finally:
            keeping.cancel()
            with suppress(FlowKitError):  # It expires.
                await self._turns.end(name, owner)

    async def _keep_turn(self, name: str, owner: str) -> None:
        while True:
            await asyncio.sleep(_TURN_SEC / 3)
            with suppress(FlowKitError):
                await self._turns.take(name, owner, _TURN_SEC)

    async def first_times(self, wanted: Mapping[str, ScheduleDefinition]) -> dict[ScheduleTimes, datetime]:
        """Return the next nominal time of each of the times. Many schedules may have the same ones.

        Raise ConfigError, with a note that names the schedule, as `preview` does.
        """
        owners = {each.times: name for name, each in wanted.items()}

        async def first_time(times: ScheduleTimes) -> datetime:
            with _naming(owners[times]):
                return (await self.preview(times))[0]

        return dict(zip(owners, await gather_some(first_time, owners, _CONCURRENT), strict=True))

    async def _prepare_all(self, wanted: Mapping[str, ScheduleDefinition]) -> dict[str, dict[str, Any]]:
        """Return the input of the tasks of each schedule."""
        first = await self.first_times(wanted)

        async def prepare(name: str) -> dict[str, Any]:
            with _naming(name):
                return await self._prepare(name, wanted[name], first[wanted[name].times])

        inputs = await gather_some(prepare, wanted, _CONCURRENT)
        return dict(zip(wanted, inputs, strict=True))

    @asynccontextmanager
    async def _handle(self, name: str) -> AsyncIterator[ScheduleHandle]:
        """Yield the handle of a schedule of this deployment. Raise ConfigError if there is none."""
        await self._describe(name)
        async with self._existing(name):
            yield self._client.get_schedule_handle(name)

    @asynccontextmanager
    async def _existing(self, name: str) -> AsyncIterator[None]:
        """Raise ConfigError if Temporal has no such schedule any more."""
        try:
            yield
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            raise _unknown(name) from None

    async def _describe(self, name: str) -> ScheduleDescription:
        found = await self._find(name)
        if found is None:
            raise _unknown(name)
        return found

    async def _find(self, name: str) -> ScheduleDescription | None:
        """Return a schedule; None if there is none. Raise ConfigError if it is not one of this deployment."""
        require(schedule_name_problem(name))
        try:
            found = await look(self._client.get_schedule_handle(name))
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        owner = read_owner((await found.memo()).get(MEMO))
        if owner is None or owner.kind is not OwnerKind.SCHEDULE:
            raise ConfigError(f"schedule {name!r} is not one of FlowKit; choose another name")
        if owner.deployment != await self._tasks.deployment():
            raise ConfigError(
                f"schedule {name!r} belongs to another database; choose another name, or set MONGO_URL and "
                "MONGO_DATABASE to its database"
            )
        return found

    async def _find_own(self, name: str) -> ScheduleDescription | None:
        """Return a schedule; None if this deployment has none of this name."""
        try:
            return await self._find(name)
        except ConfigError:
            return None

    async def _definition(self, description: ScheduleDescription) -> ScheduleDefinition:
        found = await self._tasks.read_scheduled(description.id, await self._input(description))
        task = found or {"graph": {}, "params": {}}
        schedule = description.schedule
        times = times_of(schedule.spec, schedule.policy)
        return ScheduleDefinition(graph=task["graph"], params=task["params"], times=times)

    async def _input(self, description: ScheduleDescription) -> dict[str, Any]:
        action = description.schedule.action
        if not isinstance(action, ScheduleActionStartWorkflow) or not action.args:
            return {}
        found: Any = (await self._client.data_converter.decode(list(action.args)))[0]
        return found if isinstance(found, dict) else {}

    async def _view(self, description: ScheduleDescription) -> ScheduleView:
        definition, info = await self._definition(description), description.info
        spec = description.schedule.spec
        recent = info.recent_actions
        view = ScheduleView(
            name=description.id,
            times=definition.times,
            paused=description.schedule.state.paused,
            note=description.schedule.state.note or "",
            next_times=await self._nominal.coming(description.id, spec, info.next_action_times),
            last_task=task_id_of(recent[-1]) if recent else None,
            task={"graph": definition.graph, "params": definition.params},
            started=info.num_actions,
            missed=info.num_actions_missed_catchup_window,
            skipped=info.num_actions_skipped_overlap,
            problem=_lost(description.id) if definition.is_lost else None,
            revision=_revision(description),
        )
        return (await self._with_backfilled([view]))[0]

    async def _run(self, action: ScheduleActionResult) -> ScheduledRun:
        run = ScheduledRun(task_id=task_id_of(action), scheduled_at=nominal_time_of(action), status="running")
        if (await self._tasks.look_up(run.task_id)).state is WorkflowState.OPEN:
            return run
        try:
            result = await self._tasks.result(run.task_id, timeout=_RESULT_SEC)
        except TaskFailed as error:
            return replace(run, status="failed", reason=one_line(error.reason), code=error.cause)
        except TaskCancelled as error:
            return replace(run, status="cancelled", reason=error.reason)
        except UnknownTask:
            return replace(run, status="unknown")
        except TimeoutError:
            return run
        return replace(run, status=result.status.value)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add to an error about one of several schedules which one it is."""
    try:
        yield
    except (ConfigError, GraphError) as error:
        error.add_note(f"this is schedule {name!r}")
        raise


def _has(found: ScheduleDescription, sent: schedule_pb.Schedule, times: ScheduleTimes) -> bool:
    """Return whether a schedule has the input and the times of an update."""
    present = found.raw_description.schedule
    same_input = present.action.start_workflow.input == sent.action.start_workflow.input
    return same_input and times_of(found.schedule.spec, found.schedule.policy) == times


def _next_time(present: ScheduleDescription, times: ScheduleTimes) -> datetime | None:
    """Return the next nominal time of a schedule whose times were edited in Temporal; None for others."""
    return next(iter(present.info.next_action_times), datetime.now(UTC)) if times.edited else None


def _free_second(started: Collection[datetime], coming: Collection[datetime], now: datetime) -> datetime:
    """Return the first whole second from now on, after those of tasks that have `started`, that is none of the `coming`
    nominal times.

    Ids of tasks end with the second. A second task with the id of one that has ended would fail. Temporal lists the
    latest ten starts only, so an earlier second may be taken although it is not listed.
    """
    at = max([now.replace(microsecond=0), *(each + timedelta(seconds=1) for each in started)])
    while at in coming:
        at += timedelta(seconds=1)
    return at


def _revision(description: ScheduleDescription) -> int:
    """Return a number that rises with each change of a schedule. A start of a task does not change it."""
    return int.from_bytes(description.raw_description.conflict_token, "big")


def _check_revision(name: str, present: ScheduleDescription, wanted: int | None) -> None:
    """Raise ActionRejected if a schedule does not have the revision that an update expects."""
    found = _revision(present)
    if wanted is not None and wanted != found:
        raise ActionRejected(
            f"if_revision is {wanted}, and schedule {name!r} has revision {found}: it was changed meanwhile; look at "
            "it again with `flowkit schedule show`, then repeat the update with its present revision",
            RejectionCause.OUTDATED,
        )


class _Exists(ConfigError):
    """This deployment has a schedule of this name."""


class _Unknown(ConfigError):
    """There is no schedule of this name."""


def _unsettled(name: str) -> str:
    return f"schedule {name!r} changes all the time; try again"


def _lost(name: str) -> str:
    return (
        f"the graph and params of schedule {name!r} are not in the collection stored_graphs of this database; update "
        "the schedule with its graph and its params"
    )


def _unknown(name: str) -> ConfigError:
    return _Unknown(f"there is no schedule {name!r}; `flowkit schedule list` shows the schedules")
