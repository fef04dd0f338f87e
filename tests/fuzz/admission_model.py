"""Requests for an admission queue, and what callers, executors and readers of its events must see of them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from flowkit.admission import rules
from flowkit.models.admission import ENDED, RUNNING, Changed, Limits, Override, Priority, State

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

Fields = dict[str, Any]

USERS: Final = 40
FLOODER: Final = "u2"
FLOODER_MOST: Final = 3
"""How many requests of this user may be open."""
LIMITS: Final = Limits(
    max_pending=40,
    max_per_user=6,
    max_active=12,
    users={
        "u0": Override(max_active=1),
        "u1": Override(max_active=2, max_total=5),
        FLOODER: Override(max_active=1, max_total=FLOODER_MOST),
    },
)
ENDS: Final = {
    State.COMPLETED: rules.COMPLETED,
    State.FAILED: rules.FAILED,
    State.CANCELLED: rules.CANCELLED,
    State.TIMEOUT: rules.TIMEOUT,
}
REJECTION: Final = "rejection"
"""What an `execution_failed` is called here that rejects a request."""
ORDER: Final = {
    name: place
    for place, name in enumerate(
        (
            *(REJECTION, rules.ACCEPTED, rules.QUEUED, rules.CREATE_POD, rules.STARTED, rules.RUNNING),
            *(rules.DELETE_POD, "end"),
        )
    )
}
"""The documented order of the events about one request."""


class Door(StrEnum):
    """How a request reaches the queue."""

    QUEUE = "a call"
    HTTP = "HTTP"
    KAFKA = "Kafka"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A request, and what its caller does about it."""

    id: str
    user_id: str
    priority: Priority
    is_task: bool = False
    doors: Sequence[Door]
    """Through which doors it is submitted, at the same time."""
    repeat: Door | None = None
    """Through which door it is submitted once more, later."""
    cancel: Door | None = None
    move: Priority | None = None
    pause: float = 0.0
    """Seconds that its caller waits before it."""

    @property
    def is_ordinary(self) -> bool:
        """Whether nothing but its band and its arrival determine when it starts."""
        return self.cancel is None and self.move is None and self.user_id not in LIMITS.users


def random_request(chance: random.Random, id: str, pause: float) -> Wanted:
    """Return a request. Kafka carries no tasks.

    An id belongs to the users of one door. Executions that the play submits by a call are those of records.
    """
    is_task = chance.random() < 0.4
    owners = [[Door.QUEUE], [Door.HTTP]] if is_task else [[Door.QUEUE, Door.KAFKA], [Door.HTTP]]
    doors = chance.choice(owners)
    rare = chance.random()
    return Wanted(
        id=id,
        user_id=f"u{chance.randrange(USERS) if chance.random() < 0.9 else chance.randrange(3)}",
        priority=chance.choice([*Priority]),
        is_task=is_task,
        doors=[chance.choice(doors) for _ in range(2 if chance.random() < 0.1 else 1)],
        repeat=chance.choice(doors) if rare < 0.1 else None,
        cancel=chance.choice([*Door]) if 0.1 < rare < 0.2 else None,
        move=chance.choice([*Priority]) if 0.2 < rare < 0.3 else None,
        pause=chance.uniform(0, 2 * pause),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An event as a reader of the topics has seen it first."""

    kind: str
    event_id: str
    at: int
    """When it was sent, in milliseconds."""
    body: Fields


@dataclass
class Journal:
    """What callers, the executor and a reader of the topics know."""

    answers: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """How often a request was answered in which way: `accepted` and `rejected` by a call, `duplicate`, `HTTP 200` and so on."""
    waits_since: dict[str, float] = field(default_factory=dict)
    """When a caller knew that a request waits."""
    cancelled: dict[str, Changed] = field(default_factory=dict)
    """What the calls that cancel have answered."""
    cancelled_by_event: set[str] = field(default_factory=set)
    reports: dict[str, State] = field(default_factory=dict)
    """How executions have ended, as the executor reports it."""
    own: set[str] = field(default_factory=set)
    """The ids of the events that clients and the executor have sent."""
    seen: defaultdict[str, dict[str, Seen]] = field(default_factory=lambda: defaultdict(dict))
    """The events of the queue by execution and event id."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def see(self, kind: str, at: int, body: Fields) -> None:
        """Note an event that a topic has."""
        id, event_id = body["execution_id"], body["event_id"]
        if event_id in self.own:
            return
        if body.get("error_type") == "resource_limit":
            kind = REJECTION
        known = self.seen[id].get(event_id)
        if known is not None:
            self.counts["repeated events"] += 1
            # A repeated event has the metadata of the latest request with its id.
            if {**known.body, "metadata": None} != {**body, "metadata": None}:
                self.problems.append(f"{id} has two events {event_id}: {known.body} and {body}")
        if known is None or at < known.at:
            self.seen[id][event_id] = Seen(kind=kind, event_id=event_id, at=at, body=body)


# --- limits -----------------------------------------------------------------------------------------------------


def both(first: Iterable[Fields], second: Iterable[Fields]) -> list[Fields]:
    """Return the requests of which two looks show the same try in the same part of the queue, so all were there at once."""
    known = {_part(item) for item in first}
    return [item for item in second if _part(item) in known]


def _part(item: Fields) -> tuple[str, str, bool]:
    return item["_id"], item["place"], item["state"] in RUNNING


def cap_problems(items: Collection[Fields]) -> Iterator[str]:
    """Yield the limits that requests exceed that were in the queue at once."""
    counts: Counter[str] = Counter()
    for item in items:
        active = item["state"] in RUNNING
        counts["active" if active else "pending"] += 1
        counts[f"{item['user_id']} total"] += 1
        counts[f"{item['user_id']} active"] += active
    caps = {"active": LIMITS.max_active, "pending": LIMITS.max_pending}
    for user_id in {item["user_id"] for item in items}:
        own = LIMITS.users.get(user_id, Override())
        caps[f"{user_id} total"] = own.max_total or LIMITS.max_per_user
        caps[f"{user_id} active"] = own.max_active or LIMITS.max_active
    yield from (f"{counts[name]} {name}, more than {cap}" for name, cap in caps.items() if counts[name] > cap)


# --- order ------------------------------------------------------------------------------------------------------


def order_problems(items: Iterable[Fields], waits_since: Mapping[str, float]) -> Iterator[str]:
    """Yield the ordinary requests that waited while a dispatch gave slots to later ones, and not to them.

    A process makes one dispatch after the other. So a dispatch began after the pops of the one before, and had ended at
    those of the next one. A request that waited at the former, and was popped after the latter, was left out.
    """
    items = list(items)
    waiting = sorted(
        (waits_since[item["_id"]], item["popped_at"], _key(item), item["_id"])
        for item in items
        if item["_id"] in waits_since
    )
    for before, latest, after in _dispatches(items):
        for since, popped_at, key, id in waiting:
            if since >= before:
                break
            if popped_at > after and key < latest:
                yield f"{id} {key} was left out when {latest} got a slot"


def _key(item: Fields) -> tuple[int, int]:
    return item["rank"], item["seq"]


def _dispatches(items: Iterable[Fields]) -> Iterator[tuple[float, tuple[int, int], float]]:
    """Yield the pops of each dispatch: those before, the last place in the queue that got a slot, and the next ones."""
    sessions: defaultdict[str, defaultdict[float, list[tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for item in items:
        sessions[item["slot"].partition("-")[0]][item["popped_at"]].append(_key(item))
    for pops in sessions.values():
        times = sorted(pops)
        for before, at, after in zip(times, times[1:], times[2:], strict=False):
            yield before, max(pops[at]), after


def sequence_problems(items: Iterable[Fields]) -> Iterator[str]:
    """Yield the requests that a single process has started too late, all of which waited before it began."""
    found = sorted(items, key=_key)
    for first, second in pairwise(found):
        if first["popped_at"] > second["popped_at"]:
            yield f"{first['_id']} {_key(first)} has started after {second['_id']} {_key(second)}"


# --- one request ------------------------------------------------------------------------------------------------


def request_problems(wanted: Wanted, item: Fields | None, journal: Journal) -> list[str]:
    """Return what is wrong with a request at the end, as it is stored, with all that is known about it."""
    events = sorted(journal.seen[wanted.id].values(), key=lambda seen: (seen.at, _place(seen, wanted)))
    if item is None:
        return [f"{wanted.id} is lost; the answers were {journal.answers[wanted.id]}"]
    checks = [_end_problems, _answer_problems, _event_problems, _rejection_problems]
    found = [problem for check in checks for problem in check(wanted, item, events, journal)]
    shown = [(seen.kind, seen.at, seen.event_id) for seen in events]
    stored = {name: value for name, value in item.items() if name not in ("body", "events")}
    return [f"{wanted.id}: {each}" for each in found] + [f"{wanted}, {stored}, {shown}"] * bool(found)


def _place(seen: Seen, wanted: Wanted) -> int:
    ends = wanted.is_task or seen.kind not in ORDER
    return ORDER.get(seen.kind, ORDER["end"] if ends else 0)


def _end_problems(wanted: Wanted, item: Fields, events: Sequence[Seen], journal: Journal) -> Iterator[str]:
    """Check the state in which a request has ended."""
    state = State(item["state"])
    if state not in ENDED or item.get("owes"):
        yield f"it has not ended: {state}, and owes {item.get('owes')}"
    if journal.cancelled.get(wanted.id) is Changed.DONE and (state, item.get("popped_at")) != (
        State.CANCELLED,
        None,
    ):
        yield f"it was cancelled while it waited, and is {state}, popped at {item.get('popped_at')}"
    report = journal.reports.get(wanted.id)
    allowed = {report, State.CANCELLED} if wanted.id in journal.cancelled_by_event else {report}
    if not wanted.is_task and item.get("popped_at") and state not in allowed:
        yield f"the executor has reported {report}, and it is {state}"


def _answer_problems(wanted: Wanted, item: Fields, events: Sequence[Seen], journal: Journal) -> Iterator[str]:
    """Check what callers were told."""
    answers, rejected = journal.answers[wanted.id], item["state"] == State.REJECTED
    if answers["accepted"] > 1:
        yield f"it was accepted {answers['accepted']} times"
    if rejected and answers.keys() & {"accepted", "duplicate", "HTTP 200", "HTTP 409"}:
        yield f"it is rejected, and the answers were {answers}"


def _rejection_problems(
    wanted: Wanted, item: Fields, events: Sequence[Seen], journal: Journal
) -> Iterator[str]:
    """Check that each rejection has an event with the documented text."""
    found = [seen.body for seen in events if seen.kind == REJECTION]
    answers = journal.answers[wanted.id]
    if len(found) < max(answers["rejected"], "HTTP 429" in answers, item["state"] == State.REJECTED):
        yield f"it was answered as {answers}, with {len(found)} events about rejections"
    own = LIMITS.users.get(wanted.user_id, Override()).max_total or LIMITS.max_per_user
    texts = {"Queue is full", f"User execution limit exceeded ({own})"}
    for body in found:
        stderr = re.fullmatch(r"Queue full: (.*)\. Queue size: (\d+)", body["stderr"])
        text = body["error_message"]
        if text not in texts or stderr is None or stderr[1] != text or int(stderr[2]) > LIMITS.max_pending:
            yield f"its rejection is {body}"


def _event_problems(wanted: Wanted, item: Fields, events: Sequence[Seen], journal: Journal) -> Iterator[str]:
    """Check that the events are those of the way of the request, each once and in order."""
    counts = Counter(seen.kind if seen.kind in ORDER else "end" for seen in events)
    counts.pop(REJECTION, None)
    deleted = counts.pop(rules.DELETE_POD, 0)
    expected = expected_events(wanted, item)
    quick = Counter(expected) - Counter({rules.STARTED: 1, rules.RUNNING: 1})
    if counts != expected and not (wanted.is_task and counts == quick):
        yield f"the events are {dict(counts)} instead of {dict(expected)}"
    if deleted > (not wanted.is_task and rules.CREATE_POD in expected):
        yield f"{deleted} commands stop it"
    places = [_place(seen, wanted) for seen in events]
    if places != sorted(places):
        yield "its events are out of order"
    for seen in events:
        if seen.kind in ENDS.values() and seen.kind != ENDS.get(State(item["state"])):
            yield f"it is {item['state']}, and an event says {seen.kind}"


def expected_events(wanted: Wanted, item: Fields) -> Counter[str]:
    """Return how many events of each kind a request must have beside rejections and commands that stop it.

    The executor reports the ends of executions that run.
    """
    if item["state"] == State.REJECTED:
        return Counter()
    runs = bool(item.get("popped_at"))
    ran = [rules.STARTED, rules.RUNNING] if runs else []
    command = [rules.CREATE_POD] if runs and not wanted.is_task else []
    ends = ["end"] if wanted.is_task or not runs else []
    return Counter([rules.ACCEPTED, rules.QUEUED, *ran, *command, *ends])
