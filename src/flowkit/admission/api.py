"""The HTTP API of an admission queue: its models, its rules about callers, and its operations.

The paths and fields are those of the admission specification, section 7.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flowkit import limits, reason_codes
from flowkit.activities.params_checks import ParamsChecks
from flowkit.admission import rules
from flowkit.admission.fields import (
    MAX_HELD,
    MAX_QUEUE,
    MAX_STALE_SEC,
    Command,
    Cpu,
    Filename,
    Image,
    Language,
    LanguageVersion,
    Memory,
    RequestId,
    Script,
    Tenant,
    Timeout,
    UrlId,
    UserId,
    UserKey,
)
from flowkit.admission.models import ENDED, Changed, Door, Kind, Limits, Override, Request, State, Ticket
from flowkit.core.utils import Fields, stable_hash
from flowkit.core.version import __version__
from flowkit.errors import GraphError, TaskIdTaken
from flowkit.graph.params import complete_params
from flowkit.graph.submission import validate_input
from flowkit.graph.validation import executor_of, raise_if
from flowkit.models import COORDINATOR_FN
from flowkit.models.admission import DEFAULT_TENANT, RANKS, Priority
from flowkit.server.errors import HttpError
from flowkit.server.openapi import Operation, operation_routes
from flowkit.server.rpc import Params
from flowkit.server.tokens import Right
from flowkit.text import names, printed
from flowkit.validation.arguments import new_task_id_problem
from flowkit.validation.storable import storage_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from starlette.routing import BaseRoute

    from flowkit.admission.models import QueueStatus
    from flowkit.admission.queue import AdmissionQueue
    from flowkit.server.auth import Caller
    from flowkit.server.openapi import CallInput

PREFIX: Final = "/api/v1"
TITLE: Final = "FlowKit admission"

KEY_CHARS: Final = 255
"""Longest `Idempotency-Key`."""
MAX_PAGE: Final = 200
"""Most requests of one list."""
MAX_SKIP: Final = 100_000
MAX_OVERRIDES: Final = 1_000

_HASH: Final = "request_hash"
"""The field of a request's metadata with the hash of what its client has sent."""
_CANCEL_EVENTS: Final = frozenset({rules.CANCELLED, rules.DELETE_POD})


class ExecutionStatus(StrEnum):
    """The documented statuses. `state` is more exact."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


STATUSES: Final[Mapping[State, ExecutionStatus]] = {
    State.RESERVING: ExecutionStatus.QUEUED,
    State.QUEUED: ExecutionStatus.QUEUED,
    State.STARTING: ExecutionStatus.SCHEDULED,
    State.ACTIVE: ExecutionStatus.RUNNING,
    State.COMPLETED: ExecutionStatus.COMPLETED,
    State.FAILED: ExecutionStatus.FAILED,
    State.TIMEOUT: ExecutionStatus.TIMEOUT,
    State.EXPIRED: ExecutionStatus.TIMEOUT,
    State.CANCELLED: ExecutionStatus.CANCELLED,
    State.REJECTED: ExecutionStatus.ERROR,
}


class CancelStatus(StrEnum):
    """What a call to cancel has done."""

    ALREADY_CANCELLED = "already_cancelled"
    CANCELLATION_REQUESTED = "cancellation_requested"


# --- what clients send --------------------------------------------------------------------------------------------


class Submission(Params):
    """What every request may name."""

    execution_id: UrlId | None = Field(default=None, description="A new UUID if it is left out.")
    tenant: Tenant = Field(default=DEFAULT_TENANT, description="Only an operator may name another one.")
    priority: Priority = Field(
        default=Priority.NORMAL, description="Only an operator may ask for `critical` and `high`."
    )
    user_id: UserId | None = Field(
        default=None,
        description="For whom the request is. Only an operator may name another user. Without it, the actor of the "
        "token, or `operator`.",
    )

    @property
    def chosen_id(self) -> str | None:
        """The id that the client has chosen; None if it is left to the queue."""
        return self.execution_id


class ExecutionSubmission(Submission):
    """A script for an outside executor. Without the fields of its runtime, an image of Python runs it."""

    script: Script
    lang: Language = rules.PYTHON
    lang_version: LanguageVersion = rules.PYTHON_VERSION
    runtime_image: Image | None = Field(
        default=None,
        description="For Python, `python:VERSION-slim` if it is left out. Required for other languages.",
    )
    runtime_command: Command | None = Field(
        default=None,
        description='For Python, `["python", "/scripts/main.py"]` if it is left out. Required for other languages.',
    )
    runtime_filename: Filename | None = Field(
        default=None,
        description="For Python, `main.py` if it is left out. Required for other languages.",
    )
    timeout_seconds: Timeout = rules.EXECUTION["timeout_seconds"]
    cpu_limit: Cpu = rules.EXECUTION["cpu_limit"]
    memory_limit: Memory = rules.EXECUTION["memory_limit"]
    cpu_request: Cpu = rules.EXECUTION["cpu_request"]
    memory_request: Memory = rules.EXECUTION["memory_request"]

    @model_validator(mode="after")
    def _require_runtime(self) -> ExecutionSubmission:
        missing = [name for name in rules.RUNTIME if getattr(self, name) is None]
        if self.lang != rules.PYTHON and missing:
            raise ValueError(f"lang is {self.lang!r}, which needs {', '.join(missing)}; pass them")
        return self

    @property
    def fields(self) -> Fields:
        """The fields of the event that starts the execution."""
        given = self.model_dump(include={"script", *rules.EXECUTION, *rules.RUNTIME}, exclude_none=True)
        return {
            **rules.default_runtime(self.lang, self.lang_version),
            **given,
            "language": self.lang,
            "language_version": self.lang_version,
            "priority": self.priority.value,
        }


class TaskSubmission(Submission):
    """A task of FlowKit."""

    graph: dict[str, Any] = Field(description="The graph of the task.")
    params: dict[str, Any] = Field(default_factory=dict)
    task_id: UrlId | None = Field(
        default=None, description="The same as `execution_id`, which is also the id of the task."
    )

    @model_validator(mode="after")
    def _require_one_id(self) -> TaskSubmission:
        if self.task_id is not None and self.execution_id not in (None, self.task_id):
            raise ValueError(
                f"task_id is {printed(self.task_id)}, and execution_id is another one; leave one of them out"
            )
        return self

    @property
    def chosen_id(self) -> str | None:
        """The id that the client has chosen under either name; None if it is left to the queue."""
        return self.task_id if self.execution_id is None else self.execution_id


class SubmitHeaders(Params):
    """Headers of a submission."""

    idempotency_key: str | None = Field(
        default=None,
        alias="Idempotency-Key",
        min_length=1,
        max_length=KEY_CHARS,
        pattern=r"^[\x20-\x7e]+$",
        description="A second call of the same user with this key and the same body returns the first response.",
    )


class ExecutionPath(Params):
    """Which execution the call concerns."""

    id: RequestId


class Cancellation(Params):
    """Why an execution is cancelled."""

    reason: str = Field(min_length=1, max_length=limits.CANCEL_REASON_CHARS)


class NewPriority(Params):
    """The band to which an execution moves."""

    priority: Priority


class Filter(Params):
    """Which executions a list has."""

    status: ExecutionStatus | None = None
    priority: Priority | None = None
    user_id: UserId | None = None
    tenant: Tenant | None = None
    limit: int = Field(default=50, ge=1, le=MAX_PAGE)
    skip: int = Field(default=0, ge=0, le=MAX_SKIP)


class OverrideSubmission(Params):
    """Limits of one tenant or user in place of the general ones; null for the general one."""

    max_total: int | None = Field(
        default=None, ge=1, le=MAX_HELD, description="Requests that wait or are active."
    )
    max_active: int | None = Field(default=None, ge=1, le=MAX_HELD)


_Held = Annotated[int, Field(ge=1, le=MAX_HELD)]


class LimitsSubmission(Params):
    """The limits that a queue gets."""

    max_pending: int = Field(ge=1, le=MAX_QUEUE, description="Requests that wait.")
    max_per_user: int = Field(ge=1, le=MAX_HELD, description="Requests of one user that wait or are active.")
    max_active: int = Field(ge=1, le=MAX_QUEUE)
    max_active_per_user: _Held | None = Field(description="Null for no limit.")
    stale_sec: float = Field(
        ge=1, le=MAX_STALE_SEC, description="How long a request waits before it expires."
    )
    tenants: dict[Tenant, OverrideSubmission] = Field(max_length=MAX_OVERRIDES)
    users: dict[UserKey, OverrideSubmission] = Field(
        max_length=MAX_OVERRIDES, description="By `user`, or by `tenant/user`, which takes precedence."
    )

    @property
    def limits(self) -> Limits:
        """The limits as the queue uses them."""
        given = self.model_dump(exclude={"tenants", "users"})
        tenants = {name: Override(**each.model_dump()) for name, each in self.tenants.items()}
        users = {name: Override(**each.model_dump()) for name, each in self.users.items()}
        return Limits(**given, tenants=tenants, users=users)


# --- what clients get ---------------------------------------------------------------------------------------------


class ApiResult(BaseModel):
    """A JSON object without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Submitted(ApiResult):
    """A request that has got its place in the queue."""

    execution_id: str
    status: ExecutionStatus
    position: int | None = Field(description="1 for the request that starts next.")
    estimated_wait_seconds: float | None = Field(
        description="Null while fewer than 20 service times are known."
    )
    task_id: str | None = Field(description="Null for an execution of an outside executor.")


class Execution(ApiResult):
    """A request and its state."""

    execution_id: str
    kind: Kind
    status: ExecutionStatus
    state: State = Field(description="FlowKit's own state of the request.")
    door: Door = Field(description="How the request has come.")
    tenant: str
    user_id: str
    priority: Priority
    position: int | None = Field(
        description="1 for the request that starts next. Null in lists, and for one that does not wait."
    )
    estimated_wait_seconds: float | None
    task_id: str | None
    reason: str | None = Field(description="A reason code, if it was rejected or ended without success.")
    error: str | None
    cancel_requested: bool
    requested_at: datetime
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


class Event(BaseModel):
    """An event about a request, with the fields of its type."""

    model_config = ConfigDict(extra="allow", frozen=True)

    event_id: str
    event_type: str
    event_version: str
    timestamp: str
    aggregate_id: str
    metadata: dict[str, Any]
    execution_id: str


class Events(ApiResult):
    """The events about a request, in their order."""

    execution_id: str
    events: list[Event]


class Cancelled(ApiResult):
    """What a call to cancel has done."""

    execution_id: str
    status: CancelStatus
    message: str
    event_id: str | None = Field(description="The event that this call has caused, if it has caused one.")


class Executions(ApiResult):
    """Some executions, newest first."""

    executions: list[Execution]
    total: int
    limit: int
    skip: int
    has_more: bool


class OverrideView(ApiResult):
    """Limits of one tenant or user in place of the general ones."""

    max_total: int | None
    max_active: int | None


class LimitsView(ApiResult):
    """The limits of a queue."""

    max_pending: int
    max_per_user: int
    max_active: int
    max_active_per_user: int | None
    stale_sec: float
    tenants: dict[str, OverrideView]
    users: dict[str, OverrideView]


class TopUser(ApiResult):
    """A user with many requests."""

    tenant: str
    user_id: str
    pending: int
    active: int


class QueueView(ApiResult):
    """The state of a queue."""

    queue: str
    queue_depth: int = Field(description="Requests that wait.")
    active_count: int
    max_concurrent: int
    by_priority: dict[Priority, int] = Field(description="Requests that wait, of each band that has some.")
    limits: LimitsView
    top_users: list[TopUser] = Field(description="Up to ten users with the most requests.")
    utilization: float = Field(description="The used share of the places for waiting requests, 0 to 1.")
    oldest_age_seconds: float | None
    started_last_minute: int
    mean_service_seconds: float | None
    in_doubt: int = Field(description="Changes of counters that are not confirmed yet.")
    unsent_events: int


# --- who may do what ----------------------------------------------------------------------------------------------


def _permit_submission(caller: Caller, given: Submission) -> None:
    """Raise HttpError if the caller must not submit for this user or tenant, or with this priority.

    Limits count the requests of a user in one tenant, so a user that could choose tenants would have no limit.
    """
    if caller.is_operator:
        return
    if given.user_id not in (None, str(caller)):
        text = f"user_id is {printed(given.user_id)}, but the token is that of {caller}; leave it out"
        raise HttpError(403, "user_not_permitted", text)
    if given.tenant != DEFAULT_TENANT:
        text = f"tenant is {printed(given.tenant)}; leave it out, or let an operator submit the request"
        raise HttpError(403, "tenant_not_permitted", text)
    if given.priority.rank < Priority.NORMAL.rank:
        allowed = ", ".join(name for name, rank in RANKS.items() if rank >= Priority.NORMAL.rank)
        text = f"priority is {given.priority.value!r}, which only an operator may use; use one of {allowed}"
        raise HttpError(403, "priority_not_permitted", text)


def _permit_content(caller: Caller, kind: Kind, stored: Fields) -> None:
    """Raise HttpError if the token does not permit a script, or one of the roles and functions of a task."""
    if caller.is_operator:
        return
    allowed = "does not name it" if caller.roles is None else f"may use only {names(sorted(caller.roles))}"
    if kind is Kind.EXECUTION:
        if caller.roles is not None:
            text = (
                f"a script has no role, and the token {allowed}; use a token that was created without --role"
            )
            raise HttpError(403, "role_not_permitted", text)
        return
    for node in stored["graph"]["nodes"]:
        name = executor_of(node)
        if name is not None and not caller.may_use(name):
            what = "function" if node["type"] == COORDINATOR_FN else "role"
            text = (
                f"node {printed(node['node_id'])} needs the {what} {printed(name)}, and the token {allowed}; "
                f"create one with `flowkit token create --actor {caller} --right admission`, and `--role "
                "NAME` for each role and function of the graph"
            )
            raise HttpError(403, "role_not_permitted", text)


def _owns(caller: Caller, ticket: Ticket) -> bool:
    """Return whether a caller may see and change a request.

    An actor is a user of this door and of the default tenant. The same name in another tenant is another
    user, and programs and records of Kafka may name any user.
    """
    own = (Door.HTTP, DEFAULT_TENANT, str(caller))
    return caller.is_operator or (ticket.door, ticket.tenant, ticket.user_id) == own


# --- the operations -----------------------------------------------------------------------------------------------


class AdmissionApi:
    """The operations of one queue."""

    def __init__(
        self, queue: AdmissionQueue, *, max_nodes: int, external_roles: Collection[str], version: str
    ) -> None:
        self._queue = queue
        self._max_nodes = max_nodes
        self._external_roles = frozenset(external_roles)
        self._version = version
        self._params = ParamsChecks()

    async def execute(self, given: CallInput) -> Submitted:
        """Ask for admission of a script or a task.

        A request that gets no place has status 429, and may be submitted again, also with the same ids.
        """
        body: ExecutionSubmission | TaskSubmission = given.body
        _permit_submission(given.caller, body)
        user_id = body.user_id or str(given.caller)
        execution_id, taken = await self._choose_id(body, user_id, given.header.idempotency_key)
        kind, stored = await self._content_of(body, execution_id, str(given.caller))
        _permit_content(given.caller, kind, stored)
        sent = {**body.model_dump(mode="json", exclude={"execution_id", "task_id"}), "user_id": user_id}
        request = Request(
            execution_id=execution_id,
            user_id=user_id,
            kind=kind,
            body=stored,
            door=Door.HTTP,
            tenant=body.tenant,
            priority=body.priority,
            metadata={**self._metadata(), _HASH: stable_hash(sent)},
        )
        try:
            ticket = await self._queue.submit(request)
        except TaskIdTaken:
            raise taken from None
        return await self._first_response(request, taken) if _is_repeated(ticket) else _submitted(ticket)

    def _metadata(self) -> Fields:
        return {"service_name": "flowkit-admission", "service_version": self._version}

    async def _choose_id(self, body: Submission, user_id: str, key: str | None) -> tuple[str, HttpError]:
        """Return the id of a new request, and the error if an earlier one has it that differs."""
        if key is None:
            id = body.chosen_id or str(uuid.uuid4())
            text = f"execution_id {printed(id)} belongs to another request; use another one, or leave it out"
            return id, HttpError(409, "execution_id_taken", text)
        if body.chosen_id is not None:
            text = (
                f"execution_id is {printed(body.chosen_id)}, but the key determines it; leave one of them out"
            )
            raise HttpError(422, "invalid_request", text)
        text = f"the Idempotency-Key {printed(key)} belongs to a request with another body; use another key"
        secret = await self._queue.store.key_secret()
        id = rules.idempotent_id(secret, Door.HTTP, body.tenant, user_id, key)
        return id, HttpError(409, "idempotency_key_reused", text)

    async def _content_of(
        self, body: ExecutionSubmission | TaskSubmission, execution_id: str, caller: str
    ) -> tuple[Kind, Fields]:
        """Return what the queue stores. Raise HttpError if a graph is not valid."""
        if isinstance(body, ExecutionSubmission):
            return Kind.EXECUTION, body.fields
        try:
            params = await asyncio.to_thread(complete_params, body.graph, body.params)
            stored = {"graph": body.graph, "params": params}
            await asyncio.to_thread(self._check_task, execution_id, stored)
            await self._params.check(body.graph, params, whose=caller)
        except GraphError as error:
            raise HttpError(422, error.code, str(error)) from None
        return Kind.TASK, stored

    def _check_task(self, task_id: str, stored: Fields) -> None:
        raise_if([problem] if (problem := new_task_id_problem(task_id)) else [])
        validate_input(task_id, stored, max_nodes=self._max_nodes, external_roles=self._external_roles)
        raise_if(storage_problems({"body": stored}))

    async def _first_response(self, request: Request, taken: HttpError) -> Submitted:
        """Return the response that the first request with this id got. Raise `taken` if that request differs."""
        events = await self._queue.events(request.execution_id)
        first = [each for each in events if each["event_type"] == rules.ACCEPTED]
        if not first or first[-1]["metadata"].get(_HASH) != request.metadata[_HASH]:
            raise taken
        return Submitted(
            execution_id=request.execution_id,
            status=ExecutionStatus.QUEUED,
            position=first[-1]["queue_position"],
            estimated_wait_seconds=first[-1]["estimated_wait_seconds"],
            task_id=request.execution_id if request.kind is Kind.TASK else None,
        )

    async def get_execution(self, given: CallInput) -> Execution:
        """Return an execution with its position in the queue."""
        return _execution(await self._find(given))

    async def get_events(self, given: CallInput) -> Events:
        """Return the events about an execution, in their order."""
        ticket = await self._find(given)
        events = [Event(**each) for each in await self._queue.events(ticket.execution_id)]
        return Events(execution_id=ticket.execution_id, events=events)

    async def _find(self, given: CallInput) -> Ticket:
        """Return the request that a call names. Raise HttpError if the caller must not see it."""
        ticket = await self._queue.find(given.path.id)
        if ticket is None or not _owns(given.caller, ticket):
            raise _unknown(given)
        return ticket

    async def cancel_execution(self, given: CallInput) -> Cancelled:
        """Cancel an execution. One that waits ends at once; one that runs ends when its executor confirms it."""
        before = await self._find(given)
        change = await self._queue.cancel(before.execution_id, reason=given.body.reason, by=str(given.caller))
        if change.ticket is None:
            raise _unknown(given)
        if change.outcome is Changed.ENDED:
            return _already_cancelled(change.ticket)
        if change.outcome is Changed.DONE:
            text = "the execution was cancelled before it started"
        elif before.cancel_requested:
            text = "its cancellation was requested before; it ends when its executor confirms that"
        else:
            text = "it runs, and ends when its executor confirms the cancellation"
        return Cancelled(
            execution_id=before.execution_id,
            status=CancelStatus.CANCELLATION_REQUESTED,
            message=text,
            event_id=None if before.cancel_requested else await self._cancel_event(before.execution_id),
        )

    async def _cancel_event(self, execution_id: str) -> str | None:
        events = await self._queue.events(execution_id)
        found = [each["event_id"] for each in events if each["event_type"] in _CANCEL_EVENTS]
        return found[-1] if found else None

    async def retry_execution(self, given: CallInput) -> Submitted:
        """Submit what an ended execution asked for again, as a new execution of the same user, which has a new id.

        The priority is that of the ended execution; if the caller may not ask for it, it is normal.
        """
        ticket = await self._find(given)
        body = await self._queue.body(ticket.execution_id)
        if ticket.state not in ENDED:
            text = f"the execution is {STATUSES[ticket.state].value}; wait until it has ended, or cancel it"
            raise HttpError(400, "not_ended", text)
        if not body:
            text = (
                "the queue keeps what an execution asks for until one day after its end, and nothing of a "
                f"rejected one; submit it again with POST {PREFIX}/execute"
            )
            raise HttpError(400, "body_not_kept", text)
        _permit_content(given.caller, ticket.kind, body)
        least = 1 if given.caller.is_operator else Priority.NORMAL.rank
        priority = ticket.priority if ticket.priority.rank >= least else Priority.NORMAL
        own = {} if ticket.kind is Kind.TASK else {"priority": priority.value}
        request = Request(
            execution_id=str(uuid.uuid4()),
            user_id=ticket.user_id,
            kind=ticket.kind,
            body={**body, **own},
            door=ticket.door,
            tenant=ticket.tenant,
            priority=priority,
            metadata=self._metadata(),
        )
        return _submitted(await self._queue.submit(request))

    async def list_executions(self, given: CallInput) -> Executions:
        """List executions, newest first."""
        wanted: Filter = given.query
        page = await self._queue.page(
            state=[state for state, status in STATUSES.items() if status is wanted.status],
            priority=wanted.priority,
            user_id=wanted.user_id,
            tenant=wanted.tenant,
            skip=wanted.skip,
            limit=wanted.limit,
        )
        return Executions(
            executions=[_execution(each) for each in page.tickets],
            total=page.total,
            limit=wanted.limit,
            skip=wanted.skip,
            has_more=wanted.skip + len(page.tickets) < page.total,
        )

    async def set_priority(self, given: CallInput) -> Execution:
        """Move a waiting execution to another band. It keeps its arrival."""
        change = await self._queue.set_priority(given.path.id, given.body.priority)
        if change.ticket is None:
            raise _unknown(given)
        if change.outcome is Changed.NOT_WAITING:
            status = STATUSES[change.ticket.state].value
            text = f"the execution is {status}; only the priority of a waiting one can change"
            raise HttpError(409, "not_waiting", text)
        return _execution(change.ticket)

    async def get_queue(self, given: CallInput) -> QueueView:
        """Return the state of the queue."""
        return _queue_view(await self._queue.status())

    async def get_limits(self, given: CallInput) -> LimitsView:
        """Return the limits of the queue."""
        return _limits_view(await self._queue.store.limits())

    async def set_limits(self, given: CallInput) -> LimitsView:
        """Replace the limits of the queue. Every process uses them within two seconds.

        Requests that already wait or run stay, even if there are more than a new limit allows.
        """
        wanted: LimitsSubmission = given.body
        await self._queue.store.set_limits(wanted.limits)
        return _limits_view(wanted.limits)


def _is_repeated(ticket: Ticket) -> bool:
    """Return whether an earlier request with the same id was admitted."""
    return ticket.duplicate and ticket.accepted


def _submitted(ticket: Ticket) -> Submitted:
    """Return a request that waits. Raise HttpError if it was rejected."""
    if not ticket.accepted:
        seconds = max(1, math.ceil(ticket.retry_after_sec or 1))
        text = f"{ticket.error}; try again after {seconds} s"
        raise HttpError(
            429, ticket.reason or reason_codes.QUEUE_FULL, text, ((b"retry-after", b"%d" % seconds),)
        )
    return Submitted(
        execution_id=ticket.execution_id,
        status=STATUSES[ticket.state],
        position=ticket.position,
        estimated_wait_seconds=ticket.estimated_wait_sec,
        task_id=ticket.task_id,
    )


def _execution(ticket: Ticket) -> Execution:
    return Execution(
        execution_id=ticket.execution_id,
        kind=ticket.kind,
        status=STATUSES[ticket.state],
        state=ticket.state,
        door=ticket.door,
        tenant=ticket.tenant,
        user_id=ticket.user_id,
        priority=ticket.priority,
        position=ticket.position,
        estimated_wait_seconds=ticket.estimated_wait_sec,
        task_id=ticket.task_id,
        reason=ticket.reason,
        error=ticket.error,
        cancel_requested=ticket.cancel_requested,
        requested_at=datetime.fromtimestamp(ticket.requested_at, UTC),
        queued_at=_moment(ticket.queued_at),
        started_at=_moment(ticket.started_at),
        ended_at=_moment(ticket.ended_at),
    )


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _already_cancelled(ticket: Ticket) -> Cancelled:
    """Return that a request was cancelled before. Raise HttpError if it has ended otherwise."""
    if ticket.state is not State.CANCELLED:
        status = STATUSES[ticket.state].value
        raise HttpError(
            400, "already_ended", f"the execution is {status}; only one that has not ended can be"
        )
    return Cancelled(
        execution_id=ticket.execution_id,
        status=CancelStatus.ALREADY_CANCELLED,
        message="the execution was cancelled before",
        event_id=None,
    )


def _unknown(given: CallInput) -> HttpError:
    text = f"there is no execution {printed(given.path.id)}; check the id"
    return HttpError(404, "execution_not_found", text)


def _limits_view(limits: Limits) -> LimitsView:
    return LimitsView(**asdict(limits))


def _queue_view(status: QueueStatus) -> QueueView:
    return QueueView(
        queue=status.queue,
        queue_depth=status.pending,
        active_count=status.active,
        max_concurrent=status.limits.max_active,
        by_priority={Priority(name): count for name, count in status.by_priority.items()},
        limits=_limits_view(status.limits),
        top_users=[TopUser(**asdict(each)) for each in status.top_users],
        utilization=status.utilization,
        oldest_age_seconds=status.oldest_age_sec,
        started_last_minute=status.started_last_minute,
        mean_service_seconds=status.mean_service_sec,
        in_doubt=status.in_doubt,
        unsent_events=status.unsent_events,
    )


# --- the table ----------------------------------------------------------------------------------------------------

_NOT_FOUND: Final = {
    404: "There is no such execution, or it is that of another user, tenant or door: `execution_not_found`."
}
_REJECTED: Final = {
    429: "The request gets no place: `queue_full`, `user_limit` or `tenant_limit`. The header `Retry-After` says when "
    "to try again."
}


_ONE: Final = f"{PREFIX}/executions/{{id}}"
_ADMIN: Final = f"{PREFIX}/admin"

OPERATIONS: Final = (
    Operation(
        method="POST",
        path=f"{PREFIX}/execute",
        call=AdmissionApi.execute,
        result=Submitted,
        parameters={"header": SubmitHeaders},
        bodies={"graph": TaskSubmission, "": ExecutionSubmission},
        errors={
            403: "The caller may not choose it: `user_not_permitted`, `tenant_not_permitted`, "
            "`priority_not_permitted` or `role_not_permitted`.",
            409: "Another request has the same key or id: `idempotency_key_reused` or `execution_id_taken`.",
            422: "The graph is invalid: `invalid_graph`.",
            **_REJECTED,
        },
        needs=Right.ADMISSION,
    ),
    Operation(
        method="GET",
        path=_ONE,
        call=AdmissionApi.get_execution,
        result=Execution,
        parameters={"path": ExecutionPath},
        errors=_NOT_FOUND,
        needs=Right.ADMISSION,
    ),
    Operation(
        method="GET",
        path=f"{_ONE}/events",
        call=AdmissionApi.get_events,
        result=Events,
        parameters={"path": ExecutionPath},
        errors=_NOT_FOUND,
        needs=Right.ADMISSION,
    ),
    Operation(
        method="POST",
        path=f"{_ONE}/cancel",
        call=AdmissionApi.cancel_execution,
        result=Cancelled,
        parameters={"path": ExecutionPath},
        bodies={"": Cancellation},
        errors={400: "It has ended, and not by a cancellation: `already_ended`.", **_NOT_FOUND},
        needs=Right.ADMISSION,
    ),
    Operation(
        method="POST",
        path=f"{_ONE}/retry",
        call=AdmissionApi.retry_execution,
        result=Submitted,
        parameters={"path": ExecutionPath},
        errors={
            400: "It waits or runs: `not_ended`. It was rejected, or has ended more than a day ago: `body_not_kept`.",
            403: "The token may not use a role of its graph: `role_not_permitted`.",
            **_NOT_FOUND,
            **_REJECTED,
        },
        needs=Right.ADMISSION,
    ),
    Operation(
        method="GET",
        path=f"{_ADMIN}/executions/",
        call=AdmissionApi.list_executions,
        result=Executions,
        parameters={"query": Filter},
        needs=Right.OPERATOR,
    ),
    Operation(
        method="GET",
        path=f"{_ADMIN}/executions/queue",
        call=AdmissionApi.get_queue,
        result=QueueView,
        needs=Right.OPERATOR,
    ),
    Operation(
        method="PUT",
        path=f"{_ADMIN}/executions/{{id}}/priority",
        call=AdmissionApi.set_priority,
        result=Execution,
        parameters={"path": ExecutionPath},
        bodies={"": NewPriority},
        errors={409: "It no longer waits: `not_waiting`.", **_NOT_FOUND},
        needs=Right.OPERATOR,
    ),
    Operation(
        method="GET",
        path=f"{_ADMIN}/limits",
        call=AdmissionApi.get_limits,
        result=LimitsView,
        needs=Right.OPERATOR,
    ),
    Operation(
        method="PUT",
        path=f"{_ADMIN}/limits",
        call=AdmissionApi.set_limits,
        result=LimitsView,
        bodies={"": LimitsSubmission},
        needs=Right.OPERATOR,
    ),
)
"""All calls of the API."""


def admission_routes(
    queue: AdmissionQueue,
    *,
    max_nodes: int = limits.MAX_NODES,
    external_roles: Collection[str] = (),
    version: str = __version__,
) -> list[BaseRoute]:
    """Return the routes of the API for `create_app`, with its OpenAPI document.

    Graphs of tasks are checked as `TaskClient` checks them, with the same `max_nodes` and `external_roles`.
    """
    api = AdmissionApi(queue, max_nodes=max_nodes, external_roles=external_roles, version=version)
    info = {"title": TITLE, "version": version}
    return operation_routes(OPERATIONS, api, info, document_path=f"{PREFIX}/openapi.json")
