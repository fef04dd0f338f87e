"""A reference of the admission queue, written from its documentation: it shares no code with the queue.

A queue is a value, and an operation returns the queues that may come of it. Operations that happen at the same time may
take effect in any order, and slots may be given between any two of them. `outcomes` returns every end that the
documentation allows: an observed end that is not among them is a defect, of the order, of a limit, of an
empty slot, or of an answer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

BANDS: Final = ("critical", "high", "normal", "low", "background")
WAITS, RUNS = "queued", "active"
OPEN: Final = frozenset({WAITS, RUNS})
AGAIN: Final = frozenset({"rejected", "expired"})
"""States in which the same id can be submitted again."""

REASONS: Final = frozenset({"queue_full", "user_limit", "tenant_limit"})
"""Why a request may get no place."""

Owner = tuple[str, str, str]
"""Door, tenant and user. Limits know the last two only."""


# --- limits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """Limits of a tenant or a user in place of the general ones. None for the general one."""

    total: int | None = None
    active: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Caps:
    """The limits of a queue."""

    pending: int = 40
    per_user: int = 20
    active: int = 5
    active_per_user: int | None = None
    stale_sec: float = 3_600.0
    tenants: Mapping[str, Own] = field(default_factory=dict)
    users: Mapping[str, Own] = field(default_factory=dict)
    """By name, or by `tenant/name`, which takes precedence."""

    def of_user(self, tenant: str, user: str) -> Own:
        """Return the limits of a user, None for no limit."""
        own = self.users.get(f"{tenant}/{user}") or self.users.get(user) or Own()
        total = self.per_user if own.total is None else own.total
        return Own(total=total, active=self.active_per_user if own.active is None else own.active)

    def of_tenant(self, tenant: str) -> Own:
        """Return the limits of a tenant, None for no limit."""
        return self.tenants.get(tenant, Own())


# --- the queue --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A request."""

    id: str
    owner: Owner
    band: int
    is_task: bool = False
    state: str = WAITS
    reason: str | None = None
    """The reason code of the end, where the documentation names one."""
    arrival: int = 0
    start_fails: str | None = None
    """The reason code with which its start must fail; None for one that succeeds."""

    @property
    def place(self) -> tuple[int, int]:
        """The place in the order of the queue."""
        return self.band, self.arrival


@dataclass(frozen=True, slots=True)
class Queue:
    """The requests of a queue that can still change, and its limits."""

    caps: Caps
    entries: frozenset[Entry] = frozenset()

    def find(self, id: str) -> Entry | None:
        """Return a request."""
        return next((each for each in self.entries if each.id == id), None)

    def of(self, state: str) -> list[Entry]:
        """Return the requests in a state, in the order of the queue."""
        return sorted((each for each in self.entries if each.state == state), key=lambda each: each.place)

    def put(self, entry: Entry) -> Queue:
        """Return the queue with a request in place of the one with the same id."""
        return Queue(self.caps, frozenset({*(e for e in self.entries if e.id != entry.id), entry}))

    def count(self, states: Collection[str], tenant: str, user: str | None = None) -> int:
        """Return how many requests of a tenant or one of its users are in some states."""
        return sum(
            each.state in states and each.owner[1] == tenant and user in (None, each.owner[2])
            for each in self.entries
        )

    def arrive(self, entry: Entry) -> Queue:
        """Return the queue with a request at the end of its band."""
        last = max((each.arrival for each in self.entries), default=0)
        return self.put(replace(entry, arrival=last + 1))

    def reached(self, owner: Owner, states: Collection[str] = OPEN) -> set[str]:
        """Return the reasons for which another request of a user gets no place.

        Users and tenants have those in `states`.
        """
        _, tenant, user = owner
        total = self.caps.of_tenant(tenant).total
        counted = {
            "queue_full": (len(self.of(WAITS)), self.caps.pending),
            "user_limit": (self.count(states, tenant, user), self.caps.of_user(tenant, user).total),
            "tenant_limit": (self.count(states, tenant), total),
        }
        return {name for name, (count, cap) in counted.items() if cap is not None and count >= cap}

    def may_run(self, entry: Entry) -> bool:
        """Return whether a waiting request may have a slot, if one is free."""
        _, tenant, user = entry.owner
        counted = (
            (self.count({RUNS}, tenant, user), self.caps.of_user(tenant, user).active),
            (self.count({RUNS}, tenant), self.caps.of_tenant(tenant).active),
        )
        return all(cap is None or count < cap for count, cap in counted)

    def next_start(self) -> Queue | None:
        """Return the queue in which the next request has a slot; None if no slot is free, or none may have it."""
        if len(self.of(RUNS)) >= self.caps.active:
            return None
        found = next((each for each in self.of(WAITS) if self.may_run(each)), None)
        if found is None:
            return None
        if found.start_fails:
            return self.put(replace(found, state="failed", reason=found.start_fails))
        return self.put(replace(found, state=RUNS))

    def starts(self) -> Iterator[Queue]:
        """Yield the queue with no, one, two and so on of its free slots given."""
        queue: Queue | None = self
        while queue is not None:
            yield queue
            queue = queue.next_start()

    def settled(self) -> Queue:
        """Return the queue in which no slot is free that a waiting request may have."""
        *_, last = self.starts()
        return last

    def renumbered(self) -> Queue:
        """Return the queue with arrivals that depend on nothing but the order of the requests that wait."""
        order = sorted(self.of(WAITS), key=lambda each: each.arrival)
        number = {each.id: at for at, each in enumerate(order, 1)}
        return Queue(
            self.caps, frozenset(replace(each, arrival=number.get(each.id, 0)) for each in self.entries)
        )


# --- operations -------------------------------------------------------------------------------------------------

End = tuple[Queue, str]
"""What an operation makes of a queue, and its answer."""


class Operation:
    """Something that callers, executors or operators do."""

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield what may come of it. Nothing if it cannot happen yet."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit(Operation):
    """A submission, by any door."""

    id: str
    owner: Owner
    band: int
    is_task: bool = False
    start_fails: str | None = None
    rejects_freely: bool = False
    """Whether a limit may seem reached: after a crash, counters may be too high for a while."""

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield its place, or why it gets none."""
        known = queue.find(self.id)
        if known is not None and known.owner != self.owner:
            yield queue, "taken"
            return
        if known is not None and known.state not in AGAIN:
            yield queue, "accepted"
            return
        entry = Entry(
            id=self.id,
            owner=self.owner,
            band=self.band,
            is_task=self.is_task,
            start_fails=self.start_fails,
        )
        reasons = queue.reached(self.owner)
        if not reasons:
            yield queue.arrive(entry), "accepted"
        # If several are rejected at the same time, the reason may count the others.
        for reason in reasons and queue.reached(self.owner, {*OPEN, "rejected"}):
            yield queue.put(replace(entry, state="rejected", reason=reason)), reason
        if self.rejects_freely:
            yield queue.put(replace(entry, state="rejected", reason=None)), "rejected"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Operation):
    """The end of something that runs, as its executor, or the engine, says. It concerns nothing else."""

    id: str
    state: str

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the end."""
        known = queue.find(self.id)
        if known is not None and known.state == RUNS:
            queue = queue.put(replace(known, state=self.state, reason=None))
        yield queue, ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel(Operation):
    """A cancel. What runs then ends as its executor confirms it."""

    id: str
    confirmed: bool = True
    """Whether the executor stops when it is asked to."""

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the end, and what the caller is told."""
        known = queue.find(self.id)
        if known is None:
            yield queue, "unknown"
        elif known.state == WAITS or (known.state == RUNS and self.confirmed):
            yield queue.put(replace(known, state="cancelled", reason=None)), "requested"
        elif known.state == RUNS:
            yield queue, "requested"
        else:
            yield queue, "already_cancelled" if known.state == "cancelled" else "already_ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Move(Operation):
    """A new priority. The request keeps its arrival."""

    id: str
    band: int

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the queue with the request in its new band, if it waits."""
        known = queue.find(self.id)
        if known is None:
            yield queue, "unknown"
        elif known.state == WAITS:
            yield queue.put(replace(known, band=self.band)), "moved"
        else:
            yield queue, "not_waiting"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden(Operation):
    """A call about a request that its caller must not see."""

    id: str

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the queue as it was."""
        yield queue, "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expire(Operation):
    """The end of a wait. It happens after the submission of the request, which may have a slot by then."""

    id: str

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the end."""
        known = queue.find(self.id)
        if known is not None and known.state == WAITS:
            queue = queue.put(replace(known, state="expired", reason="stale"))
        yield queue, ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit(Operation):
    """Other limits. Requests that have a place or a slot keep it."""

    caps: Caps

    def apply(self, queue: Queue) -> Iterator[End]:
        """Yield the queue with the limits."""
        yield Queue(self.caps, queue.entries), ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An end that is allowed, and the answers that belong to it, by the numbers of the operations."""

    queue: Queue
    answers: frozenset[tuple[int, str]] = frozenset()


def outcomes(
    queue: Queue, chains: Sequence[Sequence[Operation]], answers: Mapping[int, str] | None = None
) -> set[Outcome]:
    """Return every end of chains that happen at the same time; the operations of one chain happen in their order.

    Operations are numbered through all chains. With `answers`, return only the ends that belong to them.
    """
    first = [sum(map(len, chains[:number])) for number in range(len(chains))]
    level = {(0,) * len(chains): {Outcome(queue)}}
    for _ in range(sum(map(len, chains))):
        following: defaultdict[tuple[int, ...], set[Outcome]] = defaultdict(set)
        for (done, states), at in product(level.items(), range(len(chains))):
            if done[at] < len(chains[at]):
                key = (*done[:at], done[at] + 1, *done[at + 1 :])
                number = first[at] + done[at]
                known = None if answers is None else answers.get(number)
                following[key] |= set(_after(states, number, chains[at][done[at]], known))
        level = following
    return {
        Outcome(each.queue.settled().renumbered(), each.answers)
        for states in level.values()
        for each in states
    }


def _after(
    states: Iterable[Outcome], number: int, operation: Operation, known: str | None
) -> Iterator[Outcome]:
    for before in states:
        for queue, answer in operation.apply(before.queue):
            if not _agree(known, answer):
                continue
            for started in queue.starts():
                yield Outcome(started, before.answers | {(number, answer)})


# --- observations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A request as the queue shows it."""

    state: str
    band: int
    reason: str | None = None
    position: int | None = None
    """1 for the one that starts next."""


def difference(queue: Queue, seen: Mapping[str, Seen], *, positions: bool = True) -> list[str]:
    """Return how the requests of a queue differ from those that are seen, one text for each."""
    places = {each.id: at for at, each in enumerate(queue.of(WAITS), 1)}
    found = []
    for entry in sorted(queue.entries, key=lambda each: each.id):
        shown = seen.get(entry.id)
        wanted = Seen(
            state=entry.state,
            band=entry.band,
            reason=entry.reason,
            position=places.get(entry.id) if positions else None,
        )
        if shown is None:
            found.append(f"{entry.id} is lost; it must be {wanted}")
            continue
        if wanted.reason is None:
            shown = replace(shown, reason=None)
        if shown != wanted:
            found.append(f"{entry.id} of {entry.owner} is {shown}; it must be {wanted}")
    return found


def _agree(given: str | None, documented: str) -> bool:
    """Return whether an answer is the documented one. None is not known, and `no` says only that nothing was done.

    A request that is `rejected` for whatever reason may name each of them.
    """
    if documented == "rejected":
        return given is None or given in REASONS
    return given in (None, documented) or (given == "no" and documented not in ("requested", "moved"))


class Judge:
    """What the documentation allows after a round."""

    def agreeing(self, seen: Mapping[str, Seen], *, positions: bool = True) -> set[Queue]:
        """Return the queues that are allowed and agree with what is seen."""
        raise NotImplementedError

    def differences(self, seen: Mapping[str, Seen]) -> list[str]:
        """Return how what is seen differs from what is allowed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Exact(Judge):
    """Every outcome that is allowed, and the answers that are known, by the numbers of the operations."""

    allowed: Collection[Outcome]
    answers: Mapping[int, str]

    def agreeing(self, seen: Mapping[str, Seen], *, positions: bool = True) -> set[Queue]:
        """Return the queues that are allowed and agree with what is seen."""
        return {
            each.queue
            for each in self.allowed
            if not self._wrong_answers(each) and not difference(each.queue, seen, positions=positions)
        }

    def differences(self, seen: Mapping[str, Seen]) -> list[str]:
        """Return how the outcome that agrees most differs from what is seen."""
        found = [[*self._wrong_answers(each), *difference(each.queue, seen)] for each in self.allowed]
        return [f"{len(found)} outcomes are allowed; the nearest one differs:", *min(found, key=len)]

    def _wrong_answers(self, outcome: Outcome) -> list[str]:
        return [
            f"operation {number} has the answer {self.answers[number]}; it must be {answer}"
            for number, answer in sorted(outcome.answers)
            if not _agree(self.answers.get(number), answer)
        ]


@dataclass(frozen=True, slots=True)
class Crowd(Judge):
    """Submissions, reports and cancels that happen at the same time, too many for all their outcomes.

    What the documentation says about any of these outcomes must hold.
    """

    before: Queue
    operations: Sequence[Operation]
    answers: Mapping[int, str]
    """By the numbers of the operations."""

    def agreeing(self, seen: Mapping[str, Seen], *, positions: bool = True) -> set[Queue]:
        """Return the queue that is seen, if it is allowed."""
        after = self._after(seen)
        if after is None or self._problems(after, seen, positions=positions):
            return set()
        return {after.renumbered()}

    def differences(self, seen: Mapping[str, Seen]) -> list[str]:
        """Return what is wrong with the queue that is seen."""
        after = self._after(seen)
        lost = [each.id for each in self._entries().values() if each.id not in seen]
        return [f"{lost} are lost"] if after is None else self._problems(after, seen, positions=True)

    def _entries(self) -> dict[str, Entry]:
        new = {
            each.id: Entry(
                id=each.id,
                owner=each.owner,
                band=each.band,
                is_task=each.is_task,
                start_fails=each.start_fails,
            )
            for each in self.operations
            if isinstance(each, Submit)
        }
        return new | {each.id: each for each in self.before.entries}

    def _after(self, seen: Mapping[str, Seen]) -> Queue | None:
        """Return the queue that is seen; None if it lacks a request.

        New requests arrive in the order of their positions.
        """
        last = max((each.arrival for each in self.before.entries), default=0)
        found = set()
        for entry in self._entries().values():
            shown = seen.get(entry.id)
            if shown is None:
                return None
            arrival = entry.arrival or last + (shown.position or 0)
            found.add(
                replace(entry, state=shown.state, band=shown.band, arrival=arrival, reason=shown.reason)
            )
        return Queue(self.before.caps, frozenset(found))

    def _problems(self, after: Queue, seen: Mapping[str, Seen], *, positions: bool) -> list[str]:
        found = [*self._wrong_states(after), *self._wrong_answers(after), *self._exceeded(after)]
        if after.next_start() is not None:
            found.append("a slot is empty that a waiting request may have")
        found += self._passed_over(after)
        if positions:
            places = {each.id: at for at, each in enumerate(after.of(WAITS), 1)}
            wrong = {id: seen[id].position for id, place in places.items() if seen[id].position != place}
            found += [f"{id} has the position {at}, and must have {places[id]}" for id, at in wrong.items()]
        return found

    def _wrong_states(self, after: Queue) -> Iterator[str]:
        for entry in after.entries:
            was = self.before.find(entry.id)
            allowed = self._states(entry, was)
            if entry.state not in allowed:
                yield f"{entry.id} was {was and was.state}, is {entry.state}, and may be {sorted(allowed)}"
            if was is not None and was.band != entry.band:
                yield f"{entry.id} has moved to the band {entry.band}"

    def _states(self, entry: Entry, was: Entry | None) -> set[str]:
        """Return the states that a request may have."""
        about = [each for each in self.operations if getattr(each, "id", None) == entry.id]
        started = {"failed"} if entry.start_fails else {RUNS}
        for each in about:
            if isinstance(each, Report) and was is not None and was.state == RUNS:
                return {each.state}
            if isinstance(each, Cancel):
                return {"cancelled"} if each.confirmed else {"cancelled", RUNS}
        if was is not None:
            return {WAITS, *started} if was.state == WAITS else {was.state}
        return {WAITS, "rejected", *started}

    def _wrong_answers(self, after: Queue) -> Iterator[str]:
        """Yield the answers to submissions that the states belie, and rejections that no limit explains."""
        for number, each in enumerate(self.operations):
            if not isinstance(each, Submit):
                continue
            entry, answer = after.find(each.id), self.answers.get(number)
            if entry is not None and answer == "accepted" and entry.state == "rejected":
                yield f"{each.id} was accepted, and is rejected"
            if entry is not None and entry.state == "rejected" and not each.rejects_freely:
                yield from self._unexplained(each, entry)

    def _unexplained(self, wanted: Submit, entry: Entry) -> Iterator[str]:
        most = self.before
        for each in self.operations:
            if isinstance(each, Submit) and most.find(each.id) is None:
                most = most.put(Entry(id=each.id, owner=each.owner, band=each.band))
        rest = Queue(most.caps, frozenset(each for each in most.entries if each.id != wanted.id))
        if entry.reason not in rest.reached(wanted.owner):
            yield f"{wanted.id} is rejected with the reason {entry.reason}, and this limit cannot be reached"

    def _exceeded(self, after: Queue) -> Iterator[str]:
        """Yield the limits that are exceeded by requests of which some are new in their part of the queue."""
        caps = after.caps
        tenants = {each.owner[1] for each in after.entries}
        users = {each.owner[1:] for each in after.entries}
        counted: list[tuple[str, Collection[str], tuple[str, ...], int | None]] = [
            ("waiting", {WAITS}, (), caps.pending),
            ("active", {RUNS}, (), caps.active),
        ]
        counted += [(f"of {name}", OPEN, (name,), caps.of_tenant(name).total) for name in tenants]
        counted += [(f"active of {name}", {RUNS}, (name,), caps.of_tenant(name).active) for name in tenants]
        counted += [(f"of {user}", OPEN, user, caps.of_user(*user).total) for user in users]
        counted += [(f"active of {user}", {RUNS}, user, caps.of_user(*user).active) for user in users]
        for name, states, owner, cap in counted:
            now, old = (
                {e.id for e in queue.entries if e.state in states and e.owner[1:][: len(owner)] == owner}
                for queue in (after, self.before)
            )
            if cap is not None and len(now) > cap and now - old:
                yield f"{len(now)} requests {name}, more than {cap}: {sorted(now)}"

    def _passed_over(self, after: Queue) -> Iterator[str]:
        """Yield the requests that still wait while later ones of the same user got slots."""
        for left in after.of(WAITS):
            was = self.before.find(left.id)
            if was is None:
                continue
            for other in after.entries:
                got_slot = other.state in (RUNS, "completed", "timeout")
                place = self.before.find(other.id)
                waited = place is None or place.state == WAITS
                later = other.band > was.band or (
                    other.band == was.band and (place is None or place.arrival > was.arrival)
                )
                if got_slot and waited and later and other.owner[1:] == left.owner[1:]:
                    yield f"{left.id} still waits, and {other.id} got a slot, which is later and of the same user"


# --- whole runs -------------------------------------------------------------------------------------------------

ARROWS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({"queued", "rejected"}),
    "queued": frozenset({"starting", "active", "cancelled", "expired"}),
    "starting": frozenset({"active", "failed", "cancelled"}),
    "active": frozenset({"completed", "failed", "timeout", "cancelled"}),
    "rejected": frozenset({"queued", "rejected"}),
    "expired": frozenset({"queued", "rejected"}),
    **dict.fromkeys(("completed", "failed", "timeout", "cancelled"), frozenset[str]()),
}
"""The states that may follow each other."""

ENDED: Final = frozenset({"completed", "failed", "timeout", "cancelled", "rejected", "expired"})

STATUSES: Final[Mapping[str, str]] = {
    "queued": "queued",
    "starting": "scheduled",
    "active": "running",
    "expired": "timeout",
    "rejected": "error",
    **{state: state for state in ("completed", "failed", "timeout", "cancelled")},
}
"""The status over HTTP for each state."""


def reachable(state: str) -> frozenset[str]:
    """Return the states that a request may have at a later look, which may have missed others."""
    found: set[str] = {state}
    while more := {after for each in found for after in ARROWS[each]} - found:
        found |= more
    return frozenset(found)


def arrow_problem(id: str, before: str, after: str, submitted_again: bool) -> str | None:
    """Return what is wrong with two states that were seen one after the other."""
    if before in AGAIN and after != before and not submitted_again:
        return f"{id} was {before}, is {after}, and nobody has submitted it again"
    if after not in reachable(before):
        return f"{id} was {before or 'unknown'}, and is {after}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A time in which a request surely had its slot, and what is known about when it got it."""

    id: str
    owner: Owner
    begin: float
    end: float
    round: int
    """It had no slot before the operations with this number."""


def cap_problems(runs: Sequence[Run], caps: Mapping[int, Sequence[Caps]]) -> Iterator[str]:
    """Yield the limits that were exceeded at some time. `caps` are the limits that may have been valid in each round.

    The last one of the requests that had slots at one time got it in the latest round of them, so the limits of this
    round must permit them all.
    """
    for each in runs:
        at = [other for other in runs if other.begin <= each.begin < other.end or other is each]
        for name, group, cap_of in _groups(each, at):
            found = [cap_of(limits) for limits in caps[max(run.round for run in group)]]
            known = [cap for cap in found if cap is not None]
            if len(known) == len(found) and len(group) > max(known):
                ids = ", ".join(sorted(run.id for run in group))
                yield f"{len(group)} requests of {name} had slots at once, more than {max(known)}: {ids}"


def _groups(each: Run, at: Sequence[Run]) -> Iterator[tuple[str, list[Run], Callable[[Caps], int | None]]]:
    _, tenant, user = each.owner
    of_tenant = [run for run in at if run.owner[1] == tenant]
    of_user = [run for run in of_tenant if run.owner[2] == user]
    yield "the queue", [*at], lambda caps: caps.active
    yield f"the tenant {tenant}", of_tenant, lambda caps: caps.of_tenant(tenant).active
    yield f"the user {tenant}/{user}", of_user, lambda caps: caps.of_user(tenant, user).active


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event that the queue has sent, as its first record."""

    kind: str
    """Its type; `rejected` for the `execution_failed` of a request that got no place."""
    id: str
    at: int
    """The time of the record, in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What has happened to a request, as far as it is certain."""

    is_task: bool
    state: str
    """Its last state."""
    accepted: int
    """How often it got a place."""
    ran: bool | None
    """Whether it had a slot; None if that is not known."""
    stopped: bool | None
    """Whether it was to be stopped while it ran; None if that is not known."""


def way_after(way: Way | None, entry: Entry, operations: Sequence[Operation]) -> Way:
    """Return what is certain about a request after a round in which it became as `entry` says."""
    was = way or Way(is_task=entry.is_task, state="", accepted=0, ran=False, stopped=False)
    about = [each for each in operations if getattr(each, "id", None) == entry.id]
    is_new = was.state in AGAIN | {""} and entry.state != "rejected"
    submitted = is_new and any(isinstance(each, Submit) for each in about)
    cancels = any(isinstance(each, Cancel) for each in about) and was.state not in ENDED
    return Way(
        is_task=entry.is_task,
        state=entry.state,
        accepted=was.accepted + submitted,
        ran=was.ran or _ran(entry, was.state, alone=len(operations) == 1),
        stopped=(was.state == RUNS and not was.stopped) or None if cancels else was.stopped,
    )


def _ran(entry: Entry, before: str, *, alone: bool) -> bool | None:
    """Return whether a request surely had a slot that is in this state now; None if that is not known."""
    if entry.state in (RUNS, "completed", "timeout") or before == RUNS:
        return True
    if entry.state == "failed":
        return entry.start_fails is None
    return None if entry.state == "cancelled" and not alone else False


ENDS: Final = {
    "completed": "execution_completed",
    "failed": "execution_failed",
    "timeout": "execution_timeout",
    "expired": "execution_timeout",
    "cancelled": "execution_cancelled",
}
_ORDER: Final = {
    kind: place
    for place, kind in enumerate(
        (
            *("rejected", "execution_accepted", "execution_queued", "create_pod_command"),
            *("execution_started", "execution_running", "delete_pod_command"),
        )
    )
}


_REJECTIONS: Final = re.compile(
    r"Queue is full|User execution limit exceeded \(\d+\)|Tenant execution limit exceeded \(\d+\)"
)


def rejection_problem(error_message: str, stderr: str) -> str | None:
    """Return what is wrong with the texts of an event about a rejection."""
    wanted = rf"Queue full: {re.escape(error_message)}\. Queue size: \d+"
    if _REJECTIONS.fullmatch(error_message) and re.fullmatch(wanted, stderr):
        return None
    return f"it was rejected with the texts {error_message!r} and {stderr!r}"


def event_problems(way: Way, events: Sequence[Event]) -> Iterator[str]:
    """Yield what is wrong with the events about one request, each of which counts once."""
    counts = Counter(event.kind if event.kind in _ORDER else "end" for event in events)
    for kind, allowed in _expected_counts(way).items():
        if counts[kind] not in allowed:
            yield f"it has {counts[kind]} events {kind}, and must have {' or '.join(map(str, sorted(allowed)))}"
    if way.state == "rejected" and not counts["rejected"]:
        yield "no event says that it was rejected"
    ends = {event.kind for event in events if event.kind not in _ORDER}
    if ends - {ENDS.get(way.state)}:
        yield f"it is {way.state}, and its events say {ends}"
    for early, late in product(events, events):
        if (
            way.accepted == 1
            and early.kind != "rejected"
            and _place(early) < _place(late)
            and late.at < early.at
        ):
            yield f"{late.kind} was sent {early.at - late.at} ms before {early.kind}"


def _place(event: Event) -> int:
    return _ORDER.get(event.kind, len(_ORDER))


def _expected_counts(way: Way) -> dict[str, set[int]]:
    """Return how many events of each kind a request may have. The ends of executions that run come from executors."""
    ran, stopped = ({0, 1} if known is None else {int(known)} for known in (way.ran, way.stopped))
    shown = ran | {0} if way.is_task else ran
    by_queue = {1} if way.is_task or way.ran is False else {0} if way.ran else {0, 1}
    return {
        "execution_accepted": {way.accepted},
        "execution_queued": {way.accepted},
        "create_pod_command": {0} if way.is_task else ran,
        "execution_started": shown,
        "execution_running": shown,
        "delete_pod_command": {0} if way.is_task else stopped,
        "end": {way.accepted} if by_queue == {1} and way.accepted else by_queue if way.accepted else {0},
    }
