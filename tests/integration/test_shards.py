"""Nodes with `parallel`: shards on several workers process the batches of one node together."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.activities import role_attempt
from flowkit.activities.batches import puller
from flowkit.errors import ActionRejected
from flowkit.models import TaskStatus
from tests import clocks
from tests.integration.handlers import BREAK_AT, Counted, Failing, Quick, Relay
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node, wait_seconds
from tests.integration.test_continue_as_new import histories, replay

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.worker import Batch, BatchResult
    from flowkit.worker.context import RunContext

pytestmark = pytest.mark.server


class Shared(Quick):
    """Takes a while for each batch, and counts which attempt has processed it.

    The first batches are processed when `together` attempts have one.
    """

    role = "shared"

    def __init__(self, seconds: float = 0.02, together: int = 1) -> None:
        self.seconds = seconds
        self.processed: Counter[int] = Counter()
        self._together = together
        self._begun: set[int] = set()
        self._all_begun = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Wait, and count."""
        self._begun.add(ctx.attempt_epoch)
        if len(self._begun) >= self._together:
            self._all_begun.set()
        await ctx.cancellable(self._all_begun.wait())
        await ctx.cancellable(wait_seconds(self.seconds))
        self.processed[ctx.attempt_epoch] += 1
        return await super().process_batch(batch, ctx)


def wide(node_id: str = "w", source: str = "a", parallel: int = 4, **fields: Any) -> dict[str, Any]:
    inline = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [source], "poll_ms": 50}}
    return node(node_id, "shared", source, inline=inline, parallel=parallel, **fields)


async def test_shards_process_the_batches_of_a_node_together(harness: Harness) -> None:
    engine, shared = await harness.engine(), Shared(together=4)
    await harness.worker({"quick": Quick(), "shared": shared}, concurrency=8)
    task_id = await harness.create(node("a", inline={"batches": 200}), wide(), node("end", "quick", "w"))
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    rows = await harness.rows(task_id, "w")
    assert len(rows) == 200
    assert sum(shared.processed.values()) == 200
    assert len(shared.processed) == 4
    entry = await harness.node(task_id, "w")
    assert (entry["status"], entry["attempt_epoch"]) == ("finished", 5)
    states = [row["status"] async for row in harness.db.node_shards.find({"task_id": task_id})]
    assert states == ["finished"] * 4
    await replay(await histories(harness, task_id))


async def test_batches_of_a_worker_with_a_slow_clock_are_processed_once(
    harness: Harness, tmp_path: Path
) -> None:
    """Its leases have ended long ago by the clock of the worker that joins while it processes the batches."""
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    harness.process(
        "worker", "--concurrency", "4", "tests.integration.handlers:Counted", **clocks.ahead(-300)
    )
    pull = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"], "poll_ms": 50}}
    task_id = await harness.create(
        node("a", inline={"batches": 4}),
        node("w", "counted", "a", inline={**pull, "folder": str(tmp_path)}, parallel=6),
    )

    def begun() -> int:
        return len([*tmp_path.glob("*.begun")])

    async def all_begun() -> bool:
        return begun() == 4

    await eventually(all_begun)
    joined = await harness.worker({"counted": Counted()})

    async def looked() -> bool:
        own = {"task_id": task_id, "worker_id": joined.worker_id}
        rows = [row async for row in harness.db.node_shards.find(own)]
        return begun() > 4 or bool(rows) and all(row["status"] == "finished" for row in rows)

    await eventually(looked)
    (tmp_path / "go").touch()
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert begun() == 4
    claims = [row async for row in harness.db.stream_progress.find({"task_id": task_id})]
    assert {row["fence"] for row in claims} == {1}


async def test_a_worker_that_dies_leaves_its_batches_to_the_others_and_counts_as_one_loss(
    harness: Harness,
) -> None:
    harness.settings["lease_ttl_sec"] = 3
    engine = await harness.engine()
    await harness.worker({"quick": Quick()})
    dying = harness.process("worker", "tests.integration.handlers:Stuck", "--concurrency", "8")
    task_id = await harness.create(
        node("a", inline={"batches": 60}), wide(parallel=8), node("end", "quick", "w")
    )

    async def all_run() -> bool:
        return await harness.db.node_shards.count_documents({"task_id": task_id, "status": "running"}) == 8

    await eventually(all_run)
    await harness.until_batches(task_id, "w", 1)
    dying.kill()
    harness.worker_process("Sharing")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    rows = await harness.rows(task_id, "w")
    assert len({row["batch_uid"] for row in rows}) == len(rows) == 60
    assert any(row.get("fence", 0) > 1 for row in rows)
    await replay(await histories(harness, task_id))


async def test_status_and_details_show_how_far_the_shards_are(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"quick": Quick(), "shared": Shared(0.2)}, concurrency=4)
    task_id = await harness.create(node("a", inline={"batches": 500}), wide(parallel=3))
    await harness.until_batches(task_id, "w", 12)
    printed = await harness.command("status", task_id)
    shown = next(line for line in printed.splitlines() if line.startswith("w "))
    assert re.search(r"3 shards on 1 worker, \d+ of 500, [\d.]+/s, .* left", shown), shown
    details = await (await harness.handle(task_id)).query("__temporal_workflow_metadata")
    assert "3 shards of up to 3" in str(details)
    await harness.coordinator.cancel_task(task_id)
    await harness.coordinator.wait(task_id, EVENT_TIMEOUT_SEC)


async def test_only_one_shard_waits_and_it_is_withdrawn_when_nothing_is_left(harness: Harness) -> None:
    engine, shared = await harness.engine(), Shared(together=3)
    await harness.worker({"quick": Quick()})
    await harness.worker({"shared": shared}, concurrency=3)
    task_id = await harness.create(node("a", inline={"batches": 60}), wide(parallel=100))
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert len(shared.processed) == 3
    history = await (await harness.handle(task_id)).fetch_history()
    scheduled = [
        event.activity_task_scheduled_event_attributes.activity_id
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert [each for each in scheduled if each.startswith("w.")] == ["w.1", "w.2", "w.3", "w.4", "w.5"]
    await replay(await histories(harness, task_id))


async def test_shards_stream_from_a_node_that_runs_and_hand_over_from_time_to_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short its time is, a shard claims batches once before it hands over, so that all are processed."""
    monkeypatch.setattr(role_attempt, "SHARD_SEC", 0.0)
    engine, shared = await harness.engine(), Shared()
    await harness.worker({"paced": Shared(0.02), "shared": shared, "relay": Quick()}, concurrency=8)
    source = node("a", "paced", inline={"batches": 30})
    source["io"]["max_ahead"] = 10
    streaming = wide(parallel=3)
    streaming["io"]["start_when"] = "first_batch"
    task_id = await harness.create(source, streaming)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert len(await harness.rows(task_id, "w")) == 30
    assert len(shared.processed) > 3
    await replay(await histories(harness, task_id))


@pytest.mark.parametrize("permanent", [False, True])
async def test_failures_of_shards_count_for_the_node(harness: Harness, permanent: bool) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "failing": Failing()}, concurrency=4)
    inline = {
        "input_adapter": "pull.from_artifacts",
        "input_args": {"from_nodes": ["a"]},
        "failures": 2,
    }
    retries = {"max": 0 if permanent else 2, "backoff_sec": 0.1}
    task_id = await harness.create(
        node("a", inline={"batches": 20}),
        node("w", "failing", "a", inline=inline, parallel=3, retry_policy=retries),
    )
    ends = TaskStatus.FAILED if permanent else TaskStatus.FINISHED
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is ends
    entry = await harness.node(task_id, "w")
    assert entry["status"] == ends.value
    if permanent:
        assert entry["last_error"].startswith("flaky: as ordered")
    else:
        assert len(await harness.rows(task_id, "w")) == 20
    await replay(await histories(harness, task_id))


async def test_a_wide_node_is_deferred_while_its_last_shard_waits_for_its_retry_and_a_retry_ends_the_wait(
    harness: Harness,
) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "failing": Failing()}, concurrency=4)
    inline = {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": ["a"]}, "failures": 1}
    policy = {"max": 1, "backoff_sec": 3600}
    task_id = await harness.create(
        node("a", inline={"batches": 20}),
        node("w", "failing", "a", inline=inline, parallel=2, retry_policy=policy),
    )
    await harness.until_node(task_id, "w", "deferred", epoch=2)
    await engine.retry_node(task_id, "w")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    rows = await harness.rows(task_id, "w")
    assert (len(rows), (await harness.node(task_id, "w")).get("generation", 0)) == (20, 0)
    await replay(await histories(harness, task_id))


async def test_a_wide_node_is_paused_retried_and_skipped_like_others(harness: Harness) -> None:
    engine, shared = await harness.engine(), Shared(0.1)
    await harness.worker({"quick": Quick(), "shared": shared}, concurrency=4)
    task_id = await harness.create(
        node("a", inline={"batches": 60}), wide(parallel=4), node("open", "approval")
    )
    await harness.until_batches(task_id, "w", 4)
    await engine.pause(task_id, ["node:w"], interrupt=True)
    entry = await harness.until_node(task_id, "w", "deferred")
    await engine.resume(task_id)
    await harness.until_node(task_id, "w", "running", epoch=entry["attempt_epoch"] + 1)
    with pytest.raises(ActionRejected, match="is running; interrupt=true stops its attempt"):
        await engine.skip_node(task_id, "w")
    await engine.retry_node(task_id, "a", interrupt=True)
    shared.seconds = 0.0
    finished = await harness.until_node(task_id, "w", "finished")
    assert finished["generation"] == 1
    rows = await harness.rows(task_id, "w")
    assert len(rows) == 60
    assert min(row["attempt_epoch"] for row in rows) > finished["first_epoch"]
    await engine.decide(task_id, "open", "approve")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    await replay(await histories(harness, task_id))


async def test_a_wide_node_whose_shards_all_wait_runs_no_attempt_and_frees_what_pulls_from_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "_YIELD_AFTER_SEC", 0.2)
    engine = await harness.engine()
    roles: dict[str, Any] = {"relay": Relay(), "shared": Shared()}
    await harness.worker(roles, concurrency=4)
    policy = {"max": 1, "backoff_sec": 3600}
    streaming, last = wide(parallel=2), wide("last", "w", parallel=1)
    for each in (streaming, last):
        each["io"]["start_when"] = "first_batch"
    task_id = await harness.create(
        node("a", "relay", inline={"batches": BREAK_AT + 2}, retry_policy=policy), streaming, last
    )
    for name in ("w", "last"):
        await harness.until_node(task_id, name, "deferred")
    await engine.retry_node(task_id, "a")
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FINISHED
    assert len(await harness.rows(task_id, "last")) == BREAK_AT + 2
    await replay(await histories(harness, task_id))


async def test_a_wide_node_is_cancelled_with_its_task(harness: Harness) -> None:
    engine = await harness.engine()
    await harness.worker({"quick": Quick(), "shared": Shared(0.1)}, concurrency=4)
    task_id = await harness.create(node("a", inline={"batches": 200}), wide())
    await harness.until_batches(task_id, "w", 4)
    await engine.cancel_task(task_id)
    assert await engine.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.CANCELLED
    assert (await harness.node(task_id, "w"))["status"] == "cancelled"
    await replay(await histories(harness, task_id))
