"""What handlers do with params and variables, on real servers, if their processes die between two writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from flowkit.models import TaskStatus
from tests.integration.handlers import InlineTallying, Tallying
from tests.integration.harness import EVENT_TIMEOUT_SEC, node
from tests.integration.test_inline_roles import ONCE, attempts

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    "engine_dies", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["worker", "worker and engine"]
)
async def test_increments_count_once_after_the_end_of_a_node_killed_its_process(
    harness: Harness, engine_dies: bool
) -> None:
    harness.settings["lease_ttl_sec"] = 4
    worker = harness.worker_process("Dying")
    engine = harness.engine_process("InlineDying") if engine_dies else None
    if engine is None:
        await harness.engine(handlers={"inline": InlineTallying()})
    graph = {"nodes": [node("native", "tallying", **ONCE), node("local", "inline", "native", **ONCE)]}
    task_id = await harness.coordinator.create_task(params={"day": "2026-01-31"}, graph=graph)
    assert await asyncio.to_thread(worker.wait, EVENT_TIMEOUT_SEC) == 9
    await harness.worker({"tallying": Tallying()})
    if engine is not None:
        assert await asyncio.to_thread(engine.wait, EVENT_TIMEOUT_SEC) == 9
        await harness.engine(handlers={"inline": InlineTallying()})
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    epochs = {"native": ("finished", 2), "local": ("finished", 1 + engine_dies)}
    assert await attempts(harness, task_id) == epochs
    assert await harness.coordinator.vars(task_id) == {
        "seen": {"native": ["2026-01-31", 0], "local": ["2026-01-31", 0]},
        "done": 2,
        "by": {"native": 2, "local": 2},
    }
