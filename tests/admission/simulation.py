"""Many processes that use one admission queue, in virtual time, against a model that knows only what callers see.

Processes are killed, calls fail or arrive late, and sessions end. The model checks the caps and the order at each step,
and in the end that every request was decided about, started once, and that nothing is held any more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from flowkit.admission.models import (
    ENDED,
    RUNNING,
    Changed,
    Door,
    Kind,
    Limits,
    Override,
    Report,
    Request,
    State,
)
from flowkit.admission.queue import AdmissionQueue
from flowkit.admission.rules import tenant_holder, user_holder
from flowkit.errors import StoreUnavailable
from flowkit.models.admission import Priority
from tests.admission.memory import MemoryStore, Outage, Shared, turn

TICK_SEC = 0.05
CLOCKS_SEC = 60.0
"""How far the clock of each process is from the right time, at most."""
LOOKS = 4
"""How often a process may look until a request has started that could start before others."""
IN_VAIN = 8
"""How often a process may look and find nothing while the same request is first. Others may start it first
each time."""
_PRIORITIES = list(Priority)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a simulation does."""

    seed: int
    requests: int
    users: int
    faults: float = 0.0
    kills: int = 0
    processes: int = 3
    submitters: int = 20
    limits: Limits = field(default_factory=Limits)
    repeats: float = 0.02
    """Share of requests that are submitted with the id of an earlier one."""
    cancels: float = 0.01
    moves: float = 0.01
    tenants: int = 1


@dataclass(frozen=True, slots=True)
class First:
    """The first request that a caller knows to wait and that may start, as it was at one moment."""

    place: tuple[int, int]
    """Rank and number."""
    id: str
    version: int
    full: tuple[int, ...]
    """How often its user and tenant had been full."""
    slots_full: int
    """How often all slots had been taken."""


class Model:
    """What callers know of the requests, and what must hold about it."""

    def __init__(self, shared: Shared, limits: Limits, *, faults: bool) -> None:
        self._shared = shared
        self._limits = limits
        self._faults = faults
        self.acknowledged: dict[str, int] = {}
        """When a request was acknowledged as waiting, in ticks."""
        self.started: Counter[tuple[str, str]] = Counter()
        self.figures: Counter[str] = Counter()
        self._waiting: list[tuple[int, int, str]] = []

    def accept(self, id: str) -> None:
        """Note that a caller knows that a request waits."""
        item = self._shared.items[id]
        heappush(self._waiting, (item["rank"], item["seq"], id))
        self.acknowledged[id] = item["seq"]

    moved = accept

    def first_eligible(self, most: int = 10) -> list[First]:
        """Return the first requests that a caller knows to wait, and that may start together."""
        passed: list[tuple[int, int, str]] = []
        found: list[First] = []
        settling = self._settling()
        taken: Counter[str] = Counter()
        while self._waiting and len(found) < most:
            entry = heappop(self._waiting)
            if self.waits(entry):
                passed.append(entry)
                item = self._shared.items[entry[2]]
                if self._may_start(item, settling, taken):
                    found.append(self._as_first(entry[2]))
                    taken.update(self.active_caps(item).keys())
        for entry in passed:
            heappush(self._waiting, entry)
        return found

    def _may_start(self, item: dict[str, Any], settling: set[str], taken: Counter[str]) -> bool:
        """Return whether user and tenant of a request have room beside what is taken, and nothing of them
        is being settled.

        After a fault, a request may be parked until a sweep.
        """
        caps = self.active_caps(item)
        if settling & caps.keys() or (self._faults and item["lane"] is not None):
            return False
        active = {holder: len(self._shared.holders[holder]["active"]) for holder in caps}
        return all(active[holder] + taken[holder] < cap for holder, cap in caps.items())

    def _settling(self) -> set[str]:
        """Return the users and tenants of the requests that steps concern which have not ended."""
        steps = self._shared.counters["doubt"].values()
        ids = [id for step in steps if step["kind"] in ("ends", "slots") for id, _ in step["ids"]]
        items = [self._shared.items[id] for id in ids if id in self._shared.items]
        return {holder for item in items for holder in self.active_caps(item)}

    def active_caps(self, item: dict[str, Any]) -> dict[str, int]:
        """Return how many requests the user and the tenant of a request may have active, if there is a limit."""
        user = self._limits.users.get(item["user_id"], Override()).max_active
        caps = {
            user_holder(item["tenant"], item["user_id"]): user or self._limits.max_active_per_user,
            tenant_holder(item["tenant"]): self._limits.tenants.get(item["tenant"], Override()).max_active,
        }
        return {holder: cap for holder, cap in caps.items() if cap is not None}

    def _as_first(self, id: str) -> First:
        item, shared = self._shared.items[id], self._shared
        holders = self.active_caps(item)
        full = tuple(shared.full[holder] + shared.parked[holder] for holder in holders)
        # A dispatch that only reads that no slot is free leaves no trace, so the request starts to wait for one then.
        slots_full = -1 if shared.counters["active"] >= self._limits.max_active else shared.slots_full
        return First((item["rank"], item["seq"]), id, item["v"], full, slots_full)

    def still(self, first: First, *, slots: bool = False) -> bool:
        """Return whether a request could have started at any time since it was first: with `slots`, there
        also was a slot.
        """
        if not self.waits((*first.place, first.id)):
            return False
        now = self._as_first(first.id)
        same = (now.version, now.full) == (first.version, first.full)
        empty = self._shared.counters["active"] < self._limits.max_active
        return same and (not slots or (empty and now.slots_full == first.slots_full))

    def check_no_slot_is_left(self, eligible: list[First]) -> None:
        """Check that no request could have started all the time while there always was an empty slot.

        After a fault, slots may be unused until the steps of the process have ended.
        """
        for first in [] if self._faults else eligible:
            assert not self.still(first, slots=True), f"{first} waits, and slots are empty"

    def waits(self, entry: tuple[int, int, str]) -> bool:
        """Return whether a request still waits at this place."""
        item = self._shared.items[entry[2]]
        return item["state"] == State.QUEUED and (item["rank"], item["seq"]) == entry[:2]

    def check_pop(self, eligible: list[First], popped: list[dict[str, Any]]) -> None:
        """Check the order: before a request that could have started all the time, only earlier ones have."""
        left = [each for each in eligible if self.still(each)]
        for item in popped:
            self.started[item["_id"], item["place"]] += 1
            assert self.started[item["_id"], item["place"]] == 1, f"{item['_id']} has started twice"
            for each in left:
                assert (item["rank"], item["seq"]) < each.place, f"{item['_id']} has started before {each}"

    def check_caps(self) -> None:
        """Check that no cap is exceeded, by counting the requests themselves."""
        states = Counter({state: len(ids) for state, ids in self._shared.in_state.items()})
        active = states[State.STARTING] + states[State.ACTIVE]
        assert active <= self._limits.max_active, f"{active} are active"
        assert states[State.QUEUED] <= self._limits.max_pending, f"{states[State.QUEUED]} wait"
        self.figures["most active"] = max(self.figures["most active"], active)
        self.figures["most pending"] = max(self.figures["most pending"], states[State.QUEUED])
        held: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for item in self._shared.of(State.QUEUED, *RUNNING):
            held.update(self._total_caps(item).keys())
            if item["state"] in RUNNING:
                running.update(self.active_caps(item).keys())
            for holder, cap in self._total_caps(item).items():
                assert held[holder] <= cap, f"{holder} has {held[holder]}"
            for holder, cap in self.active_caps(item).items():
                assert running[holder] <= cap, f"{holder} has {running[holder]} active"

    def _total_caps(self, item: dict[str, Any]) -> dict[str, int]:
        user = self._limits.users.get(item["user_id"], Override()).max_total
        caps = {
            user_holder(item["tenant"], item["user_id"]): user or self._limits.max_per_user,
            tenant_holder(item["tenant"]): self._limits.tenants.get(item["tenant"], Override()).max_total,
        }
        return {holder: cap for holder, cap in caps.items() if cap is not None}


class Simulation:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 1_000_000.0
        self.shared = Shared()
        self.shared.limits = plan.limits
        self.model = Model(self.shared, plan.limits, faults=plan.faults > 0 or plan.kills > 0)
        self.chance = random.Random(plan.seed)
        self._queues: list[AdmissionQueue] = []
        self._sessions = 0
        self._left = list(range(plan.requests))
        self._active: list[tuple[float, str]] = []
        self._done = False

    @property
    def figures(self) -> Counter[str]:
        """What has happened."""
        return self.model.figures

    async def run(self) -> Counter[str]:
        """Run until every request has ended. Raise AssertionError if something is not as it must be."""
        self._queues = [self._new_process() for _ in range(self.plan.processes)]
        submitters = [asyncio.create_task(self._submit_all()) for _ in range(self.plan.submitters)]
        others = [asyncio.create_task(work) for work in self._background()]
        try:
            await self._until(asyncio.gather(*submitters), others)
            self._done = True
            await self._until(asyncio.create_task(self._drain()), others)
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await self._check_end()
        return self.figures

    async def _until(self, work: asyncio.Future[Any], others: list[asyncio.Task[Any]]) -> None:
        await asyncio.wait([work, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            if task.done():
                task.result()
        await work

    def _background(self) -> list[Any]:
        dispatchers = [self._dispatch(number) for number in range(self.plan.processes)]
        return [self._tick(), self._end_runs(), self._sweep(), self._kill(), *dispatchers]

    def _new_id(self) -> str:
        self._sessions += 1
        return f"s{self._sessions}"

    def _new_process(self) -> AdmissionQueue:
        store: Any = MemoryStore(self.shared, faults=self.plan.faults, chance=self.chance)
        ahead_sec = self.chance.uniform(-CLOCKS_SEC, CLOCKS_SEC)
        return AdmissionQueue(
            store, clock=lambda: self.now + ahead_sec, steady=lambda: self.now, new_id=self._new_id
        )

    def _queue(self) -> AdmissionQueue:
        return self.chance.choice(self._queues)

    async def _tick(self) -> None:
        ticks = 0
        while True:
            await turn()
            self.now += TICK_SEC
            ticks += 1
            if self.shared.late and self.chance.random() < 0.05:
                self.shared.late.pop(self.chance.randrange(len(self.shared.late)))()
                self.figures["late calls"] += 1
            if ticks % 500 == 0:
                self.model.check_caps()

    async def _submit_all(self) -> None:
        while self._left:
            number = self._left.pop()
            if self.chance.random() < self.plan.repeats and self.model.acknowledged:
                number = self.chance.randrange(self.plan.requests)
            await self._submit(f"e{number}", number)
            if self.chance.random() < self.plan.cancels:
                await self._cancel(f"e{self.chance.randrange(self.plan.requests)}")
            if self.chance.random() < self.plan.moves:
                await self._move(f"e{self.chance.randrange(self.plan.requests)}")

    async def _submit(self, id: str, number: int) -> None:
        user, tenant = f"u{number % self.plan.users}", f"t{number % self.plan.tenants}"
        priority = _PRIORITIES[number // self.plan.users % 5]
        request = Request(
            execution_id=id,
            user_id=user,
            tenant=tenant,
            door=Door.PYTHON,
            kind=Kind.EXECUTION,
            body={},
            priority=priority,
        )
        while True:
            try:
                ticket = await self._queue().submit(request)
            except (Outage, StoreUnavailable):
                self.figures["failed calls"] += 1
                continue
            self.figures["duplicate" if ticket.duplicate else ticket.reason or "queued"] += 1
            if not ticket.duplicate and ticket.accepted:
                self.model.accept(id)
            if ticket.reason == "queue_full":
                assert self.shared.counters["seq"] >= self.plan.limits.max_pending
            if ticket.accepted or ticket.duplicate or self.chance.random() < 0.5:
                return
            await self._pause(20)

    async def _cancel(self, id: str) -> None:
        with suppress(Outage, StoreUnavailable):
            change = await self._queue().cancel(id, reason="test", by="me")
            self.figures[f"cancel {change.outcome}"] += 1
            if change.outcome is Changed.REQUESTED:
                await self._report(id, State.CANCELLED)

    async def _move(self, id: str) -> None:
        with suppress(Outage, StoreUnavailable):
            change = await self._queue().set_priority(id, self.chance.choice(_PRIORITIES))
            self.figures[f"move {change.outcome}"] += 1
            if change.outcome is Changed.DONE and id in self.model.acknowledged:
                self.model.moved(id)

    async def _dispatch(self, number: int) -> None:
        """Give slots. What could start some looks ago, and at all times since, must have started first, or have a slot.

        A single look may fail, because another process starts or parks requests at the same time.
        """
        seen: deque[list[First]] = deque(maxlen=IN_VAIN)
        in_vain = 0
        while True:
            queue = self._queues[number]
            seen.append(self.model.first_eligible())
            try:
                popped = await queue.dispatch(self.chance.choice([1, 5, 100]))
                self.model.check_pop(seen[-LOOKS] if len(seen) >= LOOKS else [], popped)
                in_vain = 0 if popped else in_vain + 1
                self.model.check_no_slot_is_left(seen[0][:1] if min(len(seen), in_vain) == IN_VAIN else [])
                self.figures["started"] += len(popped)
            except (Outage, StoreUnavailable):
                seen.clear()
            await self._pause(self.chance.randrange(3))

    async def _end_runs(self) -> None:
        """End runs at random."""
        while True:
            ended = [id for id in self.shared.in_state[State.ACTIVE] if self.chance.random() < 0.3]
            states = (State.COMPLETED, State.FAILED)
            await asyncio.gather(*(self._report(id, self.chance.choice(states)) for id in ended))
            await self._pause(1)

    async def _report(self, id: str, state: State) -> None:
        while True:
            try:
                await self._queue().report(id, Report(state=state))
                return
            except (Outage, StoreUnavailable):
                continue

    async def _sweep(self) -> None:
        while True:
            with suppress(Outage, StoreUnavailable):
                queue = self._queue()
                self.figures["recovered steps"] += await queue.recover()
                self.figures["expired"] += (await queue.take_due()).ended
                for item in self.shared.of(State.RESERVING):
                    item.pop("unsent", None)  # as a process does that sends events
                self.figures["woken by the sweep"] += await queue.wake_all()
            await self._pause(50)

    async def _kill(self) -> None:
        """Replace processes. Their calls in flight are cut off wherever they are, but callers see an outage."""
        for _ in range(self.plan.kills):
            await self._pause(self.chance.randrange(200, 1_000))
            if self._done:
                break
            number = self.chance.randrange(self.plan.processes)
            victim: Any = self._queues[number].store
            victim.faults = 1.0
            self._queues[number] = self._new_process()
            self.figures["kills"] += 1
        while True:
            await self._pause(10_000)

    async def _pause(self, ticks: int) -> None:
        for _ in range(ticks + 1):
            await turn()

    async def _drain(self) -> None:
        for _ in range(200_000):
            await turn()
            counters = self.shared.counters
            if not (counters["pending"] or counters["active"] or self._open()) and not self.shared.late:
                return
        raise AssertionError(f"not drained: {self.shared.counters}, {self._open()[:2]}")

    def _open(self) -> list[Any]:
        return [item for item in self.shared.items.values() if item["state"] not in ENDED or item.get("owes")]

    async def _check_end(self) -> None:
        """Check that nothing is held or counted any more, and that each accepted request had one end.

        Of late calls, entries may be left that a sweep removes.
        """
        store: Any = MemoryStore(self.shared)
        sweeper = AdmissionQueue(store, clock=lambda: self.now, steady=lambda: self.now)
        self.figures["stray entries"] += await sweeper.drop_stray_holds()
        held = {holder: lists for holder, lists in self.shared.holders.items() if any(lists.values())}
        assert not held, held
        counters = self.shared.counters
        assert counters["pending"] == counters["active"] == 0, counters
        assert set(counters["bands"].values()) <= {0}, counters
        for id in self.model.acknowledged:
            assert self.shared.items[id]["state"] in ENDED
        for (id, _), count in self.model.started.items():
            assert count == 1, f"{id} has started {count} times"
        self.figures["requests"] = len(self.shared.items)
