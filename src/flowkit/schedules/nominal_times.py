"""The nominal times of schedules, as Temporal computes them.

Of a schedule with jitter, Temporal reports the times at which its tasks start. Its nominal times are those of the same
schedule without jitter, which FlowKit creates to ask for them, and deletes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.workflowservice.v1 import ListScheduleMatchingTimesRequest
from temporalio.client import Schedule, ScheduleActionStartWorkflow, ScheduleState
from temporalio.service import RPCError, RPCStatusCode

from flowkit.models import temporal_names
from flowkit.schedules.times import spec_error
from flowkit.text import one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from temporalio.client import Client, ScheduleDescription, ScheduleHandle, ScheduleSpec

    from flowkit.schedules.times import ScheduleTimes

    Matching = Callable[[datetime, datetime], Awaitable[Sequence[datetime]]]
    """Returns the nominal times between two times, the first `MOST_TIMES` of them."""

MOST_TIMES = 1_000
"""Most nominal times that Temporal returns at once."""
FIRST = datetime(1970, 1, 1, tzinfo=UTC)
"""Histories begin then: the times of 29 February, for example, are further apart than a calendar can count."""
_STEP = timedelta(days=1)
_WIDER = 4
_LOOKS = 6
_PREVIEW = ScheduleState(paused=True, note="FlowKit asks for its times, and deletes this schedule")
_PREVIEW_MEMO = "flowkit_preview"
"""Key of the time at which a temporary schedule was created, in seconds since the epoch, in its memo."""
_LEFTOVER_SEC = 3_600.0
"""A temporary schedule that is older was left by a process that was killed. Clocks of machines differ by less."""
_LOOK_LIMITS = (timedelta(seconds=10),) * 2
_LATE = frozenset({RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED})
"""What the client returns after the time limit of a call."""
_KEPT_SPECS = 1_000
_KEPT_PAST = 100
"""Number of past times that are read at least, so that lists and histories read them once."""
_KEPT_AHEAD = 100
_MOST_AHEAD = timedelta(days=3_660)


@dataclass(slots=True)
class _Kept:
    """Nominal times that were read: all from the first one until `until`."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    times: Sequence[datetime] = ()
    until: datetime = FIRST
    asked: int = 0
    found: int = 0

    def latest(self, until: datetime, count: int) -> list[datetime] | None:
        """Return the latest `count` times; None if they have not been read."""
        past = [at for at in self.times if at <= until]
        is_enough = len(past) >= count or self.found < self.asked
        return past[-count:] if until <= self.until and is_enough else None


class NominalTimes:
    """Asks Temporal for nominal times. Those of schedules with jitter are kept, also for some time ahead."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: LRUCache[str, _Kept] = LRUCache(_KEPT_SPECS)

    async def preview(self, times: ScheduleTimes) -> Sequence[datetime]:
        """Return the next nominal times, at most ten. Nothing is started.

        Raise ConfigError, which shows the right form, if Temporal refuses the times or they never come.
        """
        try:
            async with self._temporary(replace(times, jitter=timedelta(0)).spec()) as handle:
                found = (await look(handle)).info.next_action_times
        except RPCError as error:
            if error.status is not RPCStatusCode.INVALID_ARGUMENT:
                raise
            raise spec_error(times, one_line(error)) from None
        if not found:
            raise spec_error(times, "no such time ever comes")
        return found

    async def between(self, name: str, spec: ScheduleSpec, start: datetime, end: datetime) -> list[datetime]:
        """Return the nominal times of a schedule after `start` and until `end`, in UTC: the first `MOST_TIMES`."""
        async with self._listed(name, spec) as listed:
            return await self._matching(listed, start, end)

    async def latest(
        self, name: str, spec: ScheduleSpec, until: datetime, step: timedelta, count: int
    ) -> list[datetime]:
        """Return the latest `count` nominal times of a schedule until `until`, as `find_past` does."""
        if not spec.jitter:
            return await find_past(partial(self._matching, name), FIRST, until, step, count)
        kept: _Kept = self._kept.setdefault(repr(replace(spec, jitter=None)), _Kept())
        async with kept.lock:
            found = kept.latest(until, count)
            if found is None:
                await self._read(kept, name, spec, until, step, max(count, _KEPT_PAST))
                found = kept.latest(until, count)
        return found or []

    async def coming(self, name: str, spec: ScheduleSpec, starts: Sequence[datetime]) -> Sequence[datetime]:
        """Return the nominal times of the next tasks of a schedule, which start at `starts`.

        Temporal starts each task before the next nominal time, also with a longer jitter. So these are the latest
        nominal times until the last start.
        """
        if not spec.jitter or not starts:
            return starts
        return await self.latest(name, spec, starts[-1], step_between(starts), len(starts))

    async def _read(
        self, kept: _Kept, name: str, spec: ScheduleSpec, until: datetime, step: timedelta, count: int
    ) -> None:
        ahead = until + min(step * _KEPT_AHEAD, _MOST_AHEAD)
        async with self._listed(name, spec) as listed:
            past = await find_past(partial(self._matching, listed), FIRST, until, step, count)
            coming = await self._matching(listed, until, ahead)
        kept.times, kept.asked, kept.found = [*past, *coming], count, len(past)
        kept.until = coming[-1] if len(coming) >= MOST_TIMES else ahead

    @asynccontextmanager
    async def _listed(self, name: str, spec: ScheduleSpec) -> AsyncIterator[str]:
        """Yield the name of a schedule of which Temporal lists the nominal times of this one."""
        if not spec.jitter:
            yield name
            return
        async with self._temporary(replace(spec, jitter=None)) as handle:
            yield handle.id

    @asynccontextmanager
    async def _temporary(self, spec: ScheduleSpec) -> AsyncIterator[ScheduleHandle]:
        """Yield a paused schedule, which is deleted afterwards, also if the call is cancelled meanwhile."""
        name = f"flowkit-preview-{uuid.uuid4()}"
        action = ScheduleActionStartWorkflow(temporal_names.TASK, id=name, task_queue=name)
        handle = self._client.get_schedule_handle(name)
        try:
            await self._client.create_schedule(
                name, Schedule(action=action, spec=spec, state=_PREVIEW), memo={_PREVIEW_MEMO: time.time()}
            )
        except asyncio.CancelledError:
            await _delete(handle)
            raise
        try:
            yield handle
        finally:
            await _delete(handle)

    async def remove_leftover(self, name: str, memo: Mapping[str, Any]) -> None:
        """Delete a schedule if it is a temporary one whose process was killed before it has deleted it."""
        created_at = memo.get(_PREVIEW_MEMO)
        if isinstance(created_at, (int, float)) and time.time() - created_at > _LEFTOVER_SEC:
            await _delete(self._client.get_schedule_handle(name))

    async def _matching(self, name: str, start: datetime, end: datetime) -> list[datetime]:
        bounds = [Timestamp(), Timestamp()]
        for bound, at in zip(bounds, (start, end), strict=True):
            bound.FromDatetime(at.astimezone(UTC))
        request = ListScheduleMatchingTimesRequest(
            namespace=self._client.namespace, schedule_id=name, start_time=bounds[0], end_time=bounds[1]
        )
        found = await self._client.workflow_service.list_schedule_matching_times(request, retry=True)
        return [each.ToDatetime(UTC) for each in found.start_time]


async def find_past(
    matching: Matching, since: datetime, now: datetime, step: timedelta, count: int
) -> list[datetime]:
    """Return the latest `count` nominal times between `since` and `now`. `step` is about the time between two.

    Return fewer if many times come close together, with long pauses between them.
    """
    window, best = step * count, list[datetime]()
    for _ in range(_LOOKS):
        start = now - min(window, now - since)
        found = await matching(start, now)
        if len(found) >= MOST_TIMES:
            if best:
                break
            window /= _WIDER
            continue
        best = list(found)
        if len(found) >= count or start == since:
            break
        window *= _WIDER
    return best[-count:]


def step_between(coming: Sequence[datetime]) -> timedelta:
    """Return about the time between two nominal times."""
    return (coming[-1] - coming[0]) / (len(coming) - 1) if len(coming) > 1 else _STEP


async def look(handle: ScheduleHandle) -> ScheduleDescription:
    """Return the description of a schedule.

    A busy server may lose the query with which it finds it. That call ends with its time limit, and another succeeds.
    """
    for limit in _LOOK_LIMITS:
        try:
            return await handle.describe(rpc_timeout=limit)
        except RPCError as error:
            if error.status not in _LATE:
                raise
    return await handle.describe()


async def _delete(handle: ScheduleHandle) -> None:
    try:
        await handle.delete()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
