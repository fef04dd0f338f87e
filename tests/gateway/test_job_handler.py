"""Which nodes the handler of jobs accepts, what it reads again for each job, and what it remembers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.errors import StoreUnavailable
from flowkit.gateway.delivery import JobOutcome, WireJob, describe_late
from flowkit.gateway.jobs import JobHandler
from flowkit.gateway.models import FlowNode, JobData, RunnerData
from flowkit.gateway.secret_box import SecretBox
from flowkit.gateway.store import FLOWS, JOBS, MESSAGES, RUNNERS, FlowStore, Listing, key
from flowkit.testing import memory_database
from flowkit.worker import Batch

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from flowkit.gateway.destinations import Destination

RUN = "flow:1f2e3d4c:3:40/1"
"""The task that runs the flow."""
NODES = [FlowNode(id=id).model_dump() for id in (1, 2)]


@dataclass
class Sent:
    """A supervisor that ends each job at once, and notes where each was sent, and its script."""

    jobs: list[tuple[str, str]] = field(default_factory=list)

    async def run(self, to: Destination, job: WireJob, *given: Any, **options: Any) -> JobOutcome:
        """Note a job."""
        self.jobs.append((to.address, job.payload))
        return JobOutcome(success=True, text="done")


class World:
    """A handler, and the entities of a flow with two jobs."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.sent = Sent()
        self.store = FlowStore(memory_database())
        supervisors: Any = self.sent
        self.handler = JobHandler(self.store, supervisors, SecretBox())

    async def put_flow(self) -> None:
        """Create the flow, and let the reads be counted from now on."""
        flow = {"context_id": 3, "caller_id": 11, "id": 40, "nodes": NODES, "env_vars": {}}
        await self.store.put(FLOWS, "3:40", {**flow, "run": 1, "task_id": RUN}, 0.0)
        for name in ("flow_of_task", "load", "jobs", "page"):
            self._count(name)

    def _count(self, name: str) -> None:
        call = getattr(self.store, name)

        async def counted(*given: Any, **options: Any) -> Any:
            self.reads.append(name)
            return await call(*given, **options)

        setattr(self.store, name, counted)

    async def put_runner(self, address: str, id: int = 71, executor: str = "echo") -> None:
        """Register a runner, or replace it."""
        given = RunnerData(id=id, address=address, executors=[executor])
        await self.store.put(RUNNERS, key(3, id), {**given.model_dump(), "context_id": 3}, 0.0)

    async def put_job(self, id: int, script: str) -> None:
        """Create a job, or replace it."""
        given = JobData(id=id, caller_id=11, context_id=3, executor="echo", script=script)
        await self.store.put(JOBS, key(3, 11, id), {**given.model_dump(), "flow_id": 40}, 0.0)

    async def run(self, id: int, generation: int = 0) -> tuple[str, str] | str | None:
        """Run a job. Return where it was sent and its script, or why it has failed."""
        result = await self.handler.process_batch(batch(job_id=id), attempt(RUN, f"{id}", generation))
        return self.sent.jobs[-1] if result.success else result.reason_code


def batch(**other: int) -> Batch:
    """Return the input of the node of job 1, or another one."""
    ids = {"context_id": 3, "caller_id": 11, "flow_id": 40, "run": 1, "job_id": 1}
    return Batch(batch_uid="result", payload={**ids, **other})


def attempt(task_id: str, node_id: str, generation: int = 0) -> Any:
    """Return the context of an attempt."""

    async def cancellable(work: Awaitable[Any]) -> Any:
        return await work

    fields = {"generation": generation, "failures": 0, "attempt_epoch": 1, "kv": {}}
    return SimpleNamespace(task_id=task_id, node_id=node_id, cancellable=cancellable, **fields)


@pytest.fixture
async def world() -> World:
    """A flow with the jobs 1 and 2, and a runner."""
    made = World()
    await made.put_runner("http://a")
    await made.put_job(1, "one")
    await made.put_job(2, "two")
    await made.put_flow()
    return made


async def test_jobs_of_a_run_share_what_was_read(world: World) -> None:
    found = await world.run(1), await world.run(2)
    assert found == (("http://a", "one"), ("http://a", "two"))
    assert world.reads == ["flow_of_task", "jobs", "page"]


@pytest.mark.parametrize(
    ("task_id", "node_id", "named", "cause"),
    [
        ("mine", "1", {}, "the task is not the latest run of a flow"),
        ("flow:1f2e3d4c:3:40/2", "1", {"run": 2}, "the task is not the latest run of a flow"),
        (RUN, "9", {"job_id": 9}, "flow 40 has no such job"),
        (RUN, "1", {"job_id": 2}, "its input names another job than the node"),
        (RUN, "1", {"context_id": 4}, "its input names another job than the node"),
    ],
)
async def test_a_node_that_the_gateway_has_not_started_fails_for_good_and_reads_no_job(
    world: World, task_id: str, node_id: str, named: dict[str, int], cause: str
) -> None:
    result = await world.handler.process_batch(batch(**named), attempt(task_id, node_id))
    assert (result.success, result.reason_code, result.permanent) == (False, "bad_input", True)
    assert f"node '{node_id}' of task '{task_id}' does not run a job: {cause}" in (result.error or "")
    assert world.sent.jobs == []
    assert not {"load", "page"} & {*world.reads}
    assert await world.store.messages({}, after=None, limit=10) == Listing([], more=False)


async def test_a_foreign_node_does_not_keep_the_run_from_its_jobs(world: World) -> None:
    await world.handler.process_batch(batch(), attempt("mine", "1"))
    assert await world.run(1) == ("http://a", "one")


async def test_a_node_whose_dispatch_has_the_same_id_does_not_end_that_of_a_job(world: World) -> None:
    at = {"generation": 0, "retry": 0, "state": "Ready", "outcome": None, "epoch": 1}
    await world.store.put(MESSAGES, f"{RUN}:1:0.0", {"task_id": RUN, "job_id": 1, **at}, 0.0)
    await world.handler.finalize(attempt("flow:1f2e3d4c:3", "40/1:1"))
    assert (await world.store.load(MESSAGES, f"{RUN}:1:0.0") or {})["outcome"] is None
    await world.handler.finalize(attempt(RUN, "1"))
    assert (await world.store.load(MESSAGES, f"{RUN}:1:0.0") or {})["outcome"] == "completed"


async def test_attempts_that_start_together_read_the_runners_once(world: World) -> None:
    await asyncio.gather(world.run(1), world.run(2))
    assert world.reads.count("page") == 1


async def test_no_runner_is_busy_with_a_dispatch_that_has_failed_before(world: World) -> None:
    await world.put_runner("http://a", executor="other")
    assert [await world.run(1), await world.run(1)] == ["no_runner"] * 2
    assert (await world.store.load(MESSAGES, f"{RUN}:1:0.0") or {})["open_until"] is None


async def test_a_retry_of_the_flow_runs_the_job_that_replaces_another(world: World) -> None:
    await world.run(1)
    await world.put_job(1, "better")
    assert await world.run(1, generation=1) == ("http://a", "better")


async def test_a_changed_runner_is_used_within_a_second(world: World) -> None:
    await world.run(1)
    await world.put_runner("http://b")
    assert await world.run(2) == ("http://a", "two")
    world.handler._runners_of.expire(time.monotonic() + 1.0)
    assert await world.run(2) == ("http://b", "two")


async def test_a_runner_that_was_missing_is_used_at_once(world: World) -> None:
    await world.put_runner("http://a", executor="other")
    assert await world.run(1) == "no_runner"
    await world.put_runner("http://b", id=72)
    assert await world.run(2) == ("http://b", "two")


async def test_a_late_reply_that_is_not_stored_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*given: Any) -> None:
        raise StoreUnavailable("no primary")

    await world.run(1)
    monkeypatch.setattr(world.store, "add_late_reply", fail)
    await world.handler.late_reply("1f2e3d4c:3:11:1", describe_late(b"a reply"))
    assert "the late reply for job 1f2e3d4c:3:11:1 is not stored: no primary" in caplog.text
