"""The calls of the page: tasks, their graphs, what they have stored, updates, and the actions of operators."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from temporalio.service import RPCError

from flowkit import products, reason_codes
from flowkit.actions.preconditions import check_run, run_of
from flowkit.actions.table import ACTIONS
from flowkit.adapters.tasks.fields import SCHEDULED_AT
from flowkit.attempt.workflows import ABSENT, WorkflowState
from flowkit.client.catalog import make_summary
from flowkit.config import DEFAULT_QUEUE
from flowkit.core.version import __version__
from flowkit.errors import (
    ActionRejected,
    ActionUnanswered,
    ConfigError,
    FlowKitError,
    GraphError,
    StoreUnavailable,
    UnknownTask,
)
from flowkit.graph.engine_nodes import read_approval
from flowkit.limits import ID_CHARS
from flowkit.models import RUNTIME_KEYS, TaskStatus
from flowkit.models.waits import WaitKind
from flowkit.page.live import describe_outage
from flowkit.page.shared import SharedReads
from flowkit.reading.attempts import read_attempts
from flowkit.reading.documents import reading
from flowkit.reading.explain import list_waits
from flowkit.reading.graphs import view_graph
from flowkit.reading.results import (
    debug_command,
    debug_node_command,
    logs_command,
    make_view,
    read_result,
    require_node,
)
from flowkit.reading.state import LOOK_UP_TIMEOUT
from flowkit.reading.timeline import explain_task, read_timeline, to_json
from flowkit.schedules import Schedules
from flowkit.server.errors import HttpError
from flowkit.server.openapi import HEADERS, Operation, mongo_unavailable, operation_routes, parse_params
from flowkit.server.rights import HttpRoute
from flowkit.server.rpc import Params
from flowkit.server.tokens import Right
from flowkit.text import one_line, printed, visible

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from temporalio.client import WorkflowExecutionDescription

    from flowkit.adapters.tasks.queries import StoredBatch
    from flowkit.attempt.workflows import FoundWorkflow
    from flowkit.page.live import LiveTasks
    from flowkit.products import KeptLine
    from flowkit.reading.attempts import AttemptView
    from flowkit.reading.state import Servers
    from flowkit.schedules import NominalTime, ScheduleView
    from flowkit.server.auth import Caller
    from flowkit.server.openapi import CallInput

PREFIX: Final = "/api/v1"
MAX_PAGE: Final = 200
"""Most tasks or batches of one page of a list."""
MAX_SKIP: Final = 100_000
MAX_POLL: Final = 2**53
_PLACE_CHARS: Final = 200
_CURSOR_CHARS: Final = 4_000
SHOWN_TIMES: Final = 60
"""Number of past nominal times of each schedule."""

_READ_SEC: Final = 30.0
"""How long a call waits for MongoDB and Temporal, unless it acts. A frozen server would hold calls for ever."""
_ENGINE_SEC: Final = 30.0
"""How long an action waits for an engine."""
_HOUR_SEC: Final = 3_600.0

CANCEL: Final = "cancel"
RERUN: Final = "rerun"


# --- what pages send ----------------------------------------------------------------------------------------------


class Show(StrEnum):
    """Which tasks a list has, beside the filters for a status and a name."""

    ALL = "all"
    DECISION = WaitKind.DECISION.value
    """With a node that waits for a decision of a person, about a held failure or an approval."""
    EVENT = WaitKind.EVENT.value
    """With a node that waits for prerequisites."""
    FAILED_LAST_HOUR = "failed_last_hour"


class TaskFilter(Params):
    """Which tasks a list has."""

    show: Show = Show.ALL
    status: TaskStatus | None = None
    name: str | None = Field(default=None, max_length=500)
    id: str | None = Field(default=None, max_length=500, description="How the id begins.")
    limit: int = Field(default=50, ge=1, le=MAX_PAGE)
    skip: int = Field(default=0, ge=0, le=MAX_SKIP)


class ScheduleFilter(Params):
    """Which schedules a list has."""

    limit: int = Field(default=50, ge=1, le=MAX_PAGE)
    skip: int = Field(default=0, ge=0, le=MAX_SKIP)


class TaskQuery(Params):
    """Which task the call concerns.

    Its id is no part of the path: it may contain slashes and dots, which browsers and proxies change in paths.
    """

    task_id: str = Field(min_length=1, max_length=ID_CHARS)


class UpdateQuery(TaskQuery):
    """What the page knows of the task."""

    server: str = Field(default="", max_length=_PLACE_CHARS, description="The `server` of its latest update.")
    poll: int = Field(default=0, ge=0, le=MAX_POLL, description="The `poll` of it; 0 for the whole state.")


class NodeQuery(TaskQuery):
    """Which node of the task the call concerns."""

    node: str = Field(min_length=1, max_length=ID_CHARS)


class BatchQuery(NodeQuery):
    """Which batches of the node a page has."""

    limit: int = Field(default=50, ge=1, le=MAX_PAGE)
    skip: int = Field(default=0, ge=0)
    failed: bool = False


class AttemptQuery(TaskQuery):
    """Which node the attempts are of."""

    node: str | None = Field(default=None, max_length=ID_CHARS, description="All nodes if it is left out.")


class LogLevel(StrEnum):
    """Least level of lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LineQuery(NodeQuery):
    """Which lines of an attempt a page has: the last ones, those before a place, or the next ones after a page."""

    attempt: int = Field(ge=1)
    level: LogLevel = LogLevel.DEBUG
    before: str = Field(default="", max_length=_PLACE_CHARS)
    after: str = Field(default="", max_length=_CURSOR_CHARS, description="The `end` of another page.")
    limit: int = Field(default=MAX_PAGE, ge=1, le=MAX_PAGE)


class ActionPath(Params):
    """Which action is applied."""

    action: str = Field(max_length=50)


class ActionCall(Params):
    """An action and its input."""

    input: dict[str, Any] = Field(default_factory=dict)
    dry_run: bool = Field(
        default=False, description="Whether the call only returns what the action would affect."
    )


IF_STATE: Final = Field(
    default=None,
    description="The `state` that a call with `dry_run` has returned; the action is rejected once it differs.",
)


class CancelInput(Params):
    """The input of `cancel`."""

    reason: str = ""
    if_state: str | None = IF_STATE


class RerunInput(Params):
    """The input of `rerun`."""

    nodes: list[str] | None = None
    params: dict[str, Any] | None = None
    inputs: dict[str, dict[str, Any]] | None = None
    limits: dict[str, dict[str, Any]] | None = None
    failed_batches_of: list[str] = Field(default_factory=list)
    reason: str = ""
    if_state: str | None = IF_STATE


# --- what pages get -----------------------------------------------------------------------------------------------


class PageResult(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TimedResult(PageResult):
    """A result from which the page learns the clock of the server."""

    now: float = Field(default_factory=time.time, description="When it was sent, in seconds since the epoch.")


class Session(TimedResult):
    """What the page may do, and where Temporal's Web UI is."""

    actor: str
    may_operate: bool
    read_only: bool
    web_ui: str | None = Field(description="Address of Temporal's Web UI, without a slash at its end.")
    namespace: str
    database: str
    version: str
    actions: list[str]


class TaskLine(PageResult):
    """A task in a list."""

    task_id: str
    status: TaskStatus
    name: str | None
    started_at: str | None
    finished_at: str | None
    seconds: float | None = Field(
        description="How long the latest run took, or has been open when the list was read."
    )
    total_seconds: float | None = Field(description="The same since the task was created.")
    reason: str | None


class TasksFound(TimedResult):
    """Some tasks, newest first."""

    tasks: list[TaskLine]
    more: bool = Field(description="Whether there are older ones.")


class TimeLine(PageResult):
    """A nominal time of a schedule."""

    at: str
    status: str = Field(
        description="The status of the task, or `refused`, `started`, `taken`, `no_task`, `waiting`, `due`."
    )
    task_id: str | None = Field(
        default=None, description="Null without a task; for `taken`, the id of the foreign workflow."
    )
    reason: str | None = None


class ScheduleLine(PageResult):
    """A schedule in a list, with its latest nominal times, oldest first, and its next ones."""

    name: str
    when: str
    timezone: str
    paused: bool
    note: str
    times: list[TimeLine]


class SchedulesFound(TimedResult):
    """Some schedules, by name."""

    schedules: list[ScheduleLine]
    more: bool = Field(description="Whether there are further ones.")


class Structure(PageResult):
    """A task and its graph, without the states of its nodes."""

    task_id: str
    name: str | None
    run_id: str | None = Field(
        description="The run of its workflow; null if Temporal does not know it any more, or does not respond."
    )
    queue: str | None = Field(description="The task queue of its engines; null in the same cases.")
    scheduled_at: str | None = Field(
        description="The nominal time of a task of a schedule, as RFC 3339 text in UTC; null for others."
    )
    params: dict[str, Any]
    nodes: list[dict[str, Any]] = Field(
        description="`node_id`, `role`, `function`, `parallel`, `is_map`, `when`, `sets_aside`, `prerequisites`."
    )
    edges: list[tuple[int, int, str]] = Field(description="Positions of two nodes, and the kind of the edge.")
    conditions: dict[str, str] = Field(description="The conditions of edges, by the position of the edge.")


class NodeDetails(PageResult):
    """What is known of one node beside its state."""

    node_id: str
    definition: dict[str, Any] = Field(description="The node as the graph has it.")
    asks: str = Field(description="What an approval asks; empty for other nodes, and without a question.")
    result: dict[str, Any]
    batches: int
    failed_batches: int = Field(description="Batches that the node has set aside so far.")
    debug: str | None = Field(
        description="The command that runs the node in the user's own process; null if the engine executes it."
    )


class AttemptsFound(PageResult):
    """The attempts of a task or of a node, in their order."""

    attempts: list[dict[str, Any]] = Field(
        description="As `flowkit attempts --json` has them, with times in seconds since the epoch; `began_at` is when "
        "the worker began to work, and `seconds` how long it did, or has."
    )
    waits: list[dict[str, Any]] = Field(
        description="Of a whole task: when its nodes waited, in the parts of the explanation: `node_id`, `part`, "
        "`since`, and `until`, which is null while the wait lasts."
    )
    read_at: float = Field(
        description="When they were read, in seconds since the epoch: those of a whole task are shared for a while."
    )
    complete: bool = Field(description="Whether Temporal still has the history, so that none is missing.")


class LinesFound(PageResult):
    """Some lines of an attempt, oldest first."""

    kept: bool = Field(description="Whether lines are kept: false if the product `observe` is not installed.")
    lines: list[dict[str, Any]] = Field(
        description="`at`, `level`, `logger`, `text`, `batch_uid`, `worker_id`, `shard`, `left_out`, `place`."
    )
    earlier: bool = Field(description="Whether there are lines before them.")
    later: bool = Field(description="Whether there are lines after them.")
    end: str = Field(description="The `after` of the next page; empty if there were no lines.")
    command: str = Field(description="The command that prints all lines of the attempt.")


class Explained(PageResult):
    """Where the time of a task went, in seconds."""

    task_id: str
    status: TaskStatus
    open: bool = Field(description="Whether the times end now, because the task has not ended.")
    began_at: str
    read_at: float = Field(
        description="When it was read, in seconds since the epoch: results are shared for a while."
    )
    seconds: float = Field(description="How long the latest run took, or has been open.")
    total_seconds: float = Field(description="The same since the task was created.")
    parts: dict[str, float] = Field(description="The parts of the time; they sum to `seconds`.")
    path: list[dict[str, Any]] = Field(
        description="The legs of the critical path: `node_id`, `since` and `until` after `began_at`, `parts`."
    )
    speed_ups: list[dict[str, Any]] = Field(
        description="The nodes to speed up first: `node_id`, `gain`, `work`."
    )
    reason: str | None = Field(description="Why the task has failed, or was cancelled.")
    waits_for: str
    set_aside: list[str] = Field(
        description="Hints at nodes that have set batches aside, each with the command that lists them."
    )
    missing: list[str]


class Batches(PageResult):
    """Some batches of a node, oldest first."""

    batches: list[dict[str, Any]] = Field(
        description="A failed one has `debug`, the command that runs it in the user's own process."
    )
    total: int
    skip: int


class VariablesFound(PageResult):
    """The variables of a task."""

    variables: dict[str, Any]


class Affected(PageResult):
    """What an action has changed, or would change."""

    affected: list[dict[str, Any]]
    notes: list[str]
    revision: int | None = None
    run_seq: int | None = None
    state: str | None = Field(
        default=None,
        description="With `dry_run`: the `if_state` with which the action is rejected once what it affects differs.",
    )


# --- the calls ----------------------------------------------------------------------------------------------------


class PageApi:
    """The calls of the page."""

    def __init__(
        self,
        servers: Servers,
        live: LiveTasks,
        *,
        web_ui: str | None,
        read_only: bool,
        version: str = __version__,
    ) -> None:
        self._servers = servers
        self._live = live
        self._web_ui = web_ui
        self._read_only = read_only
        self._version = version
        self._schedule_lines = SharedReads(self._read_schedules, most_sec=_READ_SEC)
        self._attempts = SharedReads(self._read_attempts, most_sec=_READ_SEC)
        self._explanations = SharedReads(self._explain, most_sec=_READ_SEC)
        """Each read of attempts of a whole task, and of an explanation, fetches the whole history from Temporal."""

    async def session(self, given: CallInput) -> Session:
        """Return what the page may do."""
        may = not self._read_only and _may_operate(given.caller)
        return Session(
            actor=str(given.caller),
            may_operate=may,
            read_only=self._read_only,
            web_ui=self._web_ui,
            namespace=self._servers.temporal.namespace,
            database=self._servers.db.name,
            version=self._version,
            actions=[*ACTIONS, CANCEL, RERUN] if may else [],
        )

    async def list_tasks(self, given: CallInput) -> TasksFound:
        """Return tasks, newest first."""
        query: TaskFilter = given.query
        failed_lately = query.show is Show.FAILED_LAST_HOUR
        found = await self._servers.catalog.newest(
            TaskStatus.FAILED.value if failed_lately else query.status and query.status.value,
            query.limit + 1,
            waits=query.show.value if query.show in (Show.DECISION, Show.EVENT) else None,
            name=query.name or None,
            ended_since=time.time() - _HOUR_SEC if failed_lately else None,
            id_prefix=query.id or None,
            skip=query.skip,
        )
        summaries = map(make_summary, found[: query.limit])
        lines = [TaskLine(**asdict(each)) for each in summaries if each is not None]
        return TasksFound(tasks=lines, more=len(found) > query.limit)

    async def list_schedules(self, given: CallInput) -> SchedulesFound:
        """Return schedules with their latest nominal times."""
        query: ScheduleFilter = given.query
        found = await self._schedule_lines.get(f"{query.skip} {query.limit}")
        return found.model_copy(update={"now": time.time()})

    @cached_property
    def _schedules(self) -> Schedules:
        """Its queue is of no account: the page creates no schedules."""
        return Schedules(self._servers.temporal, self._servers.tasks, queue=DEFAULT_QUEUE)

    async def _read_schedules(self, which: str) -> SchedulesFound:
        skip, limit = map(int, which.split())
        views = (await self._schedules.list_schedules())[skip : skip + limit + 1]
        history = await self._schedules.history(views[:limit], count=SHOWN_TIMES)
        lines = [_schedule_line(each, history[each.name]) for each in views[:limit] if each.name in history]
        return SchedulesFound(schedules=lines, more=len(views) > limit)

    async def get_task(self, given: CallInput) -> Structure:
        """Return a task with its graph."""
        task_id = given.query.task_id
        document, found = await asyncio.gather(self._document(task_id), self._describe(task_id))
        with reading(task_id):
            graph = await asyncio.to_thread(view_graph, document["graph"])
        edges = graph.edges
        return Structure(
            task_id=task_id,
            name=graph.name,
            run_id=found and found.run_id,
            queue=found and found.task_queue,
            scheduled_at=str(document[SCHEDULED_AT]) if document.get(SCHEDULED_AT) else None,
            params=_plain(document.get("params") or {}),
            nodes=[asdict(each) for each in graph.nodes],
            edges=[(each.source, each.target, each.kind.value) for each in edges],
            conditions={str(index): each.condition for index, each in enumerate(edges) if each.condition},
        )

    async def _describe(self, task_id: str) -> WorkflowExecutionDescription | None:
        try:
            return (await self._servers.tasks.look_up(task_id, rpc_timeout=LOOK_UP_TIMEOUT)).description
        except RPCError:
            return None

    async def _document(self, task_id: str) -> dict[str, Any]:
        document = await self._servers.catalog.document(task_id)
        if document is None:
            raise UnknownTask(task_id)
        return document

    async def get_node(self, given: CallInput) -> NodeDetails:
        """Return the definition of a node, and what it has stored."""
        task_id, node_id = given.query.task_id, given.query.node
        document, catalog = await self._document(task_id), self._servers.catalog
        with reading(task_id):
            require_node(document, node_id)
        stored, batches = await catalog.results(task_id), await catalog.batches(task_id)
        set_aside = await catalog.set_aside(task_id)
        with reading(task_id):
            (result,) = make_view(document, stored, batches, set_aside, node_id).nodes
        (entry,) = [each for each in document["graph"]["nodes"] if each["node_id"] == node_id]
        return NodeDetails(
            node_id=node_id,
            definition=_plain({key: value for key, value in entry.items() if key not in RUNTIME_KEYS}),
            asks=approval.text if (approval := read_approval(entry)) else "",
            result=_plain(
                {"metrics": result.metrics, "stats": result.stats, "artifacts_ref": result.artifacts_ref}
            ),
            batches=result.batches,
            failed_batches=result.failed_batches,
            debug=debug_node_command(task_id, node_id, str(entry.get("type"))),
        )

    async def list_batches(self, given: CallInput) -> Batches:
        """Return batches of a node, oldest first."""
        query: BatchQuery = given.query
        _, page = await read_result(
            self._servers.catalog,
            query.task_id,
            query.node,
            query.limit,
            query.skip,
            failed=query.failed,
        )
        assert page is not None
        return Batches(
            batches=[_batch(query.task_id, query.node, each) for each in page.batches],
            total=page.total,
            skip=query.skip,
        )

    async def list_attempts(self, given: CallInput) -> AttemptsFound:
        """Return the attempts of a task, or of one of its nodes."""
        task_id, node_id = given.query.task_id, given.query.node
        if node_id is None:
            return await self._attempts.get(task_id)
        return await self._read_attempts(task_id, node_id)

    async def _read_attempts(self, task_id: str, node_id: str | None = None) -> AttemptsFound:
        read_at = time.time()
        found, complete, waits = await self._read_whole(task_id, node_id)
        now = time.time()
        attempts = [
            {**asdict(each), "began_at": each.began_at, "seconds": each.seconds(now)} for each in found
        ]
        return AttemptsFound(attempts=attempts, waits=waits, read_at=read_at, complete=complete)

    async def _read_whole(
        self, task_id: str, node_id: str | None
    ) -> tuple[list[AttemptView], bool, list[dict[str, Any]]]:
        """Return the attempts of a task with its waits, or those of a node without any."""
        if node_id is not None:
            return *await read_attempts(self._servers, task_id, node_id), []
        found = await read_timeline(self._servers, task_id)
        waits = [{**asdict(each), "part": each.part.value} for each in list_waits(found.timeline)]
        return found.attempts, found.complete, waits

    async def list_lines(self, given: CallInput) -> LinesFound:
        """Return lines that an attempt of a node has logged, oldest first."""
        query: LineQuery = given.query
        command = logs_command(query.task_id, query.node, query.attempt)
        if (logs := products.logs()) is None:
            return LinesFound(kept=False, lines=[], earlier=False, later=False, end="", command=command)
        found = await logs.reader(self._servers.db).page(
            query.task_id,
            query.node,
            query.attempt,
            level=query.level.value,
            before=query.before,
            after=query.after,
            limit=query.limit,
        )
        return LinesFound(
            kept=True,
            lines=[*map(_line, found.lines)],
            earlier=found.earlier,
            later=found.later,
            end=found.end,
            command=command,
        )

    async def explain(self, given: CallInput) -> Explained:
        """Return where the time of a task went, and what it waits for."""
        return await self._explanations.get(given.query.task_id)

    async def _explain(self, task_id: str) -> Explained:
        explained = await explain_task(self._servers, task_id)
        return Explained(**to_json(explained), read_at=explained.read_at)

    async def close(self) -> None:
        """End the reads that run."""
        shared = (self._attempts, self._explanations, self._schedule_lines)
        await asyncio.gather(*(each.close() for each in shared))

    async def get_variables(self, given: CallInput) -> VariablesFound:
        """Return the variables of a task."""
        task_id = given.query.task_id
        if (found := await self._servers.catalog.variables(task_id)) is None:
            raise UnknownTask(task_id)
        return VariablesFound(variables=_plain(found))

    async def act(self, given: CallInput) -> Affected:
        """Apply an action, or return what it would affect."""
        call: ActionCall = given.body
        if self._read_only and not call.dry_run:
            raise HttpError(403, "read_only", "this server only shows tasks; start one without --read-only")
        task_id, name = given.query.task_id, given.path.action
        by = _signature(given.caller)
        if name == CANCEL:
            return await self._cancel(task_id, call)
        if name == RERUN:
            return await self._rerun(task_id, call, by)
        if name not in ACTIONS:
            raise HttpError(
                404, "unknown_action", f"there is no action {printed(name)}; send {', '.join(ACTIONS)}"
            )
        sent = {**call.input, "by": by}
        if call.dry_run:
            found = await self._servers.tasks.steering.preview(task_id, name, sent)
        else:
            found = await self._servers.tasks.steering.act(task_id, name, sent, wait_sec=_ENGINE_SEC)
        return _affected(found)

    async def _cancel(self, task_id: str, call: ActionCall) -> Affected:
        given = parse_params(CancelInput, call.input, strict=True)
        reason = given.reason or reason_codes.USER_REQUEST
        if (run := await self._find_cancellable(task_id)) is not None:
            check_run(given.if_state, run.first_run_id)
            if call.dry_run or await self._servers.tasks.cancel_task(
                task_id, reason=reason, if_state=given.if_state
            ):
                return Affected(
                    affected=[],
                    notes=["running attempts are told to stop; nodes that have not started are skipped"],
                    state=run_of(run.first_run_id) if call.dry_run else None,
                )
        raise ActionRejected(f"task {printed(task_id)} has ended, so it cannot be cancelled")

    async def _find_cancellable(self, task_id: str) -> FoundWorkflow | None:
        """Return the run of a task, or ABSENT if it waits for its admission; None if it has ended.

        Raise UnknownTask if there is no such task.
        """
        found = await self._servers.tasks.look_up(task_id, rpc_timeout=LOOK_UP_TIMEOUT)
        if found.state is WorkflowState.OPEN:
            return found
        pending = await self._servers.tasks.find_pending(task_id)
        if found.state is WorkflowState.ABSENT and pending is None:
            await self._document(task_id)
        return ABSENT if pending is not None and not pending.decided else None

    async def _rerun(self, task_id: str, call: ActionCall, by: str) -> Affected:
        given = parse_params(RerunInput, call.input, strict=True)
        found = await self._servers.tasks.steering.rerun(
            task_id,
            given.nodes,
            params=given.params,
            inputs=given.inputs,
            limits=given.limits,
            failed_batches_of=given.failed_batches_of,
            reason=given.reason,
            by=by,
            if_state=given.if_state,
            dry_run=call.dry_run,
        )
        return _affected(found)

    async def updates(self, request: Request) -> Response:
        """Return what has changed in a task since the poll that the page knows, as `Update.message` has it."""
        query = parse_params(UpdateQuery, dict(request.query_params), strict=False)
        update = await _answered(self._live.update(query.task_id, query.server, query.poll))
        return Response(update.message(time.time()), media_type="application/json", headers=HEADERS)


def _schedule_line(view: ScheduleView, times: Sequence[NominalTime]) -> ScheduleLine:
    return ScheduleLine(
        name=view.name,
        when=view.times.text,
        timezone=view.times.timezone,
        paused=view.paused,
        note=view.note,
        times=[TimeLine(**each.as_json()) for each in times],
    )


def _affected(found: Mapping[str, Any]) -> Affected:
    """Return what an action has changed, or would change, from its result."""
    return Affected(**{name: found[name] for name in Affected.model_fields if name in found})


def _signature(caller: Caller) -> str:
    """Return who applies an action, as the task keeps it."""
    return f"{caller} on the page" if caller.actor is None else f"actor {caller} on the page"


def _may_operate(caller: Caller) -> bool:
    return caller.is_operator or Right.TASKS_OPERATE in caller.rights


def _batch(task_id: str, node_id: str, batch: StoredBatch) -> dict[str, Any]:
    """Return a batch as pages get it."""
    debug = {"debug": debug_command(task_id, node_id, batch.uid)} if batch.status == "failed" else {}
    return {**_plain(asdict(batch)), **debug}


def _line(line: KeptLine) -> dict[str, Any]:
    """Return a line as pages get it, with its control and bidirectional characters as escapes."""
    given = {name: value for name, value in asdict(line).items() if name not in ("node_id", "attempt")}
    return {name: visible(value) if isinstance(value, str) else value for name, value in given.items()}


def _plain(value: Any) -> Any:
    """Return a value from MongoDB as JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


async def _answered(call: Awaitable[Any]) -> Any:
    """Await a call. Raise HttpError in place of FlowKit's and Temporal's errors."""
    try:
        return await call
    except UnknownTask as error:
        raise HttpError(404, error.code, one_line(error)) from None
    except StoreUnavailable as error:
        raise mongo_unavailable(error) from error
    except ActionRejected as error:
        raise HttpError(409, error.code, one_line(error)) from None
    except (ConfigError, GraphError) as error:
        remedy = "; ".join(getattr(error, "__notes__", []))
        raise HttpError(422, error.code, "; ".join(filter(None, [one_line(error), remedy]))) from None
    except ActionUnanswered as error:
        raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, error.code, one_line(error)) from None
    except FlowKitError as error:
        raise HttpError(503 if error.retryable else 500, error.code, one_line(error)) from error
    except RPCError as error:
        raise HttpError(503, reason_codes.TEMPORAL_UNAVAILABLE, describe_outage(error)) from error


def _answering(
    call: Callable[[PageApi, CallInput], Awaitable[BaseModel]], *, reads: bool
) -> Callable[[Any, CallInput], Awaitable[BaseModel]]:
    async def answered(api: PageApi, given: CallInput) -> BaseModel:
        try:
            async with asyncio.timeout(_READ_SEC if reads else None):
                result: BaseModel = await _answered(call(api, given))
        except TimeoutError:
            text = f"the servers do not respond within {_READ_SEC:g} s; try the call again"
            raise HttpError(HTTPStatus.GATEWAY_TIMEOUT, reason_codes.TIMEOUT, text) from None
        return result

    answered.__name__, answered.__doc__ = call.__name__, call.__doc__
    return answered


def _operations() -> list[Operation]:
    read, task = Right.TASKS_READ, f"{PREFIX}/task"
    unknown = {404: "There is no such task: `unknown_task`."}
    late = {504: "MongoDB or Temporal does not respond in time: `timeout`."}

    def get(at: str, call: Any, result: type[BaseModel], query: type[Params] | None = None) -> Operation:
        return Operation(
            method="GET",
            path=at,
            call=_answering(call, reads=True),
            result=result,
            needs=read,
            parameters={} if query is None else {"query": query},
            errors=late | (unknown if query is not None and issubclass(query, TaskQuery) else {}),
        )

    return [
        get(f"{PREFIX}/session", PageApi.session, Session),
        get(f"{PREFIX}/tasks", PageApi.list_tasks, TasksFound, TaskFilter),
        get(f"{PREFIX}/schedules", PageApi.list_schedules, SchedulesFound, ScheduleFilter),
        get(f"{task}/graph", PageApi.get_task, Structure, TaskQuery),
        get(f"{task}/node", PageApi.get_node, NodeDetails, NodeQuery),
        get(f"{task}/batches", PageApi.list_batches, Batches, BatchQuery),
        get(f"{task}/attempts", PageApi.list_attempts, AttemptsFound, AttemptQuery),
        get(f"{task}/logs", PageApi.list_lines, LinesFound, LineQuery),
        get(f"{task}/explanation", PageApi.explain, Explained, TaskQuery),
        get(f"{task}/variables", PageApi.get_variables, VariablesFound, TaskQuery),
        Operation(
            method="POST",
            path=f"{task}/actions/{{action}}",
            call=_answering(PageApi.act, reads=False),
            result=Affected,
            needs=Right.TASKS_OPERATE,
            parameters={"path": ActionPath, "query": TaskQuery},
            bodies={"": ActionCall},
            errors={
                **unknown,
                409: "The state of the task does not allow the action: `action_rejected`.",
                504: "No engine responds: `action_unanswered`.",
            },
        ),
    ]


OPERATIONS: Final[Sequence[Operation]] = _operations()
INFO: Final = {"title": "FlowKit page", "version": __version__}


def page_routes(api: PageApi) -> list[BaseRoute]:
    """Return the routes of the calls."""
    updates = HttpRoute(f"{PREFIX}/task/updates", api.updates, needs=Right.TASKS_READ)
    return [updates, *operation_routes(OPERATIONS, api, INFO, document_path=f"{PREFIX}/openapi.json")]
