"""Requests that wait for admission, their limits, and what the queue reports about them.

The source of the terms and numbers is the admission specification (sections 1 to 4); docs/admission.md describes them.
Times are Unix timestamps in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from flowkit.models.admission import DEFAULT_TENANT, Priority

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.core.utils import Fields


class Kind(StrEnum):
    """What starts when a request is admitted."""

    TASK = "task"
    """A task of FlowKit."""
    EXECUTION = "execution"
    """An execution of an outside executor, which gets the event `create_pod_command`."""


class Door(StrEnum):
    """The way by which a request has come.

    Users of the same name that come through different doors are different owners.
    """

    HTTP = "http"
    """The HTTP API, which knows its callers by their tokens."""
    KAFKA = "kafka"
    """A record, whose writer may name any user."""
    PYTHON = "python"
    """A program with access to the database: `Coordinator`, `TaskClient`, or the command line."""


class State(StrEnum):
    """The states of a request."""

    RESERVING = "reserving"
    """The limits are being checked. Nothing has been reported yet."""
    QUEUED = "queued"
    STARTING = "starting"
    """It has a slot, and its task is being started."""
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    """Its run took too long."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It has waited longer than `stale_sec`."""
    REJECTED = "rejected"
    """It did not get a place in the queue."""


PENDING: Final = frozenset({State.RESERVING, State.QUEUED})
RUNNING: Final = frozenset({State.STARTING, State.ACTIVE})
ENDED: Final = frozenset(State) - PENDING - RUNNING
REPEATABLE: Final = frozenset({State.REJECTED, State.EXPIRED})
"""States in which the same id can be submitted again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Limits of one tenant or user in place of the general ones; None for the general one."""

    max_total: int | None = None
    """Requests that are pending or active. A tenant has no general limit."""
    max_active: int | None = None
    """Requests that are active."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one queue."""

    max_pending: int = 10_000
    max_per_user: int = 100
    """Requests of one user that are pending or active."""
    max_active: int = 10
    max_active_per_user: int | None = None
    stale_sec: float = 3_600.0
    """How long a request waits before it expires."""
    tenants: Mapping[str, Override] = field(default_factory=dict)
    users: Mapping[str, Override] = field(default_factory=dict)
    """By the name of the user, or by `tenant/user`, which takes precedence. A name with a slash is always
    the latter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to start something."""

    execution_id: str
    user_id: str
    door: Door
    kind: Kind
    body: Fields
    """For a task, `graph` and `params`. For an execution, the fields of the event `execution_requested`."""
    tenant: str = DEFAULT_TENANT
    priority: Priority = Priority.NORMAL
    metadata: Fields = field(default_factory=dict)
    """The metadata of the event that asked for it, which the events about it repeat."""
    request_id: str | None = None
    """The id of that event. A request that was rejected or has expired is not submitted again by the same event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The state of a request, as the queue returns it."""

    execution_id: str
    state: State
    kind: Kind
    door: Door
    tenant: str
    user_id: str
    priority: Priority
    requested_at: float
    duplicate: bool = False
    """Whether an earlier request has this id, whose state this is."""
    position: int | None = None
    """1 for the request that starts next; None for one that does not wait."""
    estimated_wait_sec: float | None = None
    """None while fewer than 20 service times are known."""
    reason: str | None = None
    """Why it was rejected, or ended otherwise than with success: a reason code."""
    error: str | None = None
    retry_after_sec: float | None = None
    """For a rejected request: after which time another try may succeed."""
    task_id: str | None = None
    """The id of the task, which is that of its request; None for an execution of an outside executor."""
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    cancel_requested: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the queue has the request, or had it."""
        return self.state is not State.REJECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPage:
    """Some requests of a list, newest first."""

    tickets: Sequence[Ticket]
    total: int
    """The number of all that match, counted up to 200,000."""


class Changed(StrEnum):
    """What a call to cancel a request or to change its priority has done."""

    DONE = "done"
    REQUESTED = "requested"
    """The request runs. Its end was requested; its slot is free once the end is confirmed."""
    NOT_WAITING = "not_waiting"
    """The request no longer waits, so its priority stays."""
    ENDED = "ended"
    """The request has ended already."""
    REFUSED = "refused"
    """The request does not end, because the caller may not end it as it is."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestChange:
    """The outcome of such a call, and the request as it is now; None if it is unknown."""

    outcome: Changed
    ticket: Ticket | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UserLoad:
    """A user and the requests that it has in the queue."""

    tenant: str
    user_id: str
    pending: int
    active: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStatus:
    """The state of a queue."""

    queue: str
    pending: int
    active: int
    by_priority: Mapping[str, int]
    """Pending requests of each band that has some."""
    limits: Limits
    top_users: Sequence[UserLoad]
    """Up to ten users with the most requests."""
    oldest_age_sec: float | None
    """How long the oldest pending request has waited."""
    started_last_minute: int
    mean_service_sec: float | None
    in_doubt: int
    """Changes of counters that are not confirmed yet."""
    unsent_events: int

    @property
    def utilization(self) -> float:
        """The used share of the places for pending requests, 0 to 1."""
        return self.pending / self.limits.max_pending


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How an execution ended, as its executor or Temporal reports it."""

    state: State
    """One of `ENDED`."""
    reason: str | None = None
    error: str | None = None
    fields: Fields = field(default_factory=dict)
    """Fields of the reported event, such as `exit_code` and `resource_usage`."""
