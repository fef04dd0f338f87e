"""Pulling on real servers: several sources, routes that handlers propose, cancels during a wait, and batch events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.worker import Batch, BatchResult
from tests.integration.handlers import Failing, Paced, Quick
from tests.integration.harness import eventually, node
from tests.integration.test_cancel_terminate_reset import cancelled
from tests.integration.test_handler_hooks import SOON, outcomes
from tests.integration.test_input_routes import PULL, RECHUNK, ListSource, Proposing, proposing, route, source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


async def run(harness: Harness, *nodes: dict[str, Any], **graph: Any) -> tuple[str, Proposing]:
    """Run nodes until the task finishes. Return the task id and the batches that the handler received."""
    handler = Proposing()
    await harness.engine()
    await harness.worker({"lists": ListSource(), "proposing": handler, "quick": Quick(), "paced": Paced()})
    task_id = await harness.create(*nodes, **graph)
    await harness.result(task_id)
    return task_id, handler


# --- several sources ------------------------------------------------------------------------------------------------


async def test_batches_with_equal_uids_from_several_sources_are_all_stored(harness: Harness) -> None:
    sources = [node(name, inline={"batches": 3}) for name in ("u", "v", "w")]
    task_id, handler = await run(
        harness,
        *sources,
        proposing("ordered", "u", "v", "w", **route(PULL)),
        proposing("proposed", "u", "v", "w", propose=route(PULL, from_nodes=["v", "u"])),
        proposing("single", "u", **route(PULL)),
        node("after", "proposing", "ordered", inline=route(PULL, from_nodes=["ordered", "single"])),
    )
    uids = [f"b{number}" for number in range(3)]
    assert handler.uids("ordered") == [*uids, *(f"{uid}@v" for uid in uids), *(f"{uid}@w" for uid in uids)]
    assert handler.uids("proposed") == [*uids, *(f"{uid}@u" for uid in uids)]
    assert handler.uids("single") == uids
    for name, count in (("ordered", 9), ("proposed", 6), ("single", 3)):
        rows = await harness.rows(task_id, name)
        assert sorted(row["batch_uid"] for row in rows) == sorted(map(str, handler.uids(name)))
        assert len(rows) == count
    nested = handler.uids("after")
    assert len(set(nested)) == 12
    assert "b0%40v@ordered" in nested
    assert "b0@single" in nested


async def test_interrupted_attempt_resumes_every_source(harness: Harness) -> None:
    class Breaking(Proposing):
        """Fails in the middle of its first attempt."""

        async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
            if ctx.attempt_epoch == 1 and len(self.got.get("z", [])) == 4:
                raise ConnectionError("the source broke")
            return await super().process_batch(batch, ctx)

    handler = Breaking()
    await harness.engine()
    await harness.worker({"quick": Quick(), "proposing": handler})
    sources = [node(name, inline={"batches": 3}) for name in ("u", "v")]
    task_id = await harness.create(*sources, proposing("z", "u", "v", **route(PULL)))
    await harness.result(task_id)
    assert handler.uids("z") == ["b0", "b1", "b2", "b0@v", "b1@v", "b2@v"]
    assert (await harness.node(task_id, "z"))["attempt_epoch"] == 2


# --- routes that handlers propose -----------------------------------------------------------------------------------


async def test_parents_from_extended_edges_are_the_default_sources(harness: Harness) -> None:
    nodes = [source([1], node_id="u"), source([2], node_id="v"), proposing("z", propose=route(PULL))]
    edges = [{"from": "v", "to": "z"}, {"from": "u", "to": "z"}]
    _, handler = await run(harness, *nodes, edges_ex=edges)
    assert [payload["from_node"] for _, payload in handler.got["z"]] == ["v", "u"]


@pytest.mark.parametrize("adapter", [route(PULL), route(RECHUNK, size=2)])
async def test_empty_source_list_of_a_handler_is_an_input_without_batches(
    harness: Harness, adapter: dict[str, Any]
) -> None:
    adapter["input_args"]["from_nodes"] = []
    task_id, handler = await run(harness, source([1]), proposing("z", "u", propose=adapter))
    assert handler.got == {}
    assert await harness.statuses(task_id) == {"u": "finished", "z": "finished"}


async def test_handler_that_pulls_from_a_descendant_fails_permanently(harness: Harness) -> None:
    found = await outcomes(
        harness,
        [ListSource(), Proposing()],
        source([1]),
        proposing("z", "u", propose=route(PULL, from_nodes=["u", "after"])),
        proposing("middle", "z"),
        proposing("after", "middle"),
    )
    status, epoch, error = found["z"]
    assert (status, epoch) == ("failed", 1)
    assert error.startswith("bad_input_args: input_args.from_nodes names 'after'")
    assert "z -> middle -> after -> z" in error


# --- cancels --------------------------------------------------------------------------------------------------------


class WaitingForInput(Quick):
    """Waits for a batch that never arrives."""

    role = "silent"

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        await asyncio.Event().wait()
        yield Batch(batch_uid="never")


@pytest.mark.parametrize("waiting", ["puller", "generator"])
async def test_cancel_ends_an_attempt_that_waits_for_input_before_the_grace_period(
    harness: Harness, waiting: str
) -> None:
    harness.settings |= {"cancel_grace_sec": 60}
    await harness.engine()
    await harness.worker({"quick": Quick(), "silent": WaitingForInput()})
    endless = {"input_args": {"eof_on_task_done": False, "backoff_max_ms": 60_000}, "input_adapter": PULL}
    if waiting == "puller":
        last = node("z", "quick", "u", inline=endless)
    else:
        last = node("z", "silent", "u")
    task_id = await harness.create(node("u"), last)
    await harness.until_node(task_id, "z", "running")
    pressed = time.monotonic()
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    assert time.monotonic() - pressed < 30, "two seconds are usual, a minute is the grace"
    assert await harness.statuses(task_id) == {"u": "finished", "z": "cancelled"}


# --- events ---------------------------------------------------------------------------------------------------------


async def test_long_attempt_logs_its_batches_and_a_failed_one_its_failed_batch(harness: Harness) -> None:
    task_id, _ = await run(harness, node("slow", "paced", inline={"batches": 8, "pause": 1}))
    found = await outcomes(harness, [Failing()], node("bad", "failing", inline={"failures": 9}, **SOON))
    assert found["bad"][0] == "failed"

    async def rows(kind: str) -> list[dict[str, Any]]:
        return [row async for row in harness.db.worker_events.find({"payload.kind": kind})]

    async def reported() -> bool:
        return bool(await rows("TASK_DONE")) and bool(await rows("BATCH_FAILED"))

    await eventually(reported)
    stored = [row["payload"] for row in await rows("BATCH_OK")]
    assert 1 <= len(stored) <= 6
    assert (stored[-1]["batches"], stored[-1]["batch_uid"]) == (8, "b7")
    assert {row["task_id"] for row in await rows("BATCH_OK")} == {task_id}
    assert {row["payload"]["batch_uid"] for row in await rows("BATCH_FAILED")} == {"b0"}
    artifact: Any = await harness.db.artifacts.find_one({"node_id": "bad"})
    assert (artifact["status"], artifact["error"]) == ("failed", "flaky")
