"""The engine's own activities, which open a task, change it, record the state that its workflow reports,
and close it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit.activities.params_checks import ENGINE_SLACK, ParamsChecks
from flowkit.adapters.tasks.fields import estimate_bytes
from flowkit.adapters.tasks.store import is_same_database, latest_attempt, show_database
from flowkit.adapters.tasks.stored_graphs import StoredGraphs, pack_task, unpack_task
from flowkit.attempt.failures import cut, refusal
from flowkit.attempt.storage import complete_end
from flowkit.attempt.supervision import sending_heartbeats
from flowkit.core.instruments import TASKS_OPENED, TASKS_REFUSED
from flowkit.errors import (
    FlowKitError,
    GraphError,
    StoreRefused,
    StoreTooLarge,
    StoreUnavailable,
    TaskIdTaken,
    WrongDeployment,
)
from flowkit.graph.changes import change_graph, change_problems
from flowkit.graph.conditions import condition_problems, has_conditions
from flowkit.graph.params import complete_params
from flowkit.graph.scheduled import evaluate_params
from flowkit.graph.submission import external_problem, is_large, validate_input
from flowkit.graph.validation import normalized, parse_graph, raise_if, too_many_nodes, unknown_function
from flowkit.models import (
    AttemptInput,
    BatchesChecked,
    BatchesSettled,
    CloseTask,
    GraphChange,
    GraphChanged,
    Opened,
    OpenTask,
    ReadStoredGraph,
    RecordTask,
    ResetDone,
    ResetNodes,
    SettleBatches,
    temporal_names,
)
from flowkit.models.columns import unpack
from flowkit.models.ownership import OwnerKind
from flowkit.validation.arguments import reserved_id_problem
from flowkit.validation.storable import storage_problems

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.models import NodeRecord, Settings, StoredGraph

T = TypeVar("T")

_logger = logging.getLogger("flowkit.engine.worker")

_BEAT_SEC = 0.5
"""Seconds between the heartbeats of `record`, `close_task` and `evaluate_conditions`.

If their engine crashes, the missing heartbeats let Temporal retry the call on another engine soon.
"""


_DOCUMENT_PAUSES_SEC = (0, 0.05, 0.1, 0.2)
"""Pauses before the tries to close the document of a rejected task. A client writes it just after it starts
the task."""


async def unknown_namespace() -> str:
    """Return an empty namespace id, for engines that have no Temporal server or cannot get the id from it."""
    return ""


class TaskActivities:
    """The activities that open, change, record and close the tasks of one database."""

    def __init__(
        self,
        *,
        tasks: TaskStore,
        artifacts: ArtifactStore,
        portal: LoopPortal,
        settings: Settings,
        functions: Mapping[str, Any],
        max_nodes: int,
        external_roles: Collection[str] = (),
        namespace_id: Callable[[], Awaitable[str]] = unknown_namespace,
        on_closed: Sequence[Callable[[CloseTask], Awaitable[None]]] = (),
    ) -> None:
        """`on_closed` is called for each task that has closed, after its end is in MongoDB."""
        self._tasks = tasks
        self._artifacts = artifacts
        self._portal = portal
        self._settings = settings
        self._functions = functions
        self._max_nodes = max_nodes
        self._external_roles = external_roles
        self._stored = StoredTasks(tasks)
        self._on_closed = on_closed
        self._namespace_id = namespace_id
        self._params = ParamsChecks(slack=ENGINE_SLACK)

    @property
    def all(self) -> list[Callable[..., Any]]:
        """Return the activities to register with a Temporal worker."""
        return [
            *(self.open_task, self.record, self.close_task, self.read_stored_graph),
            *(self.reset_nodes, self.change_graph, self.check_batches, self.settle_batches),
        ]

    @activity.defn(name=temporal_names.OPEN_TASK)
    async def open_task(self, opening: OpenTask) -> Opened:
        """Insert the task document or take over an existing one. Return the settings that the task keeps."""
        work = self._open(opening, await self._namespace_id())
        if opening.stored is None:
            return await self._run_on_portal(work)
        async with heartbeats():
            return await self._run_on_portal(work)

    @activity.defn(name=temporal_names.READ_STORED_GRAPH)
    async def read_stored_graph(self, read: ReadStoredGraph) -> bytes:
        """Return one part of a stored graph."""
        return await self._run_on_portal(self._stored.read_part(read.task_id, read.stored, read.part))

    @activity.defn(name=temporal_names.RECORD)
    async def record(self, record: RecordTask) -> list[int] | None:
        """Write state transitions and flags of a running task to its document.

        Return the indexes of those of its open nodes that an attempt has finished; None if there are none.
        """
        async with heartbeats():
            return await self._run_on_portal(self._record(record))

    @activity.defn(name=temporal_names.CLOSE_TASK)
    async def close_task(self, close: CloseTask) -> bool:
        """Write the end of a task to its document. Return False if the document does not exist."""
        async with heartbeats():
            return await self._run_on_portal(self._close(close))

    @activity.defn(name=temporal_names.RESET_NODES)
    async def reset_nodes(self, record: ResetNodes) -> ResetDone:
        """Start new generations of nodes in the task document."""
        async with heartbeats():
            return await self._run_on_portal(self._reset(record))

    async def _reset(self, record: ResetNodes) -> ResetDone:
        await check_database(self._tasks, record.task_id, record.deployment)
        return ResetDone(epochs=await self._tasks.reset_nodes(record, self._artifacts))

    @activity.defn(name=temporal_names.CHECK_BATCHES)
    async def check_batches(self, record: SettleBatches) -> BatchesChecked:
        """Return those of the named batches that a node has not set aside."""
        return await self._run_on_portal(self._check_batches(record))

    async def _check_batches(self, record: SettleBatches) -> BatchesChecked:
        await check_database(self._tasks, record.task_id, record.deployment)
        known = await self._artifacts.find_set_aside(latest_attempt(record), record.batch_uids)
        return BatchesChecked(unknown=[uid for uid in record.batch_uids if uid not in known])

    @activity.defn(name=temporal_names.SETTLE_BATCHES)
    async def settle_batches(self, record: SettleBatches) -> BatchesSettled:
        """Skip, or forget, batches that a node has set aside."""
        async with heartbeats():
            return await self._run_on_portal(self._settle(record))

    async def _settle(self, record: SettleBatches) -> BatchesSettled:
        await check_database(self._tasks, record.task_id, record.deployment)
        return BatchesSettled(left=await self._tasks.settle_batches(record, self._artifacts))

    @activity.defn(name=temporal_names.CHANGE_GRAPH)
    async def change_graph(self, change: GraphChange) -> GraphChanged:
        """Validate the changed graph of a running task, and write the change to the task document."""
        namespace_id = await self._namespace_id()
        async with heartbeats():
            return await self._run_on_portal(self._change(change, namespace_id))

    async def _change(self, change: GraphChange, namespace_id: str) -> GraphChanged:
        """Raise GraphError, and write nothing, if the changed graph is not valid."""
        await check_database(self._tasks, change.task_id, change.deployment)
        task = (
            unpack(change.task)
            if change.stored is None
            else await self._stored.load(change.task_id, change.stored)
        )
        graph = change_graph(task["graph"], change.added, {each.index: each.node for each in change.changed})
        changed = {**task, "graph": graph}
        await asyncio.to_thread(self._check_change, change, task["graph"], changed)
        stored = None
        if change.stored is not None or is_large(changed):
            stored = await self._stored.put(change.task_id, changed, namespace_id)
        epochs = await self._tasks.change_graph(change, graph)
        document_bytes = estimate_bytes(task["params"], graph)
        return GraphChanged(epochs=epochs, stored=stored, document_bytes=document_bytes)

    def _check_change(self, change: GraphChange, before: dict[str, Any], changed: dict[str, Any]) -> None:
        """Raise GraphError if a changed graph is not valid, or does not fit a task that has begun with `before`."""
        after = validate_input(
            change.task_id,
            changed,
            max_nodes=self._max_nodes,
            external_roles=self._external_roles,
        )
        replaced = {each.index for each in change.changed}
        raise_if([*change_problems(normalized(before), after, change.added, replaced)])
        nodes = [*(each.node for each in change.changed), *change.added["nodes"]]
        raise_if([each for node in nodes if (each := unknown_function(node, self._functions))])

    async def _run_on_portal(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await self._portal.run(work)
        except FlowKitError as error:
            raise refusal(error) from None

    async def _open(self, opening: OpenTask, namespace_id: str) -> Opened:
        _check_id(opening)
        if opening.stored is not None:
            opening = await self._stored.load_graph(opening, opening.stored)
        given, opening = opening.params, await _own_params(opening)
        try:
            return await self._open_valid(opening, given, namespace_id)
        except GraphError as error:
            await self._close_rejected(opening, namespace_id, error)
            raise

    async def _close_rejected(self, opening: OpenTask, namespace_id: str, error: GraphError) -> None:
        """Close the document of a task with a rejected graph. Wait a moment for a client that is about to write it.

        The sweep closes a document that comes later, or that cannot be closed now. No client writes that of a task of a
        schedule: it is written here, so that lists show the task, and a rerun or a *Reset* can start it.
        """
        if opening.scheduled_at is not None and opening.rerun is None:
            TASKS_REFUSED.add(error.code)
        reason = _format_rejection(error)
        with suppress(FlowKitError):
            if opening.scheduled_at is not None and opening.rerun is None:
                database_id = await self._tasks.database_id()
                await self._tasks.open_rejected(
                    opening, reason, namespace_id=namespace_id, database_id=database_id
                )
                return
            for pause_sec in _DOCUMENT_PAUSES_SEC:
                await asyncio.sleep(pause_sec)
                if await self._tasks.reject_task(opening, reason, namespace_id=namespace_id):
                    return

    async def _open_valid(self, opening: OpenTask, given: dict[str, Any], namespace_id: str) -> Opened:
        """Open a task whose params were `given`, with the expressions of a schedule."""
        stored = await self._own_copy(opening, namespace_id)
        opened = await self._take_over(opening, namespace_id)
        changed = opening.params if stored is None and opening.params is not given else None
        size = estimate_bytes(opening.params, opening.graph)
        TASKS_OPENED.add()
        return replace(opened, document_bytes=size, params=changed, stored=stored)

    async def _own_copy(self, opening: OpenTask, namespace_id: str) -> StoredGraph | None:
        """Store the graph that a schedule has stored for the task itself, which may outlive the schedule.

        Return None for a task whose graph is not stored, or is its own.
        """
        if opening.stored is None or not opening.stored.schedule_id:
            return None
        task = {"graph": opening.graph, "params": opening.params}
        return await self._stored.put(opening.task_id, task, namespace_id)

    async def _take_over(self, opening: OpenTask, namespace_id: str) -> Opened:
        self._check(opening)
        if has_conditions(opening.graph):
            await asyncio.to_thread(_check_conditions, opening.graph)
        await self._params.check(opening.graph, opening.params)
        database_id = await self._tasks.database_id()
        if opening.rerun is not None:
            run_seq, earlier = await self._tasks.open_rerun(
                opening, opening.rerun, namespace_id=namespace_id, database_id=database_id
            )
            if opening.rerun.replaces:
                node_ids = [node["node_id"] for node in opening.graph["nodes"]]
                await self._artifacts.delete_other_nodes(opening.task_id, node_ids)
            return Opened(run_seq=run_seq, settings=self._settings, created_at=opening.at, earlier=earlier)
        try:
            run_seq, epochs = await self._tasks.open_task(
                opening, namespace_id=namespace_id, database_id=database_id
            )
        except StoreRefused:
            raise_if(storage_problems({"params": opening.params, "graph": opening.graph}))
            raise
        return Opened(run_seq=run_seq, settings=self._settings, created_at=opening.at, epochs=epochs)

    def _check(self, opening: OpenTask) -> None:
        """Raise GraphError if the graph exceeds the engine's own limits or names a function it does not have."""
        nodes = opening.graph["nodes"]
        problems = [unknown_function(node, self._functions) for node in nodes]
        problems.append(too_many_nodes(len(nodes), self._max_nodes))
        problems.append(external_problem(opening.graph, self._external_roles))
        if found := [problem for problem in problems if problem]:
            raise GraphError(found)

    async def _record(self, record: RecordTask) -> list[int] | None:
        await check_database(self._tasks, record.task_id, record.deployment)
        finished = await self._tasks.record(record)
        await self._artifacts.mark_ended(record.task_id, record.nodes, record.at)
        return [node.index for node in finished if await self._has_all_ends(record.task_id, node)] or None

    async def _has_all_ends(self, task_id: str, node: NodeRecord) -> bool:
        """Complete the last writes of the attempt that has finished a node. Return False if one of them is lost."""
        attempt = AttemptInput(
            task_id=task_id, node_id=node.node_id, index=node.index, role="", epoch=node.epoch
        )
        return await complete_end(self._artifacts, attempt) is not None

    async def _close(self, close: CloseTask) -> bool:
        await check_database(self._tasks, close.task_id, close.deployment)
        found = await self._end(close)
        await self._artifacts.mark_ended(close.task_id, close.nodes, close.at)
        for follow_up in self._on_closed:
            await _follow_up(follow_up, close)
        return found

    async def _end(self, close: CloseTask) -> bool:
        """Close the task document. Return whether it exists.

        Every task must be able to close, so treat a rejected write as temporary and let Temporal retry it. Only a
        document that is too large is a permanent error.
        """
        try:
            return await self._tasks.close_task(close)
        except StoreTooLarge:
            raise
        except StoreRefused as error:
            raise StoreUnavailable(str(error)) from None


async def _follow_up(call: Callable[[CloseTask], Awaitable[None]], close: CloseTask) -> None:
    """Call what follows the end of a task.

    An error that would come again is logged: it must not fail the workflow of a task that has ended.
    """
    try:
        await call(close)
    except FlowKitError as error:
        if error.retryable:
            raise
        _logger.exception("What follows the end of task %s failed", close.task_id)


def _format_rejection(error: GraphError) -> str:
    """Return the reason in the document of a rejected task, as the sweep would write it from the workflow's failure."""
    refused = refusal(error)
    return cut(f"{refused.type}: {refused.message}")


def _check_id(opening: OpenTask) -> None:
    """Raise GraphError for a task that a client of Temporal has started with the id of another one's task.

    It would take the id from a coming task of a schedule, or pass for one of the past. Nothing is written for it.
    """
    if opening.scheduled_at is not None or opening.rerun is not None:
        return
    if (problem := reserved_id_problem(opening.task_id, "task_id", OwnerKind.FLOW)) is not None:
        _logger.warning("a task that a client of Temporal has started is refused: %s", problem)
        TASKS_REFUSED.add(TaskIdTaken.code)
        raise GraphError([problem])


async def _own_params(opening: OpenTask) -> OpenTask:
    """Return the opening of a task with its own params: the values of a schedule's expressions, and default values.

    A client of FlowKit has added the default values. Raise GraphError if an expression cannot be evaluated.
    """
    if opening.rerun is not None:
        return opening
    params = opening.params
    if opening.scheduled_at is not None:
        params = await asyncio.to_thread(evaluate_params, params, opening.scheduled_at)
    params = await asyncio.to_thread(complete_params, opening.graph, params)
    return opening if params is opening.params else replace(opening, params=params)


def _check_conditions(graph: dict[str, Any]) -> None:
    """Raise GraphError if a condition is not valid. Takes seconds for thousands of conditions."""
    raise_if(condition_problems(graph, normalized(graph)))


def heartbeats() -> AbstractAsyncContextManager[None]:
    """Send heartbeats for the running activity, unless it is a local one."""
    return sending_heartbeats(lambda: _BEAT_SEC)


class StoredTasks:
    """The stored graphs of one database, for the activities of an engine."""

    def __init__(self, tasks: TaskStore) -> None:
        self._tasks = tasks
        self._graphs = StoredGraphs(tasks.database)

    async def read_part(self, task_id: str, stored: StoredGraph, part: int) -> bytes:
        """Return one part of a stored graph.

        Raise an error that Temporal retries if the graph is in another database. Raise GraphError if it was deleted.
        """
        await check_database(self._tasks, task_id, stored.deployment)
        content = await self._graphs.part(task_id, stored, part)
        if content is None:
            missing = f"part {part + 1} of {stored.parts} of the graph of task {task_id!r}"
            remedy = "create the task again, with another id"
            if stored.schedule_id:
                remedy = f"update schedule {stored.schedule_id!r} with its graph and its params"
            raise GraphError([f"{missing} is not in the collection stored_graphs: {remedy}"])
        return content

    async def load(self, task_id: str, stored: StoredGraph) -> dict[str, Any]:
        """Return a stored graph, which was validated before, and its params."""
        return await asyncio.to_thread(unpack_task, await self._read(task_id, stored))

    async def _read(self, task_id: str, stored: StoredGraph) -> bytes:
        return b"".join([await self.read_part(task_id, stored, part) for part in range(stored.parts)])

    async def put(self, task_id: str, task: dict[str, Any], namespace_id: str) -> StoredGraph:
        """Store the graph and params of a task."""
        content = await asyncio.to_thread(pack_task, task)
        return await self._graphs.put(
            task_id, content, namespace_id=namespace_id, database_id=await self._tasks.database_id()
        )

    async def load_graph(self, opening: OpenTask, stored: StoredGraph) -> OpenTask:
        """Return `opening` with the stored graph and params. Raise GraphError if the graph is not valid."""
        task = await asyncio.to_thread(_unpack_valid, await self._read(opening.task_id, stored))
        return replace(opening, graph=task["graph"], params=task["params"])


def _unpack_valid(content: bytes) -> dict[str, Any]:
    """Return the graph and params in a stored graph. Takes a second for 20,000 nodes."""
    task = unpack_task(content)
    parse_graph(task["graph"], max_nodes=None, max_bytes=None)
    return task


async def check_database(tasks: TaskStore, task_id: str, wanted: str) -> None:
    """Raise an error if the task uses a different database. Temporal retries it, since another engine may fit."""
    ours = await tasks.deployment()
    if wanted and not is_same_database(wanted, ours):
        raise ApplicationError(
            f"the document of task {task_id!r} is in {show_database(wanted)}, but this engine uses "
            f"{show_database(ours)}: set the same MONGO_URL and MONGO_DATABASE for all engines of the queue",
            type=WrongDeployment.code,
        )
