"""Recovery after a real process is killed or stopped."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.world import node

if TYPE_CHECKING:
    from tests.integration.world import World

pytestmark = pytest.mark.server

NO_RETRIES: dict[str, Any] = {"retry_policy": {"max": 0}}


async def assert_every_batch_counts_once(world: World, task_id: str, node_id: str, batches: int) -> None:
    """Check that each batch has one row and one artifact, and that the sum is exact."""
    rows = await world.rows(task_id, node_id)
    assert Counter(row["batch_uid"] for row in rows) == {f"b{i}": 1 for i in range(batches)}
    assert sum(row["metrics"]["n"] for row in rows) == batches
    query = {"task_id": task_id, "node_id": node_id, "status": "partial"}
    assert await world.db.artifacts.count_documents(query) == batches


async def test_an_engine_that_is_killed_goes_on_where_it_was(world: World) -> None:
    await world.worker()
    killed = world.engine_process()
    task_id = await world.create(
        node("a", "paced", inline={"batches": 8, "pause": 0.2}, **NO_RETRIES),
        node("b", "quick", "a", **NO_RETRIES),
        node("c", "coordinator_fn", "b", **NO_RETRIES),
    )
    await world.until_batches(task_id, "a", 2)
    killed.kill()
    killed.wait(10)
    await world.until_batches(task_id, "a", 8)
    world.engine_process()
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    nodes = (await world.document(task_id))["graph"]["nodes"]
    assert [(n["status"], n["attempt_epoch"]) for n in nodes] == [("finished", 1)] * 3
    await assert_every_batch_counts_once(world, task_id, "a", 8)


async def test_a_worker_that_is_killed_loses_its_node_to_another_one(world: World) -> None:
    world.settings["lease_ttl_sec"] = 2
    await world.engine()
    killed = world.worker_process("Paced")
    task_id = await world.create(
        node("a", "paced", inline={"batches": 6, "pause": 0.4}, **NO_RETRIES), node("b", "quick", "a")
    )
    await world.until_batches(task_id, "a", 2)
    killed.kill()
    killed.wait(10)
    await world.worker()
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 2
    await assert_every_batch_counts_once(world, task_id, "a", 6)


async def test_a_pulling_node_resumes_after_its_worker_was_killed(world: World) -> None:
    world.settings["lease_ttl_sec"] = 2
    await world.engine()
    feeder = world.worker_process("Quick")
    killed = world.worker_process("Paced")
    pull = {"input_adapter": "pull.from_artifacts"}
    task_id = await world.create(
        node("up", inline={"batches": 30}),
        node("down", "paced", "up", inline=pull, **NO_RETRIES),
    )
    await world.until_batches(task_id, "down", 5)
    killed.kill()
    killed.wait(10)
    before = {row["batch_uid"] for row in await world.rows(task_id, "down")}
    await world.worker()
    await world.result(task_id)
    await assert_every_batch_counts_once(world, task_id, "down", 30)
    redone = {row["batch_uid"] for row in await world.rows(task_id, "down") if row["attempt_epoch"] > 1}
    assert len(redone & before) <= 1, "a batch with a stored result is not delivered again"
    feeder.terminate()


async def test_a_worker_that_is_stopped_hands_its_node_over_at_no_charge(world: World) -> None:
    world.settings["lease_ttl_sec"] = 600
    await world.engine()
    stopped = world.worker_process("Paced")
    task_id = await world.create(node("a", "paced", inline={"batches": 6, "pause": 0.4}, **NO_RETRIES))
    await world.until_batches(task_id, "a", 2)
    await world.worker()
    stopped.send_signal(signal.SIGTERM)
    assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert stopped.wait(20) == 0
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 2
    await assert_every_batch_counts_once(world, task_id, "a", 6)


async def test_a_worker_without_the_engines_database_is_told_so(world: World) -> None:
    await world.engine()
    world.environment["MONGO_DATABASE"] = f"{world.database}_other"
    world.worker_process("Quick")
    task_id = await world.create(node("a", **NO_RETRIES))
    document = await world.until_status(task_id, "failed")
    failed = document["graph"]["nodes"][0]
    assert failed["last_error"].startswith("wrong_database: the engine uses the database with id ")
    await world.db.client.drop_database(f"{world.database}_other")
