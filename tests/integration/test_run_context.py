"""The run context on a real worker: cancellation, and clean-ups after it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.core.time import ManualClock
from flowkit.worker import Batch, BatchResult, RoleHandler, Worker, WorkerConfig
from tests.integration.harness import EVENT_TIMEOUT_SEC, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import cancelled
from tests.unit.test_resources import IGNORES_SIGTERM, pid_in, until_gone
from tests.unit.test_run_context import CleanUpScript, Scripted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

    Body = Callable[[RunContext], Awaitable[dict[str, Any] | None]]

pytestmark = pytest.mark.server


async def start(harness: Harness, body: Body, **fields: Any) -> str:
    """Start a task with the single node `a`, which runs `body`."""
    await harness.engine()
    await harness.worker({"scripted": Scripted(body)})
    return await harness.create(node("a", "scripted", **fields))


async def metrics(harness: Harness, task_id: str) -> dict[str, Any]:
    """Wait until the task finishes, and return what `body` returned."""
    await harness.result(task_id)
    (row,) = await harness.rows(task_id, "a")
    found: dict[str, Any] = row["metrics"]
    return found


async def until(recorded: asyncio.Event) -> None:
    """Wait for something that the handler records."""
    await asyncio.wait_for(recorded.wait(), EVENT_TIMEOUT_SEC)


async def raises_cancelled(work: Coroutine[Any, Any, Any]) -> bool:
    """Return whether `work` raises CancelledError within a given time."""
    try:
        await asyncio.wait_for(work, EVENT_TIMEOUT_SEC)
    except asyncio.CancelledError:
        return True
    return False


# --- identity and cancellation ----------------------------------------------------------------------------------


async def test_context_counts_the_failures_and_resets_of_its_node(harness: Harness) -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        if ctx.failures < 2:
            raise OSError("not yet")
        return {"failures": ctx.failures, "generation": ctx.generation}

    task_id = await start(harness, body, retry_policy={"max": 2, "backoff_sec": 0})
    assert await metrics(harness, task_id) == {"failures": 2, "generation": 0}
    await harness.coordinator.rerun(task_id, ["a"])
    await harness.result(task_id)
    last = [
        row async for row in harness.db.artifacts.find({"task_id": task_id, "batch_uid": {"$exists": True}})
    ]
    assert [row["meta"] for row in last] == [{"failures": 2, "generation": 1}]


async def test_running_context_is_not_cancelled(harness: Harness) -> None:
    clock = ManualClock(start_ms=5_000)

    async def body(ctx: RunContext) -> dict[str, Any]:
        ctx.kv["mine"] = 1
        await ctx.clock.sleep_ms(3_600_000)
        await ctx.raise_if_cancelled()
        with pytest.raises(ZeroDivisionError):
            await ctx.cancellable(fails())
        return {
            "who": [ctx.task_id, ctx.node_id, ctx.attempt_epoch, ctx.worker_id],
            "kv": ctx.kv,
            "now": ctx.clock.now_ms(),
            "cancelled": [ctx.cancelled(), ctx.cancel_flag.is_set()],
            "unknown": [ctx.cancel_reason, ctx.cancel_deadline_ts_ms, ctx.remaining_ms()],
            "work": await ctx.cancellable(wait_seconds(0)),
        }

    async def fails() -> None:
        raise ZeroDivisionError

    await harness.engine()
    cfg = WorkerConfig(queue=harness.queue, worker_id="w-mine")
    worker = Worker(
        db=harness.db, cfg=cfg, clock=clock, roles=["scripted"], handlers={"scripted": Scripted(body)}
    )
    await worker.start()
    task_id = await harness.create(node("a", "scripted"))
    try:
        assert await metrics(harness, task_id) == {
            "who": [task_id, "a", 1, "w-mine"],
            "kv": {"mine": 1},
            "now": 3_605_000,
            "cancelled": [False, False],
            "unknown": [None, None, None],
            "work": None,
        }
    finally:
        await worker.stop()


async def test_cancelled_context_has_its_reason_and_deadline(harness: Harness) -> None:
    running, reported, inner = asyncio.Event(), asyncio.Event(), asyncio.Event()
    seen: dict[str, Any] = {}

    async def work() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            inner.set()

    async def body(ctx: RunContext) -> None:
        seen["inside"] = await raises_cancelled(ctx.cancellable(work()))
        seen["before"] = await raises_cancelled(ctx.raise_if_cancelled())
        seen["after"] = await raises_cancelled(ctx.cancellable(asyncio.Event().wait()))
        seen["state"] = [ctx.cancelled(), ctx.cancel_flag.is_set(), ctx.cancel_reason]
        seen["remaining"], seen["deadline"] = ctx.remaining_ms(), ctx.cancel_deadline_ts_ms
        ctx.cancel_deadline_ts_ms = 1
        seen["over"] = ctx.remaining_ms()
        reported.set()

    task_id = await start(harness, body)
    await until(running)
    await harness.coordinator.cancel_task(task_id, reason="budget is spent")
    await until(reported)
    await until(inner)
    assert (seen["inside"], seen["before"], seen["after"]) == (True, True, True)
    assert seen["state"] == [True, True, "budget is spent"]
    assert 0 < seen["remaining"] <= 5_000, "the grace of this harness's engine"
    assert (type(seen["deadline"]), seen["over"]) == (int, 0.0)
    await cancelled(harness, task_id)


async def test_plain_hook_sees_the_cancel_on_its_thread(harness: Harness) -> None:
    running, seen = threading.Event(), threading.Event()

    class Looping(RoleHandler):
        def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            while not ctx.cancelled():
                running.set()
                threading.Event().wait(0.02)
            seen.set()
            return BatchResult(success=True)

    await harness.engine()
    await harness.worker({"looping": Looping()})
    task_id = await harness.create(node("a", "looping"))
    assert await asyncio.to_thread(running.wait, EVENT_TIMEOUT_SEC)
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    assert seen.is_set()


# --- processes --------------------------------------------------------------------------------------------------


async def test_cancel_kills_a_command_that_ignores_signals_and_its_children(
    harness: Harness, tmp_path: Path
) -> None:
    async def body(ctx: RunContext) -> None:
        await ctx.run_subprocess("sh", "-c", IGNORES_SIGTERM, str(tmp_path / "pid"), grace_ms=100)

    task_id = await start(harness, body)
    child = await pid_in(tmp_path / "pid")
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    await until_gone(child)


# --- clean-ups --------------------------------------------------------------------------------------------------


async def wait(ctx: RunContext) -> None:
    """Wait forever."""
    await ctx.cancellable(asyncio.Event().wait())


async def test_clean_up_after_a_cancel(harness: Harness, tmp_path: Path) -> None:
    tidy = CleanUpScript(tmp_path, wait)
    task_id = await start(harness, tidy)
    await until(tidy.running)
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    tidy.assert_tidy()


async def test_clean_up_after_a_hand_over_is_complete_when_the_worker_has_stopped(
    harness: Harness, tmp_path: Path
) -> None:
    tidy = CleanUpScript(tmp_path, wait)
    await harness.engine()
    worker = await harness.worker({"scripted": Scripted(tidy)})
    task_id = await harness.create(node("a", "scripted", retry_policy={"max": 0}))
    await until(tidy.running)
    await worker.stop()
    tidy.assert_tidy()
    await harness.worker({"scripted": Scripted(tidy)})
    await harness.result(task_id)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2


# --- the echo role ----------------------------------------------------------------------------------------------


async def echoing(harness: Harness) -> Worker:
    """A worker for the built-in role, without a handler."""
    worker = Worker(
        db=harness.db, roles=["echo"], cfg=WorkerConfig(queue=harness.queue, db_cancel_poll_ms=200)
    )
    await worker.start()
    return worker


async def test_built_in_echo_role_returns_its_input_and_stops_on_cancel(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    worker = await echoing(harness)
    try:
        task_id = await harness.create(node("a", "echo"))
        assert await metrics(harness, task_id) == {"echoed": 5}
        pull = {"input_adapter": "pull.from_artifacts"}
        long = await harness.create(
            node("u", inline={"batches": 400}),
            node("z", "echo", "u", inline=pull),
            node("after", "quick", "z"),
        )
        await harness.until_batches(long, "z", 1)
        await harness.coordinator.cancel_task(long)
        await cancelled(harness, long)
        assert await harness.statuses(long) == {"u": "finished", "z": "cancelled", "after": "skipped"}
        assert len(await harness.rows(long, "z")) < 400
    finally:
        await worker.stop()
