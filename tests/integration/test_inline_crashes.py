"""Inline attempts while engines are killed or frozen: every batch counts exactly once."""

from __future__ import annotations

import random
import signal
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.harness import eventually, node, wait_seconds
from tests.integration.test_inline_roles import ONCE, chain
from tests.integration.test_process_failures import assert_every_batch_counts_once

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

KILLS = 4
LENGTH = 20
INSTANT = 250


@pytest.mark.parametrize("batches", [1, 3])
async def test_attempt_of_a_killed_engine_counts_nothing_twice(harness: Harness, batches: int) -> None:
    killed = harness.engine_process("InlineQuick")
    loaded = {"noted": True, "first_pause": 1.8, "batches": batches}
    task_id = await harness.create(
        node("a", "inline", inline=loaded, **ONCE), node("b", "inline", "a", **ONCE)
    )
    await eventually(lambda: harness.db.notes.find_one({"node_id": "a"}))
    killed.kill()
    killed.wait(10)
    harness.engine_process("InlineQuick")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] >= 2, (
        "3 if a busy machine runs it as an ordinary one"
    )
    await assert_every_batch_counts_once(harness, task_id, "a", batches)


async def test_engines_killed_at_any_point_count_nothing_twice(harness: Harness) -> None:
    chance = random.Random(harness.queue)
    task_id = await harness.create(*chain(LENGTH, inline={"pause": 0.1, "batches": 2}, **ONCE))
    for _ in range(KILLS):
        engine = harness.engine_process("InlineQuick")
        done = await finished_nodes(harness, task_id)
        await eventually(partial(more_finished, harness, task_id, done))
        await wait_seconds(chance.uniform(0.0, 0.5))
        engine.kill()
        engine.wait(10)
    harness.engine_process("InlineQuick")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    for number in range(LENGTH):
        await assert_every_batch_counts_once(harness, task_id, f"n{number}", 2)
    finals = [
        row async for row in harness.db.metrics_raw.find({"task_id": task_id, "batch_uid": "__final__"})
    ]
    markers = {"task_id": task_id, "status": "complete"}
    assert (len(finals), await harness.db.artifacts.count_documents(markers)) == (LENGTH, LENGTH)


async def test_attempts_that_begin_at_their_end_count_nothing_twice_when_their_engine_is_killed(
    harness: Harness,
) -> None:
    task_id = await harness.create(*({**each, "type": "instant"} for each in chain(INSTANT)))
    for share in (0.2, 0.6):
        engine = harness.engine_process("InlineInstant")
        await eventually(partial(more_finished, harness, task_id, int(INSTANT * share), INSTANT))
        engine.kill()
        engine.wait(10)
    harness.engine_process("InlineInstant")
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    rows = [row async for row in harness.db.metrics_raw.find({"task_id": task_id})]
    artifacts = [row async for row in harness.db.artifacts.find({"task_id": task_id})]
    nodes = {each["node_id"]: each for each in (await harness.document(task_id))["graph"]["nodes"]}
    assert Counter(row["batch_uid"] for row in rows) == {"b0": INSTANT, "__final__": INSTANT}
    assert Counter(row["status"] for row in artifacts) == {"partial": INSTANT, "complete": INSTANT}
    for row in (*rows, *artifacts):
        assert row["attempt_epoch"] == nodes[row["node_id"]]["attempt_epoch"]
        assert row.get("lease_id") in (None, nodes[row["node_id"]]["lease"]["lease_id"])


async def finished_nodes(harness: Harness, task_id: str) -> int:
    """Return how many nodes of the task have finished."""
    document: dict[str, Any] = await harness.db.tasks.find_one({"id": task_id}) or {}
    nodes = document.get("graph", {}).get("nodes", [])
    return sum(each["status"] == "finished" for each in nodes)


async def more_finished(harness: Harness, task_id: str, before: int, length: int = LENGTH) -> bool:
    """Return whether more nodes have finished, or all have."""
    return await finished_nodes(harness, task_id) > min(before, length - 1)


async def test_engine_that_was_frozen_beyond_its_workflow_task_does_not_disturb_the_next_attempt(
    harness: Harness,
) -> None:
    frozen = harness.engine_process("InlineQuick")
    loaded = {"noted": True, "first_pause": 1.8, "pause": 0.3, "batches": 2}
    task_id = await harness.create(
        node("a", "inline", inline=loaded, **ONCE), node("b", "inline", "a", **ONCE)
    )
    first: Any = await eventually(lambda: harness.db.notes.find_one({"node_id": "a"}))
    frozen.send_signal(signal.SIGSTOP)
    harness.engine_process("InlineQuick")
    await eventually(lambda: harness.db.notes.find_one({"node_id": "a", "epoch": 2}))
    frozen.send_signal(signal.SIGCONT)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    found = await harness.node(task_id, "a")
    assert (found["status"], found["attempt_epoch"] >= 2) == ("finished", True)
    assert found["lease"]["worker_id"] != first["worker_id"]
    await assert_every_batch_counts_once(harness, task_id, "a", 2)
