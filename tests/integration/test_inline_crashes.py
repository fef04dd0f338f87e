"""Inline attempts while engines are killed or frozen: every batch counts exactly once."""

from __future__ import annotations

import random
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node, wait_seconds
from tests.integration.test_inline_roles import ONCE, chain, counts
from tests.integration.test_process_failures import assert_every_batch_counts_once

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

KILLS = 4
LENGTH = 20


@pytest.mark.parametrize("batches", [1, 3])
async def test_attempt_of_a_killed_engine_counts_nothing_twice(harness: Harness, batches: int) -> None:
    killed = harness.engine_process("InlineQuick")
    loaded = {"noted": True, "first_pause": 1.8, "batches": batches}
    task_id = await harness.create(
        node("a", "inline", inline=loaded, **ONCE), node("b", "inline", "a", **ONCE)
    )
    await eventually(lambda: harness.db.notes.find_one({"node_id": "a"}))
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    harness.engine_process("InlineQuick")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] >= 2, (
        "3 if a busy machine runs it as an ordinary one"
    )
    await assert_every_batch_counts_once(harness, task_id, "a", batches)


@pytest.mark.slow(50)
async def test_engines_killed_at_any_point_count_nothing_twice(harness: Harness) -> None:
    chance = random.Random(harness.queue)
    task_id = await harness.create(*chain(LENGTH, inline={"pause": 0.1, "batches": 2}, **ONCE))
    for _ in range(KILLS):
        engine = harness.engine_process("InlineQuick")
        done = await finished_nodes(harness, task_id)
        await eventually(partial(more_finished, harness, task_id, done))
        await wait_seconds(chance.uniform(0.0, 0.5))
        engine.kill()
        engine.wait(EVENT_TIMEOUT_SEC)
        await harness.release_tasks()
    harness.engine_process("InlineQuick")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    for number in range(LENGTH):
        await assert_every_batch_counts_once(harness, task_id, f"n{number}", 2)
    finals = [
        row async for row in harness.db.metrics_raw.find({"task_id": task_id, "batch_uid": "__final__"})
    ]
    markers = {"task_id": task_id, "status": "complete"}
    assert (len(finals), await harness.db.artifacts.count_documents(markers)) == (LENGTH, LENGTH)


async def test_handler_that_kills_its_process_uses_a_loss_instead_of_every_engine(harness: Harness) -> None:
    task_id = await harness.create(node("a", "inline", inline={"deadly": 1}, **ONCE))
    assert harness.engine_process("InlineDeadly").wait(EVENT_TIMEOUT_SEC) == 9
    harness.engine_process("InlineDeadly")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    assert await counts(harness, task_id) == (1, 1), "the loss, and the ordinary attempt after it"
    await assert_every_batch_counts_once(harness, task_id, "a", 1)


async def finished_nodes(harness: Harness, task_id: str) -> int:
    """Return how many nodes of the task have finished."""
    document: dict[str, Any] = await harness.db.tasks.find_one({"id": task_id}) or {}
    nodes = document.get("graph", {}).get("nodes", [])
    return sum(each["status"] == "finished" for each in nodes)


async def more_finished(harness: Harness, task_id: str, before: int) -> bool:
    """Return whether more nodes have finished, or all have."""
    return await finished_nodes(harness, task_id) > min(before, LENGTH - 1)


@pytest.mark.nightly
async def test_engine_that_was_frozen_beyond_its_workflow_task_does_not_disturb_the_next_attempt(
    harness: Harness,
) -> None:
    """The server may give the ordinary attempt that follows to the frozen engine as well."""
    harness.settings["lease_ttl_sec"] = 5.0
    frozen = harness.engine_process("InlineQuick")
    loaded = {"noted": True, "first_pause": 1.8, "pause": 0.3, "batches": 2}
    task_id = await harness.create(
        node("a", "inline", inline=loaded, **ONCE), node("b", "inline", "a", **ONCE)
    )
    first: Any = await eventually(lambda: harness.db.notes.find_one({"node_id": "a"}))
    frozen.send_signal(signal.SIGSTOP)
    harness.engine_process("InlineQuick")
    await eventually(lambda: harness.db.notes.find_one({"node_id": "a", "epoch": {"$gt": 1}}))
    frozen.send_signal(signal.SIGCONT)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    found = await harness.node(task_id, "a")
    assert (found["status"], found["attempt_epoch"] >= 2) == ("finished", True)
    assert found["lease"]["worker_id"] != first["worker_id"]
    await assert_every_batch_counts_once(harness, task_id, "a", 2)
