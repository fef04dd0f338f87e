"""Mirror the state of a task in its document in MongoDB: open the document, write what only the workflow
knows, close it.

The writes run in the background, one at a time, so they do not delay nodes. A task can have thousands of nodes, but
Temporal limits the size of payloads, so large records are split.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import workflow
from temporalio.common import SearchAttributeKey
from temporalio.exceptions import ApplicationError, FailureError

from flowkit import reason_codes
from flowkit.graph.scheduled import format_nominal
from flowkit.graph.submission import NewTask
from flowkit.limits import REPORT_BYTES
from flowkit.models import (
    CloseTask,
    NodeRecord,
    NodeStatus,
    Opened,
    OpenTask,
    RecordTask,
    TaskStatus,
    temporal_names,
)
from flowkit.models.actions import ActionRecord
from flowkit.models.ownership import MEMO, OwnerKind, read_owner
from flowkit.workflows.display.details import find_outside_wait
from flowkit.workflows.display.task_status import is_dead
from flowkit.workflows.engine_calls import (
    HEARTBEAT_TIMEOUT,
    call_engine,
    call_locally_first,
    cause_of,
)
from flowkit.workflows.payloads import json_size, longest_prefix, split_by_size, without_defaults

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flowkit.models import Node, NodeState, TaskResult
    from flowkit.models.actions import AppliedAction
    from flowkit.workflows.display.task_status import StatusPublisher
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.state_codec import TaskState

_WRITE_SEC = 60.0
_WRITE_SEC_PER_NODE = 0.1
"""Time limits of a write. Most take milliseconds, but one for thousands of nodes may write a marker for each."""

_OPEN_STORED_TIMEOUT = timedelta(seconds=300)
"""Time limit for opening a task with a stored graph, which the engine reads and validates meanwhile."""

_LOCAL_NODES = 20
_LOCAL_GRAPH_NODES = 500
"""Most nodes in a write, and in its task, for a write as a local activity. Others take too long.

Such a write costs one event of the history instead of six, but delays the commands of its workflow task.
"""

FLAGS_TIMEOUT_SEC = 1.0
"""How long attempts continue at most until their cancel flags have reached MongoDB."""

_MILLISECOND = 0.001
"""The precision of times in MongoDB, in seconds."""

_SUMMARY_NODES = 3
"""How many nodes the summary of a write names."""

_SCHEDULED_START_TIME = SearchAttributeKey.for_datetime(temporal_names.SCHEDULED_START_TIME)

_OPEN_SUMMARY = "open the task in MongoDB"

_ACTIONS_BYTES = 300_000
"""Largest list of applied actions in the close. Their texts may be long."""

_FIELDS_BYTES = 200
"""Upper bound for the size of a node's record without its texts."""

_MAX_BYTES_PER_CHARACTER = 6
"""Size of a character that JSON escapes, such as `\\u0000`."""


class TaskDocument:
    """The task document of a running task.

    Changes that occur while a write is in progress are written together afterwards.
    """

    def __init__(self, state: TaskState, scheduler: Scheduler, publisher: StatusPublisher) -> None:
        self._state = state
        self._scheduler = scheduler
        self._publisher = publisher
        self.pulled = pulled_nodes(scheduler.nodes)
        """The ids of the nodes whose artifacts other nodes pull."""
        self._changed_nodes: dict[int, NodeRecord] = {}
        self._task_changed = False
        self._cancel_reason: str | None = None
        self.parked: set[int] = set()
        """The nodes that would start an attempt, but are paused. `RunningNodes` changes the set."""
        self._throttles_sources = True
        """Whether the document shows the parked nodes as paused, so that their sources wait for them (`max_ahead`)."""
        self.silent: list[int] = []
        """The nodes that the document shows as silent."""
        self._actions_changed = False
        self._recorded = latest_revision(state.actions.applied)
        """The revision up to which the document lists the actions."""
        self._recorded_names = 0
        """How many of the satisfied prerequisites a record of this run has sent."""
        self._drained: frozenset[str] = frozenset()
        """The paused scopes that the document shows as drained."""
        self._no_longer_silent: set[int] = set()
        """The nodes to show as no longer silent."""
        self._finished: dict[int, int] = {}
        """The nodes that a write has found finished, with the epochs that they had then."""
        self._writing: asyncio.Task[None] | None = None

    def change_graph(self) -> None:
        """Note that nodes were added to the graph, or changed.

        The end of a node needs a marker if only a new node pulls from it, and it has ended without one.
        """
        before, self.pulled = self.pulled, pulled_nodes(self._scheduler.nodes)
        for node_id in sorted(self.pulled - before):
            index = self._scheduler.index_of[node_id]
            if self._scheduler.states[index].status.ended:
                self.write_node(index)
        self._publisher.change_graph()

    def write_node(self, index: int, cancel_reason: str | None = None) -> None:
        """Schedule a write of the node's present state. With `cancel_reason`, it sets the node's own cancel flag."""
        self._changed_nodes[index] = self._make_node_record(index, cancel_reason)
        self._start_writing()

    def write_changed_nodes(self) -> None:
        """Schedule a write of the nodes that the scheduler lists as changed, and clear that list."""
        for index in sorted(self._scheduler.changed):
            self.write_node(index)
        self._scheduler.changed.clear()

    def write_attempted(self) -> None:
        """Schedule a write of the nodes that wait for another attempt, which finds those that the last one finished."""
        for index, state in enumerate(self._scheduler.states):
            if state.status in (NodeStatus.QUEUED, NodeStatus.DEFERRED) and state.epoch > state.first_epoch:
                self.write_node(index)

    def finished(self) -> list[int]:
        """Return the open nodes that the writes have found finished, and that have started no attempt since.

        The worker of an attempt was lost before it could report the end. Of a node that starts again, the document may
        still show the earlier end.
        """
        states = self._scheduler.states
        return [
            index
            for index, epoch in self._finished.items()
            if states[index].epoch == epoch > states[index].first_epoch
            and not states[index].status.ended
            and not states[index].kept
        ]

    def write_throttling(self) -> None:
        """Schedule a write of the parked nodes for which their sources begin or cease to wait.

        A failed task that finishes what runs does not wait for paused nodes, so its sources do not either.
        """
        if self._throttles_sources is self._scheduler.finishes_running:
            self._throttles_sources = not self._throttles_sources
            for index in sorted(self.parked & self._scheduler.streams.throttling):
                self.write_node(index)

    def write_prerequisites(self, indexes: Iterable[int]) -> None:
        """Schedule a write of those of these nodes that wait, or have waited, for prerequisites."""
        for index in indexes:
            if self._scheduler.nodes[index].prerequisites and self._is_queued(index):
                self.write_node(index)

    def _is_queued(self, index: int) -> bool:
        return self._scheduler.states[index].status is NodeStatus.QUEUED

    def write_task(self, cancel_reason: str | None = None) -> None:
        """Schedule a write of the task's own fields. With `cancel_reason`, the write also sets the cancel flags."""
        self._task_changed = True
        self._cancel_reason = cancel_reason or self._cancel_reason
        self._start_writing()

    def write_silent(self, nodes: list[int]) -> None:
        """Schedule a write that shows these nodes, and no others, as silent."""
        self._no_longer_silent = (self._no_longer_silent | {*self.silent}) - {*nodes}
        self.silent = nodes
        self.write_task()

    def write_actions(self) -> None:
        """Schedule a write of the applied actions and of the paused scopes."""
        self._actions_changed = True
        self.write_task()

    def write_drained(self, scopes: frozenset[str]) -> None:
        """Schedule a write that shows these scopes, and no others, as drained. Do nothing if the document does."""
        if scopes != self._drained:
            self._drained = scopes
            self.write_actions()

    @property
    def is_idle(self) -> bool:
        """Whether no write is pending or in progress."""
        return self._writing is None

    async def flush(self) -> None:
        """Wait until no write is pending or in progress."""
        while self._writing is not None:
            await workflow.wait([self._writing])

    async def await_flags(self) -> None:
        """Wait until the cancel flags have reached MongoDB, from which attempts learn the cancel reason.

        Return after FLAGS_TIMEOUT_SEC in any case.
        """
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self.is_idle,
                timeout=FLAGS_TIMEOUT_SEC,
                timeout_summary="let the cancel flags reach MongoDB",
            )

    async def close(self, result: TaskResult, reason: str | None, *, local: bool) -> None:
        """Write the final state of the task. `reason` says why it failed or was cancelled.

        If the document no longer exists, open it again first. The close may be `local` if more events could not change
        how the task ends (see `may_be_local`).
        """
        await self.flush()
        record, nodes = self._make_close_record(result, reason), len(self._scheduler.nodes)
        is_local = local and nodes <= _LOCAL_GRAPH_NODES and len(record.nodes) <= _LOCAL_NODES
        while not await close_document(record, nodes, is_local=is_local):
            state = self._state
            await open_document(NewTask(params=state.params, graph=state.graph, stored=state.stored))
            await self.write_many_unfinished()

    async def write_many_unfinished(self) -> None:
        """Write the nodes that did not finish, if they are too many for the close."""
        unfinished = self._list_unfinished()
        if not fit_into_close([self._make_node_record(index) for index in unfinished]):
            for index in unfinished:
                self.write_node(index)
            await self.flush()

    def _start_writing(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._changed_nodes or self._task_changed:
                nodes, reason = list(self._changed_nodes.values()), self._cancel_reason
                self._changed_nodes, self._task_changed, self._cancel_reason = {}, False, None
                await self._write(nodes, reason)
        finally:
            self._writing = None

    async def _write(self, nodes: list[NodeRecord], cancel_reason: str | None) -> None:
        record = RecordTask(
            task_id=workflow.info().workflow_id,
            run_id=workflow.info().run_id,
            run_seq=self._state.opened.run_seq,
            at=self._next_time(),
            nodes=nodes,
            status=self._publisher.status,
            status_history=self._publisher.history,
            cancel_reason=cancel_reason,
            reason=self._publisher.reason,
            deployment=self._state.opened.settings.deployment,
            status_history_omitted=self._publisher.omitted,
            silent={index: self._scheduler.nodes[index].node_id for index in self.silent},
            heard=sorted(self._no_longer_silent),
            actions=self._make_action_record() if self._actions_changed else ActionRecord(),
        )
        self._no_longer_silent.clear()
        self._actions_changed = False
        for part in split_record(record):
            found = await record_document(part, of_nodes=len(self._scheduler.nodes))
            self._finished |= {node.index: node.epoch for node in part.nodes if node.index in found}

    def _next_time(self) -> float:
        """Return the time of a new record, later than that of the one before also if the server's clock was
        set back.
        """
        self._state.recorded_at = max(workflow.now().timestamp(), self._state.recorded_at + _MILLISECOND)
        return self._state.recorded_at

    def _make_action_record(self) -> ActionRecord:
        """Return the record of the actions, with those that no earlier record has: a task may have thousands."""
        state, recorded = self._state.actions, self._recorded
        self._recorded = latest_revision(state.applied)
        names, self._recorded_names = state.satisfied[self._recorded_names :], len(state.satisfied)
        return ActionRecord(
            revision=self._recorded,
            paused=[*state.paused],
            applied=[each for each in state.applied if each.revision > recorded],
            drained=[each.scope for each in state.paused if each.scope in self._drained],
            satisfied=names,
        )

    def _make_close_record(self, result: TaskResult, reason: str | None) -> CloseTask:
        unfinished = self._list_unfinished()
        nodes = [self._make_node_record(index) for index in unfinished]
        fit = fit_into_close(nodes)
        return CloseTask(
            task_id=result.task_id,
            run_id=workflow.info().run_id,
            run_seq=self._state.opened.run_seq,
            at=workflow.now().timestamp(),
            status=result.status,
            status_history=self._publisher.history,
            nodes=nodes if fit else [],
            unfinished={} if fit else self._group_by_status(unfinished),
            handled_failures=result.handled_failures,
            handled_failures_omitted=result.handled_failures_omitted,
            failed_batches=result.failed_batches,
            reason=reason,
            deployment=self._state.opened.settings.deployment,
            status_history_omitted=self._publisher.omitted,
            dead=result.status is TaskStatus.FAILED and is_dead(self._scheduler),
            applied=_latest_actions(self._state.actions.applied),
            admitted_as=_admitted_as(),
        )

    def _list_unfinished(self) -> list[int]:
        states = self._scheduler.states
        return [i for i, state in enumerate(states) if state.status is not NodeStatus.FINISHED]

    def _group_by_status(self, indexes: list[int]) -> dict[NodeStatus, list[int]]:
        found: dict[NodeStatus, list[int]] = {}
        for index in indexes:
            found.setdefault(self._scheduler.states[index].status, []).append(index)
        return found

    def _make_node_record(self, index: int, cancel_reason: str | None = None) -> NodeRecord:
        node, state = self._scheduler.nodes[index], self._scheduler.states[index]
        missing = self._scheduler.missing_prerequisites(index)
        if find_outside_wait(node, state, missing) is None:
            state.waits_since = None
        elif state.waits_since is None:
            state.waits_since = workflow.now().timestamp()
        record = node_record(
            node,
            state,
            pulled=node.node_id in self.pulled,
            missing=missing,
            cancel_reason=cancel_reason,
        )
        if index not in self._scheduler.streams.throttling:
            return record
        is_paused = index in self.parked and not record.status.ended
        return replace(record, paused=is_paused and not self._scheduler.finishes_running)


def latest_revision(applied: Sequence[AppliedAction]) -> int:
    """Return the number of actions that were applied."""
    return applied[-1].revision if applied else 0


def _admitted_as() -> str | None:
    """Return the try of a request for admission that has started this workflow."""
    with suppress(Exception):  # another converter wrote it
        owner = read_owner(workflow.memo_value(MEMO, None))
        return owner.id if owner is not None and owner.kind is OwnerKind.ADMISSION else None
    return None


def _latest_actions(applied: Sequence[AppliedAction]) -> list[AppliedAction]:
    """Return the latest actions, as many as fit into the close."""
    return longest_prefix(reversed(applied), lambda each: json_size(asdict(each)), _ACTIONS_BYTES)[::-1]


async def open_document(new: NewTask) -> Opened:
    """Open the task document, and return what the workflow needs from it. Waits while MongoDB is unavailable.

    Raise the engine's own ApplicationError when it rejects the task, so that clients see its text.
    """
    info = workflow.info()
    opening = OpenTask(
        task_id=info.workflow_id,
        first_run_id=info.first_execution_run_id,
        run_id=info.run_id,
        at=workflow.now().timestamp(),
        graph=new.graph if new.stored is None else {},
        params=new.params if new.stored is None else {},
        stored=new.stored,
        rerun=new.rerun,
        scheduled_at=_scheduled_at(),
    )
    try:
        return await _open(opening)
    except FailureError as error:
        cause = cause_of(error)
        raise (cause if isinstance(cause, ApplicationError) else error) from None


def _scheduled_at() -> str | None:
    """Return the nominal time with which a schedule has started the workflow; None without a schedule.

    Continue-as-new, *Reset* and a rerun keep it.
    """
    at = workflow.info().typed_search_attributes.get(_SCHEDULED_START_TIME)
    return None if at is None else format_nominal(at)


async def _open(opening: OpenTask) -> Opened:
    """Run `open_task`. With a stored graph, it takes longer than a local activity may take."""
    if opening.stored is None:
        opened: Opened = await call_locally_first(
            temporal_names.OPEN_TASK, opening, Opened, summary=_OPEN_SUMMARY
        )
        return opened
    opened = await call_engine(
        temporal_names.OPEN_TASK,
        opening,
        Opened,
        summary=_OPEN_SUMMARY,
        time_limit=_OPEN_STORED_TIMEOUT,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )
    return opened


async def record_document(record: RecordTask, of_nodes: int) -> list[int]:
    """Write `record`, the state that only the workflow knows, to the document of a task with `of_nodes` nodes.

    Return the indexes of those of its open nodes that an attempt has finished.
    """
    finished: list[int] | None = await (
        call_locally_first if may_be_local(record, of_nodes) else call_engine
    )(
        temporal_names.RECORD,
        without_defaults(record),
        summary=write_summary(record),
        time_limit=write_timeout(len(record.nodes)),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )
    return finished or []


def may_be_local(record: RecordTask, of_nodes: int) -> bool:
    """Return whether a write may be a local activity: it takes milliseconds, and it will still be right if
    it is repeated.

    A local activity takes effect before Temporal knows that the workflow has run it. If its engine is killed, the next
    engine may see more events. The transitions of nodes, and their deadlines, follow from earlier events, so that they
    stay. The cancel flags of the whole task wait for an ordinary activity, as does what an update has asked for: other
    updates may follow, and would have to wait for a local one.
    """
    is_quick = len(record.nodes) <= _LOCAL_NODES and of_nodes <= _LOCAL_GRAPH_NODES
    asked = (
        record.cancel_reason is not None or record.silent or record.heard or record.actions != ActionRecord()
    )
    stays = all(node.cancel_reason in {None, reason_codes.DEADLINE} for node in record.nodes)
    return is_quick and not asked and stays and _is_clearly_small(record.nodes)


async def close_document(close: CloseTask, nodes: int, *, is_local: bool) -> bool:
    """Close the document of a task with `nodes` nodes. Return False if the document does not exist."""
    exists: bool = await (call_locally_first if is_local else call_engine)(
        temporal_names.CLOSE_TASK,
        without_defaults(close),
        bool,
        summary="close the task in MongoDB",
        time_limit=write_timeout(nodes),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
    )
    return exists


def write_timeout(nodes: int) -> timedelta:
    """Return the time limit of one write that updates `nodes` nodes."""
    return timedelta(seconds=_WRITE_SEC + _WRITE_SEC_PER_NODE * nodes)


def write_summary(record: RecordTask) -> str:
    """Return the summary that the Web UI shows for this write: the first nodes, with their new statuses."""
    count = len(record.nodes)
    nodes = [f"{node.node_id} {node.status.value}" for node in record.nodes[:_SUMMARY_NODES]]
    more = [f"{count - _SUMMARY_NODES:,} more"] if count > _SUMMARY_NODES else []
    what = ["cancel flags"] if record.cancel_reason else [] if nodes else [f"task {record.status.value}"]
    return f"write to MongoDB: {', '.join([*what, *nodes, *more])}"


def node_record(
    node: Node,
    state: NodeState,
    *,
    pulled: bool,
    missing: Sequence[str] = (),
    cancel_reason: str | None = None,
) -> NodeRecord:
    """Return the record that writes `state` to the task document.

    `pulled` says whether other nodes pull artifacts from the node; its end then needs a complete marker. `missing` are
    the prerequisites that it lacks. With `cancel_reason`, the write sets the node's own cancel flag.
    """
    wait = find_outside_wait(node, state, missing)
    return NodeRecord(
        index=node.index,
        node_id=node.node_id,
        status=state.status,
        epoch=state.epoch,
        next_retry_at=state.next_retry_at,
        last_error=state.last_error,
        skip_reason=state.skip_reason,
        marker=pulled,
        after_finish=state.status is NodeStatus.FAILED and state.reason_code == reason_codes.UPSTREAM_FAILED,
        cancel_reason=cancel_reason,
        wait=wait and wait.began(state.waits_since),
        held_until=state.held_until,
        reason_code=state.reason_code if state.status is NodeStatus.FAILED else None,
        decided=wait is None and _may_have_waited(node, state),
    )


def _may_have_waited(node: Node, state: NodeState) -> bool:
    """Return whether the document may say what a node waits for, although it does not wait for that any more."""
    if not state.status.ended:
        return bool(node.prerequisites) and state.status in (NodeStatus.QUEUED, NodeStatus.DEFERRED)
    return bool(
        node.hold_sec is not None or node.approval or node.delay or node.prerequisites or state.generation
    )


def pulled_nodes(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the ids of the nodes whose artifacts other nodes pull."""
    return frozenset(source for node in nodes for source in node.pulls_from)


def split_record(record: RecordTask) -> list[RecordTask]:
    """Split `record` into records of at most REPORT_BYTES; return it unchanged if it fits.

    When it is split, failed nodes come first, and only the first part has the cancel reason.
    """
    if _is_clearly_small(record.nodes):
        return [record]
    remaining = REPORT_BYTES - json_size(without_defaults(replace(record, nodes=[])))
    if sum(map(_measure_record, record.nodes)) <= remaining:
        return [record]
    ordered = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
    parts = split_by_size(ordered, _measure_record, remaining)
    return [
        replace(
            record,
            nodes=nodes,
            cancel_reason=None if number else record.cancel_reason,
            actions=ActionRecord() if number else record.actions,
        )
        for number, nodes in enumerate(parts)
    ]


def _is_clearly_small(nodes: Sequence[NodeRecord]) -> bool:
    """Return whether the nodes fit by a quick upper estimate. Most writes then need no exact measurement."""
    characters = sum(len(node.node_id) + len(node.last_error or "") for node in nodes)
    return _FIELDS_BYTES * len(nodes) + _MAX_BYTES_PER_CHARACTER * characters < REPORT_BYTES // 2


def _measure_record(node: NodeRecord) -> int:
    return json_size(without_defaults(node)) + 1


def fit_into_close(nodes: Sequence[NodeRecord]) -> bool:
    """Return whether the close can carry these nodes. If not, the workflow writes them before."""
    return _is_clearly_small(nodes) or sum(map(_measure_record, nodes)) <= REPORT_BYTES // 2
