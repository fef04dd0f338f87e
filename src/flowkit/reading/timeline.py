"""The timeline of a task, from Temporal's history and MongoDB, and what `flowkit explain` says about it.

The history has when each attempt was scheduled, started and ended, and the timers, the waits for slots and the first
batches between them. Once Temporal has deleted it, the logs in MongoDB have the starts and ends of most attempts. What
is missing then is listed, not guessed.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from temporalio.api.enums.v1 import EventType

from flowkit.actions.records import PAUSE, RESUME, SATISFY
from flowkit.actions.scopes import Pauses
from flowkit.adapters.entries import utc
from flowkit.adapters.tasks.fields import TaskTimes, read_times
from flowkit.adapters.tasks.record import read_actions
from flowkit.client import UnknownTask
from flowkit.errors import ActionRejected
from flowkit.graph.validation import normalized
from flowkit.models import Graph, NodeStatus, Settings, StartWhen, TaskStatus, temporal_names
from flowkit.models.actions import RERUN
from flowkit.reading.attempts import LOCAL_MARKER, AttemptOutcome, read_attempts, seconds_of
from flowkit.reading.documents import reading
from flowkit.reading.explain import (
    AttemptSpan,
    NodeTimeline,
    TaskTimeline,
    TimePart,
    TimeReport,
    WaitSpan,
    explain_timeline,
)
from flowkit.reading.notes import describe_waits
from flowkit.reading.results import set_aside_hints
from flowkit.reading.state import TaskReader, add_times, key_of
from flowkit.text import count_of, names
from flowkit.workflows.display.summaries import TimerKind, read_timer, timer_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from temporalio.api.history.v1 import HistoryEvent
    from temporalio.converter import DataConverter

    from flowkit.models import Node
    from flowkit.models.actions import AppliedAction
    from flowkit.reading.attempts import AttemptView, Key
    from flowkit.reading.state import Servers

_SLOT = " slot"
"""How the id of the activity ends that waits for a slot (`models.slot_wait_id`)."""

_WITHOUT_HISTORY = (
    "Temporal no longer has the whole history of this task: attempts whose workers crashed, and attempts of functions, "
    "may be missing; the time between two attempts counts as a retry wait; queues, slots and held failures are unknown"
)

_FAILED = {
    AttemptOutcome.FAILED,
    AttemptOutcome.LOST,
    AttemptOutcome.CANCELLED,
    AttemptOutcome.REPLACED,
}
_WITHOUT_RESETS = (PAUSE, RESUME, SATISFY)
"""The actions that start no new generation of any node."""
_OPEN = {AttemptOutcome.WAITING, AttemptOutcome.RUNNING}
_TIMER_PARTS = {
    TimerKind.RETRY: TimePart.RETRY_WAITS,
    TimerKind.HOLD: TimePart.PEOPLE,
    TimerKind.DELAY: TimePart.SCHEDULED,
}

_DECIMALS = 6

_CLOSING = {
    "timer_fired_event_attributes": "started_event_id",
    "timer_canceled_event_attributes": "started_event_id",
    "activity_task_completed_event_attributes": "scheduled_event_id",
    "activity_task_failed_event_attributes": "scheduled_event_id",
    "activity_task_timed_out_event_attributes": "scheduled_event_id",
    "activity_task_canceled_event_attributes": "scheduled_event_id",
}
"""The events that end a wait, with the field that names the event with which it has begun."""

_RUN_ENDS = {
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_FAILED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCELED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_TIMED_OUT,
    EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW,
}

_OpenWait = tuple[str, TimePart, float]
"""The node that waits, what for, and since when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskExplanation:
    """Where the time of a task went, and what it waits for."""

    task_id: str
    status: TaskStatus
    is_open: bool
    """Whether the times end now, because the task has not ended."""
    report: TimeReport
    """Of the latest run."""
    read_at: float
    """When it was read, in seconds since the epoch."""
    seconds: float
    """How long the latest run took, or had been open then, as lists say it."""
    total_seconds: float
    """The same since the creation of the task: longer if it has run more than once."""
    waits_for: str
    """What the task does and waits for, in a paragraph; empty once it has ended."""
    reason: str | None = None
    """Why the task has failed, or was cancelled."""
    set_aside: tuple[str, ...] = ()
    """Hints at nodes that have set batches aside, each with the command that lists them."""
    missing: tuple[str, ...]
    """What is not known, in sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTimeline:
    """The timeline of a task with what it is made of."""

    document: Mapping[str, Any]
    """The task document; empty without one."""
    attempts: list[AttemptView]
    timeline: TaskTimeline
    read_at: float
    """When it was read, in seconds since the epoch: the end of a task that is open."""
    complete: bool
    """Whether Temporal still has the whole history of the task."""
    missing: list[str]
    """What is not known, in sentences."""


async def read_timeline(servers: Servers, task_id: str) -> KnownTimeline:
    """Return the timeline of the latest run of a task, and all its attempts.

    Raise UnknownTask, StoreUnavailable if MongoDB does not respond, and Temporal's RPCError if Temporal does not.
    """
    document = await servers.catalog.document(task_id) or {}
    with reading(task_id):
        observed = HistoryWaits(node["node_id"] for node in (document.get("graph") or {}).get("nodes") or ())
    attempts, complete = await read_attempts(servers, task_id, None, observed)
    return _make_known(document, attempts, observed, complete=complete)


def _make_known(
    document: Mapping[str, Any], attempts: list[AttemptView], observed: HistoryWaits, *, complete: bool
) -> KnownTimeline:
    now = time.time()
    with reading(str(document.get("id"))):
        timeline, missing = make_timeline(document, attempts, observed, now, complete=complete)
    return KnownTimeline(
        document=document,
        attempts=attempts,
        timeline=timeline,
        read_at=now,
        complete=complete,
        missing=missing,
    )


async def explain_task(servers: Servers, task_id: str) -> TaskExplanation:
    """Return where the time of a task went, and what it waits for.

    Raise UnknownTask, StoreUnavailable if MongoDB does not respond, and Temporal's RPCError if Temporal does not.
    """
    reader = await TaskReader.at(servers, task_id)
    view = await reader.view()
    try:
        found = await read_timeline(servers, task_id)
    except UnknownTask:  # It was deleted meanwhile.
        found = _make_known({}, [], HistoryWaits(()), complete=False)
    document, timeline = found.document, found.timeline
    is_open = not view.status.closed or (bool(document) and not document.get("finished_at"))
    view = add_times(view, read_times(document), found.read_at)
    if not document:
        timeline = replace(timeline, began_at=timeline.ended_at - (view.seconds or 0.0))
    report = explain_timeline(timeline)
    waits_for = describe_waits(view, await reader.hints(view)) if is_open else ""
    return TaskExplanation(
        task_id=task_id,
        status=view.status,
        is_open=is_open,
        report=report,
        read_at=found.read_at,
        seconds=view.seconds or 0.0,
        total_seconds=view.total_seconds or 0.0,
        waits_for=waits_for,
        reason=view.reason,
        set_aside=tuple(set_aside_hints(view)),
        missing=tuple(found.missing),
    )


def to_json(explained: TaskExplanation) -> dict[str, Any]:
    """Return an explanation as JSON. The times of the path are seconds since `began_at`."""
    report = explained.report

    def after(at: float) -> float:
        return round(at - report.began_at, _DECIMALS)

    return {
        "task_id": explained.task_id,
        "status": explained.status.value,
        "open": explained.is_open,
        "began_at": datetime.fromtimestamp(report.began_at, UTC).isoformat(),
        "seconds": explained.seconds,
        "total_seconds": explained.total_seconds,
        "parts": {part.value: round(seconds, _DECIMALS) for part, seconds in report.parts.items()},
        "path": [
            {
                "node_id": leg.node_id,
                "since": after(leg.since),
                "until": after(leg.until),
                "parts": {part.value: round(seconds, _DECIMALS) for part, seconds in leg.parts().items()},
            }
            for leg in report.path
        ],
        "speed_ups": [
            {
                "node_id": each.node_id,
                "gain": round(each.gain, _DECIMALS),
                "work": round(each.work, _DECIMALS),
            }
            for each in report.speed_ups
        ],
        "reason": explained.reason,
        "waits_for": explained.waits_for,
        "set_aside": [*explained.set_aside],
        "missing": [*explained.missing],
    }


# --- Temporal's history -----------------------------------------------------------------------------------------------


class HistoryWaits:
    """What the history of a task says beside its attempts."""

    def __init__(self, node_ids: Iterable[str]) -> None:
        self._node_ids = {timer_name(node_id): node_id for node_id in node_ids}
        self.waits: dict[str, list[WaitSpan]] = defaultdict(list)
        """Waits for retries, decisions, times and slots, by node id."""
        self.batches: dict[Key, float] = {}
        """When attempts have stored their first batch, as far as other nodes had to know."""
        self.settings = Settings()
        """The settings of the task."""

    async def observe(self, events: Sequence[HistoryEvent], converter: DataConverter) -> None:
        """Read the events of one run of the workflow."""
        opened: dict[int, _OpenWait] = {}
        for event in events:
            kind, at = event.WhichOneof("attributes") or "", seconds_of(event.event_time)
            attributes: Any = getattr(event, kind, None)
            if kind in _CLOSING:
                self._close(opened.pop(getattr(attributes, _CLOSING[kind]), None), at)
            elif (wait := await self._open(event, kind, attributes, converter)) is not None:
                opened[event.event_id] = wait
            elif kind == "workflow_execution_signaled_event_attributes":
                await self._read_signal(attributes, at, converter)
            elif kind == "marker_recorded_event_attributes":
                await self._read_settings(attributes, converter)
        ended = events[-1].event_type in _RUN_ENDS
        for each in opened.values():
            self._close(each, seconds_of(events[-1].event_time) if ended else math.inf)

    async def _open(
        self, event: HistoryEvent, kind: str, attributes: Any, converter: DataConverter
    ) -> _OpenWait | None:
        """Return the wait that an event begins."""
        at = seconds_of(event.event_time)
        if kind == "timer_started_event_attributes":
            timer = await self._read_timer(event, converter)
            return None if timer is None else (timer[0], _TIMER_PARTS[timer[1]], at)
        is_slot = kind == "activity_task_scheduled_event_attributes" and attributes.activity_id.endswith(
            _SLOT
        )
        key = key_of(attributes.activity_id.removesuffix(_SLOT)) if is_slot else None
        return None if key is None else (key[0], TimePart.SLOTS, at)

    async def _read_timer(
        self, event: HistoryEvent, converter: DataConverter
    ) -> tuple[str, TimerKind] | None:
        if not event.HasField("user_metadata") or not event.user_metadata.HasField("summary"):
            return None
        summary = await _decode([event.user_metadata.summary], converter)
        return read_timer(summary, self._node_ids) if isinstance(summary, str) else None

    def _close(self, opened: _OpenWait | None, at: float) -> None:
        if opened is not None:
            node_id, part, since = opened
            keeps_open = part in (TimePart.RETRY_WAITS, TimePart.PEOPLE)
            self.waits[node_id].append(WaitSpan(part=part, since=since, until=at, keeps_open=keeps_open))

    async def _read_signal(self, attributes: Any, at: float, converter: DataConverter) -> None:
        if attributes.signal_name != temporal_names.FIRST_BATCH:
            return
        found = await _decode(attributes.input.payloads, converter)
        if isinstance(found, dict) and isinstance(found.get("epoch"), int):
            key = str(found.get("node_id")), found["epoch"]
            self.batches[key] = min(at, self.batches.get(key, math.inf))

    async def _read_settings(self, marker: Any, converter: DataConverter) -> None:
        """Read the settings from the result of the activity that has opened the task."""
        if marker.marker_name != LOCAL_MARKER or not {"data", "result"} <= {*marker.details}:
            return
        data = json.loads(marker.details["data"].payloads[0].data)
        if data.get("activity_type") != temporal_names.OPEN_TASK:
            return
        found = await _decode(marker.details["result"].payloads, converter)
        given = (found.get("settings") or {}) if isinstance(found, dict) else {}
        known = {
            name: given[name] for name in ("window", "max_in_flight") if isinstance(given.get(name), int)
        }
        self.settings = replace(self.settings, **known)


async def _decode(payloads: Any, converter: DataConverter) -> Any:
    """Return the only value of these payloads; None if this process cannot decode it."""
    try:
        (found,) = await converter.decode(payloads)
    except (KeyError, RuntimeError, ValueError):
        return None
    return found


# --- the timeline -----------------------------------------------------------------------------------------------------


def make_timeline(
    document: Mapping[str, Any],
    attempts: Sequence[AttemptView],
    observed: HistoryWaits,
    now: float,
    *,
    complete: bool,
) -> tuple[TaskTimeline, list[str]]:
    """Return the timeline of the latest run of a task, and what is missing in it.

    `complete` says whether Temporal still has its whole history.

    Without a document, the timeline is empty.
    """
    graph = normalized(dict(document["graph"])) if document.get("graph") else Graph(nodes=())
    attempts = _leave_out_reserved(graph, attempts)
    actions = read_actions(dict(document))
    times = read_times(document) or TaskTimes(created_at=now, began_at=now, ended_at=None)
    began_at = times.began_at
    missing = [*_list_missing(document, actions, attempts, complete=complete)]
    if stopped := _find_stopped_waits(graph, document, actions):
        missing.append(
            f"waits of {names(stopped)} that an action or the end of the task has stopped are unknown; they may count "
            "as database and Temporal"
        )
    waits = _list_waits(graph, actions, observed, began_at)
    made = _NodeTimelines(graph, document, attempts, observed)
    open_or_finished = document.get("status") not in (TaskStatus.FAILED, TaskStatus.CANCELLED)
    timeline = TaskTimeline(
        began_at=began_at,
        ended_at=now if times.ended_at is None else times.ended_at,
        nodes=tuple(made.make(node, waits[node.index]) for node in graph.nodes),
        resets=tuple(each.at for each in actions if each.action not in _WITHOUT_RESETS),
        gains=open_or_finished,
    )
    return timeline, missing


def _leave_out_reserved(graph: Graph, attempts: Sequence[AttemptView]) -> list[AttemptView]:
    """Return the attempts without those that are only epochs, which a reset has reserved. Their times are unknown."""
    without = {node.node_id for node in graph.nodes if node.is_engine_node}
    return [
        each
        for each in attempts
        if each.node_id not in without
        and any(
            at is not None for at in (each.scheduled_at, each.started_at, each.accepted_at, each.ended_at)
        )
    ]


def _list_missing(
    document: Mapping[str, Any],
    actions: Sequence[AppliedAction],
    attempts: Sequence[AttemptView],
    *,
    complete: bool,
) -> Iterator[str]:
    if not document:
        yield "the task has no document: no engine has opened it yet, or it was deleted"
        return
    if not complete:
        yield _WITHOUT_HISTORY
    if any(each.action == RERUN for each in actions):
        yield "the task has run more than once; only its latest run is explained"
    if actions and actions[0].revision > 1:
        yield f"the document lists only the latest {count_of(len(actions), 'action')}, so earlier pauses are unknown"
    lost = [each for each in attempts if each.outcome is AttemptOutcome.LOST and each.started_at is None]
    if lost:
        yield (
            f"when the workers started {_name_attempts(lost)} is unknown, because they were lost; the time in the "
            "queue counts as failed attempts"
        )
    unended = [each for each in attempts if each.ended_at is None and each.outcome not in _OPEN]
    unended += _find_overtaken(attempts)
    if unended:
        yield (
            f"when {_name_attempts(unended)} ended is unknown; the time until the next attempt counts as database and "
            "Temporal"
        )


def _find_stopped_waits(
    graph: Graph, document: Mapping[str, Any], actions: Sequence[AppliedAction]
) -> list[str]:
    """Return the nodes whose wait for a person or a prerequisite an action, or the end of the task, may have stopped.

    Without an attempt, neither the history nor the document says when such a wait began and ended.
    """
    may_be_skipped = document.get("status") in (TaskStatus.FAILED, TaskStatus.CANCELLED)
    may_be_skipped = may_be_skipped or any(each.action not in _WITHOUT_RESETS for each in actions)
    return [
        node.node_id
        for node in graph.nodes
        if node.approval is not None or node.prerequisites
        for stored in [document["graph"]["nodes"][node.index]]
        if stored.get("generation") or (may_be_skipped and stored["status"] == NodeStatus.SKIPPED)
    ]


def _find_overtaken(attempts: Sequence[AttemptView]) -> list[AttemptView]:
    """Return the attempts without an end that other attempts have followed. Shards run at the same time."""
    return [
        each
        for each, following in pairwise(attempts)
        if each.ended_at is None
        and each.outcome is AttemptOutcome.RUNNING
        and following.node_id == each.node_id
    ]


def _name_attempts(attempts: Sequence[AttemptView]) -> str:
    return names([f"attempt {each.attempt} of {each.node_id}" for each in attempts])


def _list_waits(
    graph: Graph, actions: Sequence[AppliedAction], observed: HistoryWaits, began_at: float
) -> list[list[WaitSpan]]:
    """Return the waits of each node for timers, slots, pauses and prerequisites."""
    waits = [[*observed.waits.get(node.node_id, ())] for node in graph.nodes]
    pauses = Pauses(graph.nodes, [])
    for scope, since, until in _list_pauses(actions):
        with suppress(ActionRejected):
            for index in pauses.nodes_of(scope):
                waits[index].append(WaitSpan(part=TimePart.PEOPLE, since=since, until=until))
    satisfied = {name: each.at for each in actions if each.action == SATISFY for name in each.names}
    for node in graph.nodes:
        for name in node.prerequisites:
            until = satisfied.get(name, math.inf)
            waits[node.index].append(WaitSpan(part=TimePart.SCHEDULED, since=began_at, until=until))
    return waits


def _list_pauses(actions: Iterable[AppliedAction]) -> Iterator[tuple[str, float, float]]:
    """Yield each paused scope with when its pause began and ended. A resume whose names are too long ends all."""
    paused: dict[str, float] = {}
    for action in actions:
        if action.action == PAUSE:
            paused = {**dict.fromkeys(action.names, action.at), **paused}
        elif action.action == RESUME:
            ended = [scope for scope in action.names or paused if scope in paused]
            yield from ((scope, paused.pop(scope), action.at) for scope in ended)
    yield from ((scope, since, math.inf) for scope, since in paused.items())


class _NodeTimelines:
    """Makes the timelines of the nodes of a task."""

    def __init__(
        self,
        graph: Graph,
        document: Mapping[str, Any],
        attempts: Sequence[AttemptView],
        observed: HistoryWaits,
    ) -> None:
        self._stored = document["graph"]["nodes"] if document.get("graph") else []
        self._observed = observed
        self._index_of = {node.node_id: node.index for node in graph.nodes}
        self._routers: dict[str, list[int]] = defaultdict(list)
        for node in graph.nodes:
            for target in dict.fromkeys((*node.on_success, *node.on_failure)):
                self._routers[target].append(node.index)
        self._attempts: dict[str, list[AttemptView]] = defaultdict(list)
        for attempt in attempts:
            self._attempts[attempt.node_id].append(attempt)
        self._limits = _find_full(graph, attempts, observed)

    def make(self, node: Node, waits: list[WaitSpan]) -> NodeTimeline:
        """Return the timeline of a node with these waits."""
        stored = self._stored[node.index]
        status, ended_at = NodeStatus(stored["status"]), stored.get("finished_at")
        spans = [*self._make_spans(node)]
        waits = [*waits, *_fill_gaps(spans, self._attempts.get(node.node_id, ()))]
        first_batch = node.io.start_when is StartWhen.FIRST_BATCH and node.streams_from
        parents = node.streams_from if first_batch else node.depends_on
        mode = "any" if first_batch else node.fan_in.mode
        known = {"any": 1, "count": node.fan_in.count}
        is_last = not spans or status is not NodeStatus.FINISHED
        return NodeTimeline(
            node_id=node.node_id,
            parents=tuple(self._index_of[each] for each in parents),
            routers=tuple(self._routers.get(node.node_id, ())),
            streams_from=frozenset(self._index_of[each] for each in node.streams_from),
            sources=tuple(self._index_of[each] for each in node.pulls_from if each in self._index_of),
            needed=known.get(mode),
            spans=tuple(spans),
            waits=tuple(waits),
            limits=self._limits.get(node.type, ()),
            is_open=not status.ended,
            is_finished=status is NodeStatus.FINISHED,
            ended_at=utc(ended_at).timestamp() if ended_at is not None and is_last else None,
            waits_as=_waits_as(node, status),
        )

    def _make_spans(self, node: Node) -> Iterator[AttemptSpan]:
        before: AttemptView | None = None
        own = self._attempts.get(node.node_id, [])
        for attempt, following in zip(own, [*own[1:], None], strict=False):
            known = (attempt.scheduled_at, attempt.started_at, attempt.accepted_at, attempt.ended_at)
            scheduled_at = next(at for at in known if at is not None)
            started_at, ended_at = attempt.began_at, attempt.ended_at
            if attempt.outcome is AttemptOutcome.LOST and attempt.started_at is None:
                started_at = attempt.accepted_at or attempt.scheduled_at
            if ended_at is None and (attempt.outcome not in _OPEN or (following and node.parallel == 1)):
                ended_at = started_at or scheduled_at
            yield AttemptSpan(
                scheduled_at=scheduled_at,
                started_at=started_at,
                ended_at=ended_at,
                part=TimePart.FAILED_WORK if attempt.outcome in _FAILED else TimePart.WORK,
                resets=before is not None and _is_reset(before, attempt),
                yields=attempt.outcome is AttemptOutcome.YIELDED,
                first_batch_at=self._observed.batches.get((attempt.node_id, attempt.attempt)),
            )
            before = attempt


def _is_reset(before: AttemptView, attempt: AttemptView) -> bool:
    """Return whether an action has started a new generation between two attempts, which reserves an epoch."""
    return attempt.attempt > before.attempt + 1 and before.outcome is not AttemptOutcome.REPLACED


def _fill_gaps(spans: Sequence[AttemptSpan], attempts: Sequence[AttemptView]) -> Iterator[WaitSpan]:
    """Yield the time before attempts that no history has as waits for retries, if the attempts before have ended."""
    for (before, after), attempt in zip(pairwise(spans), attempts[1:], strict=False):
        ended = before.ended_at
        is_known = ended is not None and ended > before.scheduled_at and attempt.scheduled_at is None
        if ended is not None and is_known and not after.resets:
            part, until = TimePart.RETRY_WAITS, after.scheduled_at
            yield WaitSpan(part=part, since=ended, until=until, keeps_open=True)


def _waits_as(node: Node, status: NodeStatus) -> TimePart | None:
    """Return what the time of an approval or a delay is that has begun."""
    if status in (NodeStatus.QUEUED, NodeStatus.SKIPPED):
        return None
    if node.approval is not None:
        return TimePart.PEOPLE
    return TimePart.SCHEDULED if node.delay is not None else None


def _find_full(
    graph: Graph, attempts: Sequence[AttemptView], observed: HistoryWaits
) -> dict[str, tuple[WaitSpan, ...]]:
    """Return, by role, when nodes had to wait for a slot: all slots were taken, or another node waited for one."""
    role_of = {node.node_id: node.type for node in graph.nodes}
    by_role: dict[str, list[AttemptView]] = defaultdict(list)
    for attempt in attempts:
        if attempt.node_id in role_of:
            by_role[role_of[attempt.node_id]].append(attempt)
    settings = observed.settings
    whole_task = [*_find_saturated(attempts, settings.max_in_flight)]
    found: dict[str, list[WaitSpan]] = {
        role: [*whole_task, *_find_saturated(own, settings.window)] for role, own in by_role.items()
    }
    for node_id, waits in observed.waits.items():
        for wait in waits:
            if wait.part is TimePart.SLOTS:
                found.setdefault(role_of.get(node_id, ""), []).append(wait)
    return {role: tuple(_merge(waits)) for role, waits in found.items() if waits}


def _merge(waits: Sequence[WaitSpan]) -> Iterator[WaitSpan]:
    """Yield waits for slots in their order, those that overlap as one."""
    first, *others = sorted(waits, key=lambda wait: wait.since)
    for wait in others:
        if wait.since > first.until:
            yield first
            first = wait
        first = replace(first, until=max(first.until, wait.until))
    yield first


def _find_saturated(attempts: Sequence[AttemptView], limit: int) -> Iterator[WaitSpan]:
    """Yield when at least `limit` of these attempts were in flight."""
    if len(attempts) < limit:
        return
    changes = sorted(
        (at, change)
        for each in attempts
        if each.scheduled_at is not None
        for at, change in ((each.scheduled_at, 1), (math.inf if each.ended_at is None else each.ended_at, -1))
    )
    count, since = 0, None
    for at, change in changes:
        count += change
        if count >= limit and since is None:
            since = at
        elif count < limit and since is not None:
            yield WaitSpan(part=TimePart.SLOTS, since=since, until=at)
            since = None
