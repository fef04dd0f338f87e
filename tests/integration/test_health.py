"""The health of an engine and a worker, also after the Temporal workers inside them have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.handlers import Quick
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from flowkit.connection import InlineWorkers, WorkerThread
    from flowkit.coordinator import Coordinator
    from flowkit.worker import Worker
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


async def test_engine_is_healthy_while_it_runs_and_sweeps(harness: Harness) -> None:
    assert not harness.coordinator.health().ok
    engine = await harness.engine()

    async def swept() -> bool:
        return engine.health().loops[0].last_ok_at is not None

    await eventually(swept)
    health = engine.health()
    assert (health.ok, health.running, health.error) == (True, True, None)
    assert [loop.name for loop in health.loops] == [
        "the sweep",
        "concurrency limits",
        "measuring open tasks",
        "lines of handlers",
    ]
    await engine.stop()
    assert not engine.health().running


async def test_worker_is_healthy_while_it_runs(harness: Harness) -> None:
    worker = await harness.worker({"quick": Quick()})
    health = worker.health()
    assert (health.ok, health.lost_events) == (True, 0)
    assert [loop.name for loop in health.loops] == [
        "announcing the worker",
        "events of attempts",
        "lines of handlers",
    ]
    await worker.stop()
    assert not worker.health().running


def running(process: Coordinator | Worker) -> WorkerThread | InlineWorkers:
    """Return the Temporal workers of the process."""
    assert process._thread is not None
    return process._thread


async def test_engine_whose_thread_has_ended_is_unhealthy_and_can_be_restarted(harness: Harness) -> None:
    engine = await harness.engine()
    assert engine._running
    await running(engine).stop()
    assert not engine._running
    assert (engine.health().running, engine.health().ok) == (False, False)
    await engine.start()
    assert engine.health().running
    await harness.worker({"quick": Quick()})
    assert (await harness.result(await harness.create(node("a")))).status == "finished"


async def test_worker_whose_thread_has_ended_is_unhealthy_and_can_be_restarted(harness: Harness) -> None:
    worker = await harness.worker({"quick": Quick()})
    await running(worker).stop()
    assert not worker.health().running
    await worker.start()
    assert worker.health().ok


async def test_malformed_document_does_not_prevent_sweeps(harness: Harness) -> None:
    odd = [{"status": "running"}, {"id": "odd", "status": "running", "updated_at": "yesterday"}]
    await harness.db.tasks.insert_many(odd)
    engine = await harness.engine()
    task_id = await harness.create(node("a"))
    await harness.until_status(task_id, "running")
    await (await harness.handle(task_id)).terminate()
    await harness.until_status(task_id, "failed")
    assert engine.health().ok
    assert engine.health().loops[0].last_error == "'id'"
