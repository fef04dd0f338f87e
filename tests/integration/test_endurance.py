"""Many batches while workers are killed, block, or resume after their lease has expired."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit import WorkerConfig
from flowkit.models import TaskStatus
from flowkit.worker import Worker
from tests.integration.handlers import ConcurrencyCounter, Cruncher, LoopBlocker
from tests.integration.harness import ROOT, eventually, node

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

LARGE = bool(os.environ.get("FLOWKIT_LARGE"))
BATCHES = 5_000 if LARGE else 150
"""Batches in each of three stages; `make large` runs the large case."""

PAUSE_SEC = 0.0 if LARGE else 0.03
"""How long a batch takes, so that a node runs when its worker is killed."""

TIMEOUT_SEC = 900.0 if LARGE else 180.0
SOON = {"retry_policy": {"max": 3, "backoff_sec": 0.2}}


def pulling(source: str) -> dict[str, Any]:
    """Return the input of a node that pulls from one node."""
    return {"input_adapter": "pull.from_artifacts", "input_args": {"from_nodes": [source]}}


async def finished(harness: Harness, task_id: str) -> None:
    """Wait for the end of a long task."""
    result = await asyncio.wait_for((await harness.handle(task_id)).result(), TIMEOUT_SEC)
    assert result.status is TaskStatus.FINISHED


async def until_stored(harness: Harness, task_id: str, node_id: str, count: int) -> None:
    """Wait until the node has stored `count` batches."""

    async def look() -> bool:
        key = {"task_id": task_id, "node_id": node_id, "status": "partial"}
        return bool(await harness.db.artifacts.count_documents(key) >= count)

    await eventually(look, timeout_sec=TIMEOUT_SEC)


async def kill_and_replace(harness: Harness, process: ForkedProcess, *handlers: str) -> None:
    """Kill a worker, as a crash would, and start another one."""
    process.kill()
    await asyncio.to_thread(process.wait)
    harness.worker_process(*handlers)


async def assert_each_batch_once(harness: Harness, task_id: str, *nodes: str) -> None:
    """Check that the metrics and artifacts of each node contain every number exactly once."""
    for node_id in nodes:
        rows = await harness.rows(task_id, node_id)
        assert Counter(row["metrics"]["number"] for row in rows) == Counter(range(BATCHES)), node_id
        assert not [row for row in rows if row["failed"]]
        key = {"task_id": task_id, "node_id": node_id, "status": "partial"}
        stored = [partial["meta"]["number"] async for partial in harness.db.artifacts.find(key)]
        assert Counter(stored) == Counter(range(BATCHES)), node_id


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_SEC + 60)
async def test_three_stages_process_every_batch_once_under_kills_and_failures(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = 4
    await harness.engine()
    first = harness.worker_process("Relay")
    task_id = await harness.create(
        node("extract", "relay", inline={"batches": BATCHES}, **SOON),
        node("enrich", "relay", "extract", inline=pulling("extract") | {"pause": PAUSE_SEC}, **SOON),
        node("group", "relay", "enrich", inline=pulling("enrich") | {"pause": PAUSE_SEC}, **SOON),
    )
    await until_stored(harness, task_id, "enrich", BATCHES // 3)
    await kill_and_replace(harness, first, "Relay")
    second = harness.worker_process("Relay")
    await until_stored(harness, task_id, "group", BATCHES // 3)
    holder = (await harness.node(task_id, "group"))["lease"]["worker_id"]
    assert holder
    await kill_and_replace(harness, second, "Relay")
    await finished(harness, task_id)
    await assert_each_batch_once(harness, task_id, "extract", "enrich", "group")
    epochs = {n["node_id"]: n["attempt_epoch"] for n in (await harness.document(task_id))["graph"]["nodes"]}
    assert epochs["extract"] == 2, "one failure"
    assert epochs["enrich"] == 3, "one failure, one kill"
    assert epochs["group"] >= 2, "one failure, and a kill when the other worker had it"


def streaming(source: str, **more: Any) -> dict[str, Any]:
    """Return the `io` of a node that starts on the first batch of a node and pulls from it."""
    return {"input_inline": pulling(source), "start_when": "first_batch", **more}


@pytest.mark.slow(30)
@pytest.mark.timeout(TIMEOUT_SEC + 60)
@pytest.mark.parametrize("max_ahead", [None, 50] if LARGE else [50])
async def test_streaming_stages_process_every_batch_once_under_kills_and_failures(
    harness: Harness, max_ahead: int | None
) -> None:
    """The stages run at the same time in two processes. With `max_ahead`, the faster ones wait for the slower ones."""
    harness.settings["lease_ttl_sec"] = 4
    limit = {} if max_ahead is None else {"max_ahead": max_ahead}
    await harness.engine()
    workers = [harness.worker_process("Relay"), harness.worker_process("Relay")]
    task_id = await harness.create(
        node("extract", "relay", **SOON) | {"io": {"input_inline": {"batches": BATCHES}, **limit}},
        node("enrich", "relay", "extract", **SOON) | {"io": streaming("extract", **limit)},
        node("group", "relay", "enrich", **SOON) | {"io": streaming("enrich")},
    )
    for share, worker in ((4, workers[0]), (2, workers[1])):
        await until_stored(harness, task_id, "group", BATCHES // share)
        await kill_and_replace(harness, worker, "Relay")
    await finished(harness, task_id)
    await assert_each_batch_once(harness, task_id, "extract", "enrich", "group")


async def test_handler_that_blocks_its_loop_for_longer_than_its_lease_keeps_its_node(
    harness: Harness,
) -> None:
    harness.settings["lease_ttl_sec"] = 4
    await harness.engine()
    await harness.worker({"quick": LoopBlocker()})
    task_id = await harness.create(node("a", "quick", inline={"pause": 6.5}, retry_policy={"max": 0}))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 1


async def test_paused_worker_loses_its_node_and_writes_nothing_when_it_resumes(
    harness: Harness,
) -> None:
    harness.settings["lease_ttl_sec"] = 3
    await harness.engine()
    resumed_worker = harness.worker_process("Paced")
    task_id = await harness.create(node("a", "paced", inline={"batches": 4, "pause": 1.5}))
    await harness.until_batches(task_id, "a", 2)
    lost = (await harness.node(task_id, "a"))["lease"]["worker_id"]
    resumed_worker.send_signal(signal.SIGSTOP)
    harness.worker_process("Paced")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    before = await everything(harness, task_id)
    resumed_worker.send_signal(signal.SIGCONT)
    other = await harness.create(node("b", "paced"), node("c", "paced"), node("d", "paced"))
    assert (await harness.result(other)).status is TaskStatus.FINISHED
    await until_idle(harness, resumed_worker, lost)
    assert await everything(harness, task_id) == before
    assert lost not in {row["worker_id"] for row in before["artifacts"]}
    assert {row["attempt_epoch"] for row in before["metrics_raw"]} == {2}


async def everything(harness: Harness, task_id: str) -> dict[str, list[dict[str, Any]]]:
    """Return the stored documents of a task."""
    collections = ("artifacts", "metrics_raw", "stream_progress")
    found = {
        name: [row async for row in harness.db[name].find({"task_id": task_id}).sort("_id", 1)]
        for name in collections
    }
    return {**found, "tasks": [await harness.document(task_id)]}


async def until_idle(harness: Harness, process: ForkedProcess, worker_id: str) -> None:
    """Wait until the resumed worker has run a new attempt, which shows that its earlier attempts have ended."""
    assert process.poll() is None

    async def runs_something_new() -> bool:
        task_id = await harness.create(node("probe", "paced"))
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
        lease: str = (await harness.node(task_id, "probe"))["lease"]["worker_id"]
        return lease == worker_id

    await eventually(runs_something_new, timeout_sec=120)


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other processes import the handlers of these tests."""
    monkeypatch.syspath_prepend(str(ROOT))


async def process_worker(harness: Harness, handler: Cruncher) -> Worker:
    """Start a worker that computes in processes."""
    cfg = WorkerConfig(roles=["cruncher"], queue=harness.queue, executor="process", max_concurrent=2)
    worker = Worker(db=harness.db, cfg=cfg, handlers={"cruncher": handler})
    await worker.start()
    return worker


@pytest.mark.usefixtures("_importable")
async def test_plain_functions_run_in_their_own_processes(harness: Harness) -> None:
    await harness.engine()
    worker = await process_worker(harness, Cruncher())
    task_id = await harness.create(node("a", "cruncher", inline={"batches": 3}))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    metrics = [row["metrics"] for row in await harness.rows(task_id, "a")]
    assert os.getpid() not in {m["pid"] for m in metrics}
    assert sorted(m["done"] for m in metrics) == [1, 2, 3]
    await worker.stop()


@pytest.mark.usefixtures("_importable")
async def test_crashed_process_costs_a_retry_and_its_pool_is_replaced(harness: Harness) -> None:
    await harness.engine()
    worker = await process_worker(harness, Cruncher())
    task_id = await harness.create(node("a", "cruncher", inline={"die": True}, **SOON))
    failed = await harness.until_node(task_id, "a", "deferred")
    assert failed["last_error"].startswith("worker_process_died")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    await worker.stop()


@pytest.mark.usefixtures("_importable")
async def test_function_in_another_process_sees_the_cancel_of_its_run(harness: Harness) -> None:
    await harness.engine()
    worker = await process_worker(harness, Cruncher())
    task_id = await harness.create(node("a", "cruncher", inline={"until_cancelled": True}))
    await harness.until_node(task_id, "a", "running")
    await harness.coordinator.cancel_task(task_id, reason="enough")
    document = await harness.until_status(task_id, "cancelled")
    assert document["graph"]["nodes"][0]["status"] == "cancelled"
    await worker.stop()


async def test_every_role_has_its_own_slots(harness: Harness) -> None:
    await harness.engine()
    handlers = {"slow": ConcurrencyCounter("slow"), "fast": ConcurrencyCounter("fast")}
    cfg = WorkerConfig(roles=["slow", "fast"], queue=harness.queue, max_concurrent={"slow": 1, "fast": 2})
    worker = Worker(db=harness.db, cfg=cfg, handlers=dict(handlers))
    await worker.start()
    task_id = await harness.create(*(node(f"{role}{i}", role) for role in handlers for i in range(4)))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (handlers["slow"].most, handlers["fast"].most) == (1, 2)
    await worker.stop()
