"""A native parent with `max_ahead` and an external child."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.bridge.test_streaming import Pair
from tests.integration.harness import eventually, wait_seconds
from tests.integration.streaming import source, streaming

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks

pytestmark = pytest.mark.server

MAX_AHEAD = 2


class SlowChild(Pair):
    """The external child waits in its second batch until the test releases it."""

    def __init__(self, external: ExternalTasks) -> None:
        super().__init__(external, "b")
        self.released = asyncio.Event()

    async def _pass_on(self, payload: dict[str, Any], run: Any) -> Any:
        if payload["meta"]["number"] == 1:
            await run.cancellable(self.released.wait())
        return super()._pass_on(payload, run)


async def lead(external: ExternalTasks, task_id: str) -> int:
    """Return how many batches of the parent the child has not claimed."""
    stored = await external.db.artifacts.count_documents(
        {"task_id": task_id, "node_id": "a", "status": "partial"}
    )
    claims: int = await external.db.stream_progress.count_documents({"task_id": task_id, "from_node": "a"})
    return int(stored) - claims


async def test_external_child_holds_its_native_parent(external: ExternalTasks) -> None:
    pair = SlowChild(external)
    await pair.start()
    parent = source(batches=30)
    parent["io"]["max_ahead"] = MAX_AHEAD
    task_id = await external.create(parent, streaming("b", external.other_role, "a"))
    await external.until_node(task_id, "b", "running")
    await external.until_batches(task_id, "b", 1)
    pair.open()

    async def held() -> bool:
        return await lead(external, task_id) == MAX_AHEAD

    await eventually(held)
    await wait_seconds(1.0)
    assert await lead(external, task_id) == MAX_AHEAD, "several reads later"
    assert (await external.node(task_id, "a"))["status"] == "running"
    pair.released.set()
    await pair.assert_finished(task_id, 30)
