"""Inline handlers in a user's own Temporal worker: they run on an event loop of their own."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.worker import Worker

from flowkit.models import TaskStatus
from flowkit.worker import BatchResult, FinalizeResult
from tests.integration.handlers import InlineQuick
from tests.integration.harness import node
from tests.integration.test_inline_roles import ONCE, Observing, attempts, chain, counts
from tests.integration.test_plugin import connected, plugin_of, running

if TYPE_CHECKING:
    from flowkit.worker import Batch, RoleHandler
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LONGEST_BLOCK_SEC = 90.0


async def workers_of(harness: Harness, handler: RoleHandler) -> list[Worker]:
    """Return the plugin's workers of an engine and of the role `inline`, on the same client."""
    client = await connected(harness, plugin_of(harness, handlers={"inline": handler}))
    return [Worker(client, task_queue=queue) for queue in (harness.queue, f"{harness.queue}.inline")]


class Blocking(InlineQuick):
    """Blocks its event loop in the first attempt of a node, until a test releases it."""

    def __init__(self) -> None:
        self.blocks = threading.Event()
        self.release = threading.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Block, as no coroutine should."""
        if ctx.attempt_epoch == 1:
            self.blocks.set()
            assert self.release.wait(LONGEST_BLOCK_SEC)
        return await super().process_batch(batch, ctx)


async def test_handler_that_blocks_its_loop_does_not_delay_the_tasks_of_the_engine(harness: Harness) -> None:
    handler = Blocking()
    async with running(harness, *await workers_of(harness, handler)):
        blocked = await harness.create(node("a", "inline", **ONCE))
        assert await asyncio.to_thread(handler.blocks.wait, LONGEST_BLOCK_SEC)
        calls = [
            node("f0", "coordinator_fn"),
            *(node(f"f{i}", "coordinator_fn", f"f{i - 1}") for i in (1, 2, 3)),
        ]
        other = await harness.create(*calls)
        assert (await harness.result(other)).status is TaskStatus.FINISHED
        assert (await harness.result(blocked)).status is TaskStatus.FINISHED
        handler.release.set()
    assert await attempts(harness, blocked) == {"a": ("finished", 2)}
    assert [row["attempt_epoch"] for row in await harness.rows(blocked, "a")] == [2]


@pytest.mark.usefixtures("patient")
async def test_inline_handlers_run_on_a_thread_that_ends_with_the_engine(harness: Harness) -> None:
    handler = Observing()
    engine, _ = await workers_of(harness, handler)
    async with running(harness, engine):
        task_id = await harness.create(*chain(3))
        await harness.result(task_id)
    assert await counts(harness, task_id) == (3, 0)
    assert handler.threads == {"flowkit-handlers"}
    assert "flowkit-handlers" not in {thread.name for thread in threading.enumerate()}


class Using(InlineQuick):
    """Uses everything of its context that belongs to an event loop."""

    def __init__(self) -> None:
        self.cleaned_on = ""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store an artifact, read variables, run a command, and register a cleanup."""
        await ctx.artifacts.upsert_partial("own", {"n": 1})
        ctx.on_cleanup(self._clean_up)
        code = await ctx.run_subprocess(sys.executable, "-S", "-c", "")
        return BatchResult(success=True, metrics={"code": code, "vars": await ctx.vars()})

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Count the artifacts of the node."""
        stored = [partial["batch_uid"] async for partial in ctx.artifacts.partials()]
        return FinalizeResult(metrics={"stored": len(stored)})

    async def _clean_up(self) -> None:
        self.cleaned_on = threading.current_thread().name


@pytest.mark.usefixtures("patient")
async def test_context_of_an_inline_handler_works_on_its_loop(harness: Harness) -> None:
    handler = Using()
    engine, _ = await workers_of(harness, handler)
    setting: dict[str, Any] = {"fn": "vars.set", "fn_args": {"kv": {"x": 1}}}
    async with running(harness, engine):
        task_id = await harness.create(
            node("set", "coordinator_fn", io=setting), node("a", "inline", "set", **ONCE)
        )
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await attempts(harness, task_id))["a"] == ("finished", 1)
    assert handler.cleaned_on == "flowkit-handlers"
    [row] = await harness.rows(task_id, "a")
    assert row["metrics"] == {"code": 0, "vars": {"x": 1}}
