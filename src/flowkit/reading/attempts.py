"""The history of attempts of a task.

Temporal's history has every attempt: its worker, times and outcome. MongoDB has the workers of external
attempts, and, once Temporal has deleted the history, still the event log of attempts and the latest attempt
of each node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.exceptions import FailureError
from temporalio.service import RPCError

from flowkit import reason_codes
from flowkit.adapters.entries import utc
from flowkit.adapters.tasks.fields import elapsed, end_of_attempt
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.attempt.workflows import is_absent
from flowkit.client import UnknownTask
from flowkit.models import FailureKind
from flowkit.models.temporal_names import process_of
from flowkit.reading.documents import reading
from flowkit.reading.results import require_node
from flowkit.reading.state import LOOK_UP_TIMEOUT, find_workers, key_of
from flowkit.workflows.node import read_failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from datetime import datetime

    from temporalio.api.history.v1 import HistoryEvent
    from temporalio.client import Client, WorkflowExecutionDescription
    from temporalio.converter import DataConverter

    from flowkit.adapters.tasks.queries import LoggedAttempt
    from flowkit.reading.state import Servers

LOCAL_MARKER = "core_local_activity"
"""The marker with which Temporal's SDK records a local activity."""


_STORED = ("running", "finished", "failed", "cancelled")
"""Statuses of a node that are also the outcome of its latest attempt."""


class AttemptOutcome(StrEnum):
    """How an attempt ended, or that it has not."""

    WAITING = "waiting"
    """No worker has started it."""
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    HANDED_OVER = "handed over"
    YIELDED = "yielded"
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    """Another attempt has taken its place."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """One attempt as people see it. Times are in seconds since the epoch."""

    node_id: str
    attempt: int
    worker: str | None = None
    version: str | None = None
    """The version of the handler; of an external worker, the version that it announces."""
    scheduled_at: float | None = None
    """When the workflow scheduled it, according to Temporal's history."""
    started_at: float | None = None
    accepted_at: float | None = None
    """When the external worker accepted it, if `started_at` is when the bridge received it."""
    ended_at: float | None = None
    outcome: AttemptOutcome = AttemptOutcome.UNKNOWN
    code: str | None = None
    """The reason code of a failure."""
    error: str | None = None

    @property
    def began_at(self) -> float | None:
        """When its worker began to work; None if none has, or if that is unknown. A bridge is no worker."""
        if self.accepted_at is not None:
            return self.accepted_at
        return None if (self.worker or "").startswith(BRIDGE_PREFIX) else self.started_at

    def seconds(self, now: float) -> float | None:
        """Return how long the attempt ran, or has been running; None if its begin or its end is unknown."""
        ended_at = now if self.outcome is AttemptOutcome.RUNNING else self.ended_at
        if self.began_at is None or ended_at is None:
            return None
        return elapsed(self.began_at, ended_at)


Key = tuple[str, int]


class HistoryObserver(Protocol):
    """Reads more than the attempts from the history of a task."""

    async def observe(self, events: Sequence[HistoryEvent], converter: DataConverter) -> None:
        """Read the events of one run of the workflow. The newest run comes first."""


async def read_attempts(
    servers: Servers, task_id: str, node_id: str | None, observer: HistoryObserver | None = None
) -> tuple[list[AttemptView], bool]:
    """Return the attempts of a task, or of one of its nodes, and whether Temporal still has its whole history.

    `observer` reads the same history. Raise UnknownTask, and ConfigError if the task has no such node.
    """
    document = await servers.catalog.document(task_id)
    description = (await servers.tasks.look_up(task_id, rpc_timeout=LOOK_UP_TIMEOUT)).description
    if document is None and description is None:
        raise UnknownTask(task_id)
    if document is not None:
        with reading(task_id):
            require_node(document, node_id)
    recorded, complete = dict[Key, AttemptView](), False
    if description is not None:
        recorded, complete = await read_history(servers.temporal, task_id, observer)
    pending = read_pending(description)
    logged = await servers.catalog.logged_attempts(task_id, node_id)
    found = merge([*recorded.values(), *pending.values()], logged, document or {})
    unknown = {each.worker for each in found if each.worker and not each.version}
    versions = await servers.catalog.announced_versions(unknown) if unknown else {}
    wanted = [each for each in found if node_id in (None, each.node_id)]
    shown = [replace(each, version=each.version or versions.get(each.worker or "")) for each in wanted]
    return shown, complete


# --- Temporal's history -----------------------------------------------------------------------------------------------


async def read_history(
    client: Client, task_id: str, observer: HistoryObserver | None = None
) -> tuple[dict[Key, AttemptView], bool]:
    """Return the attempts in the history of a task, and whether Temporal still has all of its runs."""
    found, is_whole = dict[Key, AttemptView](), False
    async for run in _read_runs(client, task_id):
        is_whole = not run[0].workflow_execution_started_event_attributes.continued_execution_run_id
        if observer is not None:
            await observer.observe(run, client.data_converter)
        for key, attempt in (await read_events(run, client.data_converter)).items():
            found.setdefault(key, attempt)
    return found, is_whole


async def _read_runs(client: Client, task_id: str) -> AsyncIterator[list[HistoryEvent]]:
    """Yield the events of the runs of a task, newest run first, as far back as Temporal retains them."""
    run_id: str | None = None
    while True:
        handle = client.get_workflow_handle(task_id, run_id=run_id)
        try:
            events = [event async for event in handle.fetch_history_events()]
        except RPCError as error:
            if not is_absent(error):
                raise
            return
        yield events
        run_id = events[0].workflow_execution_started_event_attributes.continued_execution_run_id
        if not run_id:
            return


async def read_events(events: Iterable[HistoryEvent], converter: DataConverter) -> dict[Key, AttemptView]:
    """Return the attempts that the events of one run record."""
    scheduled: dict[int, AttemptView] = {}
    local: dict[Key, AttemptView] = {}
    for event in events:
        kind = event.WhichOneof("attributes") or ""
        attributes: Any = getattr(event, kind, None)
        if kind == "activity_task_scheduled_event_attributes":
            if (key := key_of(attributes.activity_id)) is not None:
                at = seconds_of(event.event_time)
                scheduled[event.event_id] = _new_view(key, scheduled_at=at, outcome=AttemptOutcome.WAITING)
        elif kind == "marker_recorded_event_attributes":
            if (attempt := await _read_marker(attributes, converter)) is not None:
                local[attempt.node_id, attempt.attempt] = attempt
        elif kind.startswith("activity_task_") and attributes.scheduled_event_id in scheduled:
            known = scheduled[attributes.scheduled_event_id]
            changed = await _after(known, kind, attributes, seconds_of(event.event_time), converter)
            scheduled[attributes.scheduled_event_id] = changed
    return {(each.node_id, each.attempt): each for each in scheduled.values()} | local


def _new_view(key: Key, **known: Any) -> AttemptView:
    return AttemptView(node_id=key[0], attempt=key[1], **known)


async def _after(
    attempt: AttemptView, kind: str, attributes: Any, at: float, converter: DataConverter
) -> AttemptView:
    """Return the attempt after an event of its activity."""
    match kind.removesuffix("_event_attributes"):
        case "activity_task_started" if attributes.attempt > 1:
            # Temporal has recorded only this try, which reports that the worker of the first one was lost.
            return replace(attempt, outcome=AttemptOutcome.RUNNING)
        case "activity_task_started":
            return replace(
                attempt, worker=process_of(attributes.identity), started_at=at, outcome=AttemptOutcome.RUNNING
            )
        case "activity_task_completed":
            _, version = await _read_runner(attributes.result, converter)
            return replace(attempt, ended_at=at, outcome=AttemptOutcome.FINISHED, version=version)
        case "activity_task_canceled":
            return replace(attempt, ended_at=at, outcome=AttemptOutcome.CANCELLED)
        case "activity_task_failed" | "activity_task_timed_out":
            return await _with_failure(replace(attempt, ended_at=at), attributes.failure, converter)
    return attempt


async def _with_failure(attempt: AttemptView, failure: Any, converter: DataConverter) -> AttemptView:
    try:
        error = await converter.decode_failure(failure)
    except (KeyError, RuntimeError, ValueError):
        return replace(attempt, outcome=AttemptOutcome.FAILED, error=str(failure.message))
    found = read_failure(error) if isinstance(error, FailureError) else None
    if found is None:
        return replace(attempt, outcome=AttemptOutcome.CANCELLED)
    outcome, version = _outcome_of(found.kind), found.version or None
    return replace(attempt, outcome=outcome, code=found.code, error=found.message, version=version)


def _outcome_of(kind: FailureKind | None) -> AttemptOutcome:
    """Return how an attempt with this kind of failure ended. An unknown kind is a failure."""
    match kind:
        case FailureKind.LOSS:
            return AttemptOutcome.LOST
        case FailureKind.HANDOVER:
            return AttemptOutcome.HANDED_OVER
        case FailureKind.YIELDED:
            return AttemptOutcome.YIELDED
        case FailureKind.EPOCH_TAKEN | FailureKind.FENCED:
            return AttemptOutcome.REPLACED
        case _:
            return AttemptOutcome.FAILED


async def _read_marker(marker: Any, converter: DataConverter) -> AttemptView | None:
    """Return the attempt of a local activity; None if the marker records something else.

    After a timeout, an ordinary attempt follows, which uses no retry.
    """
    if marker.marker_name != LOCAL_MARKER or "data" not in marker.details:
        return None
    data = json.loads(marker.details["data"].payloads[0].data)
    key = key_of(data["activity_id"])
    if key is None:
        return None
    started_at, ended_at = _local_time(data["original_schedule_time"]), _local_time(data["complete_time"])
    times = {"scheduled_at": started_at, "started_at": started_at, "ended_at": ended_at}
    attempt = _new_view(key, **times, outcome=AttemptOutcome.FINISHED)
    if marker.HasField("failure"):
        if marker.failure.HasField("timeout_failure_info"):
            return replace(attempt, outcome=AttemptOutcome.HANDED_OVER, code=reason_codes.NOT_LOCAL)
        return await _with_failure(attempt, marker.failure, converter)
    worker, version = await _read_runner(marker.details["result"], converter)
    return replace(attempt, worker=worker, version=version)


async def _read_runner(result: Any, converter: DataConverter) -> tuple[str | None, str | None]:
    """Return the worker id and the version in the result of a finished attempt."""
    try:
        (found,) = await converter.decode(result.payloads)
    except (KeyError, RuntimeError, ValueError):
        return None, None
    known = found if isinstance(found, dict) else {}
    return known.get("worker_id"), known.get("version") or None


def seconds_of(moment: Any) -> float:
    """Return a timestamp of Temporal in seconds since the epoch."""
    return float(moment.ToNanoseconds() / 1e9)


def _local_time(moment: dict[str, int] | None) -> float | None:
    return moment["seconds"] + moment["nanos"] / 1e9 if moment else None


def read_pending(description: WorkflowExecutionDescription | None) -> dict[Key, AttemptView]:
    """Return the attempts that Temporal runs now. The history has their workers and starts only after their ends."""
    lost = find_workers(description)
    pending: dict[Key, AttemptView] = {}
    for each in description.raw_description.pending_activities if description else ():
        if (key := key_of(each.activity_id)) is None:
            continue
        attempt = _new_view(key, outcome=AttemptOutcome.WAITING)
        if (worker := lost.get(each.activity_id)) is not None and worker.lost:
            attempt = replace(
                attempt,
                worker=worker.identity,
                ended_at=worker.heard_at,
                outcome=AttemptOutcome.LOST,
                error="no worker has replaced it yet",
            )
        elif each.state != PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
            started_at = seconds_of(each.last_started_time)
            identity = process_of(each.last_worker_identity)
            attempt = replace(attempt, outcome=AttemptOutcome.RUNNING, started_at=started_at, worker=identity)
        pending[key] = attempt
    return pending


# --- one list from all sources ----------------------------------------------------------------------------------------


def merge(
    recorded: Iterable[AttemptView], logged: Iterable[LoggedAttempt], document: Mapping[str, Any]
) -> list[AttemptView]:
    """Return each attempt once, in the order of the nodes of the graph and of the attempts.

    Of attempts that several entries of `recorded` describe, the last entry counts. `logged` adds what they lack, and
    the workers of external attempts, for which Temporal knows only the bridge. The task document adds the latest
    attempt of each node. Epochs that a reset has reserved, and that no attempt has used, are left out.
    """
    merged: dict[Key, AttemptView] = {}
    for each in recorded:
        key = each.node_id, each.attempt
        known = merged.get(key, each)
        merged[key] = replace(each, scheduled_at=_first(known.scheduled_at, each.scheduled_at))
    bridged = {key for key, each in merged.items() if (each.worker or "").startswith(BRIDGE_PREFIX)}
    for entry in logged:
        key = entry.node_id, entry.epoch
        merged[key] = _add_logged(merged.get(key, _new_view(key)), entry)
        if key in bridged:
            accepted_at = _first(merged[key].accepted_at, entry.started_at)
            merged[key] = replace(merged[key], accepted_at=accepted_at)
    nodes = (document.get("graph") or {}).get("nodes") or []
    for node in nodes:
        if epoch := node.get("attempt_epoch"):
            key = node["node_id"], epoch
            merged[key] = _add_stored(merged.get(key, _new_view(key)), node)
    place = {node["node_id"]: index for index, node in enumerate(nodes)}
    found = [each for each in merged.values() if not _is_reserved(each)]
    return sorted(found, key=lambda each: (place.get(each.node_id, len(place)), each.attempt))


def _is_reserved(attempt: AttemptView) -> bool:
    """Return whether an attempt is only an epoch that a reset of its node has reserved: nothing has ever begun it.

    A node that is skipped or cancelled before its next attempt has an end all the same.
    """
    times = (attempt.scheduled_at, attempt.started_at, attempt.accepted_at)
    return attempt.outcome is AttemptOutcome.UNKNOWN and all(at is None for at in times)


def _add_logged(known: AttemptView, entry: LoggedAttempt) -> AttemptView:
    """Return the attempt with what a log says. The outcome of Temporal's history has priority."""
    outcome = known.outcome
    if outcome in (AttemptOutcome.UNKNOWN, AttemptOutcome.WAITING) and entry.started_at is not None:
        outcome = AttemptOutcome.RUNNING
    if outcome in (AttemptOutcome.UNKNOWN, AttemptOutcome.RUNNING) and entry.finished is not None:
        ended = AttemptOutcome.CANCELLED if entry.cancelled else _outcome_of(entry.kind)
        outcome = AttemptOutcome.FINISHED if entry.finished else ended
    return replace(
        known,
        worker=entry.worker or known.worker,
        version=known.version or entry.version,
        started_at=_first(known.started_at, entry.started_at),
        ended_at=_first(known.ended_at, entry.ended_at),
        outcome=outcome,
        code=known.code or entry.code,
        error=known.error or entry.error,
    )


def _add_stored(known: AttemptView, node: Mapping[str, Any]) -> AttemptView:
    """Return the latest attempt of a node with what the task document says.

    Its times are those of the document, from which the state of the node has its duration, too. The document also says
    why FlowKit cancelled the attempt of a node that has failed, for example by its deadline.
    """
    outcome, status = known.outcome, node.get("status")
    if outcome in (AttemptOutcome.UNKNOWN, AttemptOutcome.WAITING) and status in _STORED:
        outcome = AttemptOutcome(status)
    ended = outcome not in (AttemptOutcome.WAITING, AttemptOutcome.RUNNING)
    started_at, ended_at = _stored_time(node.get("started_at")), _stored_time(end_of_attempt(node))
    lease = node.get("lease") or {}
    failed = outcome is AttemptOutcome.FAILED or (outcome is AttemptOutcome.CANCELLED and status == "failed")
    return replace(
        known,
        worker=known.worker or lease.get("worker_id"),
        version=known.version or lease.get("version"),
        started_at=_first(started_at, known.started_at),
        ended_at=_first(ended_at if ended else None, known.ended_at),
        outcome=outcome,
        error=known.error or (node.get("last_error") if failed else None),
    )


def _first(*moments: float | None) -> float | None:
    return next((moment for moment in moments if moment is not None), None)


def _stored_time(moment: datetime | None) -> float | None:
    return None if moment is None else utc(moment).timestamp()
