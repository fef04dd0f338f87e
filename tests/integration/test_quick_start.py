"""The quick start of the workers guide, word for word."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING

import pytest

from flowkit.worker import WorkerConfig
from tests.integration.harness import node
from tests.unit.test_guide_handlers import executed

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

QUICK_START = """
from flowkit.worker.runner import Worker, WorkerConfig
from flowkit.worker.handlers.base import RoleHandler, Batch, BatchResult

class MyHandler(RoleHandler):
    role = "processor"

    async def iter_batches(self, loaded):
        yield Batch(batch_uid="b1", payload={"items": [1, 2, 3]})

    async def process_batch(self, batch, ctx):
        return BatchResult(success=True, metrics={"count": len(batch.payload.get("items", []))})

worker = Worker(db=my_db, cfg=WorkerConfig(roles=["processor"]), handlers={"processor": MyHandler()})
await worker.start()
"""


@pytest.mark.slow
async def test_quick_start_runs(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    own_queue = make_dataclass("OwnQueue", [("queue", str, harness.queue)], bases=(WorkerConfig,))
    monkeypatch.setattr("flowkit.worker.runner.WorkerConfig", own_queue)
    worker = (await executed(QUICK_START, my_db=harness.db))["worker"]
    try:
        await harness.engine()
        task_id = await harness.create(node("a", "processor"))
        await harness.result(task_id)
    finally:
        await worker.stop()
    assert [(row["batch_uid"], row["metrics"]) for row in await harness.rows(task_id, "a")] == [
        ("b1", {"count": 3})
    ]
