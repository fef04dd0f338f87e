"""A worker may be killed between any two writes: it leaves either a complete result or none."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from pymongo.errors import AutoReconnect
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, documents_of
from tests.contract.pulling_node import Pull, ended_source
from tests.contract.recording_database import RecordingDatabase
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.outages import retry_while_unavailable
from flowkit.errors import Fenced

EACH_DOCUMENT_MISSING = pytest.mark.parametrize("missing", ["metrics_raw", "artifacts"])


async def killed_before(db: Any, missing: str, metrics: dict[str, Any], uid: str = "b1") -> None:
    """Run a worker that is killed before its write to one collection reaches the server."""
    reached, recording = asyncio.Event(), RecordingDatabase(db)
    present = "artifacts" if missing == "metrics_raw" else "metrics_raw"

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    recording.before[missing].append(hang)
    store = ArtifactStore(recording)
    writing = asyncio.create_task(store.store_batch(attempt("sink"), uid, metrics, WORKER, AT))
    async with asyncio.timeout(TIMEOUT_SEC):
        await reached.wait()
        wanted = {"node_id": "sink", "batch_uid": uid, "failed": {"$ne": True}, "status": {"$ne": "failed"}}
        while metrics and not await db[present].count_documents(wanted):
            await recording.reach("nothing")
    writing.cancel()
    with suppress(asyncio.CancelledError):
        await writing


async def redo(artifacts: ArtifactStore, pull: Pull, metrics: dict[str, Any]) -> list[str]:
    """Let the next attempt store its batches, and return their uids."""
    uids = await pull.uids("u", epoch=2)
    for uid in uids:
        await artifacts.store_batch(attempt("sink", epoch=2), uid, metrics, WORKER, AT + 1)
    return uids


@EACH_DOCUMENT_MISSING
async def test_batch_with_one_missing_document_is_processed_again(
    db: Any, artifacts: ArtifactStore, pull: Pull, missing: str
) -> None:
    await ended_source(artifacts, "b1", "b2")
    await batches(artifacts, "sink", "b2")
    await killed_before(db, missing, {"n": 1})
    assert await db[missing].count_documents({"node_id": "sink", "batch_uid": "b1"}) == 0
    assert await redo(artifacts, pull, {"n": 1}) == ["b1"]
    rows = [row for row in await documents_of(db.metrics_raw) if row["batch_uid"] == "b1"]
    assert [(row["metrics"], row["attempt_epoch"]) for row in rows] == [({"n": 1}, 2)]
    assert await pull.uids("u", epoch=3) == []


@EACH_DOCUMENT_MISSING
async def test_failed_batch_with_one_replaced_document_is_processed_again(
    db: Any, artifacts: ArtifactStore, pull: Pull, missing: str
) -> None:
    await ended_source(artifacts, "b1")
    await artifacts.store_failed_batch(attempt("sink"), "b1", "boom", AT)
    await killed_before(db, missing, {"n": 1})
    assert await redo(artifacts, pull, {"n": 1}) == ["b1"]
    [row] = await documents_of(db.metrics_raw)
    assert (row["failed"], row["metrics"]) == (False, {"n": 1})
    assert await pull.uids("u", epoch=3) == []


@EACH_DOCUMENT_MISSING
async def test_empty_result_with_a_remaining_failure_is_processed_again(
    db: Any, artifacts: ArtifactStore, pull: Pull, missing: str
) -> None:
    await ended_source(artifacts, "b1")
    await artifacts.store_failed_batch(attempt("sink"), "b1", "boom", AT)
    await killed_before(db, missing, {})
    assert await redo(artifacts, pull, {}) == ["b1"]
    assert await documents_of(db.metrics_raw) == []
    assert await pull.uids("u", epoch=3) == []


@pytest.mark.parametrize("metrics", [{"n": 1}, {}])
async def test_complete_result_is_not_processed_again(
    artifacts: ArtifactStore, pull: Pull, metrics: dict[str, Any]
) -> None:
    await ended_source(artifacts, "b1")
    await artifacts.store_batch(attempt("sink"), "b1", metrics, WORKER, AT)
    assert await pull.uids("u", epoch=2) == []


async def test_artifact_written_by_a_handler_is_not_a_result_of_its_batch(
    artifacts: ArtifactStore, pull: Pull
) -> None:
    await ended_source(artifacts, "b1")
    await artifacts.upsert_partial(attempt("sink"), "b1", {"half": True}, WORKER, AT)
    assert await pull.uids("u", epoch=2) == ["b1"]


async def test_artifact_of_an_earlier_release_is_a_complete_result(
    db: Any, artifacts: ArtifactStore, pull: Pull
) -> None:
    """The earlier attempt wrote the row first, and the row may no longer exist."""
    await ended_source(artifacts, "b1")
    own = {"task_id": TASK, "node_id": "sink", "batch_uid": "b1", "attempt_epoch": 1}
    await db.artifacts.insert_one({**own, "status": "partial", "meta": {"n": 1}})
    assert await pull.uids("u", epoch=2) == []


async def test_failed_batch_is_delivered_again_and_never_pulled(artifacts: ArtifactStore, pull: Pull) -> None:
    await ended_source(artifacts, "b1", "b2")
    await artifacts.store_failed_batch(attempt("sink"), "b1", "boom", AT)
    await artifacts.store_failed_batch(attempt("u", epoch=2), "b2", "boom", AT)
    assert await pull.uids("u", epoch=2) == ["b1"]


async def test_source_that_fails_and_then_succeeds_is_pulled_completely(
    artifacts: ArtifactStore, pull: Pull
) -> None:
    """The puller has seen the failed batch; its later success is a batch like any other."""
    await artifacts.store_failed_batch(attempt("u"), "b1", "boom", AT)
    running = pull.start("u")
    await batches(artifacts, "u", "b0")
    await artifacts.store_batch(attempt("u", epoch=2), "b1", {"n": 1}, WORKER, AT + 9)
    await artifacts.mark_complete(TASK, "u", 2, {}, AT)
    assert sorted(uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)) == ["b0", "b1"]


# --- both writes together -------------------------------------------------------------------------------------------


@EACH_DOCUMENT_MISSING
async def test_missing_document_is_written_when_the_server_returns(
    db: Any, artifacts: ArtifactStore, missing: str
) -> None:
    recording = RecordingDatabase(db)

    async def away() -> None:
        raise AutoReconnect("away")

    recording.before[missing].append(away)
    store = ArtifactStore(recording)
    await retry_while_unavailable(lambda: store.store_batch(attempt(), "b1", {"n": 1}, WORKER, AT))
    assert [len(await documents_of(db[name])) for name in ("artifacts", "metrics_raw")] == [1, 1]


@EACH_DOCUMENT_MISSING
async def test_newer_attempt_wins_with_either_document_missing(
    db: Any, artifacts: ArtifactStore, missing: str
) -> None:
    await artifacts.store_batch(attempt(epoch=2), "b1", {"n": 2}, WORKER, AT)
    await db[missing].delete_many({})
    with pytest.raises(Fenced):
        await artifacts.store_batch(attempt(epoch=1), "b1", {"n": 1}, WORKER, AT)
