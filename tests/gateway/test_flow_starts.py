"""Which run of a flow `flow.start` starts: that of a start that was interrupted, or the next one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from flowkit.attempt.workflows import ABSENT
from flowkit.gateway import models
from flowkit.gateway.service import Gateway
from flowkit.gateway.store import FLOWS, JOBS, FlowStore, key
from flowkit.server.auth import Caller
from flowkit.server.rpc import Call
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

CONTEXT, CALLER, FLOW = 3, 11, 40
OWN = models.InContext(context_id=CONTEXT, id=FLOW)
OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))


class Tasks:
    """A client of a deployment that has no workflows, which notes the tasks that it starts."""

    def __init__(self) -> None:
        self.started: list[str] = []

    async def deployment(self) -> str:
        """Return the id of the deployment."""
        return "1f2e3d4c5b"

    async def look_up(self, task_id: str) -> Any:
        """Return what Temporal says about a workflow."""
        return ABSENT

    async def start_task(self, task_id: str, **given: Any) -> bool:
        """Note a task."""
        self.started.append(task_id)
        return True


async def put_flow(store: FlowStore, started_at: float, *, is_starting: bool = True) -> None:
    """Store a flow whose first run has no task any more, or does not have one yet."""
    job = models.JobData(id=1, caller_id=CALLER, context_id=CONTEXT, script="result 1", executor="echo")
    await store.put(JOBS, key(CONTEXT, CALLER, 1), job.model_dump(), 0.0)
    given = models.FlowData(id=FLOW, caller_id=CALLER, context_id=CONTEXT, jobs=[1])
    nodes = [models.FlowNode(id=1).model_dump()]
    run = {
        "run": 1,
        "run_seq": 1,
        "version": 1,
        "task_id": f"flow:1f2e3d4c:{CONTEXT}:{FLOW}/1",
        "started_at": started_at,
        "is_starting": is_starting,
    }
    await store.put(FLOWS, key(CONTEXT, FLOW), {**given.model_dump(), "nodes": nodes, **run}, 0.0)


async def gateway(store: FlowStore, tasks: Tasks) -> Gateway:
    """Return a gateway with the context of the flow."""
    client: Any = tasks
    nothing: Any = None
    made = Gateway(store, client, nothing, nothing)
    await made.context_create(OPERATOR, models.ContextCreate(context=models.ContextData(id=CONTEXT)))
    return made


def run(number: int) -> str:
    """Return the id of a run of the flow."""
    return f"flow:1f2e3d4c:{CONTEXT}:{FLOW}/{number}"


@pytest.mark.parametrize(
    ("age", "is_starting", "number"),
    [(5, True, 1), (5, False, 2), (86_400, True, 2)],
    ids=["interrupted", "purged at once", "long ago"],
)
async def test_only_a_start_that_is_not_finished_keeps_its_number(
    age: float, is_starting: bool, number: int
) -> None:
    store, tasks = FlowStore(memory_database()), Tasks()
    await put_flow(store, time.time() - age, is_starting=is_starting)
    begun = await (await gateway(store, tasks)).flow_start(OPERATOR, OWN)
    assert begun.started
    assert tasks.started == [begun.run_id] == [run(number)]


async def test_a_run_that_was_purged_within_a_minute_does_not_start_again() -> None:
    store, tasks = FlowStore(memory_database()), Tasks()
    await put_flow(store, time.time())
    made = await gateway(store, tasks)
    assert [(await made.flow_start(OPERATOR, OWN)).run_id for _ in range(2)] == [run(1), run(2)]
