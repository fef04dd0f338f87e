"""Jobs that are added to a flow: repeated calls, and runs that apply the change late or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from flowkit.errors import ActionRejected, ActionUnanswered, RejectionCause, UnknownTask
from flowkit.gateway import models
from flowkit.gateway.service import Gateway, methods
from flowkit.gateway.store import CONTEXTS, FLOWS, JOBS, FlowStore, key
from flowkit.server.auth import Caller
from flowkit.server.rpc import AlreadyExists, Call, InvalidTransition, StorageError
from flowkit.server.tokens import Right
from flowkit.testing import memory_database
from tests.integration.harness import EVENT_TIMEOUT_SEC

CONTEXT, CALLER, FLOW = 3, 11, 40
TASK = f"flow:1f2e3d4c:{CONTEXT}:{FLOW}/1"
OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))
LATE = ActionUnanswered(TASK, "change_graph", 30.0)
BUSY = ActionRejected("another change is in progress", RejectionCause.BUSY)
TAKEN = ActionRejected("the task has the node '2' already", RejectionCause.TAKEN)
ENDED = ActionRejected("the task has ended", RejectionCause.ENDED)


class World:
    """A flow of job 1 that runs, and a task client whose actions fail with the given errors first."""

    def __init__(self) -> None:
        self.database = memory_database()
        self.store = FlowStore(self.database)
        self.errors: list[Exception] = []
        self.added: list[list[str]] = []
        client: Any = self
        nothing: Any = None
        self.methods = {each.name: each for each in methods(Gateway(self.store, client, nothing, nothing))}

    @property
    def steering(self) -> Any:
        """What applies actions: this stand-in."""
        return self

    async def act(self, task_id: str, name: str, given: Any, *, wait_sec: float) -> None:
        """Note the nodes of a change, or fail."""
        self.added.append([node["node_id"] for node in given["nodes"]])
        if self.errors:
            raise self.errors.pop(0)

    async def rerun(self, task_id: str, *given: Any, **more: Any) -> None:
        """Find no task."""
        raise UnknownTask(task_id)

    async def prepare(self) -> None:
        """Store the flow, its jobs and the document of its run."""
        await self.store.put(CONTEXTS, CONTEXT, {"id": CONTEXT}, 0.0)
        for id in (1, 2, 3):
            job = models.JobData(id=id, caller_id=CALLER, context_id=CONTEXT, script="x", executor="echo")
            await self.store.put(JOBS, key(CONTEXT, CALLER, id), job.model_dump(), 0.0)
        given = models.FlowData(id=FLOW, caller_id=CALLER, context_id=CONTEXT, jobs=[1])
        run = {"run": 1, "run_seq": 1, "version": 1, "task_id": TASK, "started_at": 0}
        nodes = [models.FlowNode(id=1).model_dump(exclude={"node_status"})]
        await self.store.put(FLOWS, key(CONTEXT, FLOW), {**given.model_dump(), "nodes": nodes, **run}, 0.0)
        await self.write_run("running", "1")

    async def write_run(self, status: str, *nodes: str) -> None:
        """Write the document of the run with these nodes."""
        graph = {"nodes": [{"node_id": each, "status": "queued"} for each in nodes]}
        own = {"id": TASK, "status": status, "run_seq": 1, "finished_at": None, "graph": graph}
        await self.database.tasks.delete_many({"id": TASK})
        await self.database.tasks.insert_one(own)

    async def add(self, *nodes: dict[str, Any]) -> list[int]:
        """Call `flow.add_nodes`, and return the jobs of the flow."""
        params = models.FlowAdd(
            context_id=CONTEXT, id=FLOW, nodes=[models.FlowNode(**node) for node in nodes]
        )
        await self.methods["flow.add_nodes"].call(OPERATOR, params)
        return await self.jobs()

    async def jobs(self) -> list[int]:
        """Return the jobs of the flow."""
        flow = await self.store.load(FLOWS, key(CONTEXT, FLOW))
        assert flow is not None
        assert [node["id"] for node in flow["nodes"]] == flow["jobs"]
        return list(flow["jobs"])


@pytest.fixture
async def world() -> World:
    """A flow that runs."""
    made = World()
    await made.prepare()
    return made


async def test_a_call_that_no_engine_has_applied_can_be_repeated(world: World) -> None:
    world.errors = [LATE]
    with pytest.raises(StorageError, match="may be applied later.*can be repeated"):
        await world.add({"id": 2, "depends": [1]})
    assert await world.add({"id": 2, "depends": [1]}) == [1, 2]
    assert world.added == [["2"], ["2"]]


@pytest.mark.parametrize("errors", [[TAKEN], [BUSY, TAKEN]], ids=["taken", "busy"])
async def test_a_repeated_call_succeeds_while_or_after_the_run_applies_the_first_one(
    world: World, errors: list[Exception]
) -> None:
    world.errors = [LATE, *errors]
    with pytest.raises(StorageError):
        await world.add({"id": 2})
    assert await world.add({"id": 2}) == [1, 2]
    assert world.errors == []


async def test_a_repeated_call_changes_nothing_if_the_run_has_the_nodes(world: World) -> None:
    await world.add({"id": 2}, {"id": 3})
    for status in ("running", "failed"):
        await world.write_run(status, "1", "2", "3")
        assert await world.add({"id": 3}, {"id": 2}) == [1, 2, 3]
    assert len(world.added) == 1


async def test_a_run_that_ended_before_the_change_does_not_have_the_nodes(world: World) -> None:
    world.errors = [LATE, ENDED]
    with pytest.raises(StorageError):
        await world.add({"id": 2})
    with pytest.raises(InvalidTransition, match="the task has ended"):
        await world.add({"id": 2})
    assert await world.jobs() == [1]


async def test_other_content_is_rejected_with_what_differs(world: World) -> None:
    await world.add({"id": 2, "prerequisites": ["go"]})
    with pytest.raises(AlreadyExists, match="job 2 differs in depends, prerequisites") as caught:
        await world.add({"id": 2, "depends": [1]})
    assert caught.value.data == {"nodes": [2], "differ": {2: ["depends", "prerequisites"]}}
    with pytest.raises(AlreadyExists, match=r"has the jobs \[2\] already; leave them out"):
        await world.add({"id": 2, "prerequisites": ["go"]}, {"id": 3})
    assert await world.jobs() == [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        RPCError("Timeout expired", RPCStatusCode.DEADLINE_EXCEEDED, b""),
        RPCError("no route", RPCStatusCode.UNAVAILABLE, b""),
        WorkflowUpdateRPCTimeoutOrCancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_the_sdk_says_that_the_change_may_be_applied(
    world: World, error: Exception
) -> None:
    world.errors = [error]
    with pytest.raises(StorageError, match="Temporal does not respond .*may be applied later"):
        await world.add({"id": 2})


async def test_a_retry_of_a_run_that_was_deleted_says_how_to_start(world: World) -> None:
    params = models.FlowRetry(context_id=CONTEXT, id=FLOW)
    with pytest.raises(InvalidTransition, match="start the flow with flow.start"):
        await asyncio.wait_for(world.methods["flow.retry"].call(OPERATOR, params), EVENT_TIMEOUT_SEC)
