"""Handlers of jobs that are killed, replaced while they still run, and report late: a job only moves along the arrows.

Random plays on one flow with one job. An attempt that is lost continues in the background, or ends at any
point, while the next one continues its dispatch. A supervisor reports states in any order, and repeatedly.
"""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.gateway.delivery import JobOutcome, JobState
from flowkit.gateway.events import FlowEvents
from flowkit.gateway.flows import read_latest
from flowkit.gateway.jobs import JobHandler
from flowkit.gateway.models import FlowNode, FlowStatus, JobData, NodeStatus
from flowkit.gateway.secret_box import SecretBox
from flowkit.gateway.status import (
    EDGES,
    JobDispatch,
    JobEvent,
    JobNode,
    advance,
    flow_status,
    node_states,
    path,
)
from flowkit.gateway.store import FLOWS, JOBS, FlowStore, key
from flowkit.gateway.transports import Unreachable
from flowkit.testing import memory_database
from flowkit.worker import Batch
from tests.unit.event_loop import let_other_tasks_run

if TYPE_CHECKING:
    from collections.abc import Awaitable

RUN = "flow:1f2e3d4c:3:40/1"
BATCH = Batch(
    batch_uid="result", payload={"context_id": 3, "caller_id": 11, "flow_id": 40, "run": 1, "job_id": 1}
)


class Play:
    """A flow, its engine and its supervisor, which take random turns."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.db: Any = memory_database()
        self.store = FlowStore(self.db)
        supervisors: Any = self
        self.handler = JobHandler(self.store, supervisors, SecretBox())
        self.events = FlowEvents(self.store)
        self.outcomes: dict[str, bool] = {}
        """Whether each job has succeeded at its supervisor, which honours ids."""
        self.node: dict[str, Any] = {"node_id": "1", "status": "queued", "generation": 0, "attempt_epoch": 0}
        self.run_seq, self.failures = 1, 0
        self.seen: list[tuple[str | None, FlowStatus, JobNode]] = []
        """What was seen of the flow: its run, its status, and the state of its node."""
        self.results = set[int]()
        """The generations that have stored a result."""
        self.zombies: list[asyncio.Task[Any]] = []

    async def create(self) -> None:
        """Create the flow, and start it."""
        nodes = [FlowNode(id=1, supervisor_url="http://a").model_dump()]
        flow = {"context_id": 3, "caller_id": 11, "id": 40, "nodes": nodes, "env_vars": {}}
        run = {"run": 1, "run_seq": 1, "task_id": RUN, "version": 1, "last_event": 0}
        await self.store.put(FLOWS, "3:40", {**flow, **run}, 0.0)
        job = JobData(id=1, caller_id=11, context_id=3, executor="echo", script="x")
        await self.store.put(JOBS, key(3, 11, 1), {**job.model_dump(), "flow_id": 40}, 0.0)
        await self.write("running")

    # --- the supervisor

    async def run(self, to: Any, job: Any, *given: Any, on_state: Any, **options: Any) -> JobOutcome:
        """Report random states, and the outcome of a job, unless the connection is lost."""
        for _ in range(self.chance.randint(0, 4)):
            await self.turn()
            await on_state(self.chance.choice([*JobState]))
        await self.turn()
        if self.chance.random() < 0.3:
            raise Unreachable("the connection is lost")
        success = self.outcomes.setdefault(job.id, self.chance.random() < 0.6)
        return JobOutcome(success=success, text="text")

    async def turn(self) -> None:
        """Let others go on for a while."""
        for _ in range(self.chance.randint(0, 12)):
            await let_other_tasks_run()

    # --- the engine

    async def write(self, run: str, **node: Any) -> None:
        """Write the state of the run and its node, as an engine does, and look at the flow."""
        self.node |= node
        finished_at = None if run == "running" else datetime.now(UTC)
        own = {"status": run, "run_seq": self.run_seq, "finished_at": finished_at}
        fields = {**own, "graph.nodes": [{**self.node}]}
        await self.db.tasks.update_one({"id": RUN}, {"$set": fields}, upsert=True)
        await self.look()

    def context(self) -> Any:
        """Return the context of the next attempt."""
        return SimpleNamespace(
            task_id=RUN,
            node_id="1",
            generation=self.node["generation"],
            failures=self.failures,
            attempt_epoch=self.node["attempt_epoch"],
            kv={},
            cancelled=lambda: False,
            cancellable=_await,
        )

    async def attempt(self, context: Any, *, has_result: bool) -> bool:
        """Run an attempt. Return whether the job has succeeded."""
        if not has_result:
            result = await self.handler.process_batch(BATCH, context)
            if not result.success:
                return False
            if context.attempt_epoch != self.node["attempt_epoch"]:  # the store fences its result
                return False
            self.results.add(context.generation)
            await self.turn()
        await self.handler.finalize(context)
        return True

    async def generation(self) -> str:
        """Run attempts until the node has ended, and return how."""
        self.failures = 0
        while self.failures <= 2:
            epoch = self.node["attempt_epoch"] + 1
            await self.write("running", status="running", attempt_epoch=epoch, failures=self.failures)
            has_result = self.node["generation"] in self.results
            work = asyncio.create_task(self.attempt(self.context(), has_result=has_result))
            drawn = self.chance.random()
            if drawn < 0.45:
                await self.leave(work)
                if drawn < 0.05 and self.seen[-1][2].status is not NodeStatus.COMPLETED:
                    return "cancelled"
            elif await self.watch(work):
                if self.chance.random() < 0.8:
                    return "finished"
                await self.write(
                    "running", status="finished"
                )  # and its worker is lost before the engine knows
            else:
                self.failures += 1
                await self.write("running", status="deferred")
        return "failed"

    async def leave(self, work: asyncio.Task[bool]) -> None:
        """Lose an attempt at some point: it is killed, or continues, although nobody knows."""
        for _ in range(self.chance.randint(0, 12)):
            await let_other_tasks_run()
        if self.chance.random() < 0.5:
            work.cancel()
        self.zombies.append(work)
        await self.look()

    async def watch(self, work: asyncio.Task[bool]) -> bool:
        """Look at the flow until an attempt has ended, and return whether the job has succeeded."""
        while not work.done():
            await let_other_tasks_run()
            if self.chance.random() < 0.3:
                await self.look()
        return work.result()

    async def play(self) -> None:
        """Run the flow, and retry it once."""
        await self.create()
        await self.end(await self.generation())
        flow = await self.store.load(FLOWS, "3:40") or {}
        again = {"run_seq": 2, "renewed": [[1, self.node["generation"] + 1]]}
        await self.store.change_flow(flow, again, 0.0)
        await self.look()
        self.run_seq = 2
        await self.write("running")
        again = self.node["generation"] + 1
        await self.write("running", status="queued", generation=again, failures=0)
        await self.end(await self.generation())
        await asyncio.gather(*self.zombies, return_exceptions=True)
        await self.look()

    async def end(self, how: str) -> None:
        """End the run."""
        await self.write("running", status=how)
        await self.write(how)

    # --- what is seen

    async def look(self) -> None:
        """Look at the flow as `flow.status` does, and sometimes as a subscriber does."""
        flow = await self.store.load(FLOWS, "3:40") or {}
        latest = await read_latest(self.store, flow, lambda nodes: [1])
        assert latest is not None
        assert latest.run is not None
        state = node_states(latest.nodes, latest.run)[1]
        self.seen.append((latest.id, flow_status(latest.run), state))
        if state.status is NodeStatus.COMPLETED:
            assert state.retry == self.failures
        if self.chance.random() < 0.3 or latest.run.status.closed:
            await self.events.observe(flow)

    async def problems(self) -> list[str]:
        """Return what was seen beside the arrows."""
        found = [
            f"{before} became {after}"
            for before, after in pairwise(self.seen)
            if before[0] == after[0] and not _may_become(before[2], after[2])
        ]
        rows = await self.store.events("3:40", 0, 1_000)
        if [row["seq"] for row in rows] != [*range(1, len(rows) + 1)]:
            found.append(f"the numbers of the events are {[row['seq'] for row in rows]}")
        at: dict[int, NodeStatus] = {}
        for row in rows:
            if row["node"] is None:
                continue
            before, to = NodeStatus(row["from_"]), NodeStatus(row["to"])
            if before is not at.get(row["generation"], NodeStatus.PENDING) or to not in EDGES[before]:
                found.append(f"the event {row} follows {at}")
            at[row["generation"]] = to
        own = [(row["run_id"], row["to"]) for row in rows if row["node"] is None]
        ends = [(run, status) for run, status, _ in self.seen if status is not FlowStatus.STARTED]
        wanted = [each for end in dict.fromkeys(ends) for each in ((end[0], FlowStatus.STARTED), end)]
        if own != wanted:
            found.append(f"the events of the flow are {own}, but must be {wanted}")
        if at.get(self.node["generation"]) is not self.seen[-1][2].status:
            found.append(f"the events end with {at}, but the node is {self.seen[-1][2]}")
        return found


def _may_become(before: JobNode, after: JobNode) -> bool:
    """Return whether the arrows lead from one state to another of the same run.

    Only another retry follows a failure, and another attempt: what it shows is none of the attempt before.
    """
    way = path(before.status, after.status)
    is_next = before.retry < after.retry and (
        before.attempt < after.attempt or after.status is NodeStatus.CANCELLED
    )
    if not is_next and NodeStatus.FAILED in (before.status, *way[:-1]):
        way = []
    is_later = before.retry <= after.retry and before.attempt <= after.attempt
    return is_later and (bool(way) or before.status is after.status)


async def _await(work: Awaitable[Any]) -> Any:
    return await work


@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (40, 80))])
async def test_a_job_moves_along_the_arrows_whoever_reports_when(first: int) -> None:
    for seed in range(first, first + 40):
        play = Play(seed)
        await play.play()
        assert await play.problems() == [], f"seed {seed}"


# --- the rules --------------------------------------------------------------------------------------------------


def test_a_report_of_a_lost_attempt_comes_too_late() -> None:
    open_by_second = JobDispatch(generation=0, retry=0, epoch=2)
    assert [advance(open_by_second, event, 1) for event in JobEvent] == [None] * len(JobEvent)


def test_an_outcome_is_final() -> None:
    for first in (JobEvent.COMPLETED, JobEvent.FAILED, JobEvent.NO_OUTCOME):
        ended = advance(JobDispatch(generation=0, retry=0), first, 1)
        assert ended is not None
        assert [advance(ended, event, 2) for event in JobEvent] == [None] * len(JobEvent)


def test_a_state_never_goes_back() -> None:
    for state in (NodeStatus.READY, NodeStatus.DISPATCHED, NodeStatus.RUNNING):
        for event in JobEvent:
            after = advance(JobDispatch(generation=0, retry=0, state=state), event, 1)
            assert after is None or after.state is state or path(state, after.state)
