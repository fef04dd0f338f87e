"""Random tasks under random actions of operators, simulated without servers, compared with the model."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.chaos import typed
from tests.integration.chaos.flows import flow_of
from tests.integration.chaos.handlers import Planned, count, touching
from tests.integration.chaos.operated import NativeOperatedDrawing, with_policy
from tests.integration.chaos.operated_verify import OperatedComparison
from tests.integration.chaos.operators import ACTIONS_OF_A_RUN, Request, draw_request
from tests.integration.chaos.plans import JSON, ROLES, TOUCH
from tests.integration.chaos.tasks import drawn_task, growing, written
from tests.integration.chaos.verify import read_stored

from flowkit.errors import ActionRejected
from flowkit.testing import memory_database, simulate

if TYPE_CHECKING:
    from tests.integration.chaos.plans import TaskPlan

    from flowkit.testing.simulation.steering import SimulatedTask

SEED = int(os.environ.get("FLOWKIT_SEED") or 1)
TASKS = int(os.environ.get("FLOWKIT_CHAOS_TASKS") or 12)
GROWING_SHARE = 0.4


@dataclass
class Operator:
    """Sends random actions to a simulated task, then those that let it end."""

    plan: TaskPlan
    chance: random.Random
    requests: list[Request] = field(default_factory=list)

    async def __call__(self, task: SimulatedTask) -> None:
        """Act until the task has ended."""
        for _ in range(self.chance.randint(*ACTIONS_OF_A_RUN)):
            await task.advance(self.chance.uniform(0.0, 0.7))
            statuses = {each["node_id"]: each["status"] for each in task.status()["nodes"]}
            await self._send(task, draw_request(self.chance, self.plan, self._tag(), statuses))
        wanted = sorted({each for node in self.plan.nodes for each in node.prerequisites})
        while not self._has_ended(task):
            await task.advance(2.0)
            for name, given in (("resume", {}), *(("satisfy", {"prerequisite": each}) for each in wanted)):
                tag = self._tag()
                await self._send(task, Request(tag=tag, name=name, given={**given, "reason": tag}))

    def _tag(self) -> str:
        return f"{self.plan.task_id}/{len(self.requests)}"

    def _has_ended(self, task: SimulatedTask) -> bool:
        return bool(task.status()["status"] in {"finished", "failed", "cancelled"})

    async def _send(self, task: SimulatedTask, request: Request) -> None:
        self.requests.append(request)
        try:
            request.answers.append(await task.act(request.name, **request.given))
        except ActionRejected as error:
            request.refusals.append(str(error))


def plan_of(number: int) -> TaskPlan:
    """Return a task without external nodes, to which actions are sent. Some of them add nodes."""
    chance = random.Random(f"{SEED}-{number}-simulated")
    plan = with_policy(chance, drawn_task(SEED, number, NativeOperatedDrawing))
    return written(growing(plan, chance) if chance.random() < GROWING_SHARE else plan)


async def problems_of(plan: TaskPlan) -> list[str]:
    """Simulate a task under actions, and return its differences from the model."""
    db, operator = memory_database(), Operator(plan, random.Random(f"{plan.task_id}-actions"))
    handlers: list[Any] = [*(Planned(role, behaves=True) for role in ROLES), *typed.TYPED]
    functions = {TOUCH: touching(partial(count, db.touches), pace=0)}
    begun = plan.cut(plan.first) if plan.first else plan
    graph: Any = begun.as_graph() if plan.written == JSON else flow_of(begun)
    run = await simulate(graph, *handlers, functions=functions, db=db, script=operator)
    return OperatedComparison(plan, await read_stored(db, run.task_id), operator.requests).problems()


@pytest.mark.slow(10)
@pytest.mark.parametrize("number", range(TASKS))
async def test_simulated_tasks_end_as_the_actions_on_them_say(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed, "BEHAVES", True)
    assert await problems_of(plan_of(number)) == []
