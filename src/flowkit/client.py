"""A client that starts, awaits, lists and cancels tasks; a thin layer over Temporal's own client."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from temporalio import exceptions as temporal
from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import (
    Priority,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import limits, products, reason_codes
from flowkit.actions.changed_nodes import changeable
from flowkit.actions.plans import TaskSnapshot, result_of
from flowkit.actions.preconditions import check_run, check_state, state_of
from flowkit.actions.records import PREVIEW_QUERY
from flowkit.actions.reruns import changed_nodes, check_keeps, choose_reruns, kept_sources, plan_rerun
from flowkit.actions.scopes import Pauses, children_of
from flowkit.actions.table import parse_action
from flowkit.activities.params_checks import ParamsChecks
from flowkit.adapters.role_contracts import RoleContracts
from flowkit.adapters.tasks.fields import SCHEDULED_AT, graph_of, input_digest, new_task, owner, read_times
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.adapters.tasks.stored_graphs import StoredGraphs, pack_task, unpack_task
from flowkit.attempt.pollers import bridged_problems
from flowkit.attempt.workflows import (
    ABSENT,
    QUERY_SEC,
    Found,
    WorkflowState,
    is_absent,
    list_latest,
    look_up,
    query,
    read_input_digest,
    read_marker,
)
from flowkit.connection import Namespace
from flowkit.errors import (
    ActionRejected,
    ActionUnanswered,
    ConfigError,
    FlowKitError,
    RejectionCause,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
    TaskIdTaken,
    TaskStillOpen,
    UnknownTask,
)
from flowkit.graph.contracts import data_edges
from flowkit.graph.params import complete_params
from flowkit.graph.scheduled import Nominal, evaluate_params, format_nominal, nominal_fields, nominal_of
from flowkit.graph.submission import convert_to_json, is_large, validate_input
from flowkit.graph.validation import normalized, raise_if, unknown_function
from flowkit.models import (
    NodeState,
    NodeStatus,
    Rerun,
    SkipReason,
    TaskResult,
    TaskStatus,
    temporal_names,
)
from flowkit.models.ownership import (
    INPUT_MEMO,
    Owner,
    OwnerKind,
    belongs_here,
    may_lack_marker,
    task_owner,
)
from flowkit.models.waits import OUTSIDE
from flowkit.text import clean, names, one_line, printed, shown, truncate
from flowkit.validation.arguments import (
    check_wait,
    choice_problem,
    moment_problem,
    new_task_id_problem,
    require,
    task_id_problem,
    whole_problem,
)
from flowkit.validation.json_keys import EqualKeys, to_json_types
from flowkit.workflows.display.task_status import pipeline_name
from flowkit.workflows.scheduling.scheduler import Scheduler
from flowkit.workflows.state_codec import input_of, is_stored, rerun_input, stored_in
from flowkit.workflows.task import Task

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from temporalio.client import (
        Client,
        WorkflowExecution,
        WorkflowExecutionDescription,
        WorkflowHandle,
    )

    from flowkit.actions.plans import Plan
    from flowkit.adapters.tasks.queries import TimedTask
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.graph.contracts import DataEdge
    from flowkit.models import Graph
    from flowkit.models.admission import Admission
    from flowkit.products import PendingTask, Submissions

__all__ = [
    "TaskCancelled",
    "TaskCatalog",
    "TaskClient",
    "TaskFailed",
    "TaskStillOpen",
    "TaskSummary",
    "UnknownTask",
]

_logger = logging.getLogger("flowkit.client")

_SCHEDULED_AT = SearchAttributeKey.for_datetime(temporal_names.SCHEDULED_START_TIME)
_SCHEDULED_BY = SearchAttributeKey.for_keyword(temporal_names.SCHEDULED_BY_ID)
_INSERT_TRIES = 3
_MOST_SKIPPED = 2**31 - 1
_WARNING_CHARS = 300
_WARNINGS = 1_000
"""The number of logged warnings that a client remembers."""
_LONGEST_WAIT_SEC = 10 * 365 * 24 * 3600.0
_CONTRACTS_SEC = 1.0
"""How long a submission or a rerun waits for what the workers announce about their roles."""
_SOURCES = 20
"""For how many nodes a rerun compares a stored batch with the type of the results."""
_CLOSING_SEC = 30.0
"""How long a rerun waits until the workflow of the ended run has closed, and how often it looks."""
_CLOSING_LOOK_SEC = 0.1
_ENDING_SEC = 60.0
"""How long a rerun waits for a task that is ending, whose attempts have `cancel_grace_sec` to stop."""
_UPDATE_PAUSES_SEC = (0.2, 0.4, 0.8, 1.6)
"""Seconds between the tries of an update. A run that continues as new may end while an update reaches it."""
_PREVIEW_TRIES = 2
_UNANSWERED = (
    RPCStatusCode.FAILED_PRECONDITION,
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
)
"""Errors after which it is unknown whether an update was applied: its workflow task has failed, or no
answer arrived."""
_PENDING_LOOK_SEC = 0.5
"""How often a result looks whether a task that waits for admission has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSummary:
    """One task in a list, as its task document describes it."""

    task_id: str
    status: TaskStatus
    name: str | None = None
    """`params.pipeline_name`, else the graph's name."""
    started_at: str | None = None
    """When the task was created, as ISO 8601 text in UTC."""
    finished_at: str | None = None
    seconds: float | None = None
    """How long its latest run took, or has been open when the list was read."""
    total_seconds: float | None = None
    """The same since its creation: with all earlier runs, and the time between them."""
    reason: str | None = None
    """Why the task failed or was cancelled."""


class TaskCatalog(TaskQueries):
    """Queries on the `tasks` collection. They raise StoreUnavailable when MongoDB does not respond."""

    async def list_tasks(
        self,
        status: str | None = None,
        limit: int = 50,
        *,
        waits: str | None = None,
        name: str | None = None,
        since: float | None = None,
        ended_since: float | None = None,
        id_prefix: str | None = None,
        skip: int = 0,
    ) -> list[TaskSummary]:
        """Return up to `limit` tasks, newest first: those with `status`, or all if it is None.

        With `waits`, return only tasks with a node that waits for something outside the task: `decision` for a person,
        who decides about a held failure or an approval, and `event` for prerequisites. With `name`, return only those
        of this name; with `since` or `ended_since`, times in seconds since the epoch, only those that have started
        or ended then or later; with `id_prefix`, only those whose id begins so. `skip` is the number of newer tasks
        to leave out.

        Raise ConfigError for an unknown status or wait, for a limit outside 1 to 10,000 (`limits.LIST_TASKS`), and for
        a time or a number to skip that MongoDB cannot read.
        """
        if status is not None:
            require(choice_problem(status, "status", [each.value for each in TaskStatus]))
        if waits is not None:
            require(choice_problem(waits, "waits", [each.value for each in OUTSIDE]))
        require(
            whole_problem(limit, "limit", 1, limits.LIST_TASKS),
            whole_problem(skip, "skip", 0, _MOST_SKIPPED),
            moment_problem(since, "since"),
            moment_problem(ended_since, "ended_since"),
        )
        found = await self.newest(
            status,
            limit,
            waits=waits,
            name=name,
            since=since,
            ended_since=ended_since,
            id_prefix=id_prefix,
            skip=skip,
        )
        return [summary for document in found if (summary := make_summary(document)) is not None]


def make_summary(document: dict[str, Any]) -> TaskSummary | None:
    """Return the summary of a task; None for a document that no FlowKit of this version has written.

    One such document must not hide the others.
    """
    try:
        graph, params = document.get("graph") or {}, document.get("params") or {}
        times, now = read_times(document), time.time()
        return TaskSummary(
            task_id=document["id"],
            status=TaskStatus(document["status"]),
            name=pipeline_name(_text(graph.get("name")), params),
            started_at=_text(document.get("started_at")),
            finished_at=_format_time(document.get("finished_at")),
            seconds=times.run_seconds(now) if times else None,
            total_seconds=times.total_seconds(now) if times else None,
            reason=_text(document.get("reason")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _logger.warning(
            "lists omit task %.200r, whose document cannot be read: %r", document.get("id"), error
        )
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _format_time(moment: datetime | None) -> str | None:
    """Return a stored date as ISO 8601 text. Stored dates are in UTC, with or without a time zone."""
    return None if moment is None else (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


class Start(Enum):
    """What a call that starts a workflow has found."""

    STARTED = "started"
    RUNS = "runs"
    HAS_ENDED = "has ended"


class StartedTask(NamedTuple):
    """The workflow of a task, as a call that starts it has found it."""

    start: Start
    digest: Mapping[str, str] = MappingProxyType({})
    """The hashes of the input with which the task started, from its memo; empty if it has none."""


class TaskClient:
    """Starts, awaits, lists and cancels the tasks of one deployment."""

    def __init__(
        self,
        client: Client,
        tasks: TaskStore,
        *,
        queue: str,
        max_nodes: int = limits.MAX_NODES,
        external_roles: Collection[str] = (),
        any_queue: bool = False,
    ) -> None:
        """Serve the tasks of a queue.

        With `any_queue`, tasks of other queues that do not say whose they are count, too.
        """
        self._any_queue = any_queue
        self._client = client
        self._tasks = tasks
        self._queue = queue
        self._max_nodes = max_nodes
        self._external_roles = frozenset(external_roles)
        self._catalog = TaskCatalog(tasks.database)
        self._namespace = Namespace(client)
        self._warned: set[str] = set()
        """The warnings about graphs that this client has logged."""
        self._params = ParamsChecks()
        self._contracts = RoleContracts(tasks.database, queue)
        self._submissions: Submissions | None = None
        """The product that starts tasks later, once it was needed."""

    @property
    def database(self) -> Any:
        """The database of the tasks."""
        return self._tasks.database

    @property
    def has_admission(self) -> bool:
        """Whether an installed product has an admission queue."""
        return self._find_submissions() is not None

    @property
    def temporal(self) -> Client:
        """The client of Temporal."""
        return self._client

    async def create_task(
        self,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        task_id: str | None = None,
        functions: Collection[str] | None = None,
    ) -> str:
        """Start a task and return its id. If a task with this id runs or has finished, leave it unchanged.

        Raise TaskIdTaken, which names what differs, if that task started with other params or another graph. Raise
        GraphError if the graph, the params or the id is invalid. The caller's objects are not changed.
        Large graphs and params (docs/limits.md) are stored in MongoDB first; raise StoreUnavailable if that
        fails. Once the workflow has started, MongoDB errors do not fail this call, because the workflow
        writes the task document as well.
        """
        is_new = task_id is None
        task_id = str(uuid.uuid4()) if task_id is None else task_id
        _check_new_id(task_id)
        given, edges = await self._convert(task_id, params, graph, functions)
        own = await asyncio.to_thread(input_digest, given["params"], given["graph"])
        if not is_new:
            with suppress(StoreUnavailable):  # a new task starts all the same
                await self._compare(task_id, own)
        try:
            workflow_input = await self._checked_input(task_id, given)
        except StoreUnavailable:
            if is_new or not await self._has_started(task_id, own):
                raise
            return task_id
        reuse = WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY
        started = await self._start(task_id, given, own, workflow_input, reuse, Priority.default, None)
        if started.start is Start.STARTED or await self._lacks_document(
            task_id, own, workflow_input, started
        ):
            await self._write_document(task_id, given, edges)
        if started.start is Start.HAS_ENDED:
            _logger.info("task %s has already finished; it does not run again", task_id)
        return task_id

    async def _compare(self, task_id: str, own: Mapping[str, str]) -> bool:
        """Return whether there is a document of the task. Raise TaskIdTaken if it started with another input."""
        stored = await self._catalog.input_digest(task_id)
        if stored is not None:
            _check_same(task_id, stored, own)
        return stored is not None

    async def _has_started(self, task_id: str, own: Mapping[str, str]) -> bool:
        """Return whether Temporal knows that a task with this id and this input runs or has finished.

        Raise TaskIdTaken if a task with this id started with another input, or belongs to another deployment.
        """
        looked_up = await look_up(self._client, task_id)
        if looked_up.description is None:
            return False
        await self._check_owner(task_id, looked_up, None)
        digest = await read_input_digest(looked_up.description)
        _check_same(task_id, digest, own)
        finished = looked_up.description.status is WorkflowExecutionStatus.COMPLETED
        return bool(digest) and (finished or looked_up.state is WorkflowState.OPEN)

    async def _lacks_document(
        self, task_id: str, own: Mapping[str, str], workflow_input: dict[str, Any], found: StartedTask
    ) -> bool:
        """Return whether an existing task runs with this input and has no document yet.

        Raise TaskIdTaken if it started with another input. Raise StoreUnavailable if only the document knows its input.
        """
        _check_same(task_id, found.digest, own)
        try:
            if await self._compare(task_id, own):
                return False
        except StoreUnavailable:
            if found.digest:
                return False
            raise
        runs = found.start is Start.RUNS
        if found.digest:
            return runs
        first = await self._read_input(task_id)
        if isinstance(first, dict) and isinstance(first.get("graph"), dict):
            _check_same(task_id, input_digest(first.get("params") or {}, first["graph"]), own)
            return runs
        return runs and bool(first == workflow_input)

    async def _read_input(self, task_id: str) -> Any:
        """Return the input of the latest run of a workflow; None if it cannot be read."""
        async for event in self.handle(task_id).fetch_history_events(page_size=1):
            payloads = event.workflow_execution_started_event_attributes.input.payloads
            with suppress(Exception):  # another converter wrote it
                return (await self._client.data_converter.decode(payloads))[0]
            break
        return None

    async def start_task(
        self,
        task_id: str,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        owner: Owner,
        functions: Collection[str] | None = None,
        reuse: WorkflowIDReusePolicy = WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
        priority: Priority = Priority.default,
        nominal: Nominal | None = None,
    ) -> bool:
        """Start a task for an owner. Return False if the owner has started it before, and it has ended.

        A task of the owner that is open stays as it is. Raise TaskIdTaken if another one has started a task
        with this id. By default, a task that has failed or was cancelled starts again; `reuse` can prevent
        it. With `priority`, Temporal's task queues prefer the task to others, or treat it fairly, where the
        server can. With `nominal`, the task is as one that this schedule has started.
        """
        _check_new_id(task_id, owner.kind, nominal)
        given, edges = await self._convert(task_id, params, graph, functions)
        own = await asyncio.to_thread(input_digest, given["params"], given["graph"])
        workflow_input = await self._checked_input(task_id, given)
        started = await self._start(
            task_id, given, own, workflow_input, reuse, priority, owner, nominal=nominal
        )
        if started.start is not Start.HAS_ENDED:
            await self._write_document(task_id, given, edges, nominal)
        return started.start is not Start.HAS_ENDED

    async def prepare_scheduled(
        self, name: str, *, params: dict[str, Any], graph: dict[str, Any], at: datetime
    ) -> dict[str, Any]:
        """Return the input of the tasks of a schedule. Graphs and params that are too large for it are stored.

        `at` is a nominal time, with which the params are checked. Raise GraphError if graph, params or the name, which
        begins the ids of the tasks, is invalid.
        """
        nominal = format_nominal(at)
        task_id = f"{name}-{nominal}"
        _check_new_id(task_id, OwnerKind.SCHEDULE)
        raw = convert_to_json("params", {} if params is None else params)
        completed = await asyncio.to_thread(complete_params, graph, raw, of_schedule=True)
        evaluated = await asyncio.to_thread(evaluate_params, completed, nominal)
        given, _ = await self._convert(task_id, evaluated, graph, None)
        return await self._checked_input(task_id, {**given, "params": raw}, schedule_id=name)

    async def read_scheduled(self, name: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return the graph and params in the input of the tasks of a schedule; None if MongoDB has lost them."""
        if not is_stored(given):
            return {"params": given.get("params") or {}, "graph": given.get("graph") or {}}
        stored, graphs = stored_in(given), StoredGraphs(self._tasks.database)
        parts = [await graphs.part(name, stored, part) for part in range(stored.parts)]
        if None in parts:
            return None
        return await asyncio.to_thread(unpack_task, b"".join(part for part in parts if part is not None))

    async def timed_tasks(
        self, spans: Mapping[str, tuple[datetime, datetime]], most: int
    ) -> dict[str, list[TimedTask]]:
        """Return the tasks of schedules, by name, whose nominal time is within a span: at least the latest `most`."""
        return await self._catalog.timed_tasks(spans, most)

    async def submit_task(
        self,
        admission: Admission,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        task_id: str | None = None,
        functions: Collection[str] | None = None,
        nominal: Nominal | None = None,
    ) -> str:
        """Submit a task to the admission queue and return its id. A dispatcher starts it when it is its turn.

        If the user has submitted a task with this id already, leave that unchanged. Raise TaskIdTaken if
        another one has used the id, AdmissionRejected if a limit is reached, GraphError if graph, params or
        id is invalid, StoreUnavailable, and ConfigError, also if no installed product has such a queue. With
        `nominal`, the task will be as one that this schedule has started.
        """
        submissions = self._find_submissions()
        if submissions is None:
            raise products.missing("the admission queue", "admission")
        task_id = str(uuid.uuid4()) if task_id is None else task_id
        _check_new_id(task_id, nominal=nominal)
        given, edges = await self._convert(task_id, params, graph, functions)
        await submissions.submit(admission, task_id, {**given, **nominal_fields(nominal)})
        await self._warn_of_contracts(task_id, edges)
        return task_id

    def _find_submissions(self) -> Submissions | None:
        if self._submissions is None:
            self._submissions = products.submissions(self._tasks.database, self._queue)
        return self._submissions

    async def _convert(
        self,
        task_id: str,
        params: dict[str, Any],
        graph: dict[str, Any],
        functions: Collection[str] | None,
    ) -> tuple[dict[str, Any], tuple[DataEdge, ...]]:
        """Return graph and params as JSON values, with default values, and the edges over which data flows.

        Raise GraphError if they are invalid.
        """
        own_params = {} if params is None else convert_to_json("params", params)
        given = {"params": own_params, "graph": convert_to_json("graph", graph)}
        given["params"] = await asyncio.to_thread(complete_params, given["graph"], own_params)
        edges = await asyncio.to_thread(self._check, task_id, given, functions)
        await self._params.check(given["graph"], given["params"])
        return given, edges

    def _check(
        self, task_id: str, given: dict[str, Any], functions: Collection[str] | None
    ) -> tuple[DataEdge, ...]:
        graph = validate_input(task_id, given, max_nodes=self._max_nodes, external_roles=self._external_roles)
        self._warn(task_id, graph.warnings)
        if functions is not None:
            problems = [unknown_function(node, functions) for node in given["graph"]["nodes"]]
            raise_if([problem for problem in problems if problem])
        return data_edges(graph)

    async def _warn_of_contracts(self, task_id: str, edges: tuple[DataEdge, ...]) -> None:
        """Warn of edges between roles whose announced types do not fit. Call it when MongoDB has just responded."""
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(_CONTRACTS_SEC):
                self._warn(task_id, await self._contracts.warnings(edges))

    async def _notes_of_stored(self, task_id: str, sources: Mapping[str, str]) -> list[str]:
        """Return a note about each node whose stored batches have fields that the type of its results lacks now.

        The nodes that read them would get the defaults of the other fields. `sources` are the roles of the nodes.
        """
        notes = []
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(_CONTRACTS_SEC):
                for node_id, role in [*sources.items()][:_SOURCES]:
                    meta = await self._catalog.any_meta(task_id, node_id)
                    if meta and (fields := await self._contracts.unknown_fields(role, meta)):
                        notes.append(
                            f"the stored batches of node {printed(node_id)} have {names(fields)}, which the results of "
                            f"role {printed(role)} lack now, so the nodes that read them do not get it: run "
                            f"{printed(node_id)} again as well, or let the type read the old name"
                        )
        return notes

    def _warn(self, task_id: str, warnings: Iterable[str]) -> None:
        """Log each warning once, because many tasks have the same graph."""
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _logger.warning("task %s: %s", task_id, warning)
        if len(self._warned) > _WARNINGS:
            self._warned.clear()

    async def _checked_input(
        self, task_id: str, given: dict[str, Any], *, schedule_id: str = ""
    ) -> dict[str, Any]:
        """Return the input of the workflow. If graph and params are too large for it, store them and refer to them.

        Raise GraphError if the graph may not have a role that a bridge serves now.
        """
        raise_if(await bridged_problems(self._client, self._queue, given["graph"]))
        if not is_large(given):
            return given
        content = await asyncio.to_thread(pack_task, given)
        owner = {
            "namespace_id": await self._namespace.id(),
            "database_id": await self._tasks.database_id(),
            "schedule_id": schedule_id,
        }
        return input_of(await StoredGraphs(self._tasks.database).put(task_id, content, **owner))

    async def _start(
        self,
        task_id: str,
        given: dict[str, Any],
        digest: dict[str, str],
        workflow_input: dict[str, Any],
        reuse: WorkflowIDReusePolicy,
        priority: Priority,
        owner: Owner | None,
        *,
        nominal: Nominal | None = None,
    ) -> StartedTask:
        """Start the workflow, unless it runs, or has ended and is not to start again.

        Raise TaskIdTaken if the workflow with this id belongs to another deployment or, with `owner`, to another owner.
        """
        marker = owner or await self._new_marker(task_id)
        graph_name = given["graph"].get("name")
        name = pipeline_name(graph_name if isinstance(graph_name, str) else None, given["params"])
        try:
            await self._client.start_workflow(
                temporal_names.TASK,
                workflow_input,
                id=task_id,
                task_queue=self._queue,
                id_reuse_policy=reuse,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                static_summary=truncate(name, 100) if name else None,
                priority=priority,
                memo=_memo(marker, digest),
                search_attributes=_schedule_attributes(nominal),
            )
        except WorkflowAlreadyStartedError:
            found = await look_up(self._client, task_id)
            await self._check_owner(task_id, found, owner)
            start = Start.RUNS if found.state is WorkflowState.OPEN else Start.HAS_ENDED
            return StartedTask(start, await read_input_digest(found.description) if found.description else {})
        except RPCError as error:
            error.add_note(
                f"task {task_id!r} may have started anyway: call again with task_id={task_id!r}, which starts it "
                "only if it has not started"
            )
            raise
        return StartedTask(Start.STARTED)

    async def deployment(self) -> str:
        """Return the id of the database, which distinguishes deployments in one namespace. Raise StoreUnavailable."""
        return await self._tasks.database_id()

    async def _new_marker(self, task_id: str) -> Owner | None:
        """Return the marker of a new task; None while MongoDB does not respond, or refuses the id of the database."""
        with suppress(FlowKitError):
            return task_owner(task_id, await self.deployment())
        return None

    async def _check_owner(self, task_id: str, found: Found, owner: Owner | None) -> None:
        """Raise TaskIdTaken if a workflow belongs to another deployment or, with `owner`, to another owner."""
        if found.description is not None and not await self._is_own(task_id, found.description, owner):
            raise TaskIdTaken(
                f"task id {task_id!r} belongs to a workflow that "
                + ("another deployment in this namespace" if owner is None else "something else")
                + " has started; choose another id"
            )

    async def look_up(
        self, task_id: str, owner: Owner | None = None, *, rpc_timeout: timedelta | None = None
    ) -> Found:
        """Return the latest run of a task. A workflow of another deployment counts as absent.

        With `owner`, a workflow of any other owner counts as absent. Raise RPCError if Temporal does not know, or
        not within `rpc_timeout`, and StoreUnavailable if it is not known whose workflow it is, because MongoDB does not
        respond.
        """
        require(task_id_problem(task_id))
        found = await look_up(self._client, task_id, rpc_timeout=rpc_timeout)
        own = found.description is None or await self._is_own(task_id, found.description, owner)
        return found if own else ABSENT

    async def foreign_workflows(self, task_ids: Sequence[str]) -> dict[str, WorkflowState]:
        """Return which of these ids of tasks a workflow has that is no task of this deployment, and its state.

        The latest run of each id counts. A workflow that has just started may be absent.
        """
        found = await list_latest(self._client, task_ids)
        return {
            task_id: WorkflowState.CLOSED if each.close_time else WorkflowState.OPEN
            for task_id, each in found.items()
            if not await self._is_own(task_id, each, None)
        }

    async def _is_own(self, task_id: str, description: WorkflowExecution, owner: Owner | None) -> bool:
        """Return whether a workflow is a task of this deployment or, with `owner`, the workflow of that owner."""
        marker = await read_marker(description)
        if owner is not None:
            return marker == owner
        if description.workflow_type != temporal_names.TASK:
            return False
        # The engines of one queue use the same database.
        on_own_queue = self._any_queue or description.task_queue == self._queue
        if marker is None:
            scheduled_by = description.typed_search_attributes.get(_SCHEDULED_BY)
            return on_own_queue and may_lack_marker(task_id, scheduled_by)
        try:
            return belongs_here(task_id, marker, await self.deployment())
        except StoreUnavailable:
            if on_own_queue:
                return True
            raise

    async def _write_document(
        self,
        task_id: str,
        given: dict[str, Any],
        edges: tuple[DataEdge, ...],
        nominal: Nominal | None = None,
    ) -> None:
        """Write the task document right away. The task has already started, so an error here is only logged.

        Warn of its edges, unless MongoDB does not respond.
        """
        [outcome] = await asyncio.gather(self._insert(task_id, given, nominal), return_exceptions=True)
        if isinstance(outcome, BaseException):
            _logger.warning(
                "task %s is running, but its document does not exist yet: %s", task_id, _format_cause(outcome)
            )
        else:
            await self._warn_of_contracts(task_id, edges)

    async def _insert(self, task_id: str, given: dict[str, Any], nominal: Nominal | None) -> None:
        """Insert the task document. The workflow inserts it too, so this only makes the task visible earlier."""
        namespace_id, at = await self._namespace.id(), time.time()
        scheduled_at = None if nominal is None else nominal.text
        error: FlowKitError | None = None
        for _ in range(_INSERT_TRIES):
            try:
                database_id = await self._tasks.database_id()
                ids = owner(namespace_id, database_id)
                document = new_task(
                    task_id, given["params"], given["graph"], at, scheduled_at=scheduled_at, **ids
                )
                return await self._tasks.insert_task(document)
            except StoreUnavailable as unavailable:
                error = unavailable
        if error:
            raise error

    async def find_pending(self, task_id: str) -> PendingTask | None:
        """Return how a task waits for admission, or what became of its request; None if it was not submitted.

        Raise StoreUnavailable.
        """
        submissions = self._find_submissions()
        return None if submissions is None else await submissions.find(task_id)

    async def status_of(self, task_id: str) -> TaskStatus | None:
        """Return the status in the document of a task of this namespace; None if there is none.

        Raise StoreUnavailable.
        """
        found = await self._catalog.status(task_id, namespace_id=await self._namespace.id())
        return None if found is None else TaskStatus(found)

    async def find_ended(self, task_ids: Collection[str]) -> list[str]:
        """Return which of these tasks have ended, by their documents. Raise StoreUnavailable."""
        return await self._catalog.ended(task_ids)

    async def cancel_task(
        self, task_id: str, *, reason: str = reason_codes.USER_REQUEST, if_state: str | None = None
    ) -> bool:
        """Request that a task stop, without waiting for it. Return False if it has ended or does not exist.

        A task that waits for admission then ends without starting. FlowKit stores `reason` in the task
        document and cuts it to 1,000 characters. Raise ActionRejected if `if_state` is that of another run
        (`preconditions.run_of`), and StoreUnavailable if Temporal does not know the task and MongoDB does not
        respond.
        """
        if await self.cancel_workflow(task_id, reason=reason, if_state=if_state):
            return True
        found = await self.look_up(task_id)
        submissions = self._find_submissions()
        if found.state is not WorkflowState.ABSENT or submissions is None:
            return False
        check_run(if_state, found.first_run_id)
        return await submissions.cancel(task_id, cancel_reason(reason))

    async def cancel_workflow(
        self,
        task_id: str,
        *,
        reason: str = reason_codes.USER_REQUEST,
        owner: Owner | None = None,
        if_state: str | None = None,
    ) -> bool:
        """Request that the workflow of a task stop.

        Return False if it has ended, does not exist or is not of the owner. Raise ActionRejected as `cancel_task` does.
        """
        why = cancel_reason(reason)
        found = await self.look_up(task_id, owner)
        if found.state is not WorkflowState.OPEN or found.description is None:
            return False
        check_run(if_state, found.first_run_id)
        try:
            await self._handle_of(found.description).cancel(reason=why)
        except RPCError as error:
            if not is_absent(error):
                raise
            return False
        return True

    def _handle_of(self, description: WorkflowExecutionDescription) -> WorkflowHandle[Task, TaskResult]:
        """Return a handle that reaches only the workflow that was looked up, and not a later one with the same id."""
        first_run_id = description.raw_description.workflow_execution_info.first_run_id
        return self._client.get_workflow_handle_for(
            Task.run, description.id, first_execution_run_id=first_run_id or None
        )

    async def act(
        self,
        task_id: str,
        name: str,
        given: Mapping[str, Any],
        update_id: str | None = None,
        *,
        wait_sec: float | None = None,
    ) -> dict[str, Any]:
        """Apply an action to a running task, and return its revision, the affected nodes and notes.

        `given` is the input of the action (see `flowkit.models.actions`). A call that is repeated with the same
        `update_id` is applied once. If Temporal does not answer, or the run ends just then to continue as new, the
        update is sent again with the same id.

        Raise ActionRejected, which says why and what is allowed, if the task rejects the action or has ended, and
        UnknownTask if it does not exist. The action may still be applied after two other errors:
        ActionUnanswered, if no engine applies it within `wait_sec` seconds, and RPCError, if Temporal does
        not respond.
        """
        parse_action(name, {**given})
        _check_keys(name, given)
        handle = await self._find_open(task_id, name)
        try:
            async with asyncio.timeout(_bound_timeout(wait_sec)):
                result = await _send_update(handle, name, given, update_id or str(uuid.uuid4()))
        except TimeoutError:
            raise ActionUnanswered(task_id, name, wait_sec or 0.0) from None
        except WorkflowUpdateFailedError as error:
            raise _read_rejection(error.cause) from None
        except RPCError as error:
            if not is_absent(error):
                raise
            raise _ended(task_id, name) from None
        return result

    async def preview(self, task_id: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an action would affect, in the form of `act`, and the `state` of the affected nodes.

        It changes nothing. An action with the `if_revision` and the `if_state` of its preview is rejected if the task
        is no longer as the preview has shown it.

        Raise ActionRejected and UnknownTask as `act` does. Temporal returns only the text of a rejected
        query, so `cause` does not say why the task rejects the action. Raise ActionUnanswered if no engine answers
        within 10 seconds: only the workflow knows what an action would affect.
        """
        parse_action(name, {**given})
        _check_keys(name, given)
        await self._find_open(task_id, name)
        try:
            result: dict[str, Any] = await query(
                self._client, task_id, PREVIEW_QUERY, name, {**given}, tries=_PREVIEW_TRIES
            )
        except TimeoutError:
            waited = _PREVIEW_TRIES * QUERY_SEC
            raise ActionUnanswered(task_id, name, waited, preview=True) from None
        except WorkflowQueryFailedError as error:
            raise ActionRejected(one_line(error)) from None
        return result

    async def rerun(
        self,
        task_id: str,
        nodes: Sequence[str] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Mapping[str, Mapping[str, Any]] | None = None,
        failed_batches_of: Sequence[str] = (),
        reason: str = "",
        by: str = "",
        if_state: str | None = None,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Start an ended task again: `nodes` and what depends on them, in a new run with the same task id.

        By default, the nodes start that failed, were cancelled, or were skipped for a failure or the end of the task.
        Finished nodes, their artifacts and the variables stay. `params` replaces single params, and
        `inputs` single keys of the `input_inline` of nodes, by node id. `limits` replaces `timeout_sec` and
        single keys of `retry_policy`, of those nodes that start. The nodes in `failed_batches_of` also
        start; they keep their batches, and try those again that they have set aside. `nodes` is then empty
        by default. A call while the task is ending waits up to 60 seconds for the end, and until Temporal
        has closed the ended run.

        Return `{"task_id", "run_seq", "affected": [{"node_id", "from", "to"}], "notes"}`; with `dry_run`,
        start nothing, and return the `state` of these nodes, too. Raise ActionRejected if the task has not ended,
        nothing would start, or the state is not `if_state`, UnknownTask if MongoDB has no document of the task in
        this namespace, and GraphError if the changed params are not valid.
        """
        document = await self._ended_document(task_id)
        _check_keys("rerun", {"params": params, "inputs": inputs})
        given = {"params": {**document["params"], **(params or {})}, "graph": graph_of(document)}
        await asyncio.to_thread(self._check, task_id, given, None)
        parsed = normalized(given["graph"])
        keeps = [*dict.fromkeys(failed_batches_of)]
        chosen, planned, seen = _plan_again(document, parsed, nodes, keeps)
        check_state(if_state, planned, seen)
        again = {parsed.nodes[index].node_id for index in planned.resets}
        limited = {node_id: each for node_id, each in (limits or {}).items() if node_id in again}
        changed = changed_nodes(inputs or {}, limited, parsed.nodes)
        result = result_of(planned, parsed.nodes, 0)
        del result["revision"]
        sources = kept_sources(planned, parsed.nodes, data_edges(parsed))
        result["notes"] += await self._notes_of_stored(task_id, sources)
        if not dry_run:
            rerun = Rerun(
                run_seq=seen.run_seq,
                closed_run_id=document["closed_run_id"],
                nodes=chosen,
                keeps=keeps,
                changed=changed,
                reason=clean(reason),
                by=clean(by),
            )
            nominal = nominal_of(task_id, document.get(SCHEDULED_AT))
            await self._start_again(task_id, given, rerun, nominal=nominal)
        shown = {"state": state_of(planned, seen)} if dry_run else {}
        return {"task_id": task_id, "run_seq": seen.run_seq + 1, **result, **shown}

    async def run_again(
        self,
        task_id: str,
        *,
        params: dict[str, Any],
        graph: dict[str, Any],
        owner: Owner,
        nominal: Nominal,
        reason: str,
    ) -> bool:
        """Start all of an ended task again for an owner, in a new run with these params and this graph.

        Nothing of its earlier runs counts any more. Return False if the task has not ended, or something else has
        started it first. Raise GraphError if graph or params are invalid, and StoreUnavailable.
        """
        given, _ = await self._convert(task_id, params, graph, None)
        document = await self._catalog.ended_task(task_id, namespace_id=await self._namespace.id())
        if document is None or document["finished_at"] is None:
            return False
        if (await self.look_up(task_id, owner)).description is not None:  # The owner has started it before.
            return False
        nodes = normalized(given["graph"]).nodes
        later = frozenset().union(*children_of(nodes))
        rerun = Rerun(
            run_seq=document["run_seq"],
            closed_run_id=document.get("closed_run_id"),
            nodes=[node.node_id for node in nodes if node.index not in later],
            reason=reason,
            replaces=True,
        )
        try:
            await self._start_again(task_id, given, rerun, owner=owner, nominal=nominal)
        except ActionRejected as error:
            if error.cause is not RejectionCause.BUSY:
                raise
            return False
        return True

    async def _ended_document(self, task_id: str) -> dict[str, Any]:
        """Return the document of an ended task. Wait until a task has ended that is ending. Raise as `rerun` does."""
        document = await self._read_document(task_id)
        if _is_ending(document):
            await self._await_close(task_id)
            document = await self._read_document(task_id)
        if _is_ending(document):
            raise ActionRejected(
                f"task {task_id!r} is ending, but has not ended within {_ENDING_SEC:.0f} s: its attempts have "
                "cancel_grace_sec to stop, and an engine must run; try again when `flowkit status` shows its end",
                RejectionCause.BUSY,
            )
        if not _has_ended(document):
            raise ActionRejected(
                f"task {task_id!r} has not ended; retry_node starts a node of an open task again"
            )
        return document

    async def _read_document(self, task_id: str) -> dict[str, Any]:
        document = await self._catalog.ended_task(task_id, namespace_id=await self._namespace.id())
        if document is None:
            raise UnknownTask(task_id, f"MongoDB has no document of task {task_id!r} in this namespace")
        return document

    async def _await_close(self, task_id: str) -> None:
        """Wait until the workflow of a task has closed, or _ENDING_SEC have passed."""
        until = time.monotonic() + _ENDING_SEC
        while time.monotonic() < until:
            if (await self.look_up(task_id)).state is not WorkflowState.OPEN:
                return
            await asyncio.sleep(_CLOSING_LOOK_SEC)

    async def _start_again(
        self,
        task_id: str,
        given: dict[str, Any],
        rerun: Rerun,
        *,
        owner: Owner | None = None,
        nominal: Nominal | None = None,
    ) -> None:
        latest = await self._closed_run(task_id, rerun.closed_run_id)
        marker = owner or (None if latest is None else await read_marker(latest))
        marker = marker or task_owner(task_id, await self.deployment())
        digest = await self._catalog.input_digest(task_id)
        if rerun.replaces:
            digest = await asyncio.to_thread(input_digest, given["params"], given["graph"])
        content = await asyncio.to_thread(pack_task, given)
        ids = {
            "namespace_id": await self._namespace.id(),
            "database_id": await self._tasks.database_id(),
        }
        stored = await StoredGraphs(self._tasks.database).put(task_id, content, **ids)
        try:
            await self._client.start_workflow(
                temporal_names.TASK,
                rerun_input(stored, rerun),
                id=task_id,
                task_queue=self._queue if latest is None else latest.task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                memo=_memo(marker, digest),
                search_attributes=_schedule_attributes(nominal),
            )
        except WorkflowAlreadyStartedError:
            await self._check_owner(task_id, await look_up(self._client, task_id), None)
            raise ActionRejected(
                f"task {task_id!r} runs already; another rerun has started it", RejectionCause.BUSY
            ) from None

    async def _closed_run(self, task_id: str, run_id: str | None) -> WorkflowExecutionDescription | None:
        """Return the latest run of a task; None if Temporal does not know the task.

        Wait until `run_id`, the run that has written the end of the task, has closed: it closes a moment later. Raise
        ActionRejected if no engine closes it in time.
        """
        until = time.monotonic() + _CLOSING_SEC
        while (latest := (await self.look_up(task_id)).description) is not None:
            if latest.close_time is not None or latest.run_id != run_id:
                return latest
            if time.monotonic() > until:
                raise ActionRejected(
                    f"task {task_id!r} has ended, but no engine has closed its workflow within {_CLOSING_SEC:.0f} s; "
                    "check that an engine runs, and try again",
                    RejectionCause.BUSY,
                )
            await asyncio.sleep(_CLOSING_LOOK_SEC)
        return None

    async def _find_open(self, task_id: str, name: str) -> WorkflowHandle[Any, Any]:
        """Return the handle of a task that runs. Raise ActionRejected or UnknownTask."""
        found = await self.look_up(task_id)
        if found.state is WorkflowState.ABSENT:
            raise UnknownTask(task_id)
        if found.state is WorkflowState.CLOSED:
            raise _ended(task_id, name)
        return self.handle(task_id)

    def result(self, task_id: str, timeout: float | None = None) -> Coroutine[Any, Any, TaskResult]:
        """Wait up to `timeout` seconds for a task to end, and return its result.

        Raise TaskFailed or TaskCancelled if the task ended that way, UnknownTask if it does not exist, and
        TaskStillOpen (a TimeoutError) if it is still running. Any client may have started the task, and it
        may still wait for admission.
        """
        return self._result_within(task_id, timeout)

    def wait(self, task_id: str, timeout: float | None = None) -> Coroutine[Any, Any, TaskStatus]:
        """Wait up to `timeout` seconds for a task to end, and return its final status.

        A failed or cancelled task raises no error. Raise UnknownTask if the task does not exist, and
        TaskStillOpen (a TimeoutError) if it is still running.
        """
        return _read_status(self.result(task_id, timeout))

    async def _result_within(self, task_id: str, seconds: float | None) -> TaskResult:
        check_wait(task_id, seconds)
        try:
            async with asyncio.timeout(_bound_timeout(seconds)):
                return await self._result(task_id)
        except TimeoutError:
            raise TaskStillOpen(task_id, seconds or 0.0) from None

    async def _result(self, task_id: str) -> TaskResult:
        """Return the result of the latest run, for whose start a task may still wait."""
        while (result := await self._workflow_result(task_id)) is None:
            pending = await self.find_pending(task_id)
            if pending is None or pending.error is not None:
                return await self._result_of_ended(task_id, pending)
            await asyncio.sleep(_PENDING_LOOK_SEC)
        return result

    async def _workflow_result(self, task_id: str) -> TaskResult | None:
        """Return the result of the latest run; None if Temporal does not know the task.

        A reset ends the awaited run while another run continues the task.
        """
        if (await self.look_up(task_id)).state is WorkflowState.ABSENT:
            return None
        handle = self.handle(task_id)
        while True:
            try:
                return await handle.result(follow_runs=True)
            except WorkflowFailureError as error:
                if not await self._is_running(handle):
                    raise _make_end_error(task_id, error.cause) from None
            except RPCError as error:
                if not is_absent(error):
                    raise
                return None

    async def _result_of_ended(self, task_id: str, pending: PendingTask | None) -> TaskResult:
        """Return the result of a task that Temporal did not know before its request was read, which may
        have ended since.
        """
        if pending is not None and (result := await self._workflow_result(task_id)) is not None:
            return result
        document = await self._catalog.document(task_id)
        if document is None and pending is not None and pending.error is not None:
            raise pending.error
        return _read_result(task_id, document)

    async def _is_running(self, handle: WorkflowHandle[Task, TaskResult]) -> bool:
        return (await look_up(self._client, handle.id)).state is WorkflowState.OPEN

    async def list_tasks(
        self, status: str | None = None, limit: int = 50, *, waits: str | None = None
    ) -> list[TaskSummary]:
        """Return the newest tasks first, as `TaskCatalog.list_tasks` does."""
        return await self._catalog.list_tasks(status, limit, waits=waits)

    def handle(self, task_id: str) -> WorkflowHandle[Task, TaskResult]:
        """Return Temporal's workflow handle for a task. Raise ConfigError if `task_id` is not a valid task id."""
        require(task_id_problem(task_id))
        return self._client.get_workflow_handle_for(Task.run, task_id)


async def _send_update(
    handle: WorkflowHandle[Any, Any], name: str, given: Mapping[str, Any], update_id: str
) -> dict[str, Any]:
    """Return the result of an update. While its result is unknown, send it again with its id: it is applied once."""
    for pause in _UPDATE_PAUSES_SEC:
        try:
            return await _execute_update(handle, name, given, update_id)
        except RPCError as error:
            if error.status not in _UNANSWERED:
                raise
            _logger.debug("%s gets no answer, and is sent again: %s", name, _format_cause(error))
        await asyncio.sleep(pause)
    return await _execute_update(handle, name, given, update_id)


async def _execute_update(
    handle: WorkflowHandle[Any, Any], name: str, given: Mapping[str, Any], update_id: str
) -> dict[str, Any]:
    """Return the result of an update.

    Raise RPCError after a time limit, and CancelledError if the caller was cancelled.
    """
    try:
        result: dict[str, Any] = await handle.execute_update(name, {**given}, id=update_id, result_type=dict)
    except WorkflowUpdateRPCTimeoutOrCancelledError as error:
        raise error.__cause__ or error from None
    return result


async def _read_status(work: Coroutine[Any, Any, TaskResult]) -> TaskStatus:
    try:
        return (await work).status
    except TaskFailed:
        return TaskStatus.FAILED
    except TaskCancelled:
        return TaskStatus.CANCELLED


def _make_end_error(task_id: str, cause: BaseException | None) -> FlowKitError:
    """Return the FlowKit error for a workflow that ended without finishing."""
    match cause:
        case temporal.CancelledError():
            return TaskCancelled(task_id)
        case temporal.ApplicationError():
            return TaskFailed(task_id, cause.message, cause.type or reason_codes.TASK_FAILED)
        case temporal.TerminatedError():
            return TaskFailed(task_id, f"terminated: {cause.message}", reason_codes.TERMINATED)
        case temporal.TimeoutError():
            return TaskFailed(task_id, "its workflow timed out", reason_codes.TIMED_OUT)
    return TaskFailed(task_id, str(cause))


def _read_result(task_id: str, document: dict[str, Any] | None) -> TaskResult:
    """Return the result of a task from its document, or raise its error: Temporal no longer retains the workflow."""
    if document is None:
        raise UnknownTask(task_id)
    status, reason = TaskStatus(document["status"]), document.get("reason")
    if status is TaskStatus.CANCELLED:
        raise TaskCancelled(task_id, reason)
    if status is not TaskStatus.FINISHED:
        raise TaskFailed(task_id, reason or "its workflow no longer exists in Temporal", reason_codes.LOST)
    result = document.get("result") or {}
    return TaskResult(
        task_id=task_id,
        status=status,
        handled_failures=result.get("handled_failures") or [],
        handled_failures_omitted=result.get("handled_failures_omitted") or 0,
    )


def _bound_timeout(seconds: float | None) -> float | None:
    """Return the timeout, capped at a value that every event loop supports."""
    return None if seconds is None else min(seconds, _LONGEST_WAIT_SEC)


def _format_cause(error: BaseException) -> str:
    """Return the error as one short line."""
    text = one_line(clean(str(error)))
    if isinstance(error, StoreUnavailable):
        text = text.partition(" (")[0]
    return truncate(
        text if isinstance(error, FlowKitError) else f"{type(error).__name__}: {text}", _WARNING_CHARS
    )


def _has_ended(document: Mapping[str, Any]) -> bool:
    return document["finished_at"] is not None and document.get("closed_run_id") is not None


def _is_ending(document: Mapping[str, Any]) -> bool:
    """Return whether the attempts of a task stop, because it has failed or was cancelled."""
    return document["finished_at"] is None and (document.get("coordinator") or {}).get("cancelled") is True


def _plan_again(
    document: Mapping[str, Any], graph: Graph, nodes: Sequence[str] | None, keeps: Sequence[str]
) -> tuple[list[str], Plan, TaskSnapshot]:
    """Return the nodes with which a rerun begins, what starts again, and the ended task. Raise ActionRejected."""
    entries = document["graph"]["nodes"]
    states = [_ended_state(each) for each in entries]
    named = None if nodes is None and not keeps else [*(nodes or ()), *keeps]
    chosen = choose_reruns(named, graph.nodes, states)
    _check_failed_batches(keeps, entries)
    planned = plan_rerun(chosen, graph.nodes, states, keeps)
    check_keeps(planned, graph.nodes, states)
    _check_goes_on(graph, states, planned.resets)
    pauses = Pauses(graph.nodes, [])
    ended = TaskSnapshot(nodes=graph.nodes, states=states, pauses=pauses, run_seq=document["run_seq"])
    return chosen, planned, ended


def _check_goes_on(graph: Graph, states: Sequence[NodeState], resets: Collection[int]) -> None:
    """Raise ActionRejected if a failure that a rerun leaves as it is would stop the new run at once."""
    again = [NodeState() if index in resets else state for index, state in enumerate(states)]
    failed = Scheduler(changeable(graph, {}), again).hard_failure
    if failed is not None:
        raise ActionRejected(
            f"node {failed.node_id!r} has failed, and its failure would stop the new run at once; "
            "name it, too, or leave "
            "out the nodes to run all again that did not finish"
        )


def _check_failed_batches(node_ids: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise ActionRejected if one of these nodes has set no batch aside, and has not failed."""
    by_id = {entry["node_id"]: entry for entry in entries}
    for node_id in node_ids:
        entry = by_id[node_id]
        may_have = entry["status"] == NodeStatus.FAILED and entry.get("on_batch_failure") is not None
        if not entry.get("failed_batches") and not may_have:
            raise ActionRejected(f"node {node_id!r} has set no batch aside; name it to run all of it again")


def _ended_state(entry: Mapping[str, Any]) -> NodeState:
    """Return the state of a node in the document of an ended task."""
    status, reason = NodeStatus(entry["status"]), entry.get("skip_reason")
    return NodeState(
        status=status if status.ended else NodeStatus.CANCELLED,
        skip_reason=SkipReason(reason) if reason else None,
        epoch=entry.get("attempt_epoch") or 0,
        generation=entry.get("generation") or 0,
    )


def _check_new_id(task_id: str, kind: OwnerKind = OwnerKind.TASK, nominal: Nominal | None = None) -> None:
    """Raise GraphError if a task that `kind` starts cannot have this id. That of its nominal time always fits."""
    kind = OwnerKind.SCHEDULE if nominal is not None and nominal.task_id == task_id else kind
    raise_if([problem] if (problem := new_task_id_problem(task_id, kind=kind)) else [])


def _memo(marker: Owner | None, digest: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the memo of the workflow of a task."""
    return {**(marker.as_memo() if marker else {}), **({INPUT_MEMO: digest} if digest else {})}


def _schedule_attributes(nominal: Nominal | None) -> TypedSearchAttributes | None:
    """Return the search attributes that Temporal's schedules set."""
    if nominal is None:
        return None
    pairs: list[SearchAttributePair[Any]] = [
        SearchAttributePair(_SCHEDULED_AT, nominal.at),
        SearchAttributePair(_SCHEDULED_BY, nominal.schedule),
    ]
    return TypedSearchAttributes(pairs)


def _check_same(task_id: str, started: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise TaskIdTaken if a task started with an input other than `own`.

    `started` has the hashes of its input; empty if they are not known.
    """
    differ = [name for name, digest in own.items() if started.get(name, digest) != digest]
    if differ:
        names = {"params": "other params", "graph": "another graph"}
        raise TaskIdTaken(
            f"task id {task_id!r} belongs to a task that started with {' and '.join(names[each] for each in differ)}; "
            "choose another id, or pass the same params and graph"
        )


def _check_keys(name: str, given: Mapping[str, Any]) -> None:
    """Raise ActionRejected if JSON would drop a part of the input of an action."""
    try:
        to_json_types({**given})
    except EqualKeys as error:
        raise ActionRejected(f"{name}: {error}", RejectionCause.INVALID) from None
    except (ValueError, RecursionError):
        return  # no JSON at all, which the checks of the single values report


def _read_rejection(error: BaseException) -> ActionRejected:
    """Return the error with which a task has rejected an update."""
    if not isinstance(error, temporal.ApplicationError):
        return ActionRejected(one_line(error))
    known = {each.value: each for each in RejectionCause}
    named = (known[each] for each in error.details if isinstance(each, str) and each in known)
    return ActionRejected(error.message, next(named, RejectionCause.NOT_ALLOWED))


def _ended(task_id: str, name: str) -> ActionRejected:
    return ActionRejected(
        f"task {task_id!r} has ended, so {name} can no longer change it; rerun starts nodes of an ended task again",
        RejectionCause.ENDED,
    )


def cancel_reason(given: str | None) -> str:
    """Return a cancel reason in stored form: valid UTF-8 text of at most 1,000 characters."""
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"reason is {shown(given)}; it must be a string")
    text = clean(given or reason_codes.USER_REQUEST)
    return truncate(text, limits.CANCEL_REASON_CHARS)
