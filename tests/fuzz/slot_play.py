"""Plays random tasks against the engine's part of the concurrency limits, and compares it with the model."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from tests.fuzz.play import Difference
from tests.fuzz.slot_model import Attempt, SlotModel
from tests.fuzz.slot_world import Engine, Task, World

from flowkit import CoordinatorConfig
from flowkit.models import AcquireSlots, ReleaseSlots, Slot, SlotReply

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.slots import SlotStore

ROLES = ("a", "b.c", "12")
LEAK_SEC = 10.0
"""Engines free slots that nothing uses any more within this time."""
MOST_OVERTAKEN = 2
"""How often a task may get a slot while an attempt of another waits: once as it was first, once for its priority."""
_TICK_SEC = 1.0
_WAIT_TIMEOUT_SEC = 60.0
"""Temporal repeats a wait after this time, because a late call of a cancelled attempt may have taken its place."""
_LONGEST_WAIT_SEC = 300.0
"""By then, the last attempt of a play has had its turn, even if each slot before it leaked."""


class SlotPlay:
    """Some tasks that share limits. `chance` decides everything that happens."""

    def __init__(self, chance: random.Random, events: int) -> None:
        self._chance, self._events = chance, events
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()
        """Number of events, by kind."""
        self.longest_leak_sec = 0.0
        """Longest time after the end of all attempts in which a slot was held."""
        tasks = [Task(f"t{n}", chance.choice([0, 0, 5, -5])) for n in range(chance.randint(1, 5))]
        self.model = SlotModel(total=None, by_role={}, served=set(ROLES))
        self._world = World(tasks, self.model.served)
        self._config = CoordinatorConfig()
        self._set_limits()
        self._engines: list[Engine] = []
        self._store: SlotStore
        self._attempts = 0

    async def run(self) -> None:
        """Play the events, end all tasks, and check that all slots become free."""
        with self._world.installed():
            self._engines = [self._world.engine(self._config) for _ in range(2)]
            self._store = await self._engine().grants.store()
            for _ in range(self._events):
                self._world.now += self._chance.choice([0.01, 0.01, 0.01, 1.0])
                await self._move()
                await self._compare()
            await self._end_all()

    def _note(self, kind: str, what: object = "") -> None:
        self.counts[kind] += 1
        self.history.append(f"{self._world.now:.2f} {kind} {what}")

    def _engine(self) -> Engine:
        return self._chance.choice(self._engines)

    async def _move(self) -> None:
        moves: list[tuple[int, Callable[[Task], Awaitable[None]]]] = [
            (6, self._ask),
            (6, self._wait),
            (6, self._end),
            (5, self._free),
            (2, self._cancel),
            (1, self._repeat),
            (1, self._continue),
            (1, self._close),
        ]
        drawn = self._chance.random()
        if drawn < 0.25:
            await self._tick()
        elif drawn < 0.3:
            await self._die_after_grants()
        elif drawn < 0.35:
            self._change()
        else:
            [(_, act)] = self._chance.choices(moves, [weight for weight, _ in moves])
            tasks = [task for task in self._world.tasks.values() if not task.closed]
            if tasks:
                await act(self._chance.choice(tasks))

    # What workflows do.

    async def _ask(self, task: Task) -> None:
        """Start some attempts: ask for their slots in one call, sometimes twice, because a reply is lost."""
        attempts = [self._next_attempt(task) for _ in range(self._chance.choice([1, 1, 2, 4]))]
        self._note("ask", attempts)
        wanted = [_slot(attempt, withdrawn=False) for attempt in attempts]
        for _ in range(self._chance.choice([1, 1, 2])):
            request = AcquireSlots(task_id=task.name, slots=wanted, release=self._taken(task))
            found = await self._engine().grants.acquire(request, task.run_id)
            refusals = self.model.refusals(attempts)
            expected = [SlotReply(granted=reason is None, reason=reason or "") for reason in refusals]
            if found.replies != expected:
                raise Difference(f"{attempts} get {found}, and should get {expected}")
        for attempt, refusal in zip(attempts, refusals, strict=True):
            (task.asking if refusal else task.in_flight).add(attempt)

    def _next_attempt(self, task: Task) -> Attempt:
        """Return an attempt that was refused a slot, or a new one."""
        if task.asking and self._chance.random() < 0.5:
            attempt = self._chance.choice(sorted(task.asking))
            task.asking.remove(attempt)
            return attempt
        self._attempts += 1
        return Attempt(task.name, f"n{self._attempts}", 1, self._chance.choice(ROLES))

    def _taken(self, task: Task) -> list[Slot]:
        """Take some slots to free, which the next call carries."""
        taken = task.releases[: self._chance.choice([0, 0, 1])]
        del task.releases[: len(taken)]
        for attempt, withdrawn in taken:
            self.model.release(attempt, withdrawn=withdrawn)
        return [_slot(attempt, withdrawn) for attempt, withdrawn in taken]

    async def _wait(self, task: Task) -> None:
        """Let an attempt wait that was refused. Of each role of a task, one waits."""
        able = sorted(attempt for attempt in task.asking if attempt.role not in task.waiting)
        if not able:
            return
        attempt = self._chance.choice(able)
        task.asking.remove(attempt)
        task.waiting[attempt.role] = attempt
        task.open_waits.add(attempt)
        await self._enqueue(task, attempt)

    async def _enqueue(self, task: Task, attempt: Attempt) -> None:
        self._note("wait", attempt)
        self.model.wait(attempt, task.priority, self._world.now)
        await self._engine().grants.wait(task.request(attempt))

    async def _repeat(self, task: Task) -> None:
        """Repeat a wait, because the activity timed out, or runs again after a cancel."""
        if task.open_waits:
            await self._enqueue(task, self._chance.choice(sorted(task.open_waits)))

    async def _end(self, task: Task) -> None:
        """End an attempt."""
        if task.in_flight:
            attempt = self._chance.choice(sorted(task.in_flight))
            self._note("end", attempt)
            task.in_flight.remove(attempt)
            task.releases.append((attempt, False))

    async def _cancel(self, task: Task) -> None:
        """Cancel an attempt that waits or has asked. Temporal may list the cancelled activity for some time."""
        able = sorted([*task.waiting.values(), *task.asking])
        if able:
            attempt = self._chance.choice(able)
            self._note("cancel", attempt)
            task.waiting = {role: each for role, each in task.waiting.items() if each != attempt}
            task.asking.discard(attempt)
            if self._chance.random() < 0.5:
                task.open_waits.discard(attempt)
            task.releases.append((attempt, True))

    async def _free(self, task: Task) -> None:
        """Let an engine free the slots of ended attempts, sometimes twice."""
        if not task.releases:
            return
        self._note("free", task.releases)
        slots = [_slot(attempt, withdrawn) for attempt, withdrawn in task.releases]
        for attempt, withdrawn in task.releases:
            self.model.release(attempt, withdrawn=withdrawn)
        for _ in range(self._chance.choice([1, 1, 2])):
            await self._engine().grants.release(ReleaseSlots(task_id=task.name, slots=slots))
        task.releases.clear()

    async def _continue(self, task: Task) -> None:
        """Continue as new: attempts that wait ask again in the next run."""
        if not task.in_flight:
            await self._free(task)
            self._note("continue as new", task.name)
            task.asking |= set(task.waiting.values())
            task.waiting.clear()
            task.open_waits.clear()
            task.run += 1

    async def _close(self, task: Task) -> None:
        """End a task, or terminate it, so that it does not free its slots."""
        frees = self._chance.random() < 0.5
        self._note("close" if frees else "terminate", task.name)
        if frees:
            self.model.release_task(task.name)
            await self._engine().grants.release(ReleaseSlots(task_id=task.name, whole_task=True))
        task.closed = True
        for each in (task.in_flight, task.open_waits, task.asking, task.waiting, task.releases):
            each.clear()

    # What engines do.

    async def _tick(self, number: int | None = None) -> None:
        """Let an engine grant free slots, and check for leaks if it is time."""
        number = self._chance.randrange(len(self._engines)) if number is None else number
        self._note("tick of engine", number)
        granted = self.model.grant()
        self.counts["slot after a wait"] += len(granted)
        for attempt in granted:
            if self._world.tasks[attempt.task].closed:
                self.model.release(attempt)
        used = {attempt for attempt in self.model.holders if self._world.tasks[attempt.task].uses(attempt)}
        await self._engines[number].loop._once()
        await asyncio.gather(*self._engines[number].grants._delivering)
        holders = await self._holders()
        self.counts["leaked slot"] += len(self.model.holders - holders)
        if lost := used - holders:
            raise Difference(f"slots that are in use were freed: {lost}")
        self.model.holders &= holders
        waiting = await self._waiting()
        gone = [key for key, place in self.model.places.items() if place.attempt not in waiting]
        self.model.drop([key for key in gone if self._world.tasks[key[0]].closed])

    async def _die_after_grants(self) -> None:
        """Kill an engine that has granted slots before it reports them. It starts again with new checks."""
        number = self._chance.randrange(len(self._engines))
        self._note("engine dies", number)
        if self._chance.random() < 0.5:
            self.model.grant()
            await self._engines[number].grants._grant_in_order(self._store)
        self._engines[number] = self._world.engine(self._config)

    def _change(self) -> None:
        """Change the limits, or which roles have workers."""
        if self._chance.random() < 0.5:
            self._set_limits()
        else:
            self.model.served ^= {self._chance.choice(ROLES)}
        self._note("change", (self.model.total, self.model.by_role, sorted(self.model.served)))

    def _set_limits(self) -> None:
        self.model.total = self._chance.choice([None, None, 1, 2, 4])
        self.model.by_role = {
            role: self._chance.choice([1, 1, 1, 2, 3]) for role in ROLES if self._chance.random() < 0.6
        }
        self._config.max_global_running = self.model.total
        self._config.max_type_concurrency = dict(self.model.by_role)

    # Comparisons.

    async def _holders(self) -> set[Attempt]:
        holders = [Attempt(*each.key, each.role) for each in await self._store.holders()]
        if len(set(holders)) < len(holders):
            raise Difference(f"an attempt holds two slots: {holders}")
        return set(holders)

    async def _waiting(self) -> list[Attempt]:
        return [Attempt(r.task_id, r.node_id, r.epoch, r.role) for r in await self._store.waiting()]

    async def _compare(self) -> None:
        holders, usage = await self._holders(), await self._store.usage()
        _same("holders", holders, self.model.holders)
        _same("order", await self._waiting(), self.model.order())
        _same("total", usage.total, len(holders))
        counts = {role: count for role, count in usage.by_role.items() if count}
        _same("slots by role", counts, dict(Counter(attempt.role for attempt in holders)))
        in_flight = {attempt for task in self._world.tasks.values() for attempt in task.in_flight}
        if without := in_flight - holders:
            raise Difference(f"attempts without a slot: {without}")
        if self.model.most_overtaken() > MOST_OVERTAKEN:
            raise Difference(f"a task overtakes others: {self.model.overtaken}")

    async def _end_all(self) -> None:
        """End the attempts in flight, and let those that wait have their turn, or cancel them.

        Each slot must become free in time, also if its task does not free it.
        """
        tasks = [task for task in self._world.tasks.values() if not task.closed]
        cancels = self._chance.random() < 0.5
        self.model.served |= set(ROLES)
        if self._chance.random() < 0.5:
            self._engines.pop(self._chance.randrange(len(self._engines)))
        held_since: dict[Attempt, float] = {}
        latest = self._world.now + _LONGEST_WAIT_SEC
        repeat_at = self._world.now + _WAIT_TIMEOUT_SEC
        while self.model.holders or self.model.places or any(task.is_busy for task in tasks):
            for task in tasks:
                await self._settle(task, cancels=cancels)
                if self._world.now > repeat_at:
                    for attempt in sorted(task.waiting.values()):
                        await self._enqueue(task, attempt)
            repeat_at += _WAIT_TIMEOUT_SEC * (self._world.now > repeat_at)
            await self._pass_second()
            held_since = {each: held_since.get(each, self._world.now) for each in self.model.holders}
            longest = max((self._world.now - since for since in held_since.values()), default=0.0)
            self.longest_leak_sec = max(self.longest_leak_sec, longest)
            if self._world.now > latest:
                raise Difference(f"attempts that wait without end: {self.model.places}")
            if longest > LEAK_SEC:
                raise Difference(f"slots that nothing uses: {held_since}")

    async def _settle(self, task: Task, *, cancels: bool) -> None:
        while task.in_flight:
            await self._end(task)
        while cancels and (task.waiting or task.asking):
            await self._cancel(task)
        await self._free(task)
        for _ in range(len(task.asking)):
            await self._wait(task)

    async def _pass_second(self) -> None:
        self._world.now += _TICK_SEC
        for number in range(len(self._engines)):
            await self._tick(number)
        await self._compare()


def _slot(attempt: Attempt, withdrawn: bool) -> Slot:
    return Slot(node_id=attempt.node, epoch=attempt.epoch, role=attempt.role, withdrawn=withdrawn)


def _same(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise Difference(f"{what}: {actual} should be {expected}")
