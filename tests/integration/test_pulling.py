"""Pulling on real servers: cancels during a wait, and batch events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.worker import Batch
from tests.integration.handlers import ALL, Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node
from tests.integration.test_cancel_terminate_reset import cancelled
from tests.unit.test_handler_hooks import SOON
from tests.unit.test_input_routes import PULL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


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
    late_sec = int(3 * EVENT_TIMEOUT_SEC)
    harness.settings |= {"cancel_grace_sec": late_sec}
    await harness.engine()
    await harness.worker({"quick": Quick(), "silent": WaitingForInput()})
    endless = {
        "input_args": {"eof_on_task_done": False, "backoff_max_ms": late_sec * 1000},
        "input_adapter": PULL,
    }
    if waiting == "puller":
        last = node("z", "quick", "u", inline=endless)
    else:
        last = node("z", "silent", "u")
    task_id = await harness.create(node("u"), last)
    await harness.until_node(task_id, "z", "running")
    await harness.coordinator.cancel_task(task_id)
    await cancelled(harness, task_id)
    assert await harness.statuses(task_id) == {"u": "finished", "z": "cancelled"}


# --- events ---------------------------------------------------------------------------------------------------------


async def test_long_attempt_logs_its_batches_and_a_failed_one_its_failed_batch(harness: Harness) -> None:
    await harness.engine()
    await harness.worker(ALL)
    task_id = await harness.create(
        node("slow", "paced", inline={"batches": 8, "pause": 1}),
        node("bad", "failing", inline={"failures": 9}, allow_failure=True, **SOON),
    )
    assert (await harness.result(task_id)).handled_failures == ["bad"]

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
