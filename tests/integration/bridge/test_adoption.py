"""Bridges that stop or die while external workers run: other bridges continue the attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.bridge.gates import Gate
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks


async def test_graceful_stop_hands_running_attempts_to_the_next_bridge(external: ExternalTasks) -> None:
    await external.served_engine()
    gate = Gate()
    worker = await external.external(gate.handler)
    task_id = await external.create(node("extract", external.role, retry_policy={"max": 0}))
    await worker.wait_for("BATCH_OK")
    await external.coordinator.restart()
    gate.open()
    assert (await external.result(task_id)).status == "finished"
    assert [r["attempt_epoch"] for r in await external.dispatches(task_id)] == [1]
    assert len(worker.sent_for("extract", "TASK_ACCEPTED")) == 1
