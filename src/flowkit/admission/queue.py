"""The queue: how requests get their places and slots, exactly and without transactions.

MongoDB changes one document at a time, so a step that concerns several documents is a sequence of changes,
which a crash may cut off at any point. Four rules keep the limits exact nevertheless:

* Each step has a *token*. In the update that begins the step, the token becomes *in doubt*: the counters list it, with
  the requests that it concerns. Then the requests change, and each names the token. The update that ends the step takes
  the token off the list.
* What a step adds to a counter, it adds in its first update, and gives back in its last one for requests that did not
  change after all. What it subtracts, it subtracts in its last update. A counter is therefore never lower than what it
  counts, and each update happens once, because it depends on the list.
* A request changes only if its version is the one that was read.
* Changes of the counters belong to a *session* of a process, and have no effect once the session is closed. Before
  another process ends the steps that a session has left behind, it closes the session and raises the versions of their
  requests. A late call of a process that was only slow therefore changes nothing.

What a user or tenant holds is a set of entries, so adding and removing can be repeated. An entry contains the token of
the step that added it: one that is left behind is never taken for that of a later try.

The names of the code:

* place, slot: a request that waits has a *place* in the queue, and one that was started has a *slot*. Both are limited.
* rank, band: the *rank* is the priority as a number, the lowest first. The *band* of a rank are its waiting requests.
* holder, hold: a *holder* is a user or a tenant, and a *hold* is an entry in one of its lists: of what it has waiting
  or active (`held`), or active (`active`).
* step, token, doubt: explained above. A step with a token in doubt has begun, and its end is not recorded.
* owe, settle: a request that has ended *owes* its place or slot until a step *settles* it, which gives that back.
* tally: the sum of what the last updates of some steps change in the counters.
* lane, park, wake: a request whose user or tenant has as many active ones as it may have is *parked*: its *lane* names
  the holder for which it waits, and dispatchers do not read it. When that holder may have more active requests, the
  queue *wakes* the first of the lane.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from flowkit import reason_codes
from flowkit.adapters.group_commit import GroupCommit
from flowkit.admission import rules
from flowkit.admission.fields import ExecutionFields, RequestFields, require
from flowkit.admission.models import (
    ENDED,
    REPEATABLE,
    Changed,
    Door,
    Kind,
    Limits,
    QueueStatus,
    Report,
    Request,
    RequestChange,
    RequestPage,
    State,
    Ticket,
    UserLoad,
)
from flowkit.admission.store import AdmissionStore, CounterChange, Hold, ItemUpdate
from flowkit.core.time import LeaseObserver
from flowkit.core.utils import Fields, dumps
from flowkit.errors import ConfigError, StoreUnavailable, TaskIdTaken
from flowkit.limits import ADMITTED_TASK_BYTES
from flowkit.models.admission import RANKS, Admission, Priority
from flowkit.text import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence

    from flowkit.adapters.mongo import Database

T = TypeVar("T")

SESSION_SEC: Final = 30.0
"""How long another process must see no renewal of a session before it closes it.

After the same time, a task whose start is not noted is started again.
"""
_IDLE_SHARE: Final = 2 / 3
"""After this share of its time, a session that nothing has renewed is replaced."""
LIMITS_SEC: Final = 2.0
"""How long a process uses the limits that it has read."""
GROUP: Final = 100
"""Most requests that one step concerns."""
_CANCEL_AGAIN_SEC: Final = 10.0
"""After this time, the end of a task is requested again if it is not confirmed."""
_RESERVED_SEC: Final = 60.0
"""How long a submission waits for another one of the same id."""
_POLL_SEC: Final = 0.02
_RECORDED: Final = 50_000
"""Most requests that are added to a list of a tenant whose limit is new. A limit is much lower than that."""
_RECORD_AGAIN_SEC: Final = 60.0
"""After this time, further requests are added to a list that was full."""
_KEPT_TIMES: Final = 100_000
"""How many times a process keeps for metrics that nobody reads."""
_TRIES: Final = 5
_OUTBOX_ITEMS: Final = 500
_KEPT_EVENTS: Final = 100
"""How many events of its earlier tries a request keeps that are not sent."""
_LOOKS: Final = 20
"""How often a dispatch looks at what is ready, while it lets requests wait apart."""

_logger = logging.getLogger("flowkit.admission")


class StepKind(StrEnum):
    """What happens to the requests of a step."""

    PLACES = "places"
    """They get places in the queue."""
    SLOTS = "slots"
    """They get slots."""
    MOVES = "moves"
    """They move to another band."""
    ENDS = "ends"
    """They have ended, and give back what they owe."""


_MARKERS: Final[Mapping[str, str]] = {
    StepKind.PLACES: "placed",
    StepKind.SLOTS: "slot",
    StepKind.MOVES: "moved",
    StepKind.ENDS: "settled",
}
"""The field in which a request names the step of a kind that has changed it."""


class SessionClosed(Exception):
    """Another process has closed the session, because it was not renewed in time."""


@dataclass(slots=True)
class Tally:
    """What the last updates of some steps change.

    They can be made together, or with the first update of another one.
    """

    tokens: set[str] = field(default_factory=set)
    returned: Counter[int] = field(default_factory=Counter)
    """Places in the queue that become free, by rank."""
    moved: Counter[int] = field(default_factory=Counter)
    """Changes of the numbers of waiting requests, by rank, which add up to nothing."""
    freed: int = 0
    """Slots that become free."""
    services: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens)


class QueueSession:
    """The right of one process to change the counters of a queue."""

    def __init__(
        self, store: AdmissionStore, *, clock: Callable[[], float], new_id: Callable[[], str]
    ) -> None:
        """`clock` is monotonic."""
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._opening = asyncio.Lock()
        self._numbers = 0
        self._renewed_at = 0.0
        self._renewals = 0
        self._due = Tally()
        self._seen: Fields | None = None
        self.id: str | None = None
        self.abandoned: list[str] = []
        """Sessions of this process that it no longer uses and has not closed yet."""

    async def token(self) -> str:
        """Return a new token. Open a session if there is none, or none that is valid for a while."""
        async with self._opening:
            if self.id is not None and self._clock() - self._renewed_at > SESSION_SEC * _IDLE_SHARE:
                self.abandon()
            if self.id is None:
                session = self._new_id()
                opened_at = self._clock()
                await self._store.open_session(session)
                self.id, self._due, self._renewed_at = session, Tally(), opened_at
            self._numbers += 1
            return f"{self.id}-{self._numbers}"

    async def begin(self, steps: Mapping[str, Fields], **change: Any) -> Fields | None:
        """Begin steps, each a token with what it concerns, and end those that are due. Return the counters.

        None if a limit in `change` does not permit it; what is due has then ended. Raise SessionClosed.
        """
        due = self._take_due(next(iter(steps)))
        doubt = {token: {**step, "ids": list(step["ids"].items())} for token, step in steps.items()}
        counted = await self._count(next(iter(steps)), due, doubt=doubt, **change)
        if counted is None:
            self.end(due)
            await self.end_due()
        return counted

    async def end_other(self, tally: Tally) -> Fields | None:
        """End steps of another session that is closed. None if another process has ended them."""
        return await self._count(await self.token(), tally)

    def end(self, tally: Tally) -> None:
        """Let steps end with the next update of the counters."""
        if self.id is not None and all(owner(token) == self.id for token in tally.tokens):
            self._due.tokens |= tally.tokens
            self._due.returned.update(tally.returned)
            self._due.moved.update(tally.moved)
            self._due.freed += tally.freed
            self._due.services += tally.services

    async def end_due(self) -> None:
        """End the steps that are due, and renew the session in time. Raise SessionClosed."""
        late = self._clock() - self._renewed_at > SESSION_SEC / 3
        if self.id is not None and (self._due or late):
            token = f"{self.id}-0"
            if await self._count(token, self._take_due(token)) is None:
                self.abandon()
                raise SessionClosed

    def _take_due(self, token: str) -> Tally:
        if owner(token) != self.id:
            raise SessionClosed
        due, self._due = self._due, Tally()
        return due

    async def _count(self, token: str, due: Tally, **change: Any) -> Fields | None:
        now = self._clock()
        renews = now - self._renewed_at > SESSION_SEC / 6
        counted = await self._store.count(
            CounterChange(
                session=owner(token),
                returned=due.returned,
                moved=due.moved,
                freed=due.freed,
                services=due.services,
                ended=due.tokens,
                renewal=self._renewals + 1 if renews else None,
                **change,
            )
        )
        if counted is not None and renews:
            self._renewed_at = now
            self._renewals += 1
        self._seen = counted
        return counted

    @property
    def has_seen(self) -> bool:
        """Whether an update of this process has found the counters since they were last used."""
        return self._seen is not None

    async def used(self, *, fresh: bool) -> tuple[int, int]:
        """Return how many places and how many slots are taken, without those that become free with the next update.

        Without `fresh`, they are those that the last update of this process has found, if it was since the last call.
        """
        if fresh:
            self._seen = None
            await self.end_due()
        seen, self._seen = self._seen, None
        counters = seen or await self._store.used()
        pending = counters["pending"] - sum(self._due.returned.values())
        return pending, counters["active"] - self._due.freed

    def abandon(self) -> None:
        """Use another session from now on. A dispatcher ends the steps that this one has left behind."""
        if self.id is not None:
            self.abandoned.append(self.id)
        self.id = None

    async def close(self) -> None:
        """End what is due, and end the session."""
        try:
            await self.end_due()
        except SessionClosed:
            self.abandon()
        session, self.id = self.id, None
        for each in [*self.abandoned, session]:
            if each is not None:
                await self._store.close_session(each)
        self.abandoned.clear()


def owner(token: str) -> str:
    """Return the session to which a token belongs."""
    return token.partition("-")[0]


def new_session_id() -> str:
    """Return an id that no other session has."""
    return secrets.token_hex(8)


class Outbox:
    """Requests whose events this process has just stored, for the relay of the process, which then need not
    read them.
    """

    def __init__(self) -> None:
        self.has_relay = False
        self._items: dict[tuple[str, str], Fields] = {}
        self._others = False

    def __bool__(self) -> bool:
        return bool(self._items) or self._others

    def add(self, item: Fields) -> None:
        """Pass a request as it is now stored. If there are too many, the relay reads them."""
        if self.has_relay and len(self._items) < _OUTBOX_ITEMS:
            self._items[item["_id"], item["place"]] = item
        else:
            self.add_others()

    def add_others(self) -> None:
        """Note that there are events of requests that the relay has to read."""
        self._others = self.has_relay

    def take(self) -> tuple[list[Fields], bool]:
        """Return the requests, and whether there may be others with events. They are then the caller's."""
        items, others = list(self._items.values()), self._others
        self._items, self._others = {}, False
        return items, others


@dataclass(slots=True)
class DueCounts:
    """What was due by the clock."""

    ended: int = 0
    """How many requests have ended."""
    starts: list[Fields] = field(default_factory=list)
    """Requests whose task is to be started again, because that failed or its process was lost."""
    cancels: list[Fields] = field(default_factory=list)
    """Requests whose task is to be cancelled."""


@dataclass(eq=False, slots=True)
class _Submission:
    request: Request
    at: float
    ticket: Ticket | None = None
    """The outcome. None if another submission of the same id is being decided, so that this one has to wait."""
    error: Exception | None = None


Decide: TypeAlias = "Callable[[Fields | None], tuple[Report, Sequence[Fields]] | None]"
"""Returns how a request ends, and the events about it; None if it does not end. It gets None for an unknown request."""


@dataclass(eq=False, slots=True)
class _Ending:
    execution_id: str
    decide: Decide
    change: RequestChange | None = None
    """The outcome. None if the request has changed meanwhile."""
    error: Exception | None = None


@dataclass(slots=True)
class _Group:
    """Submissions that get their places together."""

    token: str
    limits: Limits
    members: Mapping[str, _Submission]
    counters: Fields = field(default_factory=dict)


class AdmissionQueue:
    """One queue of requests. Any number of processes can use it at the same time.

    Methods raise StoreUnavailable if MongoDB does not respond. What they were asked for may then have happened or not;
    each can be repeated.
    """

    def __init__(
        self,
        store: AdmissionStore,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = new_session_id,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """`clock` returns the time of requests, and `steady` that of sessions, which is never set.

        `on_change` is called when a request of this process waits or has ended, so that a dispatcher
        need not poll.
        """
        self.on_change = on_change
        self.store = store
        self.clock = clock
        self.session = QueueSession(store, clock=steady, new_id=new_id)
        self._sessions = LeaseObserver(steady)
        self.counts: Counter[tuple[str, str]] = Counter()
        """How often something has happened in this process: by name and label, for the metrics."""
        self.waits: deque[tuple[int, float]] = deque(maxlen=_KEPT_TIMES)
        """Rank and waiting time of the requests that this process has popped since the metrics were read."""
        self.dispatch_times: deque[float] = deque(maxlen=_KEPT_TIMES)
        """How long each dispatch took that gave slots, in seconds, since the metrics were read."""
        self._submissions: GroupCommit[_Submission] = GroupCommit(
            "submissions", self._submit_one, self._submit_group
        )
        self._endings: GroupCommit[_Ending] = GroupCommit("endings", self._end_one, self._end_group)
        self._starts: GroupCommit[Fields] = GroupCommit("starts", self._note_start, self._note_starts)
        self.outbox = Outbox()
        self._known_limits: tuple[float, Limits] | None = None
        self._reading_limits = asyncio.Lock()
        self._record_again: dict[tuple[str, str], float] | None = None
        """When to record once more what tenants have whose limit is new, by their list; None before the first time."""
        self._relays = False
        """Whether a process sends the events of the queue, read with the limits."""
        self._submitting = 0
        self.idle = True
        """Whether nothing waited or was to be settled when a dispatcher last looked."""
        self.more = False
        """Whether another look would find more to do."""
        self.dispatches = False
        """Whether a dispatcher of this process looks at the queue after each change, and ends what is due."""

    async def limits(self) -> Limits:
        """Return the limits, at most two seconds old."""
        async with self._reading_limits:
            now = self.clock()
            if self._known_limits is None or now - self._known_limits[0] >= LIMITS_SEC:
                limits = await self.store.limits()
                self._relays = await self.store.sends_events()
                if self._known_limits is not None and limits != self._known_limits[1]:
                    await self._adapt(self._known_limits[1], limits)
                self._known_limits = now, limits
            return self._known_limits[1]

    async def _adapt(self, old: Limits, new: Limits) -> None:
        """Count what is there against new limits, before they are used, and let go what they no longer hold back."""
        lists = rules.tenant_lists(new) - rules.tenant_lists(old)
        await self._record(new, lists)
        if self._record_again is not None:
            self._record_again |= dict.fromkeys(lists, self.clock() + 2 * LIMITS_SEC)
        await self._wake_lanes(new, {})

    async def keep_records(self) -> None:
        """Record what tenants have whose limit is new to this process, and once more when every process
        knows the limit.
        """
        limits, now = await self.limits(), self.clock()
        lists = rules.tenant_lists(limits)
        again = self._record_again
        due = lists if again is None else {each for each, at in again.items() if at <= now} & lists
        full = await self._record(limits, due)
        later = {each: at for each, at in (again or {}).items() if at > now}
        self._record_again = later | dict.fromkeys(full, now + _RECORD_AGAIN_SEC)

    async def _record(
        self, limits: Limits, lists: Collection[tuple[str, str]]
    ) -> Collection[tuple[str, str]]:
        """Add requests to lists of tenants that had no limit when the requests got their place or slot.

        A request may end meanwhile. Its entry is then removed again. Return the lists that are full, so that they lack
        some requests, because a document has room for only so many.
        """
        room = Counter(dict.fromkeys(lists, _RECORDED))
        async for items in self.store.open_items({rules.tenant_of(holder) for holder, _ in lists}):
            all_holds = [hold for item in items for hold in rules.holds_of(item)]
            holds = [hold for hold in all_holds if room[hold[:2]] > 0]
            room.subtract(hold[:2] for hold in holds)
            await self.store.hold([Hold(holder=each, list=name, entry=entry) for each, name, entry in holds])
            await self._give_back(limits, await self._without_request(holds))
            if not +room:
                break
        return [each for each in lists if room[each] <= 0]

    # --- submitting

    async def submit(self, request: Request) -> Ticket:
        """Ask for admission. Return the request as it waits or was rejected, or an earlier one with the same id.

        Raise TaskIdTaken if another user or queue has used the id. Users of the same name in different
        tenants, or that come through different doors, are different users.
        """
        deadline = self.clock() + _RESERVED_SEC
        while True:
            submission = _Submission(request, self.clock())
            self._submitting += 1
            try:
                await self._submissions.write(submission)
            finally:
                self._submitting -= 1
            if submission.error is not None:
                raise submission.error
            if submission.ticket is not None:
                return submission.ticket
            if self.clock() > deadline:
                raise _busy(request.execution_id)
            await asyncio.sleep(_POLL_SEC)

    async def _submit_one(self, submission: _Submission) -> None:
        await self._submit_group([submission])

    async def _submit_group(self, submissions: Sequence[_Submission]) -> Collection[int]:
        """Decide about a group. An error concerns those whose fate is not known."""
        [error] = await asyncio.gather(self._guarded(self._decide(submissions)), return_exceptions=True)
        for each in submissions:
            if each.ticket is None and isinstance(error, Exception):
                each.error = error
        return ()

    async def _decide(self, submissions: Sequence[_Submission]) -> None:
        members: dict[str, _Submission] = {}
        for each in submissions:
            members.setdefault(each.request.execution_id, each)
        limits = await self.limits()
        group = _Group(await self.session.token(), limits, members)
        items = [
            _new_item(each.request, group.token, each.at, self.store.queue, relayed=self._relays)
            for each in members.values()
        ]
        known = await self.store.insert(items)
        fresh = [item for item in items if item["_id"] not in known]
        if known:
            fresh += await self._repeat(group, [item for item in items if item["_id"] in known])
        if fresh:
            await self._admit(group, fresh)
        if len(submissions) == self._submitting:
            await self._end_due()

    async def _end_due(self) -> None:
        """End what is due, unless a dispatcher of this process does so at once."""
        if not self.dispatches:
            await self.session.end_due()

    async def _repeat(self, group: _Group, items: Sequence[Fields]) -> list[Fields]:
        """Return the items whose id an earlier request had that was rejected or has expired.

        The others are duplicates.
        """
        earlier = await self.store.load([item["_id"] for item in items], events=True)
        doubtful = (await self.store.counters())["doubt"]
        updates, revived = [], {}
        for item in items:
            known = earlier.get(item["_id"])
            if known is None or known["state"] == State.RESERVING:
                continue
            if rules.owner_of(known) != rules.owner_of(item):
                group.members[item["_id"]].error = _taken(item)
            elif _may_repeat(known, item, doubtful):
                changed = _resubmitted(known, item)
                updates.append(ItemUpdate(id=item["_id"], version=known["v"], set=changed))
                revived[item["_id"]] = {**item, **changed, "v": known["v"] + 1}
            else:
                self.counts["submitted", "duplicate"] += 1
                group.members[item["_id"]].ticket = await self._ticket(known, duplicate=True)
        done = await self.store.update(updates, ("place", group.token))
        return [item for id, item in revived.items() if id in done]

    async def _admit(self, group: _Group, items: Sequence[Fields]) -> None:
        waiting = await self._hold(group, items)
        if not waiting:
            return
        fits = await self._reserve(group, waiting)
        if fits:
            await self._enqueue(group, waiting[:fits])
        await self._reject(group, waiting[fits:], {})

    async def _hold(self, group: _Group, items: Sequence[Fields]) -> list[Fields]:
        """Add the items to what their users and tenants hold. Reject those that do not fit, and return the others.

        Users come first: what a user may not have takes nothing from the others of its tenant.
        """
        waiting, refused = list(items), dict[str, Hold]()
        for caps_of in (rules.user_total, rules.tenant_total):
            refused |= await self._add("held", partial(caps_of, group.limits), group.token, waiting)
            waiting = [item for item in waiting if item["_id"] not in refused]
        await self._reject(group, [item for item in items if item["_id"] in refused], refused)
        return waiting

    async def _add(
        self,
        name: str,
        caps_of: Callable[[str, str], Mapping[str, int | None]],
        token: str,
        items: Sequence[Fields],
    ) -> dict[str, Hold]:
        """Add the items to a list of their users and tenants. Return, by id, the first hold that does not fit."""
        wanted = [
            (item["_id"], Hold(holder=holder, list=name, entry=rules.entry_of(token, item["_id"]), cap=cap))
            for item in items
            for holder, cap in caps_of(item["tenant"], item["user_id"]).items()
        ]
        fit = await self.store.hold([hold for _, hold in wanted]) if wanted else ()
        refused: dict[str, Hold] = {}
        for (id, hold), fits in zip(wanted, fit, strict=True):
            if not fits:
                refused.setdefault(id, hold)
        return refused

    async def _reserve(self, group: _Group, items: Sequence[Fields]) -> int:
        """Take places in the queue for as many of the items as possible. Return their number."""
        fits = len(items)
        for _ in range(_TRIES):
            ranks = {item["_id"]: item["rank"] for item in items[:fits]}
            counted = await self.session.begin(
                {group.token: _step(StepKind.PLACES, ranks)},
                taken=Counter(ranks.values()),
                max_pending=group.limits.max_pending,
            )
            if counted is not None:
                group.counters = counted
                return fits
            group.counters = await self._counters_of(group.token)
            fits = min(len(items), group.limits.max_pending - group.counters["pending"])
            if fits <= 0:
                return 0
        raise _busy(items[0]["_id"])

    async def _counters_of(self, token: str) -> Fields:
        counters = await self.store.counters()
        if owner(token) not in counters["sessions"]:
            raise SessionClosed
        return counters

    async def _enqueue(self, group: _Group, items: Sequence[Fields]) -> None:
        counters, at = group.counters, self.clock()
        first = counters["seq"] - len(items) + 1
        places = rules.positions([item["rank"] for item in items], _bands(counters))
        changes: dict[str, tuple[Fields, Sequence[Fields]]] = {}
        tickets = {}
        for number, (item, position) in enumerate(zip(items, places, strict=True), first):
            wait = rules.estimated_wait(position, counters["services"], group.limits.max_active)
            fields = {
                "state": State.QUEUED.value,
                "seq": number,
                "queued_at": at,
                "due_at": item["requested_at"] + group.limits.stale_sec,
                "placed": group.token,
            }
            changes[item["_id"]] = fields, rules.accepted(item, at, position, wait)
            tickets[item["_id"]] = rules.ticket_of(item | fields, position=position, estimated_wait_sec=wait)
        updates = [_change(item, *changes[item["_id"]]) for item in items]
        if len(await self.store.update(updates, ("placed", group.token))) < len(updates):
            raise SessionClosed
        self._hand_over(items, changes)
        for id, ticket in tickets.items():
            group.members[id].ticket = ticket
        self.session.end(Tally({group.token}))
        self.counts["submitted", "queued"] += len(items)
        self.on_change()

    async def _reject(self, group: _Group, items: Sequence[Fields], refused: Mapping[str, Hold]) -> None:
        """Reject items together, and give back what they hold. `refused` names the limit of a user or tenant, by id."""
        if not items:
            return
        counters, at = group.counters or await self._counters_of(group.token), self.clock()
        retry_after = rules.retry_after(counters["services"], group.limits.max_active)
        await self.store.release(hold for item in items for hold in rules.holds_of(item))
        changes = {}
        for item in items:
            full = refused.get(item["_id"])
            holder, cap = (None, group.limits.max_pending) if full is None else (full.holder, full.cap or 0)
            code, text = rules.rejection(holder, cap)
            fields = rules.rejecting(code, text, retry_after, at) | {"rejected_by": group.token}
            changes[item["_id"]] = fields, [rules.rejected(item, at, text, counters["pending"])]
        updates = [_change(item, *changes[item["_id"]]) for item in items]
        if len(await self.store.update(updates, ("rejected_by", group.token))) < len(updates):
            raise SessionClosed
        self._hand_over(items, changes)
        for item in items:
            fields, _ = changes[item["_id"]]
            self.counts["submitted", fields["reason"]] += 1
            group.members[item["_id"]].ticket = rules.ticket_of(item | fields)
        self.on_change()

    def _hand_over(
        self, items: Iterable[Fields], changes: Mapping[str, tuple[Fields, Sequence[Fields]]]
    ) -> None:
        """Pass what was stored to the relay of this process, so that it need not read it."""
        for item in items:
            fields, events = changes[item["_id"]]
            self.outbox.add({**item, **fields, "events": [*item["events"], *events]})

    # --- looking

    async def find(self, execution_id: str) -> Ticket | None:
        """Return a request with its position; None if there is none with this id."""
        item = await self._load(execution_id)
        return None if item is None else await self._ticket(item)

    async def events(self, execution_id: str) -> list[Fields]:
        """Return the events about a request, in their order."""
        item = await self._load(execution_id, events=True)
        if item is None:
            return []
        item["body"] = await self.body(execution_id)
        return [rules.envelope(item, each) for each in item["events"]]

    async def body(self, execution_id: str) -> Fields:
        """Return what a request asks for.

        It is empty for an unknown request, and for one whose body is no longer kept.
        """
        return (await self.store.bodies([execution_id])).get(execution_id, {})

    async def _load(self, execution_id: str, *, events: bool = False) -> Fields | None:
        """Return a request about which the queue has decided."""
        item = (await self.store.load([execution_id], events=events)).get(execution_id)
        known = item is not None and item["queue"] == self.store.queue and item["state"] != State.RESERVING
        return item if known else None

    async def _ticket(self, item: Fields, *, duplicate: bool = False) -> Ticket:
        if item["state"] != State.QUEUED:
            return rules.ticket_of(item, duplicate=duplicate)
        position = 1 + await self.store.count_before(item)
        services = (await self.store.counters())["services"]
        wait = rules.estimated_wait(position, services, (await self.limits()).max_active)
        return rules.ticket_of(item, duplicate=duplicate, position=position, estimated_wait_sec=wait)

    async def page(
        self,
        *,
        state: State | Collection[State] | None = None,
        priority: Priority | None = None,
        user_id: str | None = None,
        tenant: str | None = None,
        skip: int = 0,
        limit: int = 50,
    ) -> RequestPage:
        """Return requests, newest first. `state` is one state or several."""
        states = [state] if isinstance(state, State) else state
        given = {
            "state": {"$in": [each.value for each in states]} if states else None,
            "rank": priority and priority.rank,
            "user_id": user_id,
            "tenant": tenant,
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        items, total = await self.store.page(wanted, skip=skip, limit=limit)
        return RequestPage(tickets=[rules.ticket_of(item) for item in items], total=total)

    async def status(self, *, users: bool = True) -> QueueStatus:
        """Return the state of the queue: with its top users, or without."""
        counters, limits = await self.store.counters(), await self.limits()
        oldest = await self.store.oldest()
        waiting = _bands(counters)
        return QueueStatus(
            queue=self.store.queue,
            pending=counters["pending"],
            active=counters["active"],
            by_priority={name: waiting[rank] for name, rank in RANKS.items() if waiting.get(rank)},
            limits=limits,
            top_users=await self._top_users() if users else (),
            oldest_age_sec=None if oldest is None else max(0.0, self.clock() - oldest),
            started_last_minute=await self.store.count_items({"started_at": {"$gt": self.clock() - 60}}),
            mean_service_sec=rules.mean_service(counters["services"]),
            in_doubt=len(counters["doubt"]),
            unsent_events=await self.store.count_items({"unsent": self.store.queue}),
        )

    async def _top_users(self, most: int = 10) -> list[UserLoad]:
        loads = []
        for holder, held, active in await self.store.top_users(most):
            _, tenant, user_id = holder.split("/", 2)
            loads.append(
                UserLoad(tenant=tenant, user_id=user_id, active=active, pending=max(0, held - active))
            )
        return loads

    # --- changing requests

    async def set_priority(self, execution_id: str, priority: Priority) -> RequestChange:
        """Move a waiting request to another band. It keeps its arrival."""
        for _ in range(_TRIES):
            item = await self._load(execution_id)
            if item is None:
                return RequestChange(outcome=Changed.UNKNOWN)
            if item["state"] != State.QUEUED:
                return RequestChange(outcome=Changed.NOT_WAITING, ticket=rules.ticket_of(item))
            if item["rank"] == priority.rank:
                return RequestChange(outcome=Changed.DONE, ticket=await self._ticket(item))
            moved = await self._guarded(self._move(item, priority))
            if moved is not None:
                return RequestChange(outcome=Changed.DONE, ticket=await self._ticket(moved))
        raise _busy(execution_id)

    async def _move(self, item: Fields, priority: Priority) -> Fields | None:
        """Move a request. One that waits for its user becomes ready, since it may now be the user's first."""
        if not await self._has_moved(item):
            return None
        token = await self.session.token()
        step = _step(StepKind.MOVES, {item["_id"]: [item["rank"], priority.rank]})
        if await self.session.begin({token: step}, shifted=_shift(item["rank"], priority.rank)) is None:
            raise SessionClosed
        changed = {"rank": priority.rank, "lane": None, "moved": token}
        done = await self.store.update([_change(item, changed)], ("moved", token))
        await self._end_step(token, step, done, {item["_id"]: item})
        return {**item, **changed, "v": item["v"] + 1} if done else None

    async def _has_moved(self, item: Fields) -> bool:
        """Return whether the last move of a request has ended. The next one would overwrite the token of its step."""
        if item.get("moved") is None:
            return True
        await self.session.end_due()
        return item["moved"] not in (await self.store.counters())["doubt"]

    async def cancel(
        self,
        execution_id: str,
        *,
        reason: str,
        by: str,
        source: str | None = None,
        within: float | None = None,
    ) -> RequestChange:
        """Cancel a request. One that waits ends at once; one that runs ends when its end is confirmed.

        An execution also ends `within` seconds. `source` is kept with the cancel: an id of what has requested it.
        """
        for _ in range(_TRIES):
            item = await self._load(execution_id)
            if item is None:
                return RequestChange(outcome=Changed.UNKNOWN)
            if item["state"] in ENDED:
                return RequestChange(outcome=Changed.ENDED, ticket=rules.ticket_of(item))
            wanted = {"reason": reason, "by": by, "at": self.clock(), "source": source, "within": within}
            changed = await self._cancel(
                item, {name: each for name, each in wanted.items() if each is not None}
            )
            if changed is not None:
                outcome = Changed.DONE if changed["state"] == State.CANCELLED else Changed.REQUESTED
                return RequestChange(outcome=outcome, ticket=rules.ticket_of(changed))
        raise _busy(execution_id)

    async def _cancel(self, item: Fields, cancel: Fields) -> Fields | None:
        at, reason = cancel["at"], cancel["reason"]
        if item["state"] == State.QUEUED:
            return await self._end(item, _stopped(reason), [rules.cancelled(item, at, reason, cancel["by"])])
        if item.get("cancel"):
            return item
        events = [rules.delete_pod(item, at, reason)] if item["kind"] == Kind.EXECUTION else []
        wanted: Fields = {"cancel": cancel}
        if item["kind"] == Kind.TASK:
            wanted["due_at"] = at
        elif "within" in cancel:
            wanted["due_at"] = at + cancel["within"]
        changed = await self.store.change(_change(item, wanted, events))
        self._announce(events)
        return changed

    def _announce(self, events: Sequence[Fields]) -> None:
        """Let a dispatcher, and a relay, look at a change whose request is not at hand."""
        if events:
            self.outbox.add_others()
        self.on_change()

    async def report(
        self, execution_id: str, report: Report, *, events: Sequence[Fields] = ()
    ) -> RequestChange:
        """Note the end of a request, which gives back its place or slot."""
        return await self.end(execution_id, lambda _: (report, events))

    async def end(self, execution_id: str, decide: Decide) -> RequestChange:
        """Note the end of a request, if `decide` returns one for the request as it is.

        It gives back its place or slot.
        """
        for _ in range(_TRIES):
            ending = _Ending(execution_id, decide)
            await self._endings.write(ending)
            if ending.error is not None:
                raise ending.error
            if ending.change is not None:
                return ending.change
        raise _busy(execution_id)

    async def _end_one(self, ending: _Ending) -> None:
        await self._end_group([ending])

    async def _end_group(self, endings: Sequence[_Ending]) -> Collection[int]:
        """End a group of requests. One that has changed meanwhile, or is reported twice, gets no outcome."""
        [error] = await asyncio.gather(self._guarded(self._end_all(endings)), return_exceptions=True)
        for each in endings:
            if each.change is None and isinstance(error, Exception):
                each.error = error
        return ()

    async def _end_all(self, endings: Sequence[_Ending]) -> None:
        items = await self.store.load({each.execution_id for each in endings})
        chosen: dict[str, tuple[_Ending, Report, Sequence[Fields]]] = {}
        for each in endings:
            if (found := self._decided(each, items.get(each.execution_id))) is not None:
                chosen.setdefault(each.execution_id, (each, *found))
        if chosen:
            await self._end_chosen(items, chosen)

    def _decided(self, ending: _Ending, item: Fields | None) -> tuple[Report, Sequence[Fields]] | None:
        """Return how a request ends. If it does not, set the outcome."""
        if item is None or item["queue"] != self.store.queue or item["state"] == State.RESERVING:
            ending.decide(None)
            ending.change = RequestChange(outcome=Changed.UNKNOWN)
            return None
        found = ending.decide(item)
        if found is None or item["state"] in ENDED:
            outcome = Changed.ENDED if item["state"] in ENDED else Changed.REFUSED
            ending.change = RequestChange(outcome=outcome, ticket=rules.ticket_of(item))
            return None
        return found

    async def _end_chosen(
        self, items: Mapping[str, Fields], chosen: Mapping[str, tuple[_Ending, Report, Sequence[Fields]]]
    ) -> None:
        """End requests, and give back what they hold, in one step."""
        token, at = await self.session.token(), self.clock()
        ended, updates = {}, []
        for id, (_, report, events) in chosen.items():
            fields = {**rules.ending(items[id], report, at), "settled": token}
            ended[id] = {**items[id], **fields}
            updates.append(_change(items[id], {**fields, "owes": None}, events))
        step = _step(StepKind.ENDS, {id: _owed(item) for id, item in ended.items()})
        if await self.session.begin({token: step}) is None:
            raise SessionClosed
        done = await self.store.update(updates, ("settled", token))
        for id in done:
            chosen[id][0].change = RequestChange(outcome=Changed.DONE, ticket=rules.ticket_of(ended[id]))
            self.counts["ended", ended[id]["state"]] += 1
        await self._end_step(token, step, done, ended)
        self._announce([event for id in done for event in chosen[id][2]])
        await self._end_due()

    async def _end(self, item: Fields, report: Report, events: Sequence[Fields]) -> Fields | None:
        """End a request that is as it was read. Return it; None if it has changed meanwhile."""
        fields = rules.ending(item, report, self.clock())
        ended = await self.store.change(_change(item, fields, events))
        if ended is not None and item["state"] == State.QUEUED:
            # It may have been the next one of its user.
            await self._wake(await self.limits(), {holder for holder, _, _ in rules.holds_of(item)}, {})
        if ended is not None:
            self._announce(events)
        return ended

    # --- runs

    async def started(self, item: Fields) -> None:
        """Note that the task of a request has started, unless the request has changed meanwhile."""
        await self._starts.write(item)

    async def _note_start(self, item: Fields) -> None:
        await self._note_starts([item])

    async def _note_starts(self, items: Sequence[Fields]) -> Collection[int]:
        at = self.clock()
        fields = {"state": State.ACTIVE.value, "started_at": at}
        updates = [
            _change(item, {**fields, "due_at": _cancel_due(item, at)}, rules.started(item, at))
            for item in items
        ]
        await self.store.update(updates, ("started_at", at))
        self.outbox.add_others()
        return ()

    async def try_again(self, item: Fields, error: str) -> Fields | None:
        """Note that a task could not be started. Start it again later, or end its request after the last try."""
        tries = item["tries"] + 1
        if tries >= rules.START_TRIES:
            return await self.refuse(item, error)
        fields = {"tries": tries, "due_at": self.clock() + rules.start_pause(tries), "error": error}
        return await self.store.change(_change(item, fields))

    async def hand_over(self, item: Fields) -> Fields | None:
        """Let another process start a task at once, since this one has not noted that it has started."""
        return await self.store.change(_change(item, {"due_at": self.clock()}))

    async def refuse(
        self, item: Fields, error: str, *, reason: str = reason_codes.START_FAILED
    ) -> Fields | None:
        """End a request that cannot be started."""
        report = Report(state=State.FAILED, reason=reason, error=error)
        text = f"Failed to schedule execution: {error}"
        failed = rules.failed(item, self.clock(), "system_error", error, text)
        ended = await self._end(item, report, [failed])
        self.counts["refused", ""] += ended is not None
        return ended

    # --- what is due by the clock

    async def take_due(self) -> DueCounts:
        """End requests that have waited or run too long, and take over what else is due. The caller does the latter."""
        due, now = DueCounts(), self.clock()
        found = await self.store.due(now)
        await self.store.drop_bodies([item["_id"] for item in found if item["state"] in ENDED], now)
        for item in found:
            state = State(item["state"])
            if state is State.QUEUED:
                due.ended += await self._expire(item) is not None
            elif item.get("cancel") and item["kind"] == Kind.TASK:
                due.cancels += await self._postpone(item, now + _CANCEL_AGAIN_SEC)
            elif state is State.STARTING:
                due.starts += await self._postpone(item, now + SESSION_SEC)
            elif state is State.ACTIVE:
                due.ended += await self._lose(item) is not None
        return due

    async def _postpone(self, item: Fields, due_at: float) -> list[Fields]:
        """Return the request, unless it has changed meanwhile. It is due again later if nothing comes of it."""
        taken = await self.store.change(_change(item, {"due_at": due_at}))
        return [] if taken is None else [taken]

    async def _expire(self, item: Fields) -> Fields | None:
        waited = item["due_at"] - item["requested_at"]
        text = f"the request has waited longer than {waited:g} s"
        report = Report(state=State.EXPIRED, reason=reason_codes.STALE, error=text)
        return await self._end(item, report, [rules.timed_out(item, self.clock(), waited, text)])

    async def _lose(self, item: Fields) -> Fields | None:
        """End an execution about which nothing was heard for too long, and stop it in case it still runs."""
        if "within" in (item.get("cancel") or {}):
            return await self._end(item, _stopped(item["cancel"]["reason"]), ())
        seconds = item["timeout_sec"]
        text = f"the executor has not reported the end within {seconds:g} s and {rules.OVERDUE_SEC:g} s more"
        report = Report(state=State.TIMEOUT, reason=reason_codes.TIMED_OUT, error=text)
        at = self.clock()
        events = [rules.delete_pod(item, at, text), rules.timed_out(item, at, seconds, text)]
        return await self._end(item, report, events)

    # --- giving slots

    async def dispatch(self, most: int = GROUP) -> list[Fields]:
        """Give back what ended requests owe, and give slots to the first requests that wait. Return the latter.

        When it begins, no eligible request with a lower band and number waits than those that get a slot.
        """
        began = time.perf_counter()
        popped = await self._guarded(self._dispatch(most))
        if popped:
            self.dispatch_times.append(time.perf_counter() - began)
        return popped

    async def _dispatch(self, most: int) -> list[Fields]:
        limits = await self.limits()
        pending, active, ready = await self._look(limits, min(most, GROUP))
        # Requests that have ended count until they are settled, so there are some only if others than those
        # are counted.
        owing = await self.store.owing(GROUP) if pending + active > len(ready) else []
        self.idle = not owing and pending <= len(ready)
        ends = (
            await self.session.token(),
            _step(StepKind.ENDS, {item["_id"]: _owed(item) for item in owing}),
        )
        slots = await self._take_slots(limits, ready, ends)
        popped: list[Fields] = []
        if slots is not None:
            popped, _ = await asyncio.gather(self._start(*slots), self._settle(*ends, owing))
        else:
            await self._settle(*ends, owing)
        self.more = pending > len(ready) and (bool(owing) or GROUP == len(ready) < limits.max_active - active)
        if not popped:
            await self.session.end_due()
        return popped

    async def _look(self, limits: Limits, most: int) -> tuple[int, int, list[Fields]]:
        """Return how many requests have places and slots, and the first ones that can start.

        What this process has just seen of the counters is enough if slots are left over. Otherwise it looks again.
        """
        fresh = not self.session.has_seen
        while True:
            pending, active = await self.session.used(fresh=fresh)
            free = limits.max_active - active
            ready = await self._eligible(limits, min(most, free)) if pending > 0 and free > 0 else []
            if fresh or len(ready) == most or (ready and len(ready) < free):
                return pending, active, ready
            fresh = True

    async def _take_slots(
        self, limits: Limits, ready: Sequence[Fields], ends: tuple[str, Fields]
    ) -> tuple[str, Sequence[Fields]] | None:
        """Take slots for as many requests as possible, and begin the step `ends`. None if no slot was taken."""
        begun = {ends[0]: ends[1]} if ends[1]["ids"] else {}
        token, fits = await self.session.token(), len(ready)
        while fits > 0:
            step = _step(StepKind.SLOTS, {item["_id"]: item["rank"] for item in ready[:fits]})
            if await self.session.begin({token: step, **begun}, active=fits, max_active=limits.max_active):
                return token, ready[:fits]
            fits = min(fits - 1, limits.max_active - (await self._counters_of(token))["active"])
        if begun and await self.session.begin(begun) is None:
            raise SessionClosed
        return None

    async def _eligible(self, limits: Limits, most: int) -> list[Fields]:
        """Return the first requests that may start. Let those wait apart whose user or tenant has its share active."""
        limited = rules.limits_active(limits)
        chosen: list[Fields] = []
        has_compared = False
        for _ in range(_LOOKS):
            ready = await self._first_ready(most, limited=limited)
            choice = rules.choose(ready, most, limits, await self._active_of(limits, ready))
            chosen = choice.items
            if choice.full:
                await self._park(limits, choice)
            if not limited:
                break
            if choice.full:
                continue
            # Requests that wait apart may be earlier than those that are chosen, also those of the same
            # user: it may have had an end that has not woken them yet.
            wanted = _wanted(limits, ready)
            if not has_compared:
                wanted, has_compared = wanted - Counter(choice.taken), True
            if await self._wake_lanes(limits, wanted):
                continue
            overlooked = await self._overlooked(limits, ready, chosen)
            if not overlooked:
                break
            await self._wake(limits, overlooked, {})
        return chosen

    async def _overlooked(
        self, limits: Limits, ready: Sequence[Fields], chosen: Sequence[Fields]
    ) -> set[str]:
        """Return the users and tenants with a chosen request before which another one waits that `ready` lacks.

        It may have waited apart when `ready` was read, and be woken since by the end that made room for the chosen one.
        """
        last: dict[str | None, tuple[int, int]] = {
            holder: (item["rank"], item["seq"])
            for item in chosen
            for holder in rules.active_caps(limits, item["tenant"], item["user_id"])
        }
        if not last:
            return set()
        before = {**last, None: max(last.values())}
        return {
            holder
            for item in await self.store.waiting_before(before, known=[item["_id"] for item in ready])
            for holder in rules.active_caps(limits, item["tenant"], item["user_id"])
            if holder in last and (item["rank"], item["seq"]) < last[holder]
        }

    async def _first_ready(self, most: int, *, limited: bool) -> list[Fields]:
        """Return requests that wait for a slot: with their bodies if there is nothing else for which they
        may have to wait.
        """
        if limited:
            return await self.store.first_ready(GROUP, with_body=False)
        return await self.store.first_ready(most)

    async def _active_of(self, limits: Limits, items: Sequence[Fields]) -> dict[str, int]:
        """Return how many requests the users and tenants of some requests have active, if they have a limit."""
        holders = {
            holder for item in items for holder in rules.active_caps(limits, item["tenant"], item["user_id"])
        }
        return await self.store.active_counts(holders) if holders else {}

    async def _park(self, limits: Limits, choice: rules.Choice) -> None:
        """Let the requests of full users and tenants wait apart, but for those that are chosen."""
        for holder in choice.full:
            await self.store.park(holder, [item["_id"] for item in choice.items])
        # One of their requests may have ended in between, before there was one to be woken.
        await self._wake(limits, choice.full, choice.taken)

    async def _wake(self, limits: Limits, holders: Collection[str], taken: Mapping[str, int]) -> int:
        """Let the first requests become ready that wait for holders and may start, beside those that are `taken`."""
        caps = {
            each: cap for each in sorted(holders) if (cap := rules.active_cap_of(limits, each)) is not None
        }
        counts = await self.store.active_counts(caps.keys()) if caps else {}
        woken = 0
        for holder, cap in caps.items():
            free = cap - counts.get(holder, 0) - taken.get(holder, 0)
            woken += await self.store.unpark(holder, free) if free > 0 else 0
        return woken

    async def _wake_lanes(self, limits: Limits, taken: Mapping[str, int]) -> int:
        """Do the same for all holders for which requests wait. Return the number of requests that have become ready."""
        lanes = await self.store.lanes()
        free = [lane for lane in lanes if rules.active_cap_of(limits, lane) is None]
        woken = sum([await self.store.unpark(lane, None) for lane in free])
        return woken + await self._wake(limits, lanes, taken)

    async def _start(self, token: str, items: Sequence[Fields]) -> list[Fields]:
        """Give the slots of a step to the requests that still wait and may have one. Return these requests."""
        limits, at = await self.limits(), self.clock()
        holders_of = partial(rules.recorded_active, limits)
        refused = await self._add("active", holders_of, token, items)
        allowed = [*_in_turn(items, refused, holders_of)]
        await self._add_bodies(allowed)
        changes = {item["_id"]: _start_of(item, token, at) for item in allowed}
        updates = [_change(item, *changes[item["_id"]]) for item in allowed]
        done = await self.store.update(updates, ("slot", token))
        known = {item["_id"]: item for item in items}
        await self._end_step(
            token, _step(StepKind.SLOTS, {id: item["rank"] for id, item in known.items()}), done, known
        )
        popped = [
            {**item, **changes[item["_id"]][0], "v": item["v"] + 1} for item in allowed if item["_id"] in done
        ]
        self._hand_over((item for item in allowed if item["_id"] in done), changes)
        self.waits += [(item["rank"], at - item["queued_at"]) for item in popped]
        self.counts["popped", ""] += len(popped)
        return popped

    async def _add_bodies(self, items: Sequence[Fields]) -> None:
        """Read what requests ask for that get their slots now, unless it is at hand."""
        lacking = [item for item in items if "body" not in item]
        bodies = await self.store.bodies([item["_id"] for item in lacking]) if lacking else {}
        for item in lacking:
            item["body"] = bodies.get(item["_id"], {})

    async def _settle(self, token: str, step: Fields, owing: Sequence[Fields]) -> None:
        """Give back what requests owe, in a step that has begun."""
        if not owing:
            return
        updates = [_change(item, {"owes": None, "settled": token}) for item in owing]
        done = await self.store.update(updates, ("settled", token))
        self.counts.update(("ended", item["state"]) for item in owing if item["_id"] in done)
        await self._end_step(token, step, done, {item["_id"]: item for item in owing})

    # --- ending steps

    async def _end_step(
        self, token: str, step: Fields, done: Collection[str], items: Mapping[str, Fields]
    ) -> None:
        """End a step of this process in which the requests `done` have changed."""
        tally = Tally({token})
        await self._tally(token, step, done, items, tally)
        self.session.end(tally)

    async def _tally(
        self, token: str, step: Fields, done: Collection[str], items: Mapping[str, Fields], tally: Tally
    ) -> None:
        """Add what the end of a step changes, and release what users and tenants hold by then.

        `items` are the requests as they were when the step began, or later.
        """
        left = [id for id in step["ids"] if id not in done]
        match step["kind"]:
            case StepKind.PLACES:
                tally.returned.update(step["ids"][id] for id in left)
            case StepKind.MOVES:
                for id in left:
                    tally.moved.update(_shift(*reversed(step["ids"][id])))
            case StepKind.SLOTS:
                tally.returned.update(step["ids"][id] for id in done)
                tally.freed += len(left)
                await self._release(
                    [{**items[id], "place": None, "slot": token} for id in left if id in items]
                )
            case StepKind.ENDS:
                ended = [items[id] for id in done]
                tally.returned.update(step["ids"][id] for id in done if step["ids"][id])
                slots = [item for item in ended if not step["ids"][item["_id"]]]
                tally.freed += len(slots)
                tally.services += [
                    item["ended_at"] - item["started_at"] for item in slots if item.get("started_at")
                ]
                await self._release(ended)

    async def _release(self, items: Sequence[Fields]) -> None:
        """Remove requests from what their users and tenants hold, and let the next ones of these become ready."""
        await self._give_back(await self.limits(), [hold for item in items for hold in rules.holds_of(item)])

    async def _give_back(self, limits: Limits, holds: Collection[tuple[str, str, str]]) -> None:
        await self.store.release(holds)
        await self._wake(limits, {holder for holder, _, _ in holds}, {})

    # --- ending what other processes have left behind

    async def recover(self) -> int:
        """Close the sessions that nobody renews any more, and end their steps. Return how many steps there were."""
        for session in list(self.session.abandoned):
            await self.store.close_session(session)
            self.session.abandoned.remove(session)
        read_at = self._sessions.now()
        counters = await self.store.counters()
        late = {
            session: renewal
            for session, renewal in counters["sessions"].items()
            if self._sessions.unchanged_sec(session, renewal, read_at) > SESSION_SEC
        }
        for session, renewal in late.items():
            _logger.info("the session %s is no longer renewed; its steps are ended", session)
            await self.store.close_session(session, renewal)
        counters = await self.store.counters() if late else counters
        live = counters["sessions"]
        left = {token: step for token, step in counters["doubt"].items() if owner(token) not in live}
        for token, step in left.items():
            await self._guarded(self._recover(token, {**step, "ids": dict(step["ids"])}))
        await self._drop_reservations()
        return len(left)

    async def _recover(self, token: str, step: Fields) -> None:
        """End a step of a session that is closed."""
        marker = _MARKERS[step["kind"]]
        items = await self.store.freeze(step["ids"], (marker, token))
        done = {id for id, item in items.items() if item.get(marker) == token}
        tally = Tally({token})
        await self._tally(token, step, done, items, tally)
        if await self.session.end_other(tally) is not None:
            changed = f"{len(done)} of {len(step['ids'])}"
            _logger.info(
                "ended the step %s (%s), in which %s requests had changed", token, step["kind"], changed
            )

    async def _drop_reservations(self) -> None:
        """Delete the reservations of closed sessions, and what their users hold for them. Nobody was told about them.

        One that has events of an earlier try stays until they are sent.
        """
        reserving = await self.store.in_state(State.RESERVING)
        # Read later than the reservations, the counters have the sessions of all of them.
        counters = await self.store.counters() if reserving else {}
        for item in reserving:
            token = item["place"]
            if owner(token) not in counters["sessions"] and token not in counters["doubt"]:
                await self.store.release(rules.holds_of(item))
                if not item.get("unsent"):
                    await self.store.delete(item["_id"], item["v"])

    async def wake_all(self) -> int:
        """Let requests become ready that wait for a user or tenant that may have another one active.

        Return their number.
        """
        return await self._wake_lanes(await self.limits(), {})

    async def drop_stray_holds(self) -> int:
        """Remove entries from what users and tenants hold whose requests do not have them. Return their number.

        Delete holders that hold nothing.
        Only a call that arrives late, from a process that then ends, leaves such an entry behind.
        """
        count = 0
        async for holder, lists in self.store.all_holders():
            count += await self._drop_strays(
                [(holder, name, entry) for name, entries in lists.items() for entry in entries]
            )
        await self.store.drop_idle_holders()
        return count

    async def _drop_strays(self, holds: Sequence[tuple[str, str, str]]) -> int:
        """Remove those of the entries that no step can use any more.

        A step opens its session before it adds an entry. So the counters, read after the entries, have its session.
        """
        counters = await self.store.counters() if holds else {}
        tokens = {hold: rules.parts_of(hold[2])[0] for hold in holds}
        stray = await self._without_request(
            [
                hold
                for hold, token in tokens.items()
                if owner(token) not in counters["sessions"] and token not in counters["doubt"]
            ]
        )
        await self._give_back(await self.limits(), stray)
        return len(stray)

    async def _without_request(self, holds: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        """Return those of the entries that their requests do not have."""
        ids = {hold: rules.parts_of(hold[2])[1] for hold in holds}
        items = await self.store.load(set(ids.values())) if ids else {}
        return [hold for hold, id in ids.items() if not _has(items.get(id), hold)]

    async def _guarded(self, step: Coroutine[Any, Any, T]) -> T:
        """Await a step. After an error or a cancel, use another session: a call that was cut off may still arrive."""
        try:
            return await step
        except SessionClosed:
            self.session.abandon()
            raise StoreUnavailable("the queue was not reached for a while; try again") from None
        except BaseException:
            self.session.abandon()
            raise


async def queue_with(db: Database, task_id: str) -> AdmissionQueue | None:
    """Return the queue to which a task was submitted; None if it was not. Raise StoreUnavailable."""
    item = (await AdmissionStore(db, queue="").load([task_id])).get(task_id)
    if item is None or item["kind"] != Kind.TASK:
        return None
    return AdmissionQueue(AdmissionStore(db, queue=item["queue"]))


def _busy(execution_id: str) -> StoreUnavailable:
    return StoreUnavailable(f"the request {execution_id!r} could not be changed in time; try again")


_CLEARED: Final[Fields] = dict.fromkeys(
    (
        *("reason", "error", "retry_after_sec", "report", "cancel", "lane", "owes"),
        *("queued_at", "started_at", "ended_at", "purge_at", "seq", "due_at"),
        *("popped_at", "tries"),
        *("placed", "slot", "moved", "settled", "rejected_by"),
    )
)


def request_of(admission: Admission, id: str, given: Fields, kind: Kind = Kind.TASK) -> Request:
    """Return a request of a program.

    Raise ConfigError if a field of it is invalid, or if what is to start is too large.
    """
    if admission.priority not in tuple(RANKS):
        raise ConfigError(f"priority is {shown(admission.priority)}; choose from {', '.join(RANKS)}")
    require(RequestFields, {"execution_id": id, **asdict(admission)})
    if kind is Kind.EXECUTION:
        require(ExecutionFields, given)
    if (size := len(dumps(given))) > ADMITTED_TASK_BYTES:
        what = "graph and params have" if kind is Kind.TASK else "the execution has"
        raise ConfigError(
            f"{what} {size:,} bytes; a {kind} that waits for admission may have {ADMITTED_TASK_BYTES:,}"
        )
    return Request(
        execution_id=id,
        user_id=admission.user_id,
        door=Door.PYTHON,
        tenant=admission.tenant,
        priority=Priority(admission.priority),
        kind=kind,
        body=given,
    )


def _new_item(request: Request, token: str, at: float, queue: str, *, relayed: bool) -> Fields:
    return {
        "_id": request.execution_id,
        "queue": queue,
        "door": request.door.value,
        "tenant": request.tenant,
        "user_id": request.user_id,
        "kind": request.kind.value,
        "timeout_sec": request.body.get("timeout_seconds"),
        "rank": request.priority.rank,
        "state": State.RESERVING.value,
        "lane": None,
        "requested_at": at,
        "body": request.body,
        "metadata": request.metadata,
        "request_id": request.request_id,
        "place": token,
        "relayed": relayed or request.kind is Kind.EXECUTION,
        "events": [],
        "sent": 0,
        # An earlier request of the id may have been deleted: late calls about it must not find its version again.
        "v": secrets.randbelow(1 << 48),
    }


def _resubmitted(earlier: Fields, item: Fields) -> Fields:
    """Return what changes in a request that is submitted again.

    Events of its earlier tries stay until they are sent, with the metadata of their try.
    """
    changed = {**_CLEARED, **item}
    del changed["_id"], changed["v"]
    if earlier.get("unsent"):
        kept = [{"metadata": earlier["metadata"], **event} for event in earlier["events"]][-_KEPT_EVENTS:]
        changed["events"] = kept
        changed["sent"] = max(0, len(kept) - (len(earlier["events"]) - earlier["sent"]))
    return changed


def _may_repeat(earlier: Fields, item: Fields, doubtful: Collection[str]) -> bool:
    """Return whether a request can have the id of an earlier one, which has given back all that it held."""
    same_event = item["request_id"] is not None and item["request_id"] == earlier.get("request_id")
    named = [earlier["place"], *(earlier.get(marker) for marker in _MARKERS.values())]
    settled = not earlier.get("owes") and not any(token in doubtful for token in named)
    return earlier["state"] in REPEATABLE and settled and not same_event


def _taken(item: Fields) -> TaskIdTaken:
    error = TaskIdTaken(f"execution_id is {shown(item['_id'])}, which another user or queue has used")
    error.add_note("choose another id")
    return error


def _change(item: Fields, fields: Fields, events: Sequence[Fields] = ()) -> ItemUpdate:
    """Return the change of a request that is as it was read. Its events are to be sent if a process sends them."""
    unsent = {"unsent": item["queue"]} if events and item.get("relayed") else {}
    return ItemUpdate(id=item["_id"], version=item["v"], set={**fields, **unsent}, events=events)


def _stopped(reason: str) -> Report:
    """Return the report of a request that was cancelled."""
    return Report(state=State.CANCELLED, reason=reason_codes.USER_REQUEST, error=reason)


def _cancel_due(item: Fields, at: float) -> float | None:
    """Return when the end of a task is requested again that starts now; None if it is not to end."""
    return at + _CANCEL_AGAIN_SEC if item.get("cancel") else None


def _step(kind: StepKind, ids: Mapping[str, Any]) -> Fields:
    return {"kind": kind.value, "ids": dict(ids)}


def _shift(old: int, new: int) -> Counter[int]:
    return Counter({old: -1, new: 1})


def _bands(counters: Fields) -> dict[int, int]:
    return {int(rank): count for rank, count in counters["bands"].items()}


def _wanted(limits: Limits, ready: Sequence[Fields]) -> Counter[str]:
    """Return how many ready requests there are of each user and tenant that may have only so many active."""
    return Counter(
        holder for item in ready for holder in rules.active_caps(limits, item["tenant"], item["user_id"])
    )


def _owed(item: Fields) -> int | None:
    """Return the rank of the place that a request owes; None if it owes a slot."""
    return item["rank"] if item["owes"] == "place" else None


def _start_of(item: Fields, token: str, at: float) -> tuple[Fields, Sequence[Fields]]:
    """Return what changes when a request gets a slot, and the events about it.

    An execution is active at once, since its event starts it. A task is active when Temporal has it.
    """
    fields: Fields = {"slot": token, "popped_at": at}
    if item["kind"] == Kind.TASK:
        return {**fields, "state": State.STARTING.value, "tries": 0, "due_at": at + SESSION_SEC}, ()
    fields |= {"state": State.ACTIVE.value, "started_at": at, "due_at": rules.overdue_at(item, at)}
    return fields, rules.popped(item, at)


def _in_turn(
    items: Iterable[Fields],
    refused: Mapping[str, Hold],
    holders_of: Callable[[str, str], Mapping[str, int | None]],
) -> Iterator[Fields]:
    """Yield the items, in their order, but for those that were refused, and later ones of the same user or tenant.

    What these hold may have become free in between, and is for the earlier ones.
    """
    full: set[str] = set()
    for item in items:
        if (hold := refused.get(item["_id"])) is not None:
            full.add(hold.holder)
        elif full.isdisjoint(holders_of(item["tenant"], item["user_id"])):
            yield item


def _has(item: Fields | None, hold: tuple[str, str, str]) -> bool:
    """Return whether a request has an entry in what a user or tenant holds."""
    if item is None or (item["state"] in ENDED and not item.get("owes")):
        return False
    return hold in rules.holds_of(item)
