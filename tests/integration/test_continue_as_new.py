"""A task with a long history continues as a new run, even if the history consists of retries only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.worker import Replayer

from flowkit.activities import role_attempt
from flowkit.models import TaskStatus
from flowkit.plugin import FlowKitPlugin
from flowkit.worker import BatchResult
from tests.integration.handlers import Quick, Sharing
from tests.integration.harness import Harness, node
from tests.integration.test_large_graphs import run_ids, run_of, until_only_runs

if TYPE_CHECKING:
    from temporalio.client import WorkflowHistory

    from flowkit.worker import Batch
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

HELD_EVENTS = 200
ROUNDS = 40


class Endless(Quick):
    """Runs until its worker stops."""

    role = "endless"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait until the worker stops."""
        await asyncio.Event().wait()
        return await super().process_batch(batch, ctx)


class RetriedAtOnce(Quick):
    """Fails in every attempt but the last."""

    role = "insistent"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Fail, or return one metrics row."""
        if ctx.attempt_epoch <= ROUNDS:
            return BatchResult(success=False, reason_code="flaky", error="as ordered")
        return await super().process_batch(batch, ctx)


def chain(count: int) -> list[dict[str, Any]]:
    """Return nodes that run one after another."""
    return [node("n0"), *(node(f"n{i}", "quick", f"n{i - 1}") for i in range(1, count))]


async def histories(harness: Harness, task_id: str) -> list[WorkflowHistory]:
    """Return the history of each run of a task."""
    client = await harness.client()
    handles = [
        client.get_workflow_handle(task_id, run_id=run_id) for run_id in await run_ids(harness, task_id)
    ]
    return [await handle.fetch_history() for handle in handles]


async def replay(histories: list[WorkflowHistory]) -> None:
    """Replay each history."""
    replayer = Replayer(workflows=[], plugins=[FlowKitPlugin()])
    for history in histories:
        await replayer.replay_workflow(history)


@pytest.mark.slow
async def test_last_attempt_handed_over_while_starts_are_held_back_runs_again_in_a_new_run(
    short_runs: Harness,
) -> None:
    short_runs.settings["hold_starts_events"] = HELD_EVENTS
    await short_runs.engine()
    await short_runs.worker({"quick": Quick()})
    stopped = await short_runs.worker({"endless": Endless()})
    waiting = node("waits", "failing", retry_policy={"max": 1, "backoff_sec": 20}, allow_failure=True)
    await short_runs.worker()
    task_id = await short_runs.create(
        node("long", "endless"), {**waiting, "io": {"input_inline": {"failures": 9}}}, *chain(60)
    )
    await short_runs.until_node(task_id, "waits", "deferred")
    await until_only_runs(short_runs, task_id, "long.1")
    held = [name for name, status in (await short_runs.statuses(task_id)).items() if status == "queued"]
    assert held
    await stopped.stop()
    await short_runs.worker({"endless": Quick()})
    result = await short_runs.result(task_id)
    assert result.status is TaskStatus.FINISHED
    assert await run_of(short_runs, task_id, "long.2") > await run_of(short_runs, task_id, "long.1")
    entry = await short_runs.node(task_id, "waits")
    assert (entry["status"], entry["attempt_epoch"]) == ("failed", 2)
    found = await histories(short_runs, task_id)
    await replay(found)


async def test_node_that_exceeds_its_deadline_while_starts_are_held_back_fails_in_this_run(
    short_runs: Harness,
) -> None:
    short_runs.settings["hold_starts_events"] = HELD_EVENTS
    await short_runs.engine()
    await short_runs.worker({"endless": Endless(), "quick": Quick()})
    task_id = await short_runs.create(
        node("long", "endless", deadline_sec=2.5, allow_failure=True, retry_policy={"max": 3}), *chain(60)
    )
    assert (await short_runs.result(task_id)).handled_failures == ["long"]
    entry = await short_runs.node(task_id, "long")
    assert (entry["status"], entry["attempt_epoch"]) == ("failed", 1)
    assert entry["last_error"].startswith("deadline_exceeded")
    await replay(await histories(short_runs, task_id))


@pytest.mark.parametrize("parallel", [0, 3])
async def test_node_with_many_immediate_retries_continues_in_new_runs(
    short_runs: Harness, parallel: int
) -> None:
    short_runs.settings["hold_starts_events"] = HELD_EVENTS
    await short_runs.engine()
    await short_runs.worker({"insistent": RetriedAtOnce()})
    policy = {"max": ROUNDS, "backoff_sec": 0}
    task_id = await short_runs.create(
        *(node(f"n{i}", "insistent", retry_policy=policy) for i in range(parallel + 1))
    )
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    assert (await short_runs.node(task_id, "n0"))["attempt_epoch"] == ROUNDS + 1
    found = await histories(short_runs, task_id)
    assert len(found) > 1
    await replay(found)


async def test_shards_continue_in_a_new_run(short_runs: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_attempt, "SHARD_SEC", 0.1)
    short_runs.settings["hold_starts_events"] = HELD_EVENTS
    await short_runs.engine()
    await short_runs.worker({"quick": Quick(), "shared": Sharing()}, concurrency=3)
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"], "poll_ms": 50}}
    task_id = await short_runs.create(
        node("a", inline={"batches": 150}), node("w", "shared", "a", inline=pull, parallel=3)
    )
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    assert len(await short_runs.rows(task_id, "w")) == 150
    found = await histories(short_runs, task_id)
    assert len(found) > 1
    await replay(found)
