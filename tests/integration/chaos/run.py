"""One run: tasks are started as long as it takes, things die meanwhile, and in the end everything is compared."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from tests.integration.chaos.faults import faults
from tests.integration.chaos.histories import replay_problems
from tests.integration.chaos.plans import task_plan
from tests.integration.chaos.verify import Comparison, left
from tests.integration.chaos.world import every, in_a_while, patiently, until
from tests.integration.world import eventually

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHandle

    from tests.integration.chaos.plans import TaskPlan
    from tests.integration.chaos.verify import Left
    from tests.integration.chaos.world import Ground

MOST_OPEN = 14
"""Tasks at once."""
CALM_SEC = 240.0
"""How long the last tasks may take once nothing dies any more."""
_ROWS = ("metrics_raw", "artifacts")


@dataclass(kw_only=True)
class Figures:
    """What a run was about."""

    seed: int
    tasks: int = 0
    nodes: int = 0
    batches: int = 0
    increments: int = 0
    attempts: int = 0
    interrupted: int = 0
    """Attempts beyond those that were planned."""
    histories: int = 0
    worn_out: int = 0
    """Tasks of which nothing can be told, because a node has lost more executors than it may."""
    statuses: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        given_up = f", {self.worn_out} of which lost too many executors" if self.worn_out else ""
        seconds = ", ".join(f"{seconds:.0f} s {what}" for what, seconds in self.seconds.items())
        return (
            f"seed {self.seed}: {self.tasks} tasks{given_up} ({listed(self.statuses)}), {self.nodes} nodes, "
            f"{self.attempts} attempts ({self.interrupted} again after a fault), {self.batches} batches, {self.increments} increments; "
            f"{self.blows.total()} faults ({listed(self.blows)}); {self.histories} histories replayed; {seconds}"
        )


def listed(counts: Counter[str]) -> str:
    """Counts for people, the largest first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


class Run:
    """One run on a ground of its own."""

    def __init__(self, ground: Ground, seed: int) -> None:
        self.ground = ground
        self.world = ground.world
        self.figures = Figures(seed=seed, blows=ground.blows)
        self.plans: dict[str, TaskPlan] = {}
        self.problems: list[str] = []
        self._client: Client | None = None
        self._open: set[str] = set()
        self._epochs: dict[tuple[str, Any], int] = {}
        self._cancels: list[asyncio.Task[None]] = []

    async def rage(self, seconds: float) -> None:
        """Start tasks and let things die for so long, then wait until all tasks have ended."""
        begun = time.monotonic()
        keeping = asyncio.create_task(self.ground.keep())
        watching = [asyncio.create_task(every(1.0, self._watch)), asyncio.create_task(every(0.3, self._look))]
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._strike(begun + seconds))
                both.create_task(self._start_tasks(begun + seconds))
            await self.ground.calm()
            self.figures.seconds["under faults"] = time.monotonic() - begun
            await self._until_ended()
        finally:
            for each in (keeping, *watching, *self._cancels):
                each.cancel()
            ends = await asyncio.gather(keeping, *watching, *self._cancels, return_exceptions=True)
        self.figures.seconds["until all had ended"] = time.monotonic() - begun
        self.problems += [f"a watcher broke: {end!r}" for end in ends if isinstance(end, Exception)]

    async def _strike(self, end: float) -> None:
        for fault in faults(self.figures.seed):
            if time.monotonic() + fault.pause > end:
                return
            await self.ground.strike(fault)

    async def _start_tasks(self, end: float) -> None:
        number = 0
        while await until(end, lambda: len(self._open) < MOST_OPEN):
            await self._start(task_plan(self.figures.seed, number))
            number += 1

    async def _start(self, plan: TaskPlan) -> None:
        async def create() -> None:
            """A failed task would run again under its id: look whether a call whose answer was lost has started it."""
            if not await self._is_there(plan.task_id):
                await self.world.coordinator.create_task(
                    params={}, graph=plan.as_graph(), task_id=plan.task_id
                )

        self.plans[plan.task_id] = plan
        await patiently(create)
        self._open.add(plan.task_id)
        if plan.cancel_after is not None:
            cancel = in_a_while(plan.cancel_after, lambda: self._cancel(plan.task_id))
            self._cancels.append(asyncio.create_task(cancel))

    async def _is_there(self, task_id: str) -> bool:
        try:
            await (await self._handle(task_id)).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    async def _handle(self, task_id: str) -> WorkflowHandle[Any, Any]:
        if self._client is None:
            self._client = await patiently(self.world.client)
        return self._client.get_workflow_handle(task_id)

    async def _cancel(self, task_id: str) -> None:
        await patiently(lambda: self.world.coordinator.cancel_task(task_id, reason="enough"))

    async def _look(self) -> None:
        """Which tasks have ended."""
        with suppress(RPCError):
            for task_id in sorted(self._open):
                if (
                    await (await self._handle(task_id)).describe()
                ).status is not WorkflowExecutionStatus.RUNNING:
                    self._open.discard(task_id)

    async def _watch(self) -> None:
        """No row ever goes back to an older epoch."""
        with suppress(PyMongoError):
            for name in _ROWS:
                rows = self.world.db[name].find({}, {"attempt_epoch": 1, "node_id": 1, "batch_uid": 1})
                async for row in rows:
                    key, epoch = (name, row["_id"]), row["attempt_epoch"]
                    if epoch < self._epochs.get(key, 0):
                        self.problems.append(f"{name} of {row}: was at epoch {self._epochs[key]} before")
                    self._epochs[key] = epoch

    async def _until_ended(self) -> None:
        async def ended() -> bool:
            return not self._open

        try:
            await eventually(ended, ceiling=CALM_SEC)
        except AssertionError:
            self.problems.append(f"these tasks do not end: {sorted(self._open)}")

    async def compare(self) -> None:
        """Compare what is left of all tasks with the model, and replay their histories."""
        begun = time.monotonic()
        for task_id, plan in self.plans.items():
            self._compare(plan, await left(self.world.db, task_id))
        ids = await self.world.db.tasks.distinct("id")
        if unknown := set(ids) - self.plans.keys():
            self.problems.append(f"documents of no task: {unknown}")
        client = await self.world.client()
        self.figures.histories, found = await replay_problems(client, sorted(self.plans))
        self.problems += found
        self.figures.seconds["to compare"] = time.monotonic() - begun

    def _compare(self, plan: TaskPlan, found: Left) -> None:
        comparison, figures = Comparison(plan, found), self.figures
        figures.tasks += 1
        figures.nodes += len(plan.nodes)
        figures.statuses[comparison.status] += 1
        figures.batches += sum(row["status"] == "partial" for row in found.artifacts)
        figures.attempts += sum(entry["attempt_epoch"] for entry in comparison.entries.values())
        figures.interrupted += comparison.interrupted
        calls = [node for node in plan.nodes if node.call and node.call.fn == "vars.incr"]
        counted = [node for node in calls if "applied_generation" in comparison.entries.get(node.node_id, {})]
        figures.increments += len(counted)
        if comparison.worn_out:
            figures.worn_out += 1
        else:
            self.problems += comparison.problems()
