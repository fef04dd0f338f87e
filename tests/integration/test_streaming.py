"""Nodes that start on the first batch of a parent, on real servers: what they wait for, and exact totals."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from flowkit.models import FirstBatch, TaskStatus
from flowkit.models.temporal_names import FIRST_BATCH
from flowkit.worker import Batch, BatchResult
from tests.integration.handlers import Quick
from tests.integration.harness import Harness, node
from tests.integration.streaming import PULL, Sink, Source, assert_exact, signals, source, streaming
from tests.integration.test_continue_as_new import histories, replay

if TYPE_CHECKING:
    from flowkit.worker import RoleHandler
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
MANY = 5_000 if LARGE else 250
"""Batches of a long parent; `make large` runs the large case."""


async def served(harness: Harness, *handlers: RoleHandler) -> None:
    """Start an engine and a worker."""
    await harness.engine()
    await harness.worker({handler.role: handler for handler in (*handlers, Quick())})


async def finished(harness: Harness, task_id: str) -> None:
    """Wait until the task finishes, and replay its history."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_child_starts_while_its_parent_runs(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 1)
    assert (await harness.node(task_id, "a"))["status"] == "running"
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 5)
    (history,) = await histories(harness, task_id)
    assert signals(history) == [FIRST_BATCH]


class Publisher(Quick):
    """Publishes batches from its only batch, and waits before it returns."""

    role = "publisher"

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Publish, and wait."""
        for number in (1, 2):
            await ctx.artifacts.upsert_partial(f"published{number}", {"number": number})
        await ctx.cancellable(self.gate.wait())
        return BatchResult(success=True, metrics={"number": 0})


async def test_child_starts_on_a_batch_that_the_handler_of_its_parent_publishes(harness: Harness) -> None:
    parent = Publisher()
    await served(harness, parent, Sink())
    task_id = await harness.create(node("a", "publisher"), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "b", 2)
    assert (await harness.node(task_id, "a"))["status"] == "running"
    parent.gate.set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 3)
    (history,) = await histories(harness, task_id)
    assert signals(history) == [FIRST_BATCH]


async def test_parent_signals_only_if_a_child_streams(harness: Harness) -> None:
    await served(harness, Sink())
    task_id = await harness.create(node("a", inline={"batches": 3}), node("b", "sink", "a", inline=PULL))
    await finished(harness, task_id)
    (history,) = await histories(harness, task_id)
    assert signals(history) == []


async def test_one_child_starts_early_and_another_waits_for_the_end(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    edges = [{"from": "a", "to": "early", "mode": "async"}, {"from": "a", "to": "late"}]
    children = [node(name, "sink", inline=PULL) for name in ("early", "late")]
    task_id = await harness.create(source(), *children, edges_ex=edges)
    await harness.until_batches(task_id, "early", 1)
    assert (await harness.statuses(task_id)) == {"a": "running", "early": "running", "late": "queued"}
    parent.gates["a"].set()
    await finished(harness, task_id)
    for name in ("early", "late"):
        await assert_exact(harness, task_id, name, 5)


async def test_gate_for_all_waits_for_a_batch_of_one_parent_and_the_end_of_another(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    edges = [{"from": "a", "to": "c", "mode": "async"}, {"from": "b", "to": "c"}]
    pull = {**PULL, "input_args": {"poll_ms": 50, "from_nodes": ["a"]}}
    task_id = await harness.create(source("a"), source("b"), node("c", "sink", inline=pull), edges_ex=edges)
    await harness.until_batches(task_id, "a", 1)
    await harness.until_batches(task_id, "b", 1)
    assert (await harness.node(task_id, "c"))["status"] == "queued"
    parent.gates["b"].set()
    await harness.until_batches(task_id, "c", 1)
    assert (await harness.node(task_id, "a"))["status"] == "running"
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "c", 5)


async def test_first_batch_with_a_count_starts_when_so_many_parents_have_finished(harness: Harness) -> None:
    """spec §14, test_fanin_count_n."""
    parent = Source()
    await served(harness, parent, Sink())
    parents = ["a", "b", "c"]
    task_id = await harness.create(*map(source, parents), streaming("d", "sink", *parents, fan_in="count:2"))
    for name in parents:
        await harness.until_batches(task_id, name, 1)
    parent.gates["a"].set()
    await harness.until_node(task_id, "a", "finished")
    assert (await harness.node(task_id, "d"))["status"] == "queued"
    parent.gates["b"].set()
    await harness.until_batches(task_id, "d", 1)
    assert [*(await harness.statuses(task_id)).values()][:3].count("finished") == 2
    parent.gates["c"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "d", 5, sources=3)


async def test_parents_of_different_speed(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    slow = source("slow", hold_at=0)
    task_id = await harness.create(source("fast", hold_at=-1), slow, streaming("c", "sink", "fast", "slow"))
    await harness.until_batches(task_id, "c", 5)
    assert (await harness.node(task_id, "slow"))["status"] == "running"
    parent.gates["slow"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "c", 5, sources=2)


async def test_three_stages_run_at_the_same_time(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    stages = [streaming("b", "sink", "a"), streaming("c", "sink", "b"), streaming("d", "sink", "c")]
    task_id = await harness.create(source(batches=40), *stages)
    await harness.until_batches(task_id, "d", 1)
    assert {*(await harness.statuses(task_id)).values()} == {"running"}
    parent.gates["a"].set()
    await finished(harness, task_id)
    for name in ("b", "c", "d"):
        await assert_exact(harness, task_id, name, 40)


async def test_child_that_starts_late_reads_every_batch(harness: Harness) -> None:
    """No worker serves the role of the child until the parent has stored most of its batches."""
    parent, sink = Source(), Sink()
    await served(harness, parent)
    task_id = await harness.create(source(batches=30, hold_at=25), streaming("b", "sink", "a"))
    await harness.until_batches(task_id, "a", 25)
    await harness.worker({"sink": sink})
    await harness.until_batches(task_id, "b", 25)
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 30)


async def test_parent_without_batches_opens_the_gate_when_it_finishes(harness: Harness) -> None:
    await served(harness, Sink())
    task_id = await harness.create(node("a", inline={"batches": 0}), streaming("b", "sink", "a"))
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 0)
    (history,) = await histories(harness, task_id)
    assert signals(history) == []


async def test_repeated_and_invalid_signals_change_nothing(harness: Harness) -> None:
    parent = Source()
    await served(harness, parent, Sink())
    task_id = await harness.create(source(hold_at=0), node("aside"), streaming("b", "sink", "a"))
    await harness.until_node(task_id, "aside", "finished")
    run = await harness.handle(task_id)
    run_id = (await run.describe()).run_id
    for name, epoch in (("nobody", 1), ("a", 0), ("a", 2), ("aside", 1)):
        await run.signal(FIRST_BATCH, FirstBatch(node_id=name, run_id=run_id, epoch=epoch))
    assert (await run.query("status"))["nodes"][2]["status"] == "queued"
    for _ in range(3):
        await run.signal(FIRST_BATCH, FirstBatch(node_id="a", run_id=run_id, epoch=1))
    await harness.until_node(task_id, "b", "running")
    parent.gates["a"].set()
    await finished(harness, task_id)
    await assert_exact(harness, task_id, "b", 5)
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 1


@pytest.mark.slow
async def test_totals_of_many_batches_are_exact(harness: Harness) -> None:
    """The parent and the child fail once."""
    parent = Source()
    parent.gates["a"].set()
    await served(harness, parent, Sink(fail_at=MANY // 3))
    task_id = await harness.create(source(batches=MANY, fail_at=MANY // 2), streaming("b", "sink", "a"))
    assert (await (await harness.handle(task_id)).result()).status is TaskStatus.FINISHED
    await assert_exact(harness, task_id, "b", MANY)
    assert [(await harness.node(task_id, name))["attempt_epoch"] for name in "ab"] == [2, 2]
