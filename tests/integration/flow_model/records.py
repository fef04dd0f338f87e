"""What one client has sent and seen of a flow, and what its supervisor has received: plain records in the
order of time.

All times are seconds of one monotonic clock, that of the test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

Fields = dict[str, Any]
RunKey = tuple[int, int]
"""Number of a run, and of its retry: (1, 1) is the run `…/1`, and (1, 2) its retry `…/1.2`."""

PENDING, READY, DISPATCHED, RUNNING = "Pending", "Ready", "Dispatched", "Running"
COMPLETED, FAILED, CANCELLED = "Completed", "Failed", "Cancelled"
CREATED, STARTED, FINISHED, ERROR = "Created", "Started", "Finished", "Error"
ENDS: Final = frozenset({FINISHED, ERROR})

STORAGE_ERROR: Final = -32010
ALREADY_EXISTS: Final = -32002

_RUN = re.compile(
    r"flow:(?P<deployment>[0-9a-f]{8}):(?P<context>\d+):(?P<flow>\d+)/(?P<run>\d+)(\.(?P<retry>\d+))?"
)
_WIRE = re.compile(
    r"(?P<deployment>[0-9a-f]{8}):(?P<context>\d+):(?P<caller>\d+):(?P<job>\d+)"
    r"(@(?P<flow>\d+)\.(?P<run>\d+))?(/(?P<generation>\d+)\.(?P<retry>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Whose a flow is."""

    deployment: str
    """The first eight characters of the id of the database."""
    context: int
    caller: int
    flow: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireId:
    """The parts of the id of a job at its supervisor."""

    deployment: str
    context: int
    caller: int
    job: int
    flow: int | None
    """None in the first run of the flow."""
    run: int
    generation: int
    retry: int


def run_key(place: Place, text: str) -> RunKey:
    """Return the numbers of a run. Raise ValueError if it is none of this flow."""
    found = _RUN.fullmatch(text)
    own = (place.deployment, str(place.context), str(place.flow))
    if found is None or found.group("deployment", "context", "flow") != own:
        raise ValueError(f"{text!r} is no run of {place}")
    return int(found["run"]), int(found["retry"] or 1)


def wire_id(text: str) -> WireId:
    """Return the parts of the id of a job. Raise ValueError if it has another form."""
    found = _WIRE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the id of a job")
    numbers = {name: int(found[name] or 0) for name in ("context", "caller", "job", "generation", "retry")}
    flow = None if found["flow"] is None else int(found["flow"])
    return WireId(deployment=found["deployment"], flow=flow, run=int(found["run"] or 1), **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a method that changes something, with its answer."""

    method: str
    params: Fields
    sent: float
    answered: float
    result: Any = None
    code: int | None = None
    """The code of the error. Neither a result nor a code: no answer came."""
    text: str = ""
    """The message of the error."""
    repeats: bool = False
    """Whether an identical call, with nothing in between, has succeeded before."""

    @property
    def accepted(self) -> bool:
        """Whether the gateway has answered with a result."""
        return self.result is not None

    @property
    def is_uncertain(self) -> bool:
        """Whether the call may have had its effect or not: no answer came, or a server did not respond."""
        return self.result is None and self.code in (None, STORAGE_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What `flow.status` has returned."""

    sent: float
    answered: float
    state: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of the subscription, in the order of their arrival."""

    at: float
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `job.result` has returned. `run` is the latest run before and after the call."""

    run: RunKey
    answered: float
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A job that a supervisor has received, and whether it has accepted it."""

    id: str
    at: float
    job: Fields
    secret: str | None
    accepted: bool
    succeeds: bool
    """Whether the attempt with this id ends with a success."""


@dataclass(slots=True, kw_only=True)
class Execution:
    """A job that a supervisor has run. `token` is its result, which no other execution has."""

    id: str
    token: str
    begun: float
    ended: float | None = None


@dataclass(slots=True, kw_only=True)
class History:
    """All that is known of one flow."""

    place: Place
    secret: str
    """The secret of its runner."""
    is_calm: bool
    """Whether no process was killed, and the supervisor did nothing wrong."""
    shown_sec: float
    """How long after a call its effect may be missing in views: while no engine runs, nothing changes in them."""
    calls: list[Call] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    dispatches: list[Fields] = field(default_factory=list)
    """The dispatches of the flow after its last run, as `message.list` returns them."""
    purges: list[tuple[float, float]] = field(default_factory=list)
    """When ended runs were deleted: from, and to."""
