"""The run context: subprocesses, clean-ups, variables and artifacts."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import wait_seconds
from tests.unit.handler_runs import node, rows
from tests.unit.test_resources import names_in

from flowkit.testing import memory_database, run_graph
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from flowkit.testing import GraphRun
    from flowkit.worker.context import RunContext

    Body = Callable[[RunContext], Awaitable[dict[str, Any] | None]]


class Scripted(RoleHandler):
    """Runs a function of the test as its only batch."""

    role = "scripted"

    def __init__(self, body: Body) -> None:
        self._body = body

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=True, metrics=await self._body(ctx) or {})


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
        await wait_seconds(0.1)
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


async def run(body: Body, db: Any = None, **fields: Any) -> GraphRun:
    """Run a task with the single node `a`, which runs `body`."""
    return await run_graph({"nodes": [node("a", "scripted", **fields)]}, Scripted(body), db=db)


async def metrics(run: GraphRun) -> dict[str, Any]:
    """Return what `body` returned."""
    assert run.status == "finished", run.reason
    (row,) = await rows(run, "a")
    found: dict[str, Any] = row["metrics"]
    return found


# --- processes --------------------------------------------------------------------------------------------------


async def test_commands_return_their_exit_codes_with_large_outputs() -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        scripts = ["exit 0", "exit 9", "kill -KILL $$", "head -c 3000000 /dev/zero; echo x >&2"]
        with pytest.raises(FileNotFoundError):
            await ctx.run_subprocess("no-such-command-anywhere")
        return {"codes": [await ctx.run_subprocess("sh", "-c", script) for script in scripts]}

    assert await metrics(await run(body)) == {"codes": [0, 9, -signal.SIGKILL, 0]}


async def test_registered_processes_end_with_the_run() -> None:
    started: list[asyncio.subprocess.Process] = []

    async def body(ctx: RunContext) -> None:
        for own_group in (True, False):
            process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=own_group)
            ctx.register_subprocess(process)
            started.append(process)

    assert (await run(body)).status == "finished"
    codes = [await asyncio.wait_for(process.wait(), TIMEOUT_SEC) for process in started]
    assert codes == [-signal.SIGKILL] * 2


async def test_clean_up_after_success(tmp_path: Path) -> None:
    tidy = CleanUpScript(tmp_path, succeed)
    assert (await run(tidy)).status == "finished"
    tidy.assert_tidy()


async def test_clean_up_after_a_failure(tmp_path: Path) -> None:
    tidy = CleanUpScript(tmp_path, fail)
    assert (await run(tidy)).status == "failed"
    tidy.assert_tidy()


async def test_clean_up_that_waits_for_cancelled_work_does_not_end_the_run() -> None:
    order: list[str] = []

    async def body(ctx: RunContext) -> None:
        work = asyncio.create_task(asyncio.Event().wait())
        ctx.on_cleanup(lambda: order.append("last"))
        ctx.on_cleanup(lambda: work)
        ctx.on_cleanup(work.cancel)

    ended = await run(body)
    assert order == ["last"]
    assert (ended.status, ended.nodes["a"].attempts) == ("finished", 1)


async def test_variables_are_read_at_the_time_of_the_call() -> None:
    db = memory_database()

    async def body(ctx: RunContext) -> dict[str, Any]:
        before = await ctx.vars()
        change = {"$set": {"coordinator.vars": {"routing": {"sla": "gold"}, "n": 1}}}
        await db.tasks.update_one({"id": ctx.task_id}, change)
        return {"before": before, "after": await ctx.vars()}

    found = await metrics(await run(body, db))
    assert found == {"before": {}, "after": {"routing": {"sla": "gold"}, "n": 1}}


async def test_handler_can_write_and_read_artifacts() -> None:
    db = memory_database()
    refs: list[dict[str, Any]] = []

    async def body(ctx: RunContext) -> dict[str, Any]:
        with pytest.raises(ValueError, match="batch_uid must be a non-empty string"):
            await ctx.artifacts.upsert_partial("", {})
        seen = [(partial["batch_uid"], partial["meta"]) async for partial in ctx.artifacts.partials()]
        refs.append(await ctx.artifacts.upsert_partial(f"mine{ctx.attempt_epoch}", {"x": 1}))
        refs.append(await ctx.artifacts.mark_complete({"early": True}))
        refs.append(await ctx.artifacts.mark_complete({"early": True}, {"bucket": "b"}))
        marker: Any = await db.artifacts.find_one({"task_id": ctx.task_id, "status": "complete"})
        if ctx.attempt_epoch == 1:
            raise ConnectionError("once more")
        return {"seen": seen, "marker": [marker["meta"], marker["artifacts_ref"]]}

    ended = await run(body, db, retry_policy={"max": 1, "backoff_sec": 0.1})
    assert await metrics(ended) == {
        "seen": [["mine1", {"x": 1}]],
        "marker": [{"early": True}, {"bucket": "b"}],
    }
    own = {"task_id": ended.task_id, "node_id": "a"}
    assert refs == [
        expected
        for uid in ("mine1", "mine2")
        for expected in ({**own, "batch_uid": uid}, own, {"bucket": "b"})
    ]


# --- params and input -------------------------------------------------------------------------------------------


class Asking(RoleHandler):
    """Notes what each hook sees of the params and the input of the node `asked`."""

    role = "asking"

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def _note(self, hook: str, ctx: RunContext) -> None:
        if ctx.node_id == "asked":
            self.seen[hook] = [ctx.params, ctx.input_inline, ctx.input_ref]

    async def init(self, info: dict[str, Any], *, ctx: RunContext) -> None:
        self._note("init", ctx)

    def load_input(self, input_ref: Any, input_inline: Any, ctx: RunContext) -> Any:
        self._note("load_input", ctx)
        return input_inline

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self._note("process_batch", ctx)
        return BatchResult(success=True)

    async def finalize(self, ctx: RunContext) -> None:
        self._note("finalize", ctx)


class Yielding(Asking):
    """Yields a batch with the day of the params, from a coroutine."""

    async def iter_batches(self, loaded: Any, ctx: RunContext) -> AsyncIterator[Batch]:
        self._note("iter_batches", ctx)
        yield Batch(batch_uid=ctx.params["day"])


class YieldingPlainly(Asking):
    """Yields a batch with the day of the params, from a plain generator."""

    def iter_batches(self, loaded: Any, *, ctx: RunContext) -> Iterator[Batch]:
        self._note("iter_batches", ctx)
        yield Batch(batch_uid=ctx.params["day"])


PULL: dict[str, Any] = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["source"]}}
HOOKS = {"init", "load_input", "process_batch", "finalize"}


@pytest.mark.parametrize(
    ("handler", "inline", "hooks"),
    [
        (Yielding(), {"unit": "euros"}, HOOKS | {"iter_batches"}),
        (YieldingPlainly(), {"unit": "euros"}, HOOKS | {"iter_batches"}),
        (Yielding(), PULL, HOOKS),
    ],
)
async def test_every_hook_with_a_context_reads_the_params_and_the_input(
    handler: Asking, inline: dict[str, Any], hooks: set[str]
) -> None:
    asked = {**node("asked", "asking", "source"), "io": {"input_inline": inline, "input_ref": {"key": "k"}}}
    graph, params = {"nodes": [node("source", "asking"), asked]}, {"day": "2026-01-31"}
    run = await run_graph(graph, handler, params=params)
    assert run.status == "finished", run.reason
    assert handler.seen == {hook: [params, inline, {"key": "k"}] for hook in hooks}


async def test_params_without_values_are_empty_and_cannot_be_replaced() -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        for name in ("params", "input_inline", "input_ref"):
            with pytest.raises(AttributeError):
                setattr(ctx, name, {})
        return {"given": [ctx.params, ctx.input_inline, ctx.input_ref]}

    assert await metrics(await run(body)) == {"given": [{}, None, None]}


# --- variables --------------------------------------------------------------------------------------------------


async def test_variables_of_a_running_node_reach_later_nodes() -> None:
    async def body(ctx: RunContext) -> dict[str, Any]:
        before = await ctx.vars.get("counts.done", 0)
        await ctx.vars.set("counts.done", before + 1)
        await ctx.vars.merge({"nodes": {ctx.node_id: ctx.attempt_epoch}})
        return await ctx.vars()

    run = await run_graph({"nodes": [node("a", "scripted"), node("b", "scripted", "a")]}, Scripted(body))
    assert run.status == "finished", run.reason
    assert run.nodes["a"].batches == [{"counts": {"done": 1}, "nodes": {"a": 1}}]
    assert run.vars == {"counts": {"done": 2}, "nodes": {"a": 1, "b": 1}}


async def test_invalid_change_of_variables_fails_the_node_without_a_retry() -> None:
    async def body(ctx: RunContext) -> None:
        await ctx.vars.set("a..b", 1)

    run = await run_graph({"nodes": [node("a", "scripted")]}, Scripted(body))
    assert (run.nodes["a"].status, run.nodes["a"].attempts, run.vars) == ("failed", 1, {})
    assert (run.nodes["a"].error or "").startswith(
        "adapter_error: vars.set: 'coordinator.vars.a..b' has a segment"
    )


class Tally(RoleHandler):
    """Counts its node in variables, after a first attempt that fails in `finalize`."""

    role = "tally"

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        if ctx.attempt_epoch == 1:
            raise ConnectionError("once more")
        return FinalizeResult(metrics={"n": 1}, vars={"incr": {"done": ctx.params.get("by", 1)}})


class ChangingPlainly(RoleHandler):
    """Calls a coroutine of its context from a plain function, without `await`."""

    role = "plain"

    def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        return BatchResult(success=ctx.vars.set("tier", 2) is not None)


async def test_coroutine_that_a_plain_function_calls_fails_the_node_instead_of_doing_nothing() -> None:
    run = await run_graph({"nodes": [{"node_id": "n", "type": "plain"}]}, ChangingPlainly())
    text, _, rest = str(run.nodes["n"].error).partition(", at ")
    assert text == (
        "bad_input: TypeError: ctx.vars.set needs `await`, which a plain function cannot do: write the method of the "
        "handler as `async def`"
    )
    assert "ChangingPlainly.process_batch" in rest


async def test_increments_of_finalize_count_once_for_each_node() -> None:
    soon = {"retry_policy": {"max": 1, "backoff_sec": 0.1}}
    run = await run_graph({"nodes": [node("a", "tally", **soon), node("b", "tally", "a", **soon)]}, Tally())
    assert run.status == "finished", run.reason
    assert (run.nodes["a"].attempts, run.nodes["b"].final, run.vars) == (2, {"n": 1}, {"done": 2})


async def test_increment_that_is_no_number_fails_the_node_as_bad_vars() -> None:
    soon = {"retry_policy": {"max": 5, "backoff_sec": 0.1}}
    run = await run_graph({"nodes": [node("a", "tally", **soon)]}, Tally(), params={"by": "one"})
    assert (run.nodes["a"].status, run.nodes["a"].attempts, run.vars) == ("failed", 2, {})
    assert run.nodes["a"].error == (
        "bad_vars: the result of finalize: vars.incr: 'by' must be int or float, not str: coordinator.vars.done"
    )
