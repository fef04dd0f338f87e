"""The run context on a real worker: cancellation, subprocesses, clean-ups, variables and artifacts."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import WorkflowFailureError

from flowkit.core.time import ManualClock
from flowkit.worker import Batch, BatchResult, RoleHandler, Worker, WorkerConfig
from tests.integration.harness import EVENT_TIMEOUT_SEC, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import cancelled
from tests.unit.test_resources import IGNORES_SIGTERM, names_in, pid_in, until_gone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

    Body = Callable[[RunContext], Awaitable[dict[str, Any] | None]]

pytestmark = pytest.mark.server


class Scripted(RoleHandler):
    """Runs a function of the test as its only batch."""

    role = "scripted"

    def __init__(self, body: Body) -> None:
        self._body = body

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=await self._body(ctx) or {})


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
        def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:  # type: ignore[override]
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


async def test_commands_return_their_exit_codes_with_large_outputs(harness: Harness) -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        scripts = ["exit 0", "exit 9", "kill -KILL $$", "head -c 3000000 /dev/zero; echo x >&2"]
        with pytest.raises(FileNotFoundError):
            await ctx.run_subprocess("no-such-command-anywhere")
        return {"codes": [await ctx.run_subprocess("sh", "-c", script) for script in scripts]}

    assert await metrics(harness, await start(harness, body)) == {"codes": [0, 9, -signal.SIGKILL, 0]}


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


async def test_registered_processes_end_with_the_run(harness: Harness) -> None:
    started: list[asyncio.subprocess.Process] = []

    async def body(ctx: RunContext) -> None:
        for own_group in (True, False):
            process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=own_group)
            ctx.register_subprocess(process)
            started.append(process)

    await harness.result(await start(harness, body))
    codes = [await asyncio.wait_for(process.wait(), EVENT_TIMEOUT_SEC) for process in started]
    assert codes == [-signal.SIGKILL] * 2


# --- clean-ups --------------------------------------------------------------------------------------------------


class CleanUpScript:
    """A run that registers every kind of clean-up, and then ends as its test requests."""

    def __init__(self, folder: Path, ending: Callable[[RunContext], Awaitable[None]]) -> None:
        self._folder = folder
        self._ending = ending
        self.running = asyncio.Event()
        self.done: list[str] = []

    async def __call__(self, ctx: RunContext) -> None:
        if ctx.attempt_epoch > 1:
            return
        (self._folder / "folder").mkdir()
        for name in ("file", "folder/file"):
            (self._folder / name).touch()
        ctx.register_temp_path(str(self._folder / "file"))
        ctx.register_temp_path(self._folder / "folder")
        ctx.register_temp_path(self._folder / "missing")
        ctx.on_cleanup(lambda: self.done.append("plain"))
        ctx.on_cleanup(self._fail)
        ctx.on_cleanup(self._slowly)
        self.running.set()
        await self._ending(ctx)

    async def _slowly(self) -> None:
        self.done.append("begins")
        await wait_seconds(0.5)
        self.done.append("coroutine")

    def _fail(self) -> None:
        self.done.append("fails")
        raise OSError("the disk is gone")

    def assert_tidy(self) -> None:
        """Check that the run released everything in reverse order."""
        assert self.done == ["begins", "coroutine", "fails", "plain"]
        assert names_in(self._folder) == []


async def succeed(ctx: RunContext) -> None:
    """Succeed."""


async def fail(ctx: RunContext) -> None:
    """Fail."""
    raise ValueError("broken")


async def wait(ctx: RunContext) -> None:
    """Wait forever."""
    await ctx.cancellable(asyncio.Event().wait())


async def test_clean_up_after_success(harness: Harness, tmp_path: Path) -> None:
    tidy = CleanUpScript(tmp_path, succeed)
    await harness.result(await start(harness, tidy))
    tidy.assert_tidy()


async def test_clean_up_after_a_failure(harness: Harness, tmp_path: Path) -> None:
    tidy = CleanUpScript(tmp_path, fail)
    task_id = await start(harness, tidy)
    with pytest.raises(WorkflowFailureError):
        await (await harness.handle(task_id)).result()
    tidy.assert_tidy()


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


async def test_clean_up_that_waits_for_cancelled_work_does_not_end_the_run(harness: Harness) -> None:
    order: list[str] = []

    async def body(ctx: RunContext) -> None:
        work = asyncio.create_task(asyncio.Event().wait())
        ctx.on_cleanup(lambda: order.append("last"))
        ctx.on_cleanup(lambda: work)
        ctx.on_cleanup(work.cancel)

    task_id = await start(harness, body)
    await harness.result(task_id)
    assert order == ["last"]
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 1


# --- variables, artifacts and the echo role ---------------------------------------------------------------------


async def test_variables_are_read_at_the_time_of_the_call(harness: Harness) -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        before = await ctx.vars()
        change = {"$set": {"coordinator.vars": {"routing": {"sla": "gold"}, "n": 1}}}
        await harness.db.tasks.update_one({"id": ctx.task_id}, change)
        return {"before": before, "after": await ctx.vars()}

    found = await metrics(harness, await start(harness, body))
    assert found == {"before": {}, "after": {"routing": {"sla": "gold"}, "n": 1}}


async def test_handler_can_write_and_read_artifacts(harness: Harness) -> None:
    refs: list[dict[str, Any]] = []

    async def body(ctx: RunContext) -> dict[str, Any]:
        with pytest.raises(ValueError, match="batch_uid must be a non-empty string"):
            await ctx.artifacts.upsert_partial("", {})
        seen = [(partial["batch_uid"], partial["meta"]) async for partial in ctx.artifacts.partials()]
        refs.append(await ctx.artifacts.upsert_partial(f"mine{ctx.attempt_epoch}", {"x": 1}))
        refs.append(await ctx.artifacts.mark_complete({"early": True}))
        refs.append(await ctx.artifacts.mark_complete({"early": True}, {"bucket": "b"}))
        marker: Any = await harness.db.artifacts.find_one({"task_id": ctx.task_id, "status": "complete"})
        if ctx.attempt_epoch == 1:
            raise ConnectionError("once more")
        return {"seen": seen, "marker": [marker["meta"], marker["artifacts_ref"]]}

    task_id = await start(harness, body, retry_policy={"max": 1, "backoff_sec": 0.1})
    found = await metrics(harness, task_id) if await harness.result(task_id) else {}
    assert found == {"seen": [["mine1", {"x": 1}]], "marker": [{"early": True}, {"bucket": "b"}]}
    own = {"task_id": task_id, "node_id": "a"}
    assert refs == [
        expected
        for uid in ("mine1", "mine2")
        for expected in ({**own, "batch_uid": uid}, own, {"bucket": "b"})
    ]


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
