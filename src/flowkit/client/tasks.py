"""A client that starts, awaits, lists and cancels tasks; a thin layer over Temporal's own client."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from temporalio import exceptions as temporal
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.common import Priority, WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from flowkit import limits, products, reason_codes
from flowkit.actions.preconditions import check_run
from flowkit.adapters.tasks.fields import input_digest, new_task, owner
from flowkit.adapters.tasks.stored_graphs import StoredGraphs, unpack_task
from flowkit.attempt.workflows import WorkflowState, is_absent, look_up, read_input_digest
from flowkit.client.inputs import TaskInputs
from flowkit.client.steering import TaskSteering
from flowkit.client.workflows import TaskWorkflows, bound_timeout, format_cause, memo_of, schedule_attributes
from flowkit.errors import (
    ConfigError,
    FlowKitError,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
    TaskIdTaken,
    TaskStillOpen,
    UnknownTask,
)
from flowkit.graph.params import complete_params
from flowkit.graph.scheduled import Nominal, evaluate_params, format_nominal, nominal_fields
from flowkit.graph.submission import convert_to_json
from flowkit.graph.validation import raise_if
from flowkit.models import TaskResult, TaskStatus, temporal_names
from flowkit.models.ownership import Owner, OwnerKind
from flowkit.text import clean, shown, truncate
from flowkit.validation.arguments import check_wait, new_task_id_problem
from flowkit.workflows.display.task_status import pipeline_name
from flowkit.workflows.state_codec import is_stored, stored_in

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping
    from datetime import datetime

    from temporalio.client import Client, WorkflowHandle

    from flowkit.adapters.tasks.queries import TimedTask
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.client.catalog import TaskSummary
    from flowkit.graph.contracts import DataEdge
    from flowkit.models.admission import Admission
    from flowkit.products import PendingTask, Submissions
    from flowkit.workflows.task import Task

_logger = logging.getLogger("flowkit.client")

_INSERT_TRIES = 3
_PENDING_LOOK_SEC = 0.5
"""How often a result looks whether a task that waits for admission has started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRun:
    """What the first run of a task starts with."""

    task_id: str
    given: dict[str, Any]
    """Graph and params as JSON, with default values."""
    edges: tuple[DataEdge, ...]
    """The edges of the graph over which data flows."""
    digest: dict[str, str]
    """The hashes of graph and params."""
    owner: Owner | None = None
    """What starts it; None for a task of this deployment."""
    nominal: Nominal | None = None
    """The nominal time, of a task that a schedule has started."""
    reuse: WorkflowIDReusePolicy = WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY
    priority: Priority = Priority.default

    @property
    def name(self) -> str | None:
        """The name of the task."""
        name = self.given["graph"].get("name")
        return pipeline_name(name if isinstance(name, str) else None, self.given["params"])

    def check_same(self, started: Mapping[str, str]) -> None:
        """Raise TaskIdTaken if a task with its id started with another input.

        `started` has the hashes of that input; empty if they are not known.
        """
        differ = [name for name, digest in self.digest.items() if started.get(name, digest) != digest]
        if differ:
            other = {"params": "other params", "graph": "another graph"}
            raise TaskIdTaken(
                f"task id {self.task_id!r} belongs to a task that started with "
                f"{' and '.join(other[each] for each in differ)}; choose another id, or pass the same params and graph"
            )


class StartOutcome(Enum):
    """What a call that starts a workflow has found."""

    STARTED = "started"
    RUNS = "runs"
    HAS_ENDED = "has ended"


class StartedTask(NamedTuple):
    """The workflow of a task, as a call that starts it has found it."""

    start: StartOutcome
    digest: Mapping[str, str] = MappingProxyType({})
    """The hashes of the input with which the task started, from its memo; empty if it has none."""


class TaskClient(TaskWorkflows):
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
        super().__init__(client, tasks, queue, any_queue=any_queue)
        self._inputs = TaskInputs(self, max_nodes=max_nodes, external_roles=external_roles)
        self.steering = TaskSteering(self, self._inputs)
        """Applies actions to running tasks, and starts ended ones again."""
        self._submissions: Submissions | None = None
        """The product that starts tasks later, once it was needed."""

    @property
    def has_admission(self) -> bool:
        """Whether an installed product has an admission queue."""
        return self._find_submissions() is not None

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
        run = await self._new_run(task_id, params, graph, functions)
        if not is_new:
            with suppress(StoreUnavailable):  # a new task starts all the same
                await self._compare(run)
        try:
            workflow_input = await self._inputs.checked_input(task_id, run.given)
        except StoreUnavailable:
            if is_new or not await self._has_started(run):
                raise
            return task_id
        started = await self._start(run, workflow_input)
        if started.start is StartOutcome.STARTED or await self._lacks_document(run, workflow_input, started):
            await self._write_document(run)
        if started.start is StartOutcome.HAS_ENDED:
            _logger.info("task %s has already finished; it does not run again", task_id)
        return task_id

    async def _new_run(
        self,
        task_id: str,
        params: dict[str, Any],
        graph: dict[str, Any],
        functions: Collection[str] | None,
    ) -> NewRun:
        given, edges = await self._inputs.convert(task_id, params, graph, functions)
        digest = await asyncio.to_thread(input_digest, given["params"], given["graph"])
        return NewRun(task_id=task_id, given=given, edges=edges, digest=digest)

    async def _compare(self, run: NewRun) -> bool:
        """Return whether there is a document of the task. Raise TaskIdTaken if it started with another input."""
        stored = await self.catalog.input_digest(run.task_id)
        if stored is not None:
            run.check_same(stored)
        return stored is not None

    async def _has_started(self, run: NewRun) -> bool:
        """Return whether Temporal knows that a task with this id and this input runs or has finished.

        Raise TaskIdTaken if a task with this id started with another input, or belongs to another deployment.
        """
        looked_up = await look_up(self.temporal, run.task_id)
        if looked_up.description is None:
            return False
        await self.check_owner(run.task_id, looked_up, None)
        digest = await read_input_digest(looked_up.description)
        run.check_same(digest)
        finished = looked_up.description.status is WorkflowExecutionStatus.COMPLETED
        return bool(digest) and (finished or looked_up.state is WorkflowState.OPEN)

    async def _lacks_document(self, run: NewRun, workflow_input: dict[str, Any], found: StartedTask) -> bool:
        """Return whether an existing task runs with this input and has no document yet.

        Raise TaskIdTaken if it started with another input. Raise StoreUnavailable if only the document knows its input.
        """
        run.check_same(found.digest)
        try:
            if await self._compare(run):
                return False
        except StoreUnavailable:
            if found.digest:
                return False
            raise
        runs = found.start is StartOutcome.RUNS
        if found.digest:
            return runs
        first = await self._read_input(run.task_id)
        if isinstance(first, dict) and isinstance(first.get("graph"), dict):
            run.check_same(input_digest(first.get("params") or {}, first["graph"]))
            return runs
        return runs and bool(first == workflow_input)

    async def _read_input(self, task_id: str) -> Any:
        """Return the input of the latest run of a workflow; None if it cannot be read."""
        async for event in self.handle(task_id).fetch_history_events(page_size=1):
            payloads = event.workflow_execution_started_event_attributes.input.payloads
            with suppress(Exception):  # another converter wrote it
                return (await self.temporal.data_converter.decode(payloads))[0]
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
        run = replace(
            await self._new_run(task_id, params, graph, functions),
            owner=owner,
            reuse=reuse,
            priority=priority,
            nominal=nominal,
        )
        started = await self._start(run, await self._inputs.checked_input(task_id, run.given))
        if started.start is not StartOutcome.HAS_ENDED:
            await self._write_document(run)
        return started.start is not StartOutcome.HAS_ENDED

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
        given, _ = await self._inputs.convert(task_id, evaluated, graph, None)
        return await self._inputs.checked_input(task_id, {**given, "params": raw}, schedule_id=name)

    async def read_scheduled(self, name: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return the graph and params in the input of the tasks of a schedule; None if MongoDB has lost them."""
        if not is_stored(given):
            return {"params": given.get("params") or {}, "graph": given.get("graph") or {}}
        stored, graphs = stored_in(given), StoredGraphs(self.store.database)
        parts = [await graphs.part(name, stored, part) for part in range(stored.parts)]
        if None in parts:
            return None
        return await asyncio.to_thread(unpack_task, b"".join(part for part in parts if part is not None))

    async def timed_tasks(
        self, spans: Mapping[str, tuple[datetime, datetime]], most: int
    ) -> dict[str, list[TimedTask]]:
        """Return the tasks of schedules, by name, whose nominal time is within a span: at least the latest `most`."""
        return await self.catalog.timed_tasks(spans, most)

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
        given, edges = await self._inputs.convert(task_id, params, graph, functions)
        await submissions.submit(admission, task_id, {**given, **nominal_fields(nominal)})
        await self._inputs.warn_of_contracts(task_id, edges)
        return task_id

    def _find_submissions(self) -> Submissions | None:
        if self._submissions is None:
            self._submissions = products.submissions(self.store.database, self.queue)
        return self._submissions

    async def _start(self, run: NewRun, workflow_input: dict[str, Any]) -> StartedTask:
        """Start the workflow, unless it runs, or has ended and is not to start again.

        Raise TaskIdTaken if the workflow with this id belongs to another deployment or, of a task with an owner, to
        another owner.
        """
        task_id = run.task_id
        marker = run.owner or await self.new_marker(task_id)
        try:
            await self.temporal.start_workflow(
                temporal_names.TASK,
                workflow_input,
                id=task_id,
                task_queue=self.queue,
                id_reuse_policy=run.reuse,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                static_summary=truncate(run.name, 100) if run.name else None,
                priority=run.priority,
                memo=memo_of(marker, run.digest),
                search_attributes=schedule_attributes(run.nominal),
            )
        except WorkflowAlreadyStartedError:
            found = await look_up(self.temporal, task_id)
            await self.check_owner(task_id, found, run.owner)
            start = StartOutcome.RUNS if found.state is WorkflowState.OPEN else StartOutcome.HAS_ENDED
            return StartedTask(start, await read_input_digest(found.description) if found.description else {})
        except RPCError as error:
            error.add_note(
                f"task {task_id!r} may have started anyway: call again with task_id={task_id!r}, which starts it "
                "only if it has not started"
            )
            raise
        return StartedTask(StartOutcome.STARTED)

    async def _write_document(self, run: NewRun) -> None:
        """Write the task document right away. The task has already started, so an error here is only logged.

        Warn of its edges, unless MongoDB does not respond.
        """
        [outcome] = await asyncio.gather(self._insert(run), return_exceptions=True)
        if isinstance(outcome, BaseException):
            cause = format_cause(outcome)
            _logger.warning("task %s is running, but its document does not exist yet: %s", run.task_id, cause)
        else:
            await self._inputs.warn_of_contracts(run.task_id, run.edges)

    async def _insert(self, run: NewRun) -> None:
        """Insert the task document. The workflow inserts it too, so this only makes the task visible earlier."""
        namespace_id, at = await self.namespace.id(), time.time()
        scheduled_at = None if run.nominal is None else run.nominal.text
        error: FlowKitError | None = None
        for _ in range(_INSERT_TRIES):
            try:
                ids = owner(namespace_id, await self.store.database_id())
                params, graph = run.given["params"], run.given["graph"]
                document = new_task(run.task_id, params, graph, at, scheduled_at=scheduled_at, **ids)
                return await self.store.insert_task(document)
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
        found = await self.catalog.status(task_id, namespace_id=await self.namespace.id())
        return None if found is None else TaskStatus(found)

    async def find_ended(self, task_ids: Collection[str]) -> list[str]:
        """Return which of these tasks have ended, by their documents. Raise StoreUnavailable."""
        return await self.catalog.ended(task_ids)

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
            await self.handle_of(found.description).cancel(reason=why)
        except RPCError as error:
            if not is_absent(error):
                raise
            return False
        return True

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
            async with asyncio.timeout(bound_timeout(seconds)):
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
        document = await self.catalog.document(task_id)
        if document is None and pending is not None and pending.error is not None:
            raise pending.error
        return _read_result(task_id, document)

    async def _is_running(self, handle: WorkflowHandle[Task, TaskResult]) -> bool:
        return (await look_up(self.temporal, handle.id)).state is WorkflowState.OPEN

    async def list_tasks(
        self, status: str | None = None, limit: int = 50, *, waits: str | None = None
    ) -> list[TaskSummary]:
        """Return the newest tasks first, as `TaskCatalog.list_tasks` does."""
        return await self.catalog.list_tasks(status, limit, waits=waits)


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


def _check_new_id(task_id: str, kind: OwnerKind = OwnerKind.TASK, nominal: Nominal | None = None) -> None:
    """Raise GraphError if a task that `kind` starts cannot have this id. That of its nominal time always fits."""
    kind = OwnerKind.SCHEDULE if nominal is not None and nominal.task_id == task_id else kind
    raise_if([problem] if (problem := new_task_id_problem(task_id, kind=kind)) else [])


def cancel_reason(given: str | None) -> str:
    """Return a cancel reason in stored form: valid UTF-8 text of at most 1,000 characters."""
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"reason is {shown(given)}; it must be a string")
    text = clean(given or reason_codes.USER_REQUEST)
    return truncate(text, limits.CANCEL_REASON_CHARS)
