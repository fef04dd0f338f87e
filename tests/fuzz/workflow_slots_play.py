"""Plays tasks that share limits on one event loop: the workflow's part of the limits together with the
engine's part."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.fuzz.play import Difference
from tests.fuzz.slot_model import Attempt
from tests.fuzz.slot_play import LEAK_SEC, ROLES
from tests.fuzz.slot_temporal import CURRENT, Temporal
from tests.fuzz.slot_world import Task, World, pause

from flowkit import CoordinatorConfig
from flowkit.models import NodeState
from flowkit.workflows.slots import ConcurrencySlots, Slots, TaskSlots

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.fuzz.slot_world import Engine

    from flowkit.adapters.slots import SlotStore

_TICK_SEC = 0.5
_MOST_TICKS = 3_000


class LimitedTask:
    """One task: it runs its nodes, sometimes cancels one or all of them, and sometimes continues as new."""

    def __init__(
        self,
        chance: random.Random,
        task: Task,
        note: Callable[[str, object], None],
        most_nodes: int,
        *,
        undisturbed: bool,
    ) -> None:
        self._chance, self.task, self._note = chance, task, note
        self._undisturbed = undisturbed
        self._left: dict[int, tuple[Any, NodeState]] = {
            index: (SimpleNamespace(node_id=f"n{index}", index=index, type=chance.choice(ROLES)), NodeState())
            for index in range(chance.randint(1, most_nodes))
        }
        """The nodes that have not ended, with their states."""
        self._draining = False
        self._stops = chance.random() < 0.2
        self.ended = False

    async def run(self) -> None:
        """Run all nodes, then free all slots."""
        CURRENT.set(self.task)
        while self._left:
            await self._run_nodes()
            self.task.run += 1
            self.task.open_waits.clear()
        self.task.closed = self.ended = True

    async def _run_nodes(self) -> None:
        """Run the nodes that are left in one run of the workflow."""
        self._draining = False
        limits = ConcurrencySlots(
            priority=self.task.priority,
            is_draining=lambda: self._draining,
            on_change=lambda: None,
        )
        self._limit, self._window = self._chance.choice([1, 3, 9]), self._chance.choice([1, 3, 9])
        slots = TaskSlots(Slots(limit=self._limit, window=self._window))
        running = {index: asyncio.create_task(self._node(index, limits, slots)) for index in self._left}
        try:
            while not all(each.done() for each in running.values()) and not self._draining:
                limits.release_ended()
                await pause(1)
                self._disturb(running)
        finally:
            await self._cancel(list(running.values()))
        if self._left:
            await limits.flush()
        else:
            await limits.close()

    def _disturb(self, running: dict[int, asyncio.Task[None]]) -> None:
        """Cancel one node or all, or begin to continue as new, which needs that no attempt is in flight."""
        drawn = self._chance.random() + self._undisturbed
        if drawn < 0.01:
            index = self._chance.choice(list(running))
            if running[index].cancel():
                self._note("cancelled node", (self.task.name, index))
                self._left.pop(index, None)
        elif drawn < 0.02 and self._stops:
            self._note("stopped task", self.task.name)
            self._draining = True
            self._left.clear()
        elif drawn < 0.025 and not self.task.in_flight and self._left:
            self._note("continued task", self.task.name)
            self._draining = True

    async def _cancel(self, running: list[asyncio.Task[None]]) -> None:
        for each in running:
            each.cancel()
        for each in running:
            with suppress(asyncio.CancelledError):
                await each

    async def _node(self, index: int, limits: ConcurrencySlots, slots: TaskSlots) -> None:
        node, state = self._left[index]
        for _ in range(self._chance.choice([1, 1, 2])):
            async with limits.slot(node, state, lambda: slots.slot(node.type)):
                state.epoch += 1
                attempt = Attempt(self.task.name, node.node_id, state.epoch, node.type)
                self.task.in_flight.add(attempt)
                self._note("attempt", attempt)
                self._check_limits()
                try:
                    await pause(self._chance.randint(0, 30))
                finally:
                    self.task.in_flight.remove(attempt)
        self._left.pop(index, None)

    def _check_limits(self) -> None:
        """Check the limits of the task itself."""
        by_role = Counter(attempt.role for attempt in self.task.in_flight)
        if len(self.task.in_flight) > self._limit or max(by_role.values()) > self._window:
            raise Difference(
                f"{by_role} exceeds the {self._limit} slots of the task, {self._window} of a role"
            )


class LimitedPlay:
    """Some tasks under concurrency limits."""

    def __init__(self, chance: random.Random, most_nodes: int) -> None:
        self._chance = chance
        self.counts: Counter[str] = Counter()
        self.history: list[str] = []
        """What the nodes did."""
        self.longest_leak_sec = 0.0
        made = [Task(f"t{n}", chance.choice([0, 0, 5])) for n in range(chance.randint(1, 4))]
        self._undisturbed = chance.random() < 0.3
        """Whether nothing is cancelled or continued, so that no slot leaks and no check for leaks is needed."""
        self._tasks = [
            LimitedTask(chance, task, self._note, most_nodes, undisturbed=self._undisturbed) for task in made
        ]
        self._world = World(made, set(ROLES))
        self._world.lag = lambda: chance.randint(0, 12)
        self._total = chance.choice([None, 1, 2, 5])
        self._by_role = {role: chance.choice([1, 1, 2, 4]) for role in ROLES if chance.random() < 0.7}

    def _note(self, kind: str, what: object) -> None:
        self.counts[kind] += 1
        self.history.append(f"{self._world.now:g} {kind} {what}")

    async def run(self) -> None:
        """Play until all tasks have ended and all slots are free."""
        config = CoordinatorConfig(max_global_running=self._total, max_type_concurrency=self._by_role)
        with self._world.installed():
            engines = [self._world.engine(config) for _ in range(2)]
            temporal = Temporal(self._chance, self._world, engines)
            store = await engines[0].grants.store()
            with temporal.installed():
                running = [asyncio.create_task(task.run()) for task in self._tasks]
                try:
                    await self._tick_until_ended(store, engines, running)
                finally:
                    await cancel_all([*running, *temporal.running])
            await self._tick_until_free(store, engines)

    async def _tick_until_ended(
        self, store: SlotStore, engines: list[Engine], running: list[asyncio.Task[None]]
    ) -> None:
        for _ in range(_MOST_TICKS):
            if all(each.done() for each in running):
                await asyncio.gather(*running)
                return
            await self._tick(self._chance.choice(engines))
            await self._compare(store)
        raise Difference(f"tasks that do not end: {[task.task for task in self._tasks if not task.ended]}")

    async def _tick(self, engine: Engine) -> None:
        self._world.now += _TICK_SEC
        await pause(self._chance.randint(0, 8))
        await (engine.grants.grant_waiting() if self._undisturbed else engine.loop._once())

    async def _compare(self, store: SlotStore) -> None:
        holders = {Attempt(*holder.key, holder.role) for holder in await store.holders()}
        in_flight = {attempt for task in self._tasks for attempt in task.task.in_flight}
        if without := in_flight - holders:
            raise Difference(f"attempts without a slot: {without}")
        by_role = Counter(attempt.role for attempt in holders)
        if any(by_role[role] > limit for role, limit in self._by_role.items()):
            raise Difference(f"{by_role} exceeds {self._by_role}")
        if self._total is not None and len(holders) > self._total:
            raise Difference(f"{len(holders)} attempts exceed {self._total}")

    async def _tick_until_free(self, store: SlotStore, engines: list[Engine]) -> None:
        ended_at = self._world.now
        while await store.is_used():
            self.counts["leaked slot"] += len(await store.holders())
            self.longest_leak_sec = self._world.now - ended_at
            if self.longest_leak_sec > LEAK_SEC:
                raise Difference(f"leaked: {await store.holders()}, {await store.waiting()}")
            for engine in engines:
                await self._tick(engine)


async def cancel_all(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
