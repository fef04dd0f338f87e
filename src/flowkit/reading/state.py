"""The state of a task: from its workflow, or from its document if no engine can run the query."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio.api.enums.v1 import PendingActivityState, TimeoutType
from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import TemporalError

from flowkit.adapters.entries import utc
from flowkit.adapters.tasks.fields import TaskTimes, elapsed, read_times
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_registry import (
    BRIDGE_PREFIX,
    WorkerRegistry,
    describe_versions,
    find_mixed_versions,
)
from flowkit.attempt.pollers import never_polled_roles, pollers_by_role, recent_pollers
from flowkit.attempt.workflows import QUERY_SEC, look_up, query
from flowkit.client import UnknownTask
from flowkit.config import DEFAULT_QUEUE
from flowkit.engine.sweep import CLOSE_REASONS
from flowkit.errors import StoreUnavailable
from flowkit.models import ENGINE_TYPES, NodeStatus, TaskStatus, temporal_names
from flowkit.models.actions import PausedScope
from flowkit.models.temporal_names import other_databases, process_of
from flowkit.models.waits import TEXT, WaitKind, for_resume, for_worker, in_attempt, read_wait
from flowkit.reading.documents import reading
from flowkit.text import count_of, describe_set_aside, format_duration, names, one_line, shell_word
from flowkit.workflows.display.details import format_pause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from temporalio.api.workflow.v1 import PendingActivityInfo
    from temporalio.client import Client, WorkflowExecutionDescription
    from temporalio.converter import DataConverter

    from flowkit.adapters.artifacts import FailedBatches
    from flowkit.adapters.shards import ShardProgress
    from flowkit.adapters.tasks.queries import ExternalRun, LatestNodeRun
    from flowkit.adapters.worker_registry import RegisteredWorker
    from flowkit.client import TaskCatalog, TaskClient
    from flowkit.models.waits import NodeWait


T = TypeVar("T")

LOOK_UP_TIMEOUT = timedelta(seconds=5)
"""How long Temporal may take to describe a workflow; its client waits for 30 seconds by default."""

_OVERDUE = 0.6
"""Part of the heartbeat timeout after which a worker counts as silent."""

_ACTIVE = (NodeStatus.RUNNING, NodeStatus.CANCELLING)
_OF_ATTEMPTS = ("batches", "set_aside", "shards", "external_runs")
"""Queries whose results change while attempts run, without a change of the task document or of the workflow."""
_KEPT = frozenset(
    {*_OF_ATTEMPTS, "_query", "_read_stored", "times", "node_runs", "sources", "pins", "quarantining"}
)
"""Reads of what belongs to one task. Others, such as those of the workers, are never kept."""
_BEFORE_ATTEMPT = (NodeStatus.QUEUED, NodeStatus.DEFERRED)

_ENDS = {
    WorkflowExecutionStatus.COMPLETED: TaskStatus.FINISHED,
    WorkflowExecutionStatus.FAILED: TaskStatus.FAILED,
    WorkflowExecutionStatus.CANCELED: TaskStatus.CANCELLED,
    WorkflowExecutionStatus.TERMINATED: TaskStatus.FAILED,
    WorkflowExecutionStatus.TIMED_OUT: TaskStatus.FAILED,
}
_SCHEDULED = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """The clients through which tasks are read and changed."""

    temporal: Client
    tasks: TaskClient
    catalog: TaskCatalog
    db: Any
    """The database itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """The state of a node as people see it."""

    node_id: str
    role: str
    status: str
    attempt: int = 0
    batches: int = 0
    """Batches stored so far."""
    failed_batches: int = 0
    """Batches that have failed, and that the node has set aside so far."""
    causes: str = ""
    """Why they have failed, in words: their reason codes, and the error of the latest one; empty if unknown."""
    next_retry_at: float | None = None
    """Seconds since the epoch, while the node waits for its retry."""
    note: str = ""
    """Its last error, or why it was skipped."""
    began_at: float | None = None
    """When the worker of its latest attempt began to work, in seconds since the epoch; of a node with shards, when that
    of the first shard did. None if no worker has, or if `ended_at` is not known although the attempt has ended."""
    ended_at: float | None = None
    """When that attempt ended; None while it runs."""
    seconds: float | None = field(default=None, compare=False)
    """How long that attempt ran, or has been running. A row that only becomes older is the same row."""
    waiting: bool = False
    """Whether its attempt is in the task queue of its role and no worker has started it."""
    worker: str = ""
    """The worker that runs the attempt, or that has been lost with it."""
    version: str = ""
    """Version of the handler that runs or ran the latest attempt; empty if unknown."""
    external: bool = False
    """Whether `worker` is an external worker."""
    heard_at: float | None = None
    """Set once the worker has been silent for a while: when its last heartbeat arrived, in seconds since the epoch."""
    replaced_at: float | None = None
    """When another attempt replaces the one of a silent worker, in seconds since the epoch."""
    lost: bool = False
    """Whether the worker has been silent for so long that the next free worker of the role replaces it."""
    waits_for: str = ""
    """What the node waits for: a decision, prerequisites, a slot of the concurrency limits, an external worker that
    accepts the attempt, or a node that pulls from it."""
    wait_kind: WaitKind | None = None
    """The kind of this wait, by which programs decide; None if the node waits for nothing."""
    silent: bool = False
    """Whether its attempt sends no heartbeats."""
    shards: str = ""
    """Its shards that run and how far they are, in words; empty if none does."""

    @property
    def set_aside_text(self) -> str:
        """How many batches are set aside, and why; empty if none are. A failure of the node says it itself."""
        if not self.failed_batches or self.status == NodeStatus.FAILED:
            return ""
        return describe_set_aside(self.failed_batches) + (f" ({self.causes})" if self.causes else "")

    @property
    def awaits_decision(self) -> bool:
        """Whether the node waits until a person decides: about its failure, or about an approval."""
        return self.wait_kind is WaitKind.DECISION

    def ran(self, began_at: float, ended_at: float | None, now: float) -> NodeRow:
        """Return the row with when its latest attempt began and ended; None if it runs."""
        seconds = elapsed(began_at, now if ended_at is None else ended_at)
        return replace(self, began_at=began_at, ended_at=ended_at, seconds=seconds)

    def waiting_for(self, wait: NodeWait | None) -> NodeRow:
        """Return the row with another wait."""
        return replace(self, waits_for=wait.text if wait else "", wait_kind=wait.kind if wait else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskView:
    """A task and its nodes, in the order of the graph."""

    task_id: str
    status: TaskStatus
    source: str
    """Where the state comes from: `workflow` or `document`."""
    nodes: tuple[NodeRow, ...] = ()
    reason: str | None = None
    handled_failures: tuple[str, ...] = ()
    revision: int = 0
    """Number of actions that were applied to the task."""
    paused: tuple[str, ...] = ()
    """The paused scopes, with who paused them and why."""
    seconds: float | None = None
    """How long the latest run of the task took, or has been open. None if that is unknown."""
    total_seconds: float | None = None
    """The same since the creation of the task: with all earlier runs, and the time between them."""


class TaskReader:
    """Reads the state of one task repeatedly.

    With `keep`, a view reuses what an earlier one has read as long as the history of the workflow has not grown; use
    another reader once the task document has changed. While attempts run, what they store is read for each view.
    """

    def __init__(
        self,
        servers: Servers,
        task_id: str,
        description: WorkflowExecutionDescription | None,
        *,
        keep: bool = False,
    ) -> None:
        self._servers = servers
        self._task_id = task_id
        self._description = description
        self._keep = keep
        self._kept: dict[str, Any] = {}
        """What is not read again, by what it is."""
        self._progress: Any = None
        """How far the workflow was at the latest view."""
        self._active = False
        """Whether the latest view has attempts that run."""
        self._unresponsive = False
        """Whether an engine polls the queue but the last query failed."""
        self._stored = True
        """Whether MongoDB is available. After a failure it is not called again: each call takes seconds."""

    @classmethod
    async def at(cls, servers: Servers, task_id: str) -> TaskReader:
        """Return a TaskReader for a task. Raise UnknownTask if the task does not exist."""
        description = (await servers.tasks.look_up(task_id, rpc_timeout=LOOK_UP_TIMEOUT)).description
        if description is None and await servers.catalog.document(task_id) is None:
            raise UnknownTask(task_id)
        return cls(servers, task_id, description)

    @cached_property
    def _store(self) -> TaskStore:
        return TaskStore(self._servers.db)

    @property
    def stored(self) -> bool:
        """Whether the latest view has what MongoDB has."""
        return self._stored

    @property
    def queue(self) -> str | None:
        """The engine queue of the task; None if Temporal has no workflow for it."""
        return self._description.task_queue if self._description else None

    async def _describe(self) -> WorkflowExecutionDescription | None:
        """Return the description of the workflow. Without MongoDB, `at` has checked whose it is."""
        if not self._stored:
            found = await look_up(self._servers.temporal, self._task_id, rpc_timeout=LOOK_UP_TIMEOUT)
        else:
            found = await self._servers.tasks.look_up(self._task_id, rpc_timeout=LOOK_UP_TIMEOUT)
        return found.description

    async def view(self) -> TaskView:
        """Return the state of the task, without what neither the workflow nor the document contains."""
        self._description = await self._describe()
        self._forget_changed()
        status = self._description.status if self._description else None
        running = status is WorkflowExecutionStatus.RUNNING
        sources = [self._queried, self._read] if running else [self._read, self._queried]
        seen = await sources[0]() or await sources[1]() or _make_bare_view(self._task_id)
        times = await self._from_store(self._servers.catalog.times) or _times_of(self._description)
        seen = add_times(seen, times, time.time())
        if status in _ENDS and not seen.status.closed:
            return replace(seen, status=_ENDS[status], reason=seen.reason or CLOSE_REASONS.get(status))
        view = await self._with_waiting(seen)
        self._active = any(node.status in _ACTIVE for node in view.nodes)
        return view

    def _forget_changed(self) -> None:
        """Forget what may have changed since the latest view."""
        progress = _progress_of(self._description)
        if progress != self._progress or not self._keep:
            self._kept.clear()
        elif self._active:
            for name in _OF_ATTEMPTS:
                self._kept.pop(name, None)
        self._progress = progress

    async def _with_waiting(self, view: TaskView) -> TaskView:
        """Return `view` with the nodes that wait for a worker.

        If a node waits, check again: a worker may have started its attempt between the first check and `view`. Check
        again, too, if an attempt has been scheduled between them; who reads repeatedly sees it with the next view.
        """
        for refresh in (False, True):
            if refresh:
                self._description = await self._describe()
            view = mark_waiting(add_pending(view, self._description), find_untaken(self._description))
            if any(node.waiting for node in view.nodes):
                continue
            if self._keep or not has_later_attempts(view, self._description):
                break
        view = await self._with_pins(view)
        if await self._from_store(self._servers.catalog.quarantining):
            view = add_set_aside(view, await self._from_store(self._servers.catalog.set_aside))
        now = time.time()
        shards = await self._from_store(self._servers.catalog.shards) or {}
        view = add_runs(view, await self._from_store(self._servers.catalog.node_runs) or {}, now, shards)
        view = add_workers(view, find_workers(self._description), now)
        view = add_waits(view, await read_waits(self._description, self._servers.temporal.data_converter))
        if shards:
            view = add_shards(view, shards, await self._from_store(self._servers.catalog.sources) or {}, now)
        return add_external(view, await self._from_store(self._servers.catalog.external_runs) or {}, now)

    async def _with_pins(self, view: TaskView) -> TaskView:
        """Return `view` with the versions for which attempts of the task wait, and the versions that are online."""
        if not any(node.waiting for node in view.nodes):
            return view
        pins = await self._from_store(self._servers.catalog.pins) or {}
        registry = WorkerRegistry(self._servers.db)
        rows = await self._from_store(lambda _: registry.list_workers()) if pins else None
        return add_pins(view, pins, [row for row in rows or [] if row.queue == self.queue])

    async def _queried(self) -> TaskView | None:
        """Return the result of the workflow's query with the counts of batches.

        Return None if no engine responds, or if the result omits nodes.
        """
        self._unresponsive = False
        if self.queue is None or not await recent_pollers(self._servers.temporal, self.queue, workflows=True):
            return None
        try:
            view = await self._kept_or_read(self._query)
        except (TemporalError, TimeoutError):
            self._unresponsive = True
            return None
        return view and add_batches(view, await self._batches())

    async def _query(self, task_id: str) -> TaskView | None:
        state = await query(self._servers.temporal, task_id, temporal_names.STATUS_QUERY)
        return None if state.get("nodes_omitted") else read_query(task_id, state, {})

    async def _read(self) -> TaskView | None:
        view = await self._from_store(self._read_stored)
        return view and add_batches(view, await self._batches())

    async def _read_stored(self, task_id: str) -> TaskView | None:
        """Return what the task document says, without batches. The document itself is large."""
        document = await self._servers.catalog.document(task_id)
        if document is None:
            return None
        with reading(task_id):
            return read_document(document, {})

    async def _batches(self) -> dict[str, int]:
        """Return the number of stored batches by node."""
        return await self._from_store(self._servers.catalog.batches) or {}

    async def _from_store(self, ask: Callable[[str], Awaitable[T]]) -> T | None:
        if not self._stored:
            return None
        try:
            return await self._kept_or_read(ask)
        except StoreUnavailable:
            self._stored = False
            return None

    async def _kept_or_read(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """Return what an earlier call of the method has returned if that is kept; without one, call it."""
        name = ask.__name__
        if name in self._kept:
            kept: T = self._kept[name]
            return kept
        found = await ask(self._task_id)
        if name in _KEPT:
            self._kept[name] = found
        return found

    async def hints(self, view: TaskView) -> list[str]:
        """Return hints at what is missing: MongoDB, an engine for the task, or workers for its roles."""
        hints = [] if self._stored else ["MongoDB is unavailable; start it, or set MONGO_URL"]
        hints += await self._version_hints(view)
        if view.status.closed or self.queue is None:
            return hints
        if self._unresponsive:
            return [*hints, describe_silent_engine(self.queue)]
        return hints + await find_missing_processes(
            self._servers.temporal,
            self.queue,
            list_running_roles(view),
            tasks=self._store if self._stored else None,
            later=list_open_roles(view),
        )

    async def _version_hints(self, view: TaskView) -> list[str]:
        """Return hints at roles of the task of which workers run, or have run, different versions."""
        ran = describe_ran(view)
        if view.status.closed or self.queue is None or not self._stored:
            return [*ran.values()]
        registry, queue = WorkerRegistry(self._servers.db), self.queue
        rows = await self._from_store(lambda _: registry.list_workers()) or []
        roles = {node.role for node in view.nodes}
        online = {
            each.role: str(each)
            for each in find_mixed_versions(rows)
            if each.role in roles and each.queue in (queue, "")
        }
        return [*(online | {role: text for role, text in ran.items() if role not in online}).values()]


def describe_ran(view: TaskView) -> dict[str, str]:
    """Return a hint for each role of which the latest attempts of the nodes ran with different versions."""
    nodes: dict[str, dict[str, list[str]]] = {}
    for node in view.nodes:
        if node.version:
            nodes.setdefault(node.role, {}).setdefault(node.version, []).append(node.node_id)
    return {
        role: f"nodes of role {role} ran with different versions: {describe_versions(dict(sorted(by_version.items())))}"
        for role, by_version in nodes.items()
        if len(by_version) > 1
    }


def _progress_of(description: WorkflowExecutionDescription | None) -> Any:
    """Return a value that differs once the state of the workflow may have changed: a history only grows."""
    if description is None:
        return None
    info = description.raw_description.workflow_execution_info
    return description.run_id, description.status, info.history_length


def key_of(activity_id: str) -> tuple[str, int] | None:
    """Return node id and epoch of an attempt's activity; None for any other activity."""
    node_id, _, epoch = activity_id.rpartition(".")
    return (node_id, int(epoch)) if node_id and epoch.isdecimal() else None


def add_pending(view: TaskView, description: WorkflowExecutionDescription | None) -> TaskView:
    """Return `view` with the attempts that the workflow has scheduled since.

    The task document has an attempt once a worker has started it. The document of a large graph may still have the
    state before that.
    """
    pending = dict(_list_pending_attempts(description))

    def scheduled(node: NodeRow) -> NodeRow:
        epoch = pending.get(node.node_id, 0)
        if epoch <= node.attempt:
            return node
        running = NodeStatus.RUNNING.value
        return replace(node.waiting_for(None), status=running, attempt=epoch, next_retry_at=None)

    return replace(view, nodes=tuple(map(scheduled, view.nodes))) if pending else view


def has_later_attempts(view: TaskView, description: WorkflowExecutionDescription | None) -> bool:
    """Return whether nodes run whose attempts the description does not have: an engine runs them, or it is older."""
    pending = {*_list_pending_attempts(description)}
    return any(
        node.status == NodeStatus.RUNNING and (node.node_id, node.attempt) not in pending
        for node in view.nodes
    )


def add_times(view: TaskView, times: TaskTimes | None, now: float) -> TaskView:
    """Return `view` with how long the latest run and all runs of the task took, or have been open."""
    if times is None:
        return view
    return replace(view, seconds=times.run_seconds(now), total_seconds=times.total_seconds(now))


def add_batches(view: TaskView, batches: Mapping[str, int]) -> TaskView:
    """Return `view` with the numbers of stored batches, by node id."""
    nodes = tuple(
        replace(node, batches=count) if (count := batches.get(node.node_id, 0)) != node.batches else node
        for node in view.nodes
    )
    return replace(view, nodes=nodes)


def add_set_aside(view: TaskView, found: Mapping[str, FailedBatches] | None) -> TaskView:
    """Return `view` with the batches that nodes have set aside, by node id. None leaves it as it is."""
    if found is None:
        return view

    def changed(node: NodeRow) -> NodeRow:
        aside = found.get(node.node_id)
        return replace(node, failed_batches=aside.count if aside else 0, causes=aside.causes if aside else "")

    return replace(view, nodes=tuple(map(changed, view.nodes)))


def mark_waiting(view: TaskView, not_taken: frozenset[str]) -> TaskView:
    """Return `view` with `waiting` set for the running nodes whose attempt no worker has started."""

    def marked(node: NodeRow) -> NodeRow:
        waits = node.status == NodeStatus.RUNNING and f"{node.node_id}.{node.attempt}" in not_taken
        return node if waits == node.waiting else replace(node, waiting=waits)

    return replace(view, nodes=tuple(map(marked, view.nodes)))


def add_shards(
    view: TaskView, shards: Mapping[str, ShardProgress], sources: Mapping[str, Sequence[str]], now: float
) -> TaskView:
    """Return `view` with how far the running shards are. `sources` are the nodes from which wide nodes pull."""
    by_id = {node.node_id: node for node in view.nodes}

    def describe_shards(node: NodeRow) -> NodeRow:
        progress = shards.get(node.node_id)
        if progress is None or node.status not in _ACTIVE or not progress.running:
            return node
        pulled = [by_id[name] for name in sources.get(node.node_id, ()) if name in by_id]
        ended = bool(pulled) and all(NodeStatus(each.status).ended for each in pulled)
        is_final = ended or progress.items > 0
        total = progress.items or sum(each.batches for each in pulled)
        done = node.batches + node.failed_batches
        text = describe_progress(progress, done, total, now, is_final=is_final)
        return replace(node, shards=text, waiting=False, worker="")

    return replace(view, nodes=tuple(map(describe_shards, view.nodes)))


def describe_progress(progress: ShardProgress, done: int, total: int, now: float, *, is_final: bool) -> str:
    """Return how many shards run, the batches done and in all, the rate, and the time left.

    `done` also counts batches that are set aside; those that the node had stored before its shards began make no rate.
    `total` is 0 if it is unknown, and grows unless it `is_final`.
    """
    workers = {*progress.running}
    parts = [f"{count_of(len(progress.running), 'shard')} on {count_of(len(workers), 'worker')}"]
    if total:
        parts.append(f"{done:,} of {total:,}{'' if is_final else ' so far'}")
    took = now - progress.started_at
    if done > progress.before and took >= 1:
        rate = (done - progress.before) / took
        parts.append(f"{rate:,.3g}/s")
        if is_final and total > done:
            parts.append(f"{format_duration(round((total - done) / rate))} left")
    return ", ".join(parts)


def add_pins(view: TaskView, pins: Mapping[str, str], workers: Sequence[RegisteredWorker]) -> TaskView:
    """Return `view` with what attempts wait for that only workers with the version of the task may run."""
    nodes = tuple(
        node.waiting_for(for_worker(_describe_pin(node.role, pins[node.role], workers)))
        if node.waiting and node.role in pins
        else node
        for node in view.nodes
    )
    return replace(view, nodes=nodes)


def _describe_pin(role: str, version: str, workers: Sequence[RegisteredWorker]) -> str:
    others: dict[str, list[str]] = {}
    for worker in workers:
        if worker.online and role in worker.handlers:
            others.setdefault(worker.handlers[role], []).append(worker.worker_id)
    shown = describe_versions(dict(sorted(others.items()))) or "nobody"
    return f"a worker of role {role} with version {version} (pinned by this task); polled by: {shown}"


def add_waits(view: TaskView, waits: Mapping[str, str]) -> TaskView:
    """Return `view` with what the running attempts wait for, by the ids of their activities."""
    nodes = tuple(
        node.waiting_for(in_attempt(waits[f"{node.node_id}.{node.attempt}"]))
        if node.status == NodeStatus.RUNNING and f"{node.node_id}.{node.attempt}" in waits
        else node
        for node in view.nodes
    )
    return replace(view, nodes=nodes)


def add_runs(
    view: TaskView,
    runs: Mapping[str, LatestNodeRun],
    now: float,
    shards: Mapping[str, ShardProgress] = MappingProxyType({}),
) -> TaskView:
    """Return `view` with the worker and the duration of each node's latest attempt, as the task document has them.

    The duration of a node with shards begins with the first of them. Shards of an earlier generation do not count.
    """
    nodes = tuple(
        _add_node_run(node, runs.get(node.node_id), shards.get(node.node_id), now) for node in view.nodes
    )
    return replace(view, nodes=nodes)


def _add_node_run(
    node: NodeRow, run: LatestNodeRun | None, shards: ShardProgress | None, now: float
) -> NodeRow:
    active = node.status in _ACTIVE
    if shards is not None and run is not None and shards.generation < run.generation:
        shards = None
    if shards is not None and active:
        node = node.ran(shards.started_at, None, now)
    is_bridged = run is not None and run.worker.startswith(
        BRIDGE_PREFIX
    )  # No worker has accepted the attempt.
    if run is None or run.epoch != node.attempt or run.started_at is None or is_bridged:
        return node
    started_at = run.started_at if shards is None else min(run.started_at, shards.started_at)
    node = replace(node, worker=run.worker if active else "", version=run.version)
    if not active and run.ended_at is None:
        return node
    return node.ran(started_at, None if active else run.ended_at, now)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptWorker:
    """The worker that has started an attempt, according to Temporal."""

    identity: str
    heard_at: float
    """When its last heartbeat arrived, or when it started the attempt, in seconds since the epoch."""
    timeout_sec: float
    """Seconds without a heartbeat after which another worker may replace it."""
    lost: bool
    """Whether it has not sent a heartbeat for that long."""


def find_workers(description: WorkflowExecutionDescription | None) -> dict[str, AttemptWorker]:
    """Return the workers of the running attempts by activity id."""
    workers = {}
    for each in _list_pending(description):
        if each.state == _SCHEDULED and not _has_lost_worker(each):
            continue
        moments = (each.last_heartbeat_time, each.last_started_time)
        workers[each.activity_id] = AttemptWorker(
            identity=process_of(each.last_worker_identity),
            heard_at=max(moment.ToNanoseconds() / 1e9 for moment in moments),
            timeout_sec=each.activity_options.heartbeat_timeout.ToNanoseconds() / 1e9,
            lost=each.state == _SCHEDULED,
        )
    return workers


def _has_lost_worker(activity: PendingActivityInfo) -> bool:
    """Return whether an attempt is in its task queue again because the heartbeats of its worker stopped."""
    failure = activity.last_failure
    silent = failure.timeout_failure_info.timeout_type == TimeoutType.TIMEOUT_TYPE_HEARTBEAT
    return bool(activity.last_worker_identity) and failure.HasField("timeout_failure_info") and silent


def add_workers(view: TaskView, workers: Mapping[str, AttemptWorker], now: float) -> TaskView:
    """Return `view` with the workers that have started the running attempts, and since when they are silent.

    A bridge is not the worker of an external attempt, and may be replaced without harm.
    """
    nodes = tuple(
        _add_worker(node, workers.get(f"{node.node_id}.{node.attempt}"), now) for node in view.nodes
    )
    return replace(view, nodes=nodes)


def _add_worker(node: NodeRow, worker: AttemptWorker | None, now: float) -> NodeRow:
    if worker is None or node.status not in _ACTIVE or worker.identity.startswith(BRIDGE_PREFIX):
        return node
    node = replace(node, worker=worker.identity, waiting=False)
    if worker.lost:
        return replace(node, heard_at=worker.heard_at, lost=True)
    return _add_silence(node, worker.heard_at, worker.timeout_sec, now)


def _add_silence(node: NodeRow, heard_at: float, timeout_sec: float, now: float) -> NodeRow:
    """Return the node with the silence of its worker, if its heartbeats are overdue.

    Native workers send heartbeats at least four times within the timeout, external ones usually twice.
    """
    if not timeout_sec or now - heard_at < timeout_sec * _OVERDUE:
        return node
    return replace(node, heard_at=heard_at, replaced_at=heard_at + timeout_sec)


def add_external(view: TaskView, runs: Mapping[tuple[str, int], ExternalRun], now: float) -> TaskView:
    """Return `view` with the workers of the external attempts, or with what these attempts wait for."""
    nodes = tuple(_add_run(node, runs.get((node.node_id, node.attempt)), now) for node in view.nodes)
    return replace(view, nodes=nodes)


def _add_run(node: NodeRow, run: ExternalRun | None, now: float) -> NodeRow:
    if run is None or node.status not in _ACTIVE or node.waiting:
        return node
    if run.worker_id is None:
        return replace(node.waiting_for(for_worker(run.waits_for)), worker="")
    node = replace(node, worker=run.worker_id, external=True, batches=max(node.batches, run.batches))
    if run.heard_at is None or run.lease_until is None:
        return node
    return _add_silence(node, run.heard_at, run.lease_until - run.heard_at, now)


async def find_missing_processes(
    client: Client, queue: str, roles: list[str], *, tasks: TaskStore | None = None, later: Sequence[str] = ()
) -> list[str]:
    """Return hints at what is missing: an engine of the queue and the database, and workers.

    Workers are missing if none has ever polled a role that nodes need now or `later`, or if none polls one of `roles`
    and none is online for it: a worker whose slots are all taken does not poll. Without an engine, only roles that no
    worker has ever polled are named. Without `tasks`, the store of this process, and without MongoDB, nothing is known
    of databases and workers, and nothing is said of them.
    """
    option = queue_option(queue)
    engines = await recent_pollers(client, queue, workflows=True)
    hints = [] if engines else [f"no engine polls queue {queue}; start one with `flowkit engine{option}`"]
    with suppress(StoreUnavailable):
        if tasks is not None:
            others = other_databases(engines, await tasks.deployment())
            hints += _describe_other_databases(queue, others, tasks.database.name)
            unknown = await never_polled_roles(client, tasks.database, queue, {*roles, *later})
            hints += describe_unknown_roles(unknown, option)
            known = [role for role in roles if role not in unknown] if engines else []
            hints += [
                f"no worker polls role {role}; start one with `flowkit worker module:Handler{option}`"
                for role in await _find_unserved(client, tasks.database, queue, known)
            ]
    return hints


async def _find_unserved(client: Client, db: Any, queue: str, roles: Sequence[str]) -> list[str]:
    """Return those of the roles that no process polls, and for which no worker is online."""
    polled = await pollers_by_role(client, queue, roles)
    idle = [role for role in roles if not polled[role]]
    online = await WorkerRegistry(db).find_online(queue, idle) if idle else []
    served = {role for worker in online for role in worker.handlers}
    return [role for role in idle if role not in served]


def describe_silent_engine(queue: str) -> str:
    """Return the hint at an engine that polls its queue, or did a minute ago, and has not answered a query."""
    return (
        f"no engine of queue {queue} has responded within {QUERY_SEC:g} s; check that one runs: after the end of one, "
        "and while one waits for MongoDB, others take a moment"
    )


def queue_option(queue: str) -> str:
    """Return the option of `flowkit engine` and `flowkit worker` for a queue, after a blank; empty for the default."""
    return "" if queue == DEFAULT_QUEUE else f" --queue {shell_word(queue)}"


def _describe_other_databases(queue: str, others: Sequence[str], own: str) -> list[str]:
    """Return the hint at engines that all use other databases. Their names and addresses may be the cause."""
    if not others:
        return []
    theirs = f"{'database' if len(others) == 1 else 'databases'} {names([repr(each) for each in others])}"
    server = " of another server" if own in others else ""
    hint = f"no engine of database {own!r} polls queue {queue}: the engines there use {theirs}{server}"
    return [f"{hint}; set the same MONGO_URL and MONGO_DATABASE for both"]


def describe_unknown_roles(unknown: Mapping[str, Sequence[str]], option: str = "") -> list[str]:
    """Return hints at the roles that no worker has ever polled, each with similar ones that are polled
    (`never_polled_roles`).
    """
    start = f"start one with `flowkit worker module:Handler{option}`"
    others = [role for role, similar in unknown.items() if not similar]
    hints = [
        f"no worker has ever polled role {role}; did you mean {names(similar, last=' or ')}? If not, {start}"
        for role, similar in unknown.items()
        if similar
    ]
    if others:
        roles, them = ("role", "it") if len(others) == 1 else ("roles", "them")
        bridge = (
            f"`flowkit bridge {' '.join(map(shell_word, others))}{option}` if external workers run {them}"
        )
        hints.append(f"no worker has ever polled {roles} {names(others)}; {start}, or {bridge}")
    return hints


def list_running_roles(view: TaskView) -> list[str]:
    """Return the roles of the running nodes, without those that need no worker, or that a worker serves right now."""
    running = (node.role for node in view.nodes if node.status == NodeStatus.RUNNING)
    served = {node.role for node in view.nodes if (node.worker and not node.lost) or node.shards}
    return [role for role in dict.fromkeys(running) if role not in ENGINE_TYPES and role not in served]


def list_roles(graph: Mapping[str, Any]) -> list[str]:
    """Return the roles of the nodes of a valid graph, without those that need no worker."""
    return [
        role for role in dict.fromkeys(node["type"] for node in graph["nodes"]) if role not in ENGINE_TYPES
    ]


def list_open_roles(view: TaskView) -> list[str]:
    """Return the roles of the nodes that have not ended, without those that need no worker."""
    open_nodes = (node.role for node in view.nodes if not NodeStatus(node.status).ended)
    return [role for role in dict.fromkeys(open_nodes) if role not in ENGINE_TYPES]


def read_query(task_id: str, state: dict[str, Any], batches: dict[str, int]) -> TaskView:
    """Return the view from the result of a workflow's `status` query."""
    status, nodes, silent = TaskStatus(state["status"]), state["nodes"], state.get("silent_nodes") or ()
    return TaskView(
        task_id=task_id,
        status=status,
        source="workflow",
        nodes=tuple(
            _read_node(node, node.get("next_retry_at"), batches, silent=node["node_id"] in silent)
            for node in nodes
        ),
        reason=state.get("reason"),
        handled_failures=tuple(state.get("handled_failures") or ()),
        revision=state.get("revision", 0),
        paused=() if status.closed else tuple(state.get("paused") or ()),
    )


def read_document(document: dict[str, Any], batches: dict[str, int]) -> TaskView:
    """Return the view from a task document."""
    status, coordinator = TaskStatus(document["status"]), document.get("coordinator") or {}
    paused = [] if status.closed else coordinator.get("paused") or []
    view = TaskView(
        task_id=document["id"],
        status=status,
        source="document",
        nodes=tuple(_read_document_nodes(document, batches)),
        reason=document.get("reason"),
        handled_failures=tuple((document.get("result") or {}).get("handled_failures") or ()),
        revision=coordinator.get("revision") or 0,
        paused=tuple(format_pause(_read_scope(each)) for each in paused),
    )
    return add_times(view, read_times(document), time.time())


def _read_scope(stored: Mapping[str, Any]) -> PausedScope:
    since = utc(stored["since"]).timestamp() if isinstance(stored.get("since"), datetime) else 0.0
    return PausedScope(
        scope=stored.get("scope") or "task",
        since=since,
        by=stored.get("by") or "",
        reason=stored.get("reason") or "",
    )


def _times_of(description: WorkflowExecutionDescription | None) -> TaskTimes | None:
    """Return the times of a task from its workflow; None if a workflow run has continued an earlier one, whose begin
    Temporal does not say.
    """
    if description is None:
        return None
    info = description.raw_description.workflow_execution_info
    if info.first_run_id not in ("", description.run_id):
        return None
    began_at = description.start_time.timestamp()
    ended_at = None if description.close_time is None else description.close_time.timestamp()
    return TaskTimes(created_at=began_at, began_at=began_at, ended_at=ended_at)


def _read_document_nodes(document: dict[str, Any], batches: dict[str, int]) -> Iterator[NodeRow]:
    for node in document["graph"]["nodes"]:
        retry_ms = node.get("next_retry_at_ms")
        silent = node.get("liveness") is not None
        yield _read_node(node, retry_ms / 1000 if retry_ms else None, batches, silent=silent)


def _read_node(
    node: dict[str, Any], retry_at: float | None, batches: dict[str, int], *, silent: bool
) -> NodeRow:
    status = node["status"]
    error = node.get("last_error") if status != NodeStatus.FINISHED else None
    wait = read_wait(node)
    row = NodeRow(
        node_id=node["node_id"],
        role=node["type"],
        status=status,
        attempt=node.get("attempt_epoch") or 0,
        batches=batches.get(node["node_id"], 0),
        next_retry_at=retry_at if status == NodeStatus.DEFERRED and not wait else None,
        failed_batches=node.get("failed_batches") or 0,
        note=one_line(error or node.get("skip_reason") or ""),
        silent=silent,
    )
    if status not in _BEFORE_ATTEMPT:
        return row
    # Only documents flag paused nodes.
    return row.waiting_for(wait or (for_resume() if node.get("paused") else None))


def _make_bare_view(task_id: str) -> TaskView:
    """Return the view of a task when only the status of its workflow is known."""
    return TaskView(task_id=task_id, status=TaskStatus.QUEUED, source="workflow")


def _list_pending(description: WorkflowExecutionDescription | None) -> Sequence[PendingActivityInfo]:
    return description.raw_description.pending_activities if description else ()


def _list_pending_attempts(description: WorkflowExecutionDescription | None) -> Iterator[tuple[str, int]]:
    """Yield node id and epoch of each attempt that Temporal has scheduled and that has not ended."""
    return filter(None, (key_of(each.activity_id) for each in _list_pending(description)))


def find_untaken(description: WorkflowExecutionDescription | None) -> frozenset[str]:
    """Return the ids of the activities that no worker has ever started.

    Of a node with shards, one always waits for a worker. It does not count while another one of the node runs.
    """
    pending = [(key_of(each.activity_id), each) for each in _list_pending(description)]
    run = {key[0] for key, each in pending if key is not None and each.state != _SCHEDULED}
    return frozenset(
        each.activity_id
        for key, each in pending
        if each.state == _SCHEDULED and each.attempt <= 1 and (key is None or key[0] not in run)
    )


async def read_waits(
    description: WorkflowExecutionDescription | None, converter: DataConverter
) -> dict[str, str]:
    """Return what running attempts wait for according to their last heartbeats, by activity id.

    Omit heartbeats that this process cannot decode.
    """
    found = {}
    for each in _list_pending(description):
        if each.heartbeat_details.payloads and (wait := _read_wait(await _decode_details(each, converter))):
            found[each.activity_id] = wait
    return found


async def _decode_details(activity: PendingActivityInfo, converter: DataConverter) -> Any:
    try:
        (details, *_) = await converter.decode(activity.heartbeat_details.payloads)
    except (KeyError, RuntimeError, ValueError):
        return None
    return details


def _read_wait(details: Any) -> str:
    """Return the wait of an attempt that runs. Of an external attempt that waits, the task document has the text."""
    known = details if isinstance(details, dict) else {}
    return str(known.get(TEXT) or "") if known.get("state") == "running" else ""
