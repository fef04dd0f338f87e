"""How inline attempts end early: time limits, cancel flags, and handlers that do not stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from flowkit.workflows import local_attempts
from tests.integration.handlers import InlineQuick, Stubborn
from tests.integration.harness import node
from tests.integration.test_inline_roles import INLINE, ONCE, attempts, chain, counts
from tests.integration.test_large_graphs import run_ids
from tests.integration.test_process_failures import assert_every_batch_counts_once
from tests.servers import SUGGESTED_EVENTS

if TYPE_CHECKING:
    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LENGTH = SUGGESTED_EVENTS + 50


class InlineStubborn(Stubborn):
    """A Stubborn that runs inside an engine."""

    role = "inline"
    inline = True


async def test_handler_that_does_not_stop_cannot_disturb_the_ordinary_attempt(harness: Harness) -> None:
    await harness.engine(handlers={"inline": InlineStubborn()})
    task_id = await harness.create(node("a", "inline", inline={"pause": 2.6, "batches": 2}, **ONCE))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await attempts(harness, task_id) == {"a": ("finished", 2)}
    await assert_every_batch_counts_once(harness, task_id, "a", 2)
    assert {row["attempt_epoch"] for row in await harness.rows(task_id, "a")} == {2}


@pytest.mark.usefixtures("patient")
async def test_time_limit_of_the_node_uses_a_retry_as_in_a_worker(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(
        node(
            "a",
            "inline",
            inline={"pause": 1.5},
            timeout_sec=0.3,
            retry_policy={"max": 1, "backoff_sec": 0.1},
            allow_failure=True,
        )
    )
    await harness.result(task_id)
    found = await harness.node(task_id, "a")
    assert (found["status"], found["attempt_epoch"]) == ("failed", 2)
    assert found["last_error"].startswith(
        "timeout: the attempt took longer than 0.3 s (timeout_sec) (worker "
    )
    assert await counts(harness, task_id) == (2, 0)


async def test_cancel_flag_of_another_client_cancels_the_task(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    task_id = await harness.create(*chain(60, inline={"pause": 0.2}))
    await harness.until_node(task_id, "n1", "finished")
    await harness.db.tasks.update_one({"id": task_id}, {"$set": {"coordinator.cancelled": True}})
    document = await harness.until_status(task_id, "cancelled")
    assert document["graph"]["nodes"][-1]["status"] == "skipped"


async def test_sibling_of_a_failed_inline_node_does_not_finish_the_task(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    broken: dict[str, Any] = {"failures": 9, "permanent": True}
    task_id = await harness.create(
        node("broken", "inline", inline=broken),
        node("beside", "inline", inline={"pause": 1.0}),
        node("below", "inline", "beside"),
    )
    await harness.until_node(task_id, "below", "skipped", epoch=0)
    assert (await harness.document(task_id))["status"] == "failed"


class Endless(InlineQuick):
    """Waits in the node `beside` until it is cancelled. The other nodes run once it waits."""

    def __init__(self) -> None:
        self.cancelled = False
        self._waits = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, or run as usual."""
        if ctx.node_id != "beside":
            await self._waits.wait()
        else:
            self._waits.set()
            try:
                await ctx.cancellable(asyncio.Event().wait())
            finally:
                self.cancelled = ctx.cancelled()
        return await super().process_batch(batch, ctx)


async def test_failed_node_cancels_the_inline_attempt_beside_it(
    harness: Harness, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_attempts, "MAX_END_SEC", 30.0)
    handler = Endless()
    await harness.engine(handlers={"inline": handler})
    broken = node("broken", "inline", inline={"failures": 9, "permanent": True})
    task_id = await harness.create(broken, node("beside", "inline"))
    await harness.until_node(task_id, "beside", "cancelled")
    assert handler.cancelled
    assert "took too long" not in caplog.text


@pytest.mark.slow
async def test_inline_nodes_continue_in_the_next_run_of_the_workflow(
    short_runs: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_attempts, "MAX_START_SEC", 0.1)
    monkeypatch.setattr(local_attempts, "MAX_END_SEC", 6.0)
    await short_runs.engine(handlers=INLINE)
    slow = node("slow", "inline", inline={"pause": 6.5})
    task_id = await short_runs.create(slow, node("n0", "inline", "slow"), *chain(LENGTH)[1:])
    assert (await short_runs.result(task_id)).status is TaskStatus.FINISHED
    assert len(await run_ids(short_runs, task_id)) > 1
    epochs = await attempts(short_runs, task_id)
    assert epochs.pop("slow") == ("finished", 2)
    assert epochs == {f"n{number}": ("finished", 1) for number in range(LENGTH)}
