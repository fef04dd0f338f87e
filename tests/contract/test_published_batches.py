"""Batches that a handler publishes with `ctx.artifacts.upsert_partial` count as stored batches for streaming."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, begun, opened
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import eventually, wait_seconds

from flowkit.activities.batches import backpressure
from flowkit.activities.handlers import BatchResult

if TYPE_CHECKING:
    from flowkit.activities.handlers import Batch
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore

OK = BatchResult(success=True)


class Publishing(Returning):
    """Publishes two batches for each of its own, before it stores its result."""

    def __init__(self, result: BatchResult, signals: list[str], *uids: str) -> None:
        super().__init__(result, *uids)
        self._signals = signals
        self.signaled_after: list[int] = []

    async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
        """Publish, and note the number of signals after each batch."""
        for number in (1, 2):
            await ctx.artifacts.upsert_partial(f"{batch.batch_uid}.{number}", {})
            self.signaled_after.append(len(self._signals))
        return await super().process_batch(batch, ctx)


@pytest.fixture
async def prepared(db: Any, tasks: TaskStore, artifacts: ArtifactStore) -> Any:
    """A database with the open task, whose nodes have not begun."""
    await opened(tasks, "a", "x")
    return db


async def test_attempt_signals_with_its_first_published_batch_and_only_once(prepared: Any) -> None:
    signals: list[str] = []
    handler = Publishing(OK, signals, "b1", "b2")
    executor = role_executor(prepared, attempt("a"), handler, on_batch=lambda: signals.append("first"))
    await asyncio.wait_for(executor.run(), TIMEOUT_SEC)
    assert handler.signaled_after == [1, 1, 1, 1]
    assert signals == ["first"]


@pytest.mark.parametrize("failed", [True, False])
async def test_retry_signals_a_batch_that_an_earlier_attempt_published(
    prepared: Any, artifacts: ArtifactStore, failed: bool
) -> None:
    """The earlier attempt failed before its signal, and this one stores nothing."""
    if failed:
        await artifacts.store_failed_batch(attempt("a"), "b1", "torn", AT)
    else:
        await artifacts.upsert_partial(attempt("a"), "published", {"n": 1}, WORKER, AT)
    await batches(artifacts, "x", "b1")
    await artifacts.mark_complete(TASK, "a", 1, {}, AT)
    signals: list[str] = []
    retry = replace(attempt("a", epoch=2), signal_first_batch=True)
    executor = role_executor(prepared, retry, Returning(OK), on_batch=lambda: signals.append("first"))
    await asyncio.wait_for(executor.run(), TIMEOUT_SEC)
    assert signals == ([] if failed else ["first"])


async def test_batch_of_a_failed_attempt_has_been_signaled(prepared: Any) -> None:
    signals: list[str] = []
    handler = Publishing(BatchResult(success=False, reason_code="torn"), signals, "b1")
    executor = role_executor(prepared, attempt("a"), handler, on_batch=lambda: signals.append("first"))
    assert (await failure_of(executor)).code == "torn"
    assert signals == ["first"]


async def test_published_batches_count_toward_the_limit_of_a_parent(
    prepared: Any, tasks: TaskStore, artifacts: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "_LONGEST_SEC", 0.1)
    await begun(tasks, attempt("x", index=1), deadline_ms=int((time.time() + 600) * 1000))
    handler = Publishing(OK, [], "b1", "b2", "b3")
    limited = replace(attempt("a"), max_ahead=4, followers=("x",))
    running = asyncio.create_task(role_executor(prepared, limited, handler).run())

    async def stored() -> bool:
        return len(await artifacts.stored_uids(TASK, "a")) == 6

    await eventually(stored, TIMEOUT_SEC)
    await wait_seconds(0.3)
    assert not running.done()
    assert [batch.batch_uid for batch in handler.got] == ["b1", "b2"]
    await artifacts.claims.make(attempt("x"), "a", ["b1", "b1.1", "b1.2"], AT)
    await asyncio.wait_for(running, TIMEOUT_SEC)
    assert len(await artifacts.stored_uids(TASK, "a")) == 9
