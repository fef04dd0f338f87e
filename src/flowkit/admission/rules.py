"""The rules of admission without I/O: limits, texts, positions, estimates, and the events about a request.

The texts, fields and defaults are those of the admission specification, sections 1, 4 and 8.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flowkit import reason_codes
from flowkit.admission.models import ENDED, Door, Kind, Limits, Override, Report, State, Ticket
from flowkit.core.utils import Fields, dumps
from flowkit.models.admission import BY_RANK
from flowkit.models.tasks import TaskStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLES: Final = 20
"""Service times that must be known before a wait is estimated."""
OVERDUE_SEC: Final = 300.0
"""After this time beyond its `timeout_seconds`, an execution about which nothing was heard counts as lost."""
STOP_SEC: Final = 30.0
"""How long an execution that Kafka cancels keeps its slot while its executor stops it."""
KEEP_SEC: Final = 30 * 86_400.0
"""How long an ended request is kept, so that a second one with its id is recognised."""
KEEP_BODY_SEC: Final = 86_400.0
"""How long the queue keeps what an ended request asked for, so that it can be repeated."""
START_TRIES: Final = 8
"""How often a task is started before its request fails."""
_START_PAUSE_SEC: Final = 1.0
_MOST_START_PAUSE_SEC: Final = 60.0
_LEAST_RETRY_SEC: Final = 1.0
_MOST_RETRY_SEC: Final = 300.0
_UNKNOWN_RETRY_SEC: Final = 10.0
_ID_DIGITS: Final = 40
_SERVICE: Final = "execution-coordinator"
_VERSION: Final = "1.0.0"

ACCEPTED: Final = "execution_accepted"
QUEUED: Final = "execution_queued"
STARTED: Final = "execution_started"
RUNNING: Final = "execution_running"
COMPLETED: Final = "execution_completed"
FAILED: Final = "execution_failed"
TIMEOUT: Final = "execution_timeout"
CANCELLED: Final = "execution_cancelled"
REQUESTED: Final = "execution_requested"
CREATE_POD: Final = "create_pod_command"
DELETE_POD: Final = "delete_pod_command"


# --- limits -------------------------------------------------------------------------------------------------------


def user_holder(tenant: str, user_id: str) -> str:
    """Return the key of the document that counts the requests of a user."""
    return f"u/{tenant}/{user_id}"


def tenant_holder(tenant: str) -> str:
    """Return the key of the document that counts the requests of a tenant."""
    return f"t/{tenant}"


def _of_user(limits: Limits, tenant: str, user_id: str) -> Override:
    general = None if "/" in user_id else limits.users.get(user_id)
    own = limits.users.get(f"{tenant}/{user_id}") or general or Override()
    return Override(
        max_total=limits.max_per_user if own.max_total is None else own.max_total,
        max_active=limits.max_active_per_user if own.max_active is None else own.max_active,
    )


def user_total(limits: Limits, tenant: str, user_id: str) -> dict[str, int]:
    """Return how many requests a user may have in the queue, pending and active together, by its holder."""
    cap = _of_user(limits, tenant, user_id).max_total
    return {} if cap is None else {user_holder(tenant, user_id): cap}


def tenant_total(limits: Limits, tenant: str, user_id: str) -> dict[str, int]:
    """Return the same for the tenant of a user, by its holder. Most have no such limit."""
    cap = limits.tenants.get(tenant, Override()).max_total
    return {} if cap is None else {tenant_holder(tenant): cap}


def active_caps(limits: Limits, tenant: str, user_id: str) -> dict[str, int]:
    """Return how many requests each holder may have active. Most have no such limit."""
    caps = recorded_active(limits, tenant, user_id)
    return {holder: cap for holder, cap in caps.items() if cap is not None}


def recorded_active(limits: Limits, tenant: str, user_id: str) -> dict[str, int | None]:
    """Return the holders that record a request when it becomes active, and how many they may have; None for any number.

    A user always does, so that a new limit counts what is there. A tenant without a limit can have more requests than a
    document can list, so it records them from the moment on at which it has a limit.
    """
    caps: dict[str, int | None] = {user_holder(tenant, user_id): _of_user(limits, tenant, user_id).max_active}
    if (cap := limits.tenants.get(tenant, Override()).max_active) is not None:
        caps[tenant_holder(tenant)] = cap
    return caps


def tenant_of(holder: str) -> str:
    """Return the tenant of a holder."""
    return holder.split("/", 2)[1]


def tenant_lists(limits: Limits) -> set[tuple[str, str]]:
    """Return the lists of tenants that have a limit, each as holder and name of the list."""
    held = {(tenant_holder(tenant), "held") for tenant, own in limits.tenants.items() if own.max_total}
    return held | {
        (tenant_holder(tenant), "active") for tenant, own in limits.tenants.items() if own.max_active
    }


def active_cap_of(limits: Limits, holder: str) -> int | None:
    """Return how many requests a holder may have active; None for any number."""
    kind, tenant, *user_id = holder.split("/", 2)
    return active_caps(limits, tenant, user_id[0] if kind == "u" else "").get(holder)


def limits_active(limits: Limits) -> bool:
    """Return whether a user or tenant may have only so many requests active."""
    own = [*limits.users.values(), *limits.tenants.values()]
    return limits.max_active_per_user is not None or any(each.max_active is not None for each in own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which of some ready requests may start."""

    items: list[Fields]
    """Those that may start, in their order."""
    taken: Mapping[str, int]
    """How many they are of each user and tenant with a limit."""
    full: Sequence[str]
    """The holders that prevent the others: users, then tenants."""


def choose(ready: Sequence[Fields], most: int, limits: Limits, active: Mapping[str, int]) -> Choice:
    """Choose the first requests that may start. `active` has what users and tenants with a limit have active."""
    taken: Counter[str] = Counter()
    chosen: list[Fields] = []
    full: set[str] = set()
    for item in ready:
        if len(chosen) == most:
            break
        caps = active_caps(limits, item["tenant"], item["user_id"])
        over = [holder for holder, cap in caps.items() if active.get(holder, 0) + taken[holder] >= cap]
        if over:
            full.add(over[0])
        else:
            chosen.append(item)
            taken.update(caps.keys())
    return Choice(items=chosen, taken=taken, full=sorted(full, reverse=True))


def rejection(holder: str | None, cap: int) -> tuple[str, str]:
    """Return the reason code and the documented text of a rejection: by a holder's limit, or None for the queue's."""
    if holder is None:
        return reason_codes.QUEUE_FULL, "Queue is full"
    if holder.startswith("u/"):
        return reason_codes.USER_LIMIT, f"User execution limit exceeded ({cap})"
    return reason_codes.TENANT_LIMIT, f"Tenant execution limit exceeded ({cap})"


# --- estimates ----------------------------------------------------------------------------------------------------


def mean_service(samples: Sequence[float]) -> float | None:
    """Return the mean of recent service times, in seconds; None while too few are known."""
    return sum(samples) / len(samples) if len(samples) >= SAMPLES else None


def estimated_wait(position: int, samples: Sequence[float], max_active: int) -> float | None:
    """Return how long a request at this position may wait, in seconds; None while too little is known."""
    mean = mean_service(samples)
    return None if mean is None else round(position * mean / max_active, 3)


def retry_after(samples: Sequence[float], max_active: int) -> float:
    """Return after how many seconds a rejected request may find a place: when one request has probably ended."""
    mean = mean_service(samples)
    if mean is None:
        return _UNKNOWN_RETRY_SEC
    return round(min(max(mean / max_active, _LEAST_RETRY_SEC), _MOST_RETRY_SEC), 1)


def start_pause(tries: int) -> float:
    """Return how long the next try to start a task waits, in seconds."""
    return float(min(_START_PAUSE_SEC * 2 ** (tries - 1), _MOST_START_PAUSE_SEC))


def positions(ranks: Sequence[int], bands: Mapping[int, int]) -> list[int]:
    """Return the position of each request of a group that has just got its places, in the order of arrival.

    `bands` has the number of pending requests of each rank, with the whole group.
    """
    later: dict[int, int] = {}
    found = []
    for rank in reversed(ranks):
        ahead = sum(count for other, count in bands.items() if other < rank)
        found.append(ahead + bands.get(rank, 0) - later.get(rank, 0))
        later[rank] = later.get(rank, 0) + 1
    return found[::-1]


# --- executions ---------------------------------------------------------------------------------------------------

PYTHON: Final = "python"
"""The language of a script that names none."""
PYTHON_VERSION: Final = "3.11"
EXECUTION: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "timeout_seconds": 60,
        "cpu_limit": "1000m",
        "memory_limit": "128Mi",
        "cpu_request": "500m",
        "memory_request": "64Mi",
    }
)
"""The fields of an execution that have the same default for every language."""
RUNTIME: Final = ("runtime_image", "runtime_command", "runtime_filename")
"""The fields of an execution that a language other than Python must name."""


def default_runtime(language: str, version: str) -> Fields:
    """Return the defaults of the fields `RUNTIME`. Only Python has them."""
    if language != PYTHON:
        return {}
    command = ["python", "/scripts/main.py"]
    return dict(zip(RUNTIME, (f"python:{version}-slim", command, "main.py"), strict=True))


# --- requests -----------------------------------------------------------------------------------------------------


def owner_of(item: Fields) -> tuple[str, str, str, str]:
    """Return to whom the id of a stored request belongs: queue, door, tenant and user."""
    return item["queue"], item["door"], item["tenant"], item["user_id"]


def idempotent_id(secret: bytes, door: Door, tenant: str, user_id: str, key: str) -> str:
    """Return the id of the request behind an idempotency key of a user.

    It is derived with a secret of the queue, so that no other user can compute the id and use it first.
    """
    return hmac.digest(secret, dumps([door, tenant, user_id, key]), "sha256").hex()[:_ID_DIGITS]


def ticket_of(item: Fields, *, duplicate: bool = False, **known: Any) -> Ticket:
    """Return what the queue says about a stored request. `known` has its position and estimated wait."""
    state = State(item["state"])
    return Ticket(
        execution_id=item["_id"],
        state=state,
        kind=Kind(item["kind"]),
        door=Door(item["door"]),
        tenant=item["tenant"],
        user_id=item["user_id"],
        priority=BY_RANK[item["rank"]],
        requested_at=item["requested_at"],
        duplicate=duplicate,
        reason=item.get("reason"),
        error=item.get("error"),
        retry_after_sec=item.get("retry_after_sec"),
        task_id=item["_id"] if item["kind"] == Kind.TASK else None,
        queued_at=item.get("queued_at"),
        started_at=item.get("started_at"),
        ended_at=item.get("ended_at"),
        cancel_requested=bool(item.get("cancel")) and state not in ENDED,
        **known,
    )


def holds_of(item: Fields) -> list[tuple[str, str, str]]:
    """Return what a request may hold: holder, list of the holder, and entry in that list.

    An entry contains the token of the change that made it. It is therefore never that of another try of the same id.
    """
    holders = (user_holder(item["tenant"], item["user_id"]), tenant_holder(item["tenant"]))
    holds = []
    for holder in holders:
        if item.get("place"):
            holds.append((holder, "held", entry_of(item["place"], item["_id"])))
        if item.get("slot"):
            holds.append((holder, "active", entry_of(item["slot"], item["_id"])))
    return holds


def entry_of(token: str, execution_id: str) -> str:
    """Return the entry of a request in a list of a holder."""
    return f"{token}|{execution_id}"


def parts_of(entry: str) -> tuple[str, str]:
    """Return the token and the execution id of an entry."""
    token, _, execution_id = entry.partition("|")
    return token, execution_id


def overdue_at(item: Fields, started_at: float) -> float | None:
    """Return when an execution counts as lost: some minutes after the time that it may take.

    None without such a time.
    """
    seconds = item["timeout_sec"]
    return None if not seconds else started_at + seconds + OVERDUE_SEC


# --- events -------------------------------------------------------------------------------------------------------


def event(kind: str, item: Fields, at: float, **fields: Any) -> Fields:
    """Return an event as its request stores it."""
    return {"type": kind, "at": at, "v": item["v"], "fields": fields}


def event_id(item: Fields, stored: Fields) -> str:
    """Return the id of an event. It is derived from the request, its version, the type and the time."""
    return _uuid(f"{item['_id']} {stored['v']} {stored['type']} {stored['at']!r}")


def _uuid(text: str) -> str:
    return str(uuid.UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4))


def accepted(item: Fields, at: float, position: int, wait: float | None) -> list[Fields]:
    """Return the events of a request that has got its place."""
    start = None if wait is None else iso(at + wait)
    return [
        event(
            ACCEPTED,
            item,
            at,
            queue_position=position,
            estimated_wait_seconds=wait,
            priority=BY_RANK[item["rank"]].value,
        ),
        event(QUEUED, item, at, position_in_queue=position, estimated_start_time=start),
    ]


def rejected(item: Fields, at: float, text: str, pending: int) -> Fields:
    """Return the event of a request that gets no place."""
    return failed(item, at, "resource_limit", text, f"Queue full: {text}. Queue size: {pending}")


def ending(item: Fields, report: Report, at: float) -> Fields:
    """Return what changes in a request that ends. It then owes its place or its slot."""
    return {
        "state": report.state.value,
        "reason": report.reason,
        "error": report.error,
        "report": report.fields,
        "ended_at": at,
        "due_at": at + KEEP_BODY_SEC,
        "purge_at": purge_at(at),
        "owes": "place" if item["state"] == State.QUEUED else "slot",
    }


def rejecting(reason: str, text: str, retry_after_sec: float, at: float) -> Fields:
    """Return what changes in a request that gets no place.

    Its caller has what it asked for, so the queue drops that.
    """
    return {
        "state": State.REJECTED.value,
        "reason": reason,
        "error": text,
        "retry_after_sec": retry_after_sec,
        "ended_at": at,
        "purge_at": purge_at(at),
        "body": {},
    }


def purge_at(ended_at: float) -> datetime:
    """Return when a request is deleted that has ended."""
    return datetime.fromtimestamp(ended_at + KEEP_SEC, UTC)


def report_of(status: TaskStatus, reason: str | None) -> Report:
    """Return how the request of a task ends that has closed."""
    state = _STATES[status]
    if state is State.COMPLETED:
        return Report(state=state)
    return Report(state=state, reason=status.value, error=reason)


_STATES: Final = {
    TaskStatus.FINISHED: State.COMPLETED,
    TaskStatus.FAILED: State.FAILED,
    TaskStatus.CANCELLED: State.CANCELLED,
}


def ended(item: Fields, at: float, state: State, text: str) -> Fields:
    """Return the event of a request whose run has ended."""
    output = {"resource_usage": None, "stdout": "", "stderr": ""}
    if state is State.COMPLETED:
        return event(COMPLETED, item, at, exit_code=0, **output)
    if state is State.CANCELLED:
        return cancelled(item, at, text, "flowkit")
    if state is State.TIMEOUT:
        return timed_out(item, at, item["timeout_sec"] or 0, text)
    return event(FAILED, item, at, exit_code=1, error_type="script_error", error_message=text, **output)


def failed(item: Fields, at: float, error_type: str, message: str, stderr: str) -> Fields:
    """Return the event of a request that has failed before it ran."""
    return event(
        FAILED,
        item,
        at,
        exit_code=-1,
        error_type=error_type,
        error_message=message,
        resource_usage=None,
        stdout="",
        stderr=stderr,
    )


def popped(item: Fields, at: float) -> list[Fields]:
    """Return the events of an execution that has got its slot: the command that starts it, and that it has started."""
    return [event(CREATE_POD, item, at, saga_id=saga_id(item)), *started(item, at)]


def saga_id(item: Fields) -> str:
    """Return the id under which an executor knows a run of an execution. It is the same in all commands about it."""
    return _uuid(f"saga {item['_id']} {item['place']}")


def cancelled(item: Fields, at: float, reason: str, by: str) -> Fields:
    """Return the event of a request that was cancelled before it ran."""
    return event(CANCELLED, item, at, reason=reason, cancelled_by=by, force_terminated=False)


def delete_pod(item: Fields, at: float, reason: str) -> Fields:
    """Return the command that stops an execution."""
    return event(DELETE_POD, item, at, saga_id=saga_id(item), reason=reason, pod_name=None, namespace=None)


def timed_out(item: Fields, at: float, seconds: float, text: str) -> Fields:
    """Return the event of a request that has waited, or run, too long."""
    return event(
        *(TIMEOUT, item, at), timeout_seconds=int(seconds), resource_usage=None, stdout="", stderr=text
    )


def started(item: Fields, at: float) -> list[Fields]:
    """Return the events of a request whose run has started."""
    return [
        event(STARTED, item, at, pod_name=None, node_name=None, container_id=None),
        event(RUNNING, item, at, pod_name=None, progress_percentage=None),
    ]


def envelope(item: Fields, stored: Fields) -> Fields:
    """Return the whole event that is sent, with its envelope.

    A command has the metadata of this service, and the user; the other events have those of the request, which an event
    of an earlier try contains.
    """
    command = stored["type"] in (CREATE_POD, DELETE_POD)
    given = stored.get("metadata", item.get("metadata")) or {}
    metadata = {
        "service_name": _SERVICE,
        "service_version": _VERSION,
        "environment": given.get("environment", "production"),
    }
    metadata = {**metadata, **({} if command else given), "user_id": item["user_id"]}
    body = item["body"] if stored["type"] == CREATE_POD else {}
    return {
        "event_id": event_id(item, stored),
        "event_type": stored["type"],
        "event_version": "1.0",
        "timestamp": iso(stored["at"]),
        "aggregate_id": item["_id"],
        "metadata": metadata,
        **body,
        "execution_id": item["_id"],
        **({"priority": BY_RANK[item["rank"]].value} if stored["type"] == CREATE_POD else {}),
        **stored["fields"],
    }


def iso(at: float) -> str:
    """Return a time as ISO 8601 text in UTC, with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
