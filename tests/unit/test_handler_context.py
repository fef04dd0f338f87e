"""The context for a unit test of one handler."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from flowkit.errors import AdapterError
from flowkit.testing import handler_context, memory_database
from flowkit.worker import RunContext

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_handler_sees_what_the_test_gives() -> None:
    ctx = handler_context(
        params={"day": 1}, input_inline={"n": 2}, input_ref={"at": "x"}, node_id="count", attempt_epoch=3
    )
    assert isinstance(ctx, RunContext)
    assert (ctx.params, ctx.input_inline, ctx.input_ref) == ({"day": 1}, {"n": 2}, {"at": "x"})
    assert (ctx.node_id, ctx.attempt_epoch, ctx.failed_nodes, ctx.kv) == ("count", 3, [], {})
    assert handler_context().task_id != handler_context().task_id


async def test_variables_have_the_rules_of_a_task() -> None:
    ctx = handler_context(vars={"routing": {"sla": "gold"}})
    assert await ctx.vars.get("routing.sla") == "gold"
    await ctx.vars.set("routing.n", 2)
    assert await ctx.vars() == {"routing": {"sla": "gold", "n": 2}}
    with pytest.raises(AdapterError, match=r"routing\.sla"):
        await ctx.vars.set("routing.sla.deep", 1)


async def test_two_nodes_of_one_database_share_nothing() -> None:
    db = memory_database()
    first, second = handler_context(db=db, vars={"n": 1}), handler_context(db=db, node_id="other")
    await first.vars.set("m", 2)
    assert (await first.vars(), await second.vars()) == ({"n": 1, "m": 2}, {})


async def test_artifacts_are_stored_in_memory() -> None:
    ctx = handler_context()
    await ctx.artifacts.upsert_partial("a", {"words": 3})
    assert [each async for each in ctx.artifacts.partials()] == [{"batch_uid": "a", "meta": {"words": 3}}]
    assert (await ctx.db.artifacts.find_one({"batch_uid": "a"}))["node_id"] == "node"


async def test_a_test_can_request_a_cancel() -> None:
    ctx = handler_context()
    ctx.cancel("the user has no time", grace_sec=30)
    assert ctx.cancelled()
    with pytest.raises(asyncio.CancelledError, match="no time"):
        await ctx.cancellable(asyncio.Event().wait())


async def test_waits_on_the_clock_take_no_time() -> None:
    ctx = handler_context()
    before = ctx.clock.now_dt()
    await ctx.clock.sleep_ms(86_400_000)
    assert (ctx.clock.now_dt() - before).days == 1


async def test_clean_ups_run_at_the_end(tmp_path: Path) -> None:
    path, done = tmp_path / "scratch", list[str]()
    async with handler_context() as ctx:
        path.touch()
        ctx.register_temp_path(path)
        ctx.on_cleanup(lambda: done.append("closed"))
    assert (path.exists(), done) == (False, ["closed"])
