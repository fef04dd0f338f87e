"""An event that can never be handled ends its own attempt; the events of all other attempts are handled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.bridge_side import BridgeSide
from tests.contract.size_limited_database import SizeLimitedDatabase
from tests.unit.bridge_records import TASK

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.fields import new_task
from flowkit.bridge.rules.outcomes import lease_lost
from flowkit.errors import Fenced
from flowkit.graph.input_adapters import PullArgs
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from flowkit.models import AttemptInput


async def document(side: BridgeSide, *node_ids: str, **fields: Any) -> None:
    """Store a task document with these nodes, whose first attempts a bridge has begun."""
    graph = {"nodes": [{"node_id": node_id, "type": "indexer"} for node_id in node_ids]}
    task = new_task(TASK, {}, graph, time.time())
    for node in task["graph"]["nodes"]:
        node.update({"status": "running", "attempt_epoch": 1, "run_id": "run"}, **fields)
    await side.db.tasks.insert_one(task)


async def test_acceptance_for_a_full_document_ends_the_attempt() -> None:
    """The worker would run although no record shows its lease, and the role would handle no event any more."""
    db = SizeLimitedDatabase(memory_database(), 400)
    side = await BridgeSide.create(db)
    await document(side, "n", text="x" * 1_000)
    await side.open("n", accepted=False)
    await side.open("other")
    await side.handle(side.event("TASK_ACCEPTED", "n"), side.event("TASK_DONE", "other"))
    assert db.refused == 2, "the second time after FlowKit has made room"
    assert await side.codes(["n", "other"]) == {"n": "document_too_large", "other": "done"}
    assert [(signal.node_id, signal.target_worker_id) for signal in side.signals] == [("n", "w1")]
    assert {each.attempt.node_id for each in side.delivered} == {"n", "other"}


async def test_unknown_status_of_a_source_ends_the_attempt_that_pulls_from_it(db: Any) -> None:
    side = await BridgeSide.create(db)
    await document(side, "source", status="paused")
    await side.open("n", pull=PullArgs(from_nodes=("source",)))
    await side.open("other")
    await side.handle(side.event("TASK_DONE", "n"), side.event("TASK_DONE", "other"))
    assert await side.codes(["n", "other"]) == {"n": "mongo_refused", "other": "done"}


async def test_unexpected_error_ends_the_attempt_and_uses_a_retry(
    db: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side, store = await BridgeSide.create(db), ArtifactStore.store_batch

    async def odd(self: ArtifactStore, attempt: AttemptInput, *args: Any, **options: Any) -> None:
        if attempt.node_id == "n":
            raise KeyError("odd")
        await store(self, attempt, *args, **options)

    monkeypatch.setattr(ArtifactStore, "store_batch", odd)
    for name in ("n", "other"):
        await side.open(name)
    names = ("n", "other")
    kinds = ("BATCH_OK", "TASK_DONE")
    await side.handle(*(side.event(kind, name) for name in names for kind in kinds))
    assert await side.codes(names) == {"n": "unexpected_error", "other": "done"}
    failures = [each.outcome.failure for each in side.delivered if each.outcome]
    assert [failure and failure.permanent for failure in failures if failure] == [False]
    assert "unexpected error in an event of node 'n'" in caplog.text


async def test_record_that_keeps_changing_is_handled_again(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer repeats the poll: another bridge changes the record at the same time, which does not last."""
    side = await BridgeSide.create(db)
    await side.open("n", accepted=False)

    async def changed(*_: object) -> bool:
        return False

    accepted = side.event("TASK_ACCEPTED", "n")
    with monkeypatch.context() as patch:
        patch.setattr(side.dispatches, "accept", changed)
        with pytest.raises(Fenced):
            await side.handle(accepted)
    await side.handle(accepted)
    assert (await side.dispatch("n")).lease is not None


async def test_worker_that_lost_its_lease_is_stopped_again_while_it_stores_batches(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H33: it sends no heartbeats, and may have missed the first signal."""
    side = await BridgeSide.create(db)
    held = await side.open("n")
    now = time.time()
    await side.dispatches.end(held.key, lease_lost(held, now))
    for number in range(6):
        monkeypatch.setattr(side.bridge.context, "now", lambda at=now + number: at)
        await side.handle(side.event("BATCH_OK", "n", {"batch_uid": f"b{number}"}))
    assert [signal.target_worker_id for signal in side.signals] == ["w1"] * 3, "every two seconds"
    assert [row async for row in side.db.artifacts.find({})] == []
