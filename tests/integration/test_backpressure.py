"""A parent with `max_ahead` on real servers: a child that runs holds it, and a child that does not run never does."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskCatalog, TaskClient
from flowkit.models import TaskStatus
from flowkit.reading.state import Servers, TaskReader
from flowkit.worker import Batch, BatchResult
from tests.integration.handlers import Paced, Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node, wait_seconds
from tests.integration.test_cancel_terminate_reset import cancelled

if TYPE_CHECKING:
    from flowkit.worker.context import RunContext
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

BATCHES = 40
NUMBERS = [f"b{number}" for number in range(BATCHES)]


class Source(Quick):
    """Waits before its second batch until the child runs, and records its lead over the child at every later batch."""

    role = "source"

    def __init__(self, harness: Harness, child: Sink) -> None:
        self._claims = harness.db.stream_progress
        self._child = child
        self.leads: list[int] = []

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        stored = batch.payload["number"]
        if stored:
            await self._child.began.wait()
            claims = {"task_id": ctx.task_id, "consumer_node": "child", "from_node": "parent"}
            self.leads.append(stored - await self._claims.count_documents(claims))
        return await super().process_batch(batch, ctx)


class AfterChild(Quick):
    """Waits before its second batch until the child runs."""

    role = "source"

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        if batch.payload["number"] == 1:
            await self._harness.until_node(ctx.task_id, "child", "running")
        return await super().process_batch(batch, ctx)


class Sink(Quick):
    """Waits in its first batch until the test releases it."""

    role = "sink"

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.released = asyncio.Event()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        self.began.set()
        await ctx.cancellable(self.released.wait())
        return await super().process_batch(batch, ctx)


class Interrupted(Sink):
    """Fails in its first batch, as soon as the test releases it."""

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        await super().process_batch(batch, ctx)
        return BatchResult(success=ctx.attempt_epoch > 1, reason_code="flaky", error="as ordered")


def parent(role: str = "source", max_ahead: int = 3, batches: int = BATCHES, **fields: Any) -> dict[str, Any]:
    """Return a node that a streaming child holds."""
    made = node("parent", role, inline={"batches": batches}, **fields)
    made["io"]["max_ahead"] = max_ahead
    return made


def child(role: str = "sink", **fields: Any) -> dict[str, Any]:
    """Return a node that starts on the first batch of the parent and pulls from it."""
    made = node("child", role, "parent", inline={"input_adapter": "pull.from_artifacts"}, **fields)
    made["io"]["start_when"] = "first_batch"
    return made


async def start(harness: Harness, sink: Sink, *, processes: int = 1, **fields: Any) -> tuple[str, Source]:
    """Start a task whose parent runs in the same worker as its child or in another one."""
    source = Source(harness, sink)
    await harness.engine()
    if processes == 1:
        await harness.worker({"source": source, "sink": sink})
    else:
        await harness.worker({"source": source})
        await harness.worker({"sink": sink})
    return await harness.create(parent(**fields), child()), source


async def stored(harness: Harness, task_id: str, node_id: str = "parent") -> list[str]:
    """Return the uids of the stored batches."""
    key = {"task_id": task_id, "node_id": node_id, "status": "partial"}
    return [row["batch_uid"] async for row in harness.db.artifacts.find(key)]


async def held(harness: Harness, task_id: str, max_ahead: int = 3) -> int:
    """Wait until the parent is as far ahead of the child as it may be, and return its number of batches."""

    async def look() -> int | None:
        claims = await harness.db.stream_progress.count_documents({"task_id": task_id})
        count = len(await stored(harness, task_id))
        return count if claims and count == claims + max_ahead else None

    count = await eventually(look)
    await wait_seconds(1.0)
    assert len(await stored(harness, task_id)) == count, "several reads later"
    return count


async def finished(harness: Harness, task_id: str, batches: int = BATCHES) -> None:
    """Wait for the end of the task, and check that both nodes have each batch once."""
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    uids = sorted(f"b{number}" for number in range(batches))
    for node_id in ("parent", "child"):
        assert sorted(await stored(harness, task_id, node_id)) == uids
        assert sorted(row["batch_uid"] for row in await harness.rows(task_id, node_id)) == uids


@pytest.mark.parametrize("processes", [1, 2])
async def test_lead_over_a_running_child_never_exceeds_the_limit(harness: Harness, processes: int) -> None:
    sink = Sink()
    task_id, source = await start(harness, sink, processes=processes)
    await held(harness, task_id)
    sink.released.set()
    await finished(harness, task_id)
    assert max(source.leads) == 2, "the batch that it processes is the third one"
    assert len(source.leads) == BATCHES - 1


async def test_status_shows_for_which_node_a_parent_waits(harness: Harness) -> None:
    sink = Sink()
    task_id, _ = await start(harness, sink)
    await held(harness, task_id)
    text = "node child to claim batches (io.max_ahead is 3)"
    client = await harness.client()
    tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue)
    servers = Servers(temporal=client, tasks=tasks, catalog=TaskCatalog(harness.db), db=harness.db)

    async def shown() -> dict[str, str]:
        view = await (await TaskReader.at(servers, task_id)).view()
        return {node.node_id: node.waits_for for node in view.nodes}

    async def waits(for_: str) -> bool:
        return await shown() == {"parent": for_, "child": ""}

    await eventually(partial(waits, text))
    sink.released.set()
    await finished(harness, task_id)
    assert await waits("")


async def test_killed_child_stops_holding_its_parent(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = 3
    await harness.engine()
    await harness.worker({"source": AfterChild(harness)})
    killed = harness.worker_process("Paced")
    held = child("paced")
    held["io"]["input_inline"]["hold_at"] = 5
    task_id = await harness.create(parent(batches=60), held)
    await harness.until_batches(task_id, "child", 5)
    assert await harness.statuses(task_id) == {"parent": "running", "child": "running"}
    killed.kill()
    await asyncio.to_thread(killed.wait)
    await harness.until_node(task_id, "parent", "finished")
    assert len(await stored(harness, task_id)) == 60
    assert (await harness.node(task_id, "child"))["status"] != "finished"
    harness.worker_process("Paced")
    await finished(harness, task_id, 60)


async def test_deferred_child_does_not_hold_its_parent(harness: Harness) -> None:
    sink = Interrupted()
    source = Source(harness, sink)
    await harness.engine()
    await harness.worker({"source": source, "sink": sink})
    policy = {"max": 1, "backoff_sec": 600}
    task_id = await harness.create(parent(), child(retry_policy=policy))
    assert await held(harness, task_id) < BATCHES
    sink.released.set()
    await harness.until_node(task_id, "parent", "finished")
    assert (await harness.node(task_id, "child"))["status"] == "deferred"
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)


async def test_paused_child_holds_its_parent_until_it_is_resumed(harness: Harness) -> None:
    sink = Sink()
    task_id, _ = await start(harness, sink, max_ahead=3)
    before = await held(harness, task_id)
    await harness.coordinator.pause(task_id, ["node:child"], interrupt=True)
    await harness.until_node(task_id, "child", "deferred")

    async def shown() -> bool:
        return (await harness.node(task_id, "child")).get("paused") is True

    await eventually(shown)
    assert await held(harness, task_id) < before + 3 < BATCHES
    sink.released.set()
    await harness.coordinator.resume(task_id)
    await finished(harness, task_id)


async def test_paused_child_holds_no_parent_that_a_failed_task_lets_finish(harness: Harness) -> None:
    sink = Sink()
    await harness.engine()
    await harness.worker({"source": Source(harness, sink), "sink": sink})
    nodes = [parent(), child(), {"node_id": "approval", "type": "approval"}]
    task_id = await harness.create(*nodes, on_node_failure="finish_running")
    await sink.began.wait()
    await harness.coordinator.pause(task_id, ["node:child"], interrupt=True)
    await harness.until_node(task_id, "child", "deferred")
    await held(harness, task_id)
    await harness.coordinator.decide(task_id, "approval", "reject")
    assert await harness.coordinator.wait(task_id, EVENT_TIMEOUT_SEC) is TaskStatus.FAILED
    assert await harness.statuses(task_id) == {
        "parent": "finished",
        "child": "cancelled",
        "approval": "failed",
    }


async def test_parent_and_child_of_one_role_with_one_slot_finish(harness: Harness) -> None:
    await harness.engine()
    await harness.worker({"quick": Quick()}, concurrency=1)
    task_id = await harness.create(parent("quick", 1), child("quick"))
    await finished(harness, task_id)


@pytest.mark.slow
async def test_middle_stage_is_held_and_holds_its_own_parent(harness: Harness) -> None:
    sink = Sink()
    await harness.engine()
    await harness.worker({"quick": Quick(), "sink": sink})
    middle = node("middle", "quick", "parent", inline={"input_adapter": "pull.from_artifacts"})
    middle["io"] |= {"start_when": "first_batch", "max_ahead": 2}
    last = child()
    last["depends_on"] = ["middle"]
    task_id = await harness.create(parent("quick", 2, batches=400), middle, last)
    await asyncio.wait_for(sink.began.wait(), EVENT_TIMEOUT_SEC)
    assert (await harness.node(task_id, "child"))["status"] == "running"
    sink.released.set()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    for node_id in ("parent", "middle", "child"):
        assert len(set(await stored(harness, task_id, node_id))) == 400


async def test_worker_renews_the_lease_in_the_document_before_it_expires(harness: Harness) -> None:
    """Otherwise, the child would seem to have lost its worker. The setting `hb_interval_sec` is 20 s."""
    harness.settings["lease_ttl_sec"] = 15
    await harness.engine()
    await harness.worker({"paced": Paced()})
    task_id = await harness.create(node("a", "paced", inline={"pause": 600}))
    expires = (await harness.until_node(task_id, "a", "running"))["lease"]["deadline_ts_ms"]

    async def renewed() -> bool:
        return bool((await harness.node(task_id, "a"))["lease"]["deadline_ts_ms"] > expires)

    await eventually(renewed)
    assert time.time() * 1000 < expires
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)


async def test_held_parent_ends_at_its_time_limit(harness: Harness) -> None:
    sink = Sink()
    task_id, _ = await start(harness, sink, timeout_sec=4, retry_policy={"max": 0})
    await held(harness, task_id)
    failed = await harness.until_node(task_id, "parent", "failed")
    assert failed["last_error"].startswith("timeout")
    assert len(await stored(harness, task_id)) < BATCHES


async def test_held_parent_ends_at_a_cancel(harness: Harness) -> None:
    harness.settings["cancel_grace_sec"] = 60
    sink = Sink()
    task_id, _ = await start(harness, sink)
    count = await held(harness, task_id)
    await harness.coordinator.cancel_task(task_id)
    await asyncio.wait_for(cancelled(harness, task_id), EVENT_TIMEOUT_SEC)
    assert len(await stored(harness, task_id)) == count
