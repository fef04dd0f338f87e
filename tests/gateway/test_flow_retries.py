"""What `flow.retry` starts, and what a flow shows of its runs before the engine has begun, and after a purge."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from flowkit.attempt.workflows import ABSENT, FoundWorkflow, WorkflowState
from flowkit.errors import ActionRejected, RejectionCause
from flowkit.gateway import models, service
from flowkit.gateway.flows import GRACE_SEC, dispatch_id
from flowkit.gateway.models import FlowStatus, NodeStatus
from flowkit.gateway.service import Gateway
from flowkit.gateway.store import FLOWS, JOBS, MESSAGES, FlowStore, key
from flowkit.server.auth import Caller
from flowkit.server.rpc import Call, InvalidTransition, RpcError, StorageError
from flowkit.server.tokens import Right
from flowkit.testing import memory_database

CONTEXT, CALLER, FLOW = 3, 11, 40
RUN = "flow:1f2e3d4c:3:40/1"
ENDED = datetime.now(UTC)
READY, FAILED = NodeStatus.READY, NodeStatus.FAILED
OPERATOR = Call(caller=Caller(actor=None, rights=frozenset({Right.OPERATOR})))
OWN = models.InContext(context_id=CONTEXT, id=FLOW)


class World:
    """A flow of two jobs whose run has ended, in a database. No engine runs."""

    def __init__(self) -> None:
        self.db: Any = memory_database()
        self.store = FlowStore(self.db)
        client: Any = self
        nothing: Any = None
        self.gateway = Gateway(self.store, client, nothing, nothing)
        self.workflow: Any = ABSENT
        self.limits: dict[str, Any] = {}
        self.meanwhile: dict[str, Any] = {}
        """What another call changes in the flow while the task starts again."""
        self.states = iter(("one",) * 9)
        """The states of the nodes, at each look at the task."""

    async def deployment(self) -> str:
        """Return the id of the deployment."""
        return "1f2e3d4c5b"

    async def look_up(self, task_id: str) -> Any:
        """Return what Temporal says about a workflow."""
        return self.workflow

    async def start_task(self, task_id: str, **given: Any) -> bool:
        """Start a task that no engine opens."""
        return True

    @property
    def steering(self) -> Any:
        """What applies actions: this stand-in."""
        return self

    async def rerun(
        self,
        task_id: str,
        nodes: Any,
        *,
        limits: Any,
        if_state: str | None = None,
        dry_run: bool = False,
        **given: Any,
    ) -> dict[str, Any]:
        """Note the limits, and start both nodes again."""
        state = next(self.states)
        if if_state not in (None, state):
            raise ActionRejected("outdated", RejectionCause.OUTDATED)
        if not dry_run:
            await self.start_again(limits)
        return {"run_seq": 2, "affected": [{"node_id": "1"}, {"node_id": "2"}], "state": state}

    async def start_again(self, limits: Any) -> None:
        """Note the limits."""
        self.limits = limits
        flow = await self.store.load(FLOWS, key(CONTEXT, FLOW))
        assert flow is not None
        if self.meanwhile:
            await self.store.change_flow(flow, self.meanwhile, 0.0)

    async def create(self) -> None:
        """Create the flow."""
        await self.gateway.context_create(
            OPERATOR, models.ContextCreate(context=models.ContextData(id=CONTEXT))
        )
        for id in (1, 2):
            await self.put_job(id)
        given = models.FlowData(id=FLOW, caller_id=CALLER, context_id=CONTEXT, jobs=[1, 2])
        nodes = [models.FlowNode(id=1).model_dump(), models.FlowNode(id=2, depends=[1]).model_dump()]
        run = {"run": 1, "run_seq": 1, "task_id": RUN, "started_at": 0, "is_starting": False}
        fields = {**given.model_dump(), "nodes": nodes, **run, "version": 1, "last_event": 0}
        await self.store.put(FLOWS, key(CONTEXT, FLOW), fields, 0.0)

    async def put_job(self, id: int, **given: Any) -> None:
        """Create a job, or replace it."""
        own = models.JobData(
            id=id, caller_id=CALLER, context_id=CONTEXT, script="x", executor="echo", **given
        )
        await self.store.put(JOBS, key(CONTEXT, CALLER, id), own.model_dump(), 0.0)

    async def put_task(self, status: str, first: str, second: str, run_seq: int = 1, **node: Any) -> None:
        """Store the document of the task."""
        entries = [
            {"node_id": "1", "status": first, **node},
            {"node_id": "2", "status": second, "skip_reason": "upstream_failed", **node},
        ]
        ended = None if status == "running" else ENDED
        own = {"id": RUN, "status": status, "run_seq": run_seq, "finished_at": ended}
        await self.db.tasks.delete_many({})
        await self.db.tasks.insert_one({**own, "graph": {"nodes": entries}})

    async def put_dispatch(self, generation: int, **fields: Any) -> str:
        """Store a dispatch of job 1, and return its id."""
        id = dispatch_id(RUN, "1", generation, 0)
        own = {"task_id": RUN, "job_id": 1, "generation": generation, "retry": 0, "outcome": None}
        made = {**own, "state": "Running", "status": "Dispatched", **fields}
        await self.store.open_dispatch(id, made, 1, {"open_until": 1e12}, 0.0)
        return id

    async def retry(self) -> models.Started:
        """Retry the flow."""
        return await self.gateway.flow_retry(OPERATOR, models.FlowRetry(context_id=CONTEXT, id=FLOW))

    async def statuses(self) -> tuple[str | None, FlowStatus, list[NodeStatus]]:
        """Return the run, the status of the flow and those of its nodes."""
        found = await self.gateway.flow_status(OPERATOR, OWN)
        return found.run_id, found.status, [node.node_status for node in found.nodes.values()]

    async def listed(self) -> tuple[str | None, FlowStatus]:
        """Return the run and the status of the flow in a list."""
        [found] = (await self.gateway.flow_list(OPERATOR, models.FlowPage(context_id=CONTEXT))).flows
        return found.run_id, found.status

    async def look(self) -> list[tuple[int, int | None, str]]:
        """Let the gateway look at the flow, and return all stored events, as number, node and status."""
        flow = await self.store.load(FLOWS, key(CONTEXT, FLOW))
        assert flow is not None
        await self.gateway.events.observe(flow)
        rows = await self.store.events(key(CONTEXT, FLOW), 0, 1_000)
        return [(row["seq"], row["node"], row["to"]) for row in rows]


@pytest.fixture
async def world() -> World:
    """A flow whose first job has failed, so that the second one was cancelled."""
    made = World()
    await made.create()
    await made.put_task("failed", "failed", "skipped")
    return made


async def test_a_retry_has_the_limits_of_a_job_that_was_replaced(world: World) -> None:
    await world.put_job(1, timeout=7.0, retries=3)
    assert (await world.retry()).run_id == f"{RUN}.2"
    limits = world.limits["1"]
    assert (limits["timeout_sec"], limits["retry_policy"]["max"]) == (7.0 + GRACE_SEC, 3)


async def test_a_retry_of_a_run_that_has_run_again_meanwhile_looks_again(world: World) -> None:
    """What it notes of the new run comes from the run that it continues."""
    world.states = iter(("one", "two", "two", "two"))
    assert (await world.retry()).run_id == f"{RUN}.2"
    assert [*world.states] == []


async def test_a_retry_ends_dispatches_for_whose_supervisors_no_attempt_waits(world: World) -> None:
    id = await world.put_dispatch(0)
    await world.retry()
    found = await world.store.load(MESSAGES, id) or {}
    assert (found["outcome"], found["status"], found["open_until"]) == ("abandoned", "Error", None)


async def test_a_look_at_an_ended_run_leaves_the_dispatch_of_the_next_one(world: World) -> None:
    id = await world.put_dispatch(1)
    await world.look()
    assert (await world.store.load(MESSAGES, id) or {})["outcome"] is None


async def test_a_new_run_never_shows_the_ends_of_the_run_before(world: World) -> None:
    await world.retry()
    again = (f"{RUN}.2", FlowStatus.STARTED, [NodeStatus.READY, NodeStatus.PENDING])
    assert await world.statuses() == again
    assert await world.listed() == again[:2]
    await world.put_task("running", "failed", "skipped", 2)
    assert await world.statuses() == again
    await world.put_task("running", "running", "queued", 2, generation=1)
    assert await world.statuses() == again
    await world.put_task("failed", "failed", "skipped", 2, generation=1)
    ends = [NodeStatus.FAILED, NodeStatus.CANCELLED]
    assert await world.statuses() == (f"{RUN}.2", FlowStatus.ERROR, ends)
    assert await world.listed() == (f"{RUN}.2", FlowStatus.ERROR)


async def test_a_job_has_failed_for_good_only_when_no_retry_follows(world: World) -> None:
    await world.put_dispatch(0, outcome="failed")
    late = {"last_error": "late", "next_retry_at_ms": 5_000}
    moments: list[tuple[dict[str, Any], tuple[object, ...]]] = [
        ({"first": "running", "attempt_epoch": 1}, (FAILED, None, None, None)),
        ({"first": "deferred", "attempt_epoch": 1, **late}, (FAILED, None, "late", 5)),
        (
            {"first": "running", "attempt_epoch": 2, "failures": 1, "last_error": "late"},
            (READY, None, None, None),
        ),
        (
            {"first": "failed", "attempt_epoch": 2, "failures": 1, "last_error": "late"},
            (FAILED, 1, "late", None),
        ),
    ]
    for node, wanted in moments:
        await world.put_task("running", second="queued", **node)
        found = await world.gateway.flow_status(OPERATOR, OWN)
        shown = found.nodes["1"]
        assert (shown.node_status, found.failed_job, shown.error, shown.retry_at) == wanted
        assert (await world.gateway.flow_dag(OPERATOR, OWN)).failed_job == found.failed_job


async def test_a_retry_changes_no_later_run_that_has_begun_meanwhile(world: World) -> None:
    world.meanwhile = {"task_id": "flow:1f2e3d4c:3:40/2", "run": 2, "run_seq": 1}
    assert (await world.retry()).run_id == f"{RUN}.2"
    flow = await world.store.load(FLOWS, key(CONTEXT, FLOW)) or {}
    assert (flow["run_seq"], flow.get("renewed")) == (1, None)


async def test_a_flow_that_was_started_is_so_before_an_engine_opens_its_run(world: World) -> None:
    run = (await world.gateway.flow_start(OPERATOR, OWN)).run_id
    assert await world.listed() == (None, FlowStatus.CREATED)
    world.workflow = FoundWorkflow(state=WorkflowState.OPEN)
    assert await world.statuses() == (run, FlowStatus.STARTED, [NodeStatus.READY, NodeStatus.PENDING])
    assert await world.listed() == (run, FlowStatus.STARTED)


async def test_the_numbers_of_events_continue_after_a_purge(world: World) -> None:
    before = await world.look()
    assert [seq for seq, _, _ in before] == [*range(1, len(before) + 1)]
    for name in ("tasks", "flow_events", "flow_messages"):
        await world.db[name].delete_many({})
    assert await world.look() == []
    started = await world.gateway.flow_start(OPERATOR, OWN)
    await world.db.tasks.insert_one(
        {
            "id": started.run_id,
            "status": "running",
            "run_seq": 1,
            "finished_at": None,
            "graph": {"nodes": []},
        }
    )
    assert (await world.look())[0] == (len(before) + 1, None, "Started")


async def test_no_other_call_starts_or_replaces_a_flow_while_a_retry_starts_its_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_BUSY_SEC", 0.0)
    refused: list[type[RpcError]] = []
    start_again, flow = (
        world.start_again,
        models.FlowData(id=FLOW, caller_id=CALLER, context_id=CONTEXT, jobs=[1]),
    )

    async def start_beside_others(limits: Any) -> None:
        others = [
            world.gateway.flow_start(OPERATOR, OWN),
            world.gateway.flow_create(OPERATOR, models.FlowCreate(context_id=CONTEXT, flow=flow)),
            world.retry(),
        ]
        for each in others:
            with pytest.raises(RpcError) as caught:
                await each
            refused.append(caught.type)
        await start_again(limits)

    monkeypatch.setattr(world, "start_again", start_beside_others)
    assert (await world.retry()).run_id == f"{RUN}.2"
    assert refused == [StorageError, InvalidTransition, StorageError]


async def test_a_retry_that_is_rejected_leaves_the_flow_to_the_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def reject(limits: Any) -> None:
        raise ActionRejected("nothing would start")

    monkeypatch.setattr(world, "start_again", reject)
    with pytest.raises(InvalidTransition):
        await world.retry()
    assert (await world.gateway.flow_start(OPERATOR, OWN)).run_id == "flow:1f2e3d4c:3:40/2"


async def interrupted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry the flow, and interrupt the call when the run has started."""

    async def interrupt(limits: Any) -> None:
        world.workflow = FoundWorkflow(state=WorkflowState.OPEN)
        raise asyncio.CancelledError

    monkeypatch.setattr(world, "start_again", interrupt)
    with pytest.raises(asyncio.CancelledError):
        await world.retry()


async def test_the_run_of_a_retry_that_was_interrupted_never_shows_the_ends_of_the_run_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = await world.statuses()
    await interrupted(world, monkeypatch)
    assert await world.statuses() == ended
    await world.put_task("running", "failed", "skipped", 2)
    begun = (f"{RUN}.2", FlowStatus.STARTED, [NodeStatus.READY, NodeStatus.PENDING])
    assert await world.statuses() == begun
    await world.put_task("failed", "failed", "skipped", 2)  # another rerun has started other nodes
    assert await world.statuses() == (f"{RUN}.2", *ended[1:])


async def test_a_retry_that_was_interrupted_after_it_had_started_the_run_counts_as_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:

    await interrupted(world, monkeypatch)
    begun = await world.gateway.flow_start(OPERATOR, OWN)
    assert (begun.started, begun.run_id) == (False, RUN)
