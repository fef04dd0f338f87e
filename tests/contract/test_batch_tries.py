"""Batches whose tries end with the loss of their process: they run alone after two, and are set aside after
the third."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import AT, WORKER, attempt, documents_of, opened
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities import role_attempt
from flowkit.activities.handlers import Batch, BatchResult
from flowkit.activities.role_attempt import BatchGate
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.models import AttemptInput, Quarantine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowkit.activities.context import RunContext

UIDS = ("b1", "b2", "b3")


@pytest.fixture
async def tasks(db: Any) -> AsyncIterator[TaskStore]:
    store = TaskStore(db)
    await store.prepare()
    await ArtifactStore(db).prepare()
    await opened(store, "w")
    yield store


class Three(Returning):
    """Makes three batches, and remembers those that it processes."""

    def __init__(self) -> None:
        super().__init__(BatchResult(success=True, metrics={"n": 1}))
        self.processed: list[str] = []
        self.fails_at = ""

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches."""
        for uid in UIDS:
            yield Batch(batch_uid=uid, payload={})

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the result, or raise an error that ends the attempt."""
        self.processed.append(batch.batch_uid or "")
        if batch.batch_uid == self.fails_at:
            raise asyncio.CancelledError
        return await super().process_batch(batch, ctx)


def setting_aside(epoch: int) -> AttemptInput:
    return replace(attempt("w", epoch=epoch), quarantine=Quarantine())


async def lose(tasks: TaskStore, epoch: int, *, alone: bool) -> None:
    """Leave what an attempt leaves whose process is lost while it processes batch `b2`."""
    await tasks.attempts.begin(setting_aside(epoch), "run", {}, AT)
    await tasks.tries.begin(setting_aside(epoch), "b2", WORKER, AT, alone=alone)


async def test_a_batch_that_was_lost_alone_is_set_aside(db: Any, tasks: TaskStore) -> None:
    for epoch in (1, 2, 3):
        await lose(tasks, epoch, alone=epoch == 3)
    handler = Three()
    result = await role_executor(db, setting_aside(4), handler).run()
    assert (handler.processed, result.failed_batches) == (["b1", "b3"], 1)
    aside = [row for row in await documents_of(db.artifacts) if row.get("batch_uid") == "b2"]
    assert [row["quarantined"] for row in aside] == [
        {
            "error": "the process that ran it was lost 3 times, the last time while it ran no other batch",
            "tries": 3,
        }
    ]
    assert aside[0]["error"] == "worker_process_died"


async def test_a_batch_that_was_lost_beside_others_is_tried_again(db: Any, tasks: TaskStore) -> None:
    for epoch in (1, 2, 3):
        await lose(tasks, epoch, alone=False)
    handler = Three()
    result = await role_executor(db, setting_aside(4), handler).run()
    assert (handler.processed, result.failed_batches) == ([*UIDS], 0)
    assert {row["attempt_epoch"] for row in await documents_of(db.batch_tries)} == {1, 2, 3}


async def test_an_attempt_that_ends_in_order_is_no_lost_try(db: Any, tasks: TaskStore) -> None:
    handler = Three()
    handler.fails_at = "b2"
    failure = await failure_of(role_executor(db, setting_aside(1), handler))
    assert failure.code == "cancelled_by_worker"
    assert await documents_of(db.batch_tries) == []


async def test_a_node_that_sets_no_batches_aside_notes_no_tries(db: Any, tasks: TaskStore) -> None:
    await role_executor(db, attempt("w"), Three()).run()
    assert await documents_of(db.batch_tries) == []


async def test_the_gate_lets_one_batch_run_alone() -> None:
    gate = BatchGate()
    assert not await gate.enter(alone=False)
    alone = asyncio.create_task(gate.enter(alone=True))
    await let_other_tasks_run()
    later = asyncio.create_task(gate.enter(alone=False))
    await let_other_tasks_run()
    assert (alone.done(), later.done(), gate.is_closed) == (False, False, True)
    gate.leave(alone=False)
    assert await alone
    assert not later.done()
    gate.leave(alone=True)
    assert not await later
    gate.leave(alone=False)
    assert not gate.is_closed


async def test_a_batch_does_not_wait_for_ever_to_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_attempt, "_MOST_WAIT_ALONE_SEC", 0.01)
    gate = BatchGate()
    await gate.enter(alone=False)
    assert not await gate.enter(alone=True)
    assert not gate.is_closed
    gate.leave(alone=False)
    gate.leave(alone=False)
    assert await gate.enter(alone=True)


async def test_a_cancelled_wait_opens_the_gate() -> None:
    gate = BatchGate()
    await gate.enter(alone=False)
    alone = asyncio.create_task(gate.enter(alone=True))
    await let_other_tasks_run()
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    assert not await gate.enter(alone=False)
