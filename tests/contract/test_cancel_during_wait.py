"""A cancel ends an attempt's wait for its next batch immediately; the attempt may finish its current batch."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, role_executor
from tests.contract.builders import attempt, documents_of, opened
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.handlers import Batch, BatchResult, RoleHandler
from flowkit.errors import StoreUnavailable
from flowkit.models import NodeIO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from flowkit.activities.role_attempt import RoleExecutor
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore

LATE_SEC = int(3 * EVENT_TIMEOUT_SEC)
"""The grace period, and the longest pause between two reads: who waits for one of them does not end in time."""

OK = BatchResult(success=True)
PULL = {
    "input_adapter": "pull.from_artifacts",
    "input_args": {"from_nodes": ["u"], "eof_on_task_done": False, "backoff_max_ms": LATE_SEC * 1000},
}


@pytest.fixture
async def prepared(db: Any, tasks: TaskStore, artifacts: ArtifactStore) -> Any:
    """`db` with its indexes and an open task."""
    await opened(tasks, "a", "u")
    return db


async def cancelled_soon(body: RoleExecutor, running: asyncio.Task[Any]) -> None:
    """Cancel an attempt as its worker does, and check that it ends soon."""
    body.cancel("budget is spent", LATE_SEC)
    ended, _ = await asyncio.wait([running], timeout=EVENT_TIMEOUT_SEC)
    assert ended, "the attempt still waits"
    assert running.cancelled()


class Watched(Returning):
    """Records when it has started."""

    def __init__(self) -> None:
        super().__init__(OK)
        self.begun = asyncio.Event()

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        self.begun.set()
        return {}


async def test_waiting_puller_ends_immediately(prepared: Any) -> None:
    handler = Watched()
    body = role_executor(prepared, replace(attempt(), io=NodeIO(input_inline=PULL)), handler)
    running = asyncio.create_task(body.run())
    await asyncio.wait_for(handler.begun.wait(), EVENT_TIMEOUT_SEC)
    await asyncio.wait([running], timeout=0.2)
    await cancelled_soon(body, running)
    assert handler.got == []


async def test_puller_without_a_server_ends_immediately(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowkit.adapters.artifacts import ArtifactStore

    asked = asyncio.Event()

    async def away(*_: object) -> None:
        asked.set()
        raise StoreUnavailable("away")

    monkeypatch.setattr(ArtifactStore, "scan", away)
    body = role_executor(prepared, replace(attempt(), io=NodeIO(input_inline=PULL)), Returning(OK))
    running = asyncio.create_task(body.run())
    await asyncio.wait_for(asked.wait(), EVENT_TIMEOUT_SEC)
    await cancelled_soon(body, running)


async def test_waiting_iter_batches_ends_immediately_and_is_closed(prepared: Any) -> None:
    waits, closed = asyncio.Event(), asyncio.Event()

    class Endless(Returning):
        async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
            yield Batch(batch_uid="b1")
            try:
                waits.set()
                await asyncio.Event().wait()
            finally:
                closed.set()

    handler = Endless(OK)
    body = role_executor(prepared, attempt(), handler)
    running = asyncio.create_task(body.run())
    await asyncio.wait_for(waits.wait(), EVENT_TIMEOUT_SEC)
    await cancelled_soon(body, running)
    assert closed.is_set()
    assert [batch.batch_uid for batch in handler.got] == ["b1"]


async def test_plain_generator_finishes_its_current_step(prepared: Any) -> None:
    """The hook runs in a thread, which cannot be interrupted, so the resources that it uses must remain."""
    waits, released = threading.Event(), threading.Event()

    def blocking(loaded: Any) -> Iterator[Batch]:
        waits.set()
        released.wait(EVENT_TIMEOUT_SEC)
        yield Batch(batch_uid="b1")

    handler: Any = RoleHandler()
    handler.iter_batches = blocking
    body = role_executor(prepared, attempt(), handler)
    running = asyncio.create_task(body.run())
    assert await asyncio.to_thread(waits.wait, EVENT_TIMEOUT_SEC)
    body.cancel("budget is spent", LATE_SEC)
    await asyncio.wait([running], timeout=0.2)
    assert not running.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, EVENT_TIMEOUT_SEC)
    assert [row async for row in prepared.artifacts.find({})] == []


async def test_current_batch_is_finished_and_no_other_started(prepared: Any) -> None:
    processing, released = asyncio.Event(), asyncio.Event()

    class WaitsForRelease(Returning):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            processing.set()
            await released.wait()
            return await super().process_batch(batch, ctx)

    handler = WaitsForRelease(OK, "b1", "b2")
    body = role_executor(prepared, attempt(), handler)
    running = asyncio.create_task(body.run())
    await asyncio.wait_for(processing.wait(), EVENT_TIMEOUT_SEC)
    body.cancel("budget is spent", LATE_SEC)
    for _ in range(50):
        await let_other_tasks_run()
    assert not running.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, EVENT_TIMEOUT_SEC)
    assert [row["batch_uid"] for row in await documents_of(prepared.artifacts)] == ["b1"]


async def test_cancel_before_the_first_batch_processes_none(prepared: Any) -> None:
    handler = Returning(OK, "b1")
    body = role_executor(prepared, attempt(), handler)
    body.cancel("budget is spent", LATE_SEC)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(body.run(), EVENT_TIMEOUT_SEC)
    assert handler.got == []
