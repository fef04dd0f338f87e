"""Recovery after a real process is killed or stopped."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.models import TaskStatus
from flowkit.worker.runner import Worker, WorkerConfig
from tests.integration.handlers import ALL, Polite, PoliteInProcess, polite_function
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node
from tests.integration.streaming import Source

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

NO_RETRIES: dict[str, Any] = {"retry_policy": {"max": 0}}
LEASE_SEC = 4
"""Long enough for a busy machine, whose event loops stand still for a second or two."""
HELD: dict[str, Any] = {"batches": 6, "pause": 0, "hold_at": 2}
"""The input of a node whose first attempt stores two batches and no other one."""


async def assert_every_batch_counts_once(harness: Harness, task_id: str, node_id: str, batches: int) -> None:
    """Check that each batch has one row and one artifact, and that the sum is exact."""
    rows = await harness.rows(task_id, node_id)
    assert Counter(row["batch_uid"] for row in rows) == {f"b{i}": 1 for i in range(batches)}
    assert sum(row["metrics"]["n"] for row in rows) == batches
    query = {"task_id": task_id, "node_id": node_id, "status": "partial"}
    assert await harness.db.artifacts.count_documents(query) == batches


async def test_task_continues_after_its_engine_is_killed(harness: Harness) -> None:
    parent = Source()
    await harness.worker({"source": parent, **ALL})
    killed = harness.engine_process()
    task_id = await harness.create(
        node("a", "source", inline={"batches": 8, "hold_at": 2}, **NO_RETRIES),
        node("b", "quick", "a", **NO_RETRIES),
        node("c", "coordinator_fn", "b", **NO_RETRIES),
    )
    await harness.until_batches(task_id, "a", 2)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    parent.gates["a"].set()
    await harness.until_batches(task_id, "a", 8)
    harness.engine_process()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    nodes = (await harness.document(task_id))["graph"]["nodes"]
    assert [(n["status"], n["attempt_epoch"]) for n in nodes] == [("finished", 1)] * 3
    await assert_every_batch_counts_once(harness, task_id, "a", 8)


async def test_node_of_a_killed_worker_moves_to_another_worker(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    await harness.engine()
    killed = harness.worker_process("Paced")
    task_id = await harness.create(node("a", "paced", inline=HELD, **NO_RETRIES), node("b", "quick", "a"))
    await harness.until_batches(task_id, "a", 2)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    await harness.worker()
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    await assert_every_batch_counts_once(harness, task_id, "a", 6)


async def test_pulling_node_resumes_after_its_worker_is_killed(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = LEASE_SEC
    await harness.engine()
    feeder = harness.worker_process("Quick")
    killed = harness.worker_process("Paced")
    pull = {"input_adapter": "pull.from_artifacts", "hold_at": 5}
    task_id = await harness.create(
        node("up", inline={"batches": 30}),
        node("down", "paced", "up", inline=pull, **NO_RETRIES),
    )
    await harness.until_batches(task_id, "down", 5)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    before = {row["batch_uid"] for row in await harness.rows(task_id, "down")}
    await harness.worker()
    await harness.result(task_id)
    await assert_every_batch_counts_once(harness, task_id, "down", 30)
    redone = {row["batch_uid"] for row in await harness.rows(task_id, "down") if row["attempt_epoch"] > 1}
    assert len(redone & before) <= 1, "a batch with a stored result is not delivered again"
    feeder.terminate()


async def test_stopped_worker_hands_its_node_over_without_using_budget(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = 600
    await harness.engine()
    stopped = harness.worker_process("Paced")
    task_id = await harness.create(node("a", "paced", inline=HELD, **NO_RETRIES))
    await harness.until_batches(task_id, "a", 2)
    await harness.worker()
    stopped.send_signal(signal.SIGTERM)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert stopped.wait(EVENT_TIMEOUT_SEC) == 0
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    await assert_every_batch_counts_once(harness, task_id, "a", 6)


async def test_plain_functions_clean_up_when_their_processes_stop_and_their_nodes_are_handed_over(
    harness: Harness, tmp_path: Path
) -> None:
    harness.settings["lease_ttl_sec"] = 600
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps({"executor": "process", "process_workers": 1}))
    function = ("--function", "polite=tests.integration.handlers:polite_function")
    engine = harness.process("engine", *function)
    workers = [
        harness.worker_process("Polite"),
        harness.process("worker", "--config", str(pool), "tests.integration.handlers:PoliteInProcess"),
    ]
    given = {"folder": str(tmp_path)}
    called = {"io": {"fn": "polite", "fn_args": given}}
    task_id = await harness.create(
        node("a", "polite", inline=given, **NO_RETRIES),
        node("b", "polite_in_process", inline=given, **NO_RETRIES),
        node("c", "coordinator_fn", **called, **NO_RETRIES),
    )
    names = ["function", "polite", "polite_in_process"]
    await until_files(tmp_path, "begun", names)
    for process in (engine, *workers):
        process.send_signal(signal.SIGTERM)
    await until_files(tmp_path, "stops", names)
    assert [process.poll() for process in (engine, *workers)] == [None] * 3
    (tmp_path / "go").touch()
    assert [await asyncio.to_thread(process.wait, EVENT_TIMEOUT_SEC) for process in (engine, *workers)] == [
        0
    ] * 3
    assert files(tmp_path, "clean") == names
    await harness.engine(polite=polite_function)
    await harness.worker({"polite": Polite(), "polite_in_process": PoliteInProcess()})
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert [(await harness.node(task_id, each))["attempt_epoch"] for each in "abc"] == [2] * 3


def files(folder: Path, suffix: str) -> list[str]:
    """Return the names of the files with a suffix."""
    return sorted(each.stem for each in folder.glob(f"*.{suffix}"))


async def until_files(folder: Path, suffix: str, names: list[str]) -> None:
    """Return when the folder has files of these names with a suffix."""

    async def exist() -> bool:
        return files(folder, suffix) == names

    await eventually(exist)


async def test_second_signal_ends_a_worker_at_once(harness: Harness, tmp_path: Path) -> None:
    await harness.engine()
    started = harness.worker_process("Polite")
    await harness.create(node("a", "polite", inline={"folder": str(tmp_path)}))
    await until_files(tmp_path, "begun", ["polite"])
    started.send_signal(signal.SIGINT)
    await until_files(tmp_path, "stops", ["polite"])

    async def ended() -> bool:
        started.send_signal(signal.SIGTERM)  # one that comes together with the first signal does not count
        return started.poll() is not None

    await eventually(ended)
    assert started.wait(EVENT_TIMEOUT_SEC) == 130
    assert not files(tmp_path, "clean")


async def test_worker_with_a_different_database_reports_and_logs_both_names(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.engine()
    other = harness.db.client[f"{harness.database}_other"]
    worker = Worker(db=other, cfg=WorkerConfig(roles=["quick"], queue=harness.queue), handlers=ALL)
    await worker.start()
    try:
        task_id = await harness.create(node("a", **NO_RETRIES))
        document = await harness.until_status(task_id, "failed")
    finally:
        await worker.stop()
    ids = [await TaskStore(db).database_id() for db in (harness.db, other)]
    problem = (
        f"the engine uses the database '{harness.database}' (id {ids[0]}), this worker the database "
        f"'{harness.database}_other' (id {ids[1]}): set the same MONGO_URL and MONGO_DATABASE for both"
    )
    assert document["graph"]["nodes"][0]["last_error"].startswith(f"wrong_database: {problem} (worker ")
    logged = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]
    assert logged == [f"node a of task {task_id} fails: {problem}"]
    await harness.db.client.drop_database(f"{harness.database}_other")
