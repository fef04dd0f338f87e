"""Artifacts, metrics and claims: a higher epoch replaces, the same epoch repeats, a lower epoch is fenced."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import bson
import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, documents_of, seconds
from tests.contract.recording_database import RecordingDatabase

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.entries import Entry
from flowkit.adapters.metrics import BatchTooLarge
from flowkit.errors import Fenced
from flowkit.limits import BATCH_META_BYTES
from flowkit.protocol.messages import FINAL_UID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Write = Callable[[ArtifactStore, int], Awaitable[None]]


async def write_partial(artifacts: ArtifactStore, epoch: int) -> None:
    await artifacts.upsert_partial(attempt(epoch=epoch), "b1", {"from": epoch}, WORKER, AT + epoch)


async def write_metrics(artifacts: ArtifactStore, epoch: int) -> None:
    await artifacts.store_final(attempt(epoch=epoch), {"from": epoch}, AT + epoch)


async def write_marker(artifacts: ArtifactStore, epoch: int) -> None:
    await artifacts.mark_complete(TASK, "a", epoch, {"from": epoch}, AT + epoch)


WRITES = pytest.mark.parametrize(
    ("write", "collection", "field"),
    [
        pytest.param(write_partial, "artifacts", "meta", id="partial"),
        pytest.param(write_metrics, "metrics_raw", "metrics", id="metrics"),
        pytest.param(write_marker, "artifacts", "meta", id="marker"),
    ],
)


# --- epochs -----------------------------------------------------------------------------------------------------


@WRITES
@pytest.mark.parametrize("second", [1, 2])
async def test_same_or_higher_epoch_replaces_the_artifact_and_keeps_its_creation_time(
    db: Any, artifacts: ArtifactStore, write: Write, collection: str, field: str, second: int
) -> None:
    await write(artifacts, 1)
    [first] = await documents_of(db[collection])
    await write(artifacts, second)
    [row] = await documents_of(db[collection])
    assert (row["attempt_epoch"], row[field]) == (second, {"from": second})
    assert seconds(row["created_at"]) == seconds(first["created_at"]) == AT + 1


@WRITES
async def test_a_lower_epoch_is_fenced(
    db: Any, artifacts: ArtifactStore, write: Write, collection: str, field: str
) -> None:
    await write(artifacts, 2)
    with pytest.raises(Fenced, match="'a'"):
        await write(artifacts, 1)
    [row] = await documents_of(db[collection])
    assert (row["attempt_epoch"], row[field]) == (2, {"from": 2})


@WRITES
async def test_newer_attempt_wins_over_a_concurrent_older_one(
    db: Any, artifacts: ArtifactStore, write: Write, collection: str, field: str
) -> None:
    recording = RecordingDatabase(db)

    recording.before[collection].append(partial(write, artifacts, 1))
    await write(ArtifactStore(recording), 2)
    [row] = await documents_of(db[collection])
    assert (row["attempt_epoch"], row[field]) == (2, {"from": 2})


@WRITES
async def test_highest_of_many_concurrent_epochs_wins(
    db: Any, artifacts: ArtifactStore, write: Write, collection: str, field: str
) -> None:
    await write(artifacts, 1)
    await asyncio.gather(*(write(artifacts, epoch) for epoch in range(2, 12)), return_exceptions=True)
    [row] = await documents_of(db[collection])
    assert (row["attempt_epoch"], row[field]) == (11, {"from": 11})


# --- shapes -----------------------------------------------------------------------------------------------------


async def test_batch_is_stored_as_a_partial_artifact_and_a_metrics_row(
    db: Any, artifacts: ArtifactStore
) -> None:
    await artifacts.store_batch(attempt(epoch=3), "b1", {"n": 1}, WORKER, AT)
    key = {"task_id": TASK, "node_id": "a", "batch_uid": "b1", "attempt_epoch": 3}
    [partial] = await documents_of(db.artifacts)
    dates = [seconds(partial.pop(field)) for field in ("created_at", "updated_at")]
    del partial["_id"]
    assert dates == [AT, AT]
    size = len(bson.encode({"n": 1}))
    assert partial == {
        **key,
        "status": "partial",
        "meta": {"n": 1},
        "size": size,
        "worker_id": WORKER,
        "payload": None,
    }
    [row] = await documents_of(db.metrics_raw)
    assert {field: row[field] for field in key} == key
    assert (row["metrics"], row["ts_ms"], seconds(row["created_at"])) == ({"n": 1}, int(AT * 1000), AT)
    assert (row["failed"], row.get("reason"), "final" in row) == (False, None, False)


async def test_batch_without_metrics_has_no_metrics_row(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.store_batch(attempt(), "b1", {}, WORKER, AT)
    assert await documents_of(db.metrics_raw) == []
    assert len(await documents_of(db.artifacts)) == 1


async def test_failed_batch_is_stored_as_a_metrics_row_and_a_failed_artifact(
    db: Any, artifacts: ArtifactStore
) -> None:
    await artifacts.store_failed_batch(attempt(epoch=2), "b1", "bad_input", AT, worker_id=WORKER)
    [row] = await documents_of(db.metrics_raw)
    assert (row["failed"], row["reason"], row["metrics"]) == (True, "bad_input", {})
    [artifact] = await documents_of(db.artifacts)
    assert seconds(artifact["created_at"]) == seconds(artifact["updated_at"]) == AT
    assert {
        "task_id": TASK,
        "node_id": "a",
        "batch_uid": "b1",
        "attempt_epoch": 2,
        "status": "failed",
        "error": "bad_input",
        "meta": {},
        "worker_id": WORKER,
    }.items() <= artifact.items()


async def test_failed_batch_does_not_count_as_a_result(artifacts: ArtifactStore) -> None:
    await batches(artifacts, "a", "b1")
    await artifacts.store_failed_batch(attempt("a"), "b2", "boom", AT)
    await artifacts.store_failed_batch(attempt("a", epoch=2), "b1", "boom", AT)
    assert await artifacts.batch_uids(TASK, "a") == set()
    assert (await artifacts.scan(TASK, ["a"])).batches == {"a": {}}
    assert [page async for page in artifacts.pages(TASK, "a")] == []
    assert await artifacts.metas(TASK, "a", [Entry("b1", None)]) == []


@pytest.mark.parametrize("epoch", [1, 2])
async def test_a_later_success_replaces_a_failed_artifact(
    db: Any, artifacts: ArtifactStore, epoch: int
) -> None:
    await artifacts.store_failed_batch(attempt(), "b1", "boom", AT)
    ref = {"url": "x"}
    await artifacts.store_batch(attempt(epoch=epoch), "b1", {"n": 1}, WORKER, AT, artifacts_ref=ref)
    [artifact] = await documents_of(db.artifacts)
    assert (artifact["status"], artifact["meta"], artifact["artifacts_ref"]) == ("partial", {"n": 1}, ref)
    assert "error" not in artifact
    assert await artifacts.batch_uids(TASK, "a") == {"b1"}


async def test_result_without_a_reference_removes_the_reference_of_an_earlier_attempt(
    db: Any, artifacts: ArtifactStore
) -> None:
    await artifacts.store_batch(attempt(), "b1", {"n": 1}, WORKER, AT, artifacts_ref={"url": "x"})
    await artifacts.store_batch(attempt(epoch=2), "b1", {"n": 2}, WORKER, AT)
    [artifact] = await documents_of(db.artifacts)
    assert "artifacts_ref" not in artifact


@pytest.mark.parametrize("metrics", [{"n": 1}, {}])
async def test_a_later_success_replaces_the_row_of_a_failed_batch(
    db: Any, artifacts: ArtifactStore, metrics: dict[str, Any]
) -> None:
    await artifacts.store_failed_batch(attempt(epoch=1), "b1", "boom", AT)
    await artifacts.store_batch(attempt(epoch=2), "b1", metrics, WORKER, AT)
    rows = await documents_of(db.metrics_raw)
    assert [row for row in rows if row["failed"] or row.get("reason") or row["metrics"] != metrics] == []
    assert len(rows) == 1 or not metrics


async def test_final_metrics_have_their_own_row(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.store_batch(attempt(), "b1", {"n": 1}, WORKER, AT)
    await artifacts.store_final(attempt(), {"total": 1}, AT)
    rows = {row["batch_uid"]: row for row in await documents_of(db.metrics_raw)}
    assert set(rows) == {"b1", FINAL_UID}
    assert FINAL_UID == "__final__"
    assert (rows[FINAL_UID]["final"], rows[FINAL_UID]["metrics"]) == (True, {"total": 1})


async def test_complete_marker_has_no_batch_uid(db: Any, artifacts: ArtifactStore) -> None:
    await batches(artifacts, "a", "b1")
    await artifacts.mark_complete(TASK, "a", 1, {"n": 1}, AT, worker_id=WORKER, artifacts_ref={"url": "x"})
    marker = await db.artifacts.find_one({"status": "complete"})
    assert "batch_uid" not in marker
    assert (marker["meta"], marker["worker_id"], marker["artifacts_ref"]) == ({"n": 1}, WORKER, {"url": "x"})
    assert await db.artifacts.count_documents({}) == 2


async def test_complete_markers_have_the_epochs_of_their_attempts(artifacts: ArtifactStore) -> None:
    await artifacts.mark_complete(TASK, "a", 2, {}, AT)
    await artifacts.mark_complete(TASK, "b", 0, {"ended": "skipped"}, AT)
    await artifacts.mark_complete("other-task", "c", 1, {}, AT)
    await batches(artifacts, "d", "b1")
    assert (await artifacts.scan(TASK, ["a", "b", "c", "d"])).markers == {"a": 2, "b": 0}


async def test_new_attempt_removes_only_the_marker_of_an_earlier_one(artifacts: ArtifactStore) -> None:
    await batches(artifacts, "a", "b1")
    for node in ("a", "b"):
        await artifacts.mark_complete(TASK, node, 1, {}, AT)
    await artifacts.drop_marker(attempt("a", epoch=1))
    assert (await artifacts.scan(TASK, ["a", "b"])).markers == {"a": 1, "b": 1}
    await artifacts.drop_marker(attempt("a", epoch=2))
    assert (await artifacts.scan(TASK, ["a", "b"])).markers == {"b": 1}
    assert await artifacts.batch_uids(TASK, "a") == {"b1"}


async def test_batches_are_separate_for_each_task_and_node(artifacts: ArtifactStore) -> None:
    await batches(artifacts, "a", "b1")
    await batches(artifacts, "b", "b1", "b2")
    assert await artifacts.batch_uids(TASK, "a") == {"b1"}
    assert await artifacts.batch_uids(TASK, "b") == {"b1", "b2"}
    assert await artifacts.batch_uids("other-task", "a") == set()


# --- size -------------------------------------------------------------------------------------------------------


def meta_of(size: int) -> dict[str, Any]:
    """Return metrics of exactly this many bytes of BSON."""
    return {"text": "x" * (size - len(bson.encode({"text": ""})))}


async def test_the_largest_allowed_metrics_are_stored(db: Any, artifacts: ArtifactStore) -> None:
    meta = meta_of(BATCH_META_BYTES)
    assert len(bson.encode(meta)) == BATCH_META_BYTES
    await artifacts.store_batch(attempt(), "b1", meta, WORKER, AT)
    await artifacts.store_final(attempt(), meta, AT)
    assert (await db.artifacts.find_one({}))["meta"] == meta


async def test_metrics_one_byte_too_large_are_rejected_without_a_write(
    db: Any, artifacts: ArtifactStore
) -> None:
    meta = meta_of(BATCH_META_BYTES + 1)
    with pytest.raises(BatchTooLarge, match=r"'b1' are 8,000,001 bytes, more than 8,000,000"):
        await artifacts.store_batch(attempt(), "b1", meta, WORKER, AT)
    with pytest.raises(BatchTooLarge):
        await artifacts.store_final(attempt(), meta, AT)
    assert await documents_of(db.artifacts) == await documents_of(db.metrics_raw) == []
