"""A handler's result is stored as JSON. A value that cannot be stored fails the attempt permanently and is located."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import AT, TASK, WORKER, attempt, documents_of, opened, stored_statuses
from tests.contract.poison import nested

from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.adapters.metrics import BadMetrics, BatchTooLarge
from flowkit.limits import BATCH_META_BYTES, BATCH_UID_CHARS, METRICS_LEVELS
from flowkit.models import FailureKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.activities.handlers import Batch
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore

HANDLER_VALUES = {
    "at": datetime(2026, 1, 31, tzinfo=UTC),
    "id": UUID(int=5),
    "price": Decimal("1.50"),
    "raw": b"abc",
    "tags": {"x"},
    "nan": float("nan"),
    "by_year": {2026: (1, 2)},
    "a.b": {"$set": 1},
}
STORED_VALUES = {
    "at": "2026-01-31T00:00:00Z",
    "id": "00000000-0000-0000-0000-000000000005",
    "price": "1.50",
    "raw": "abc",
    "tags": ["x"],
    "nan": None,
    "by_year": {"2026": [1, 2]},
    "a.b": {"$set": 1},
}


@pytest.fixture
async def prepared(db: Any, tasks: TaskStore, artifacts: ArtifactStore) -> Any:
    """`db` with its indexes and an open task with the node `a`."""
    await opened(tasks, "a")
    return db


async def marked_as_confirmed(db: Any) -> bool:
    """Return whether the complete marker ends the nodes that pull."""
    return bool((await db.artifacts.find_one({"status": "complete"}))["confirmed"])


async def test_metrics_and_references_are_stored_as_json_from_every_source(prepared: Any) -> None:
    ref, confirmed = {"etag": UUID(int=5)}, list[bool]()

    class Writing(Returning):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            await ctx.artifacts.upsert_partial("mine", HANDLER_VALUES)
            await ctx.artifacts.mark_complete(HANDLER_VALUES, ref)
            confirmed.append(await marked_as_confirmed(prepared))
            return await super().process_batch(batch, ctx)

    result = BatchResult(success=True, metrics=HANDLER_VALUES, artifacts_ref=ref)
    await role_executor(
        prepared, attempt(), Writing(result, "b1", final=FinalizeResult(metrics=HANDLER_VALUES))
    ).run()
    artifacts = {row.get("batch_uid"): row for row in await documents_of(prepared.artifacts)}
    assert {uid: row["meta"] for uid, row in artifacts.items()} == dict.fromkeys(
        ["b1", "mine", None], STORED_VALUES
    )
    assert [artifacts[uid]["artifacts_ref"] for uid in ("b1", None)] == [{"etag": STORED_VALUES["id"]}] * 2
    rows = {row["batch_uid"]: row["metrics"] for row in await documents_of(prepared.metrics_raw)}
    assert rows == {"b1": STORED_VALUES, "__final__": STORED_VALUES}
    assert [*confirmed, await marked_as_confirmed(prepared)] == [False, True]


UNSTORABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"a": {"n": 2**70}}, "bad_metrics", "a.n is an integer outside the 64-bit range"),
    ({"a": [object()]}, "bad_metrics", "a[0] is of type object"),
    ({"a": {"b\0": 1}}, "bad_metrics", "a has the key"),
    (nested(METRICS_LEVELS + 1), "bad_metrics", "is nested more than 98 levels deep"),
    ({"a": "x" * BATCH_META_BYTES}, "batch_too_large", "are 8,000,0"),
]
EACH = pytest.mark.parametrize(
    ("metrics", "code", "text"), UNSTORABLE, ids=["int", "object", "key", "levels", "size"]
)


@EACH
async def test_batch_that_cannot_be_stored_fails_the_attempt_permanently(
    prepared: Any, metrics: dict[str, Any], code: str, text: str
) -> None:
    result = BatchResult(success=True, metrics=metrics)
    failure = await failure_of(role_executor(prepared, attempt(), Returning(result, "b1")))
    assert (failure.kind, failure.code, failure.permanent) == (FailureKind.FAILURE, code, True)
    assert failure.message.startswith("metrics of batch 'b1'")
    assert text in failure.message
    [row] = await documents_of(prepared.metrics_raw)
    assert (row["failed"], row["reason"]) == (True, code)
    [artifact] = await documents_of(prepared.artifacts)
    assert (artifact["status"], artifact["error"], artifact["meta"]) == ("failed", code, {})


@EACH
async def test_final_result_that_cannot_be_stored_leaves_the_node_running(
    prepared: Any, metrics: dict[str, Any], code: str, text: str
) -> None:
    final = FinalizeResult(metrics=metrics)
    failure = await failure_of(
        role_executor(prepared, attempt(), Returning(BatchResult(success=True), final=final))
    )
    assert (failure.code, failure.permanent) == (code, True)
    assert text in failure.message
    assert await documents_of(prepared.metrics_raw) == await documents_of(prepared.artifacts) == []
    assert await stored_statuses(prepared) == ["running"]


@pytest.mark.parametrize(
    ("bad", "reported"),
    [
        ("v" * (BATCH_UID_CHARS + 1), "has 501 characters, more than 500"),
        ("__final__", "'__final__' is reserved for the metrics of finalize"),
        ("a\0b", "contains a NUL character"),
    ],
)
async def test_uid_that_identifies_no_batch_fails_the_attempt_permanently(
    prepared: Any, bad: str, reported: str
) -> None:
    uids = ["u" * BATCH_UID_CHARS, bad]
    failure = await failure_of(
        role_executor(prepared, attempt(), Returning(BatchResult(success=True), *uids))
    )
    assert (failure.code, failure.permanent) == ("bad_batch_uid", True)
    assert reported in failure.message
    assert [row["batch_uid"] for row in await documents_of(prepared.artifacts)] == uids[:1]


@pytest.mark.parametrize("where", ["batch", "end"])
async def test_reference_that_cannot_be_stored_is_located(prepared: Any, where: str) -> None:
    ref = {"handle": object()}
    result = BatchResult(success=True, artifacts_ref=ref if where == "batch" else None)
    final = FinalizeResult(artifacts_ref=ref if where == "end" else None)
    failure = await failure_of(role_executor(prepared, attempt(), Returning(result, "b1", final=final)))
    assert (failure.code, failure.permanent) == ("bad_metrics", True)
    assert failure.message.startswith("artifacts_ref of ")
    assert "handle is of type object" in failure.message


async def test_handler_write_that_cannot_be_stored_fails_its_batch_permanently(prepared: Any) -> None:
    class Writing(Returning):
        async def process_batch(self, batch: Batch, ctx: Any) -> BatchResult:
            await ctx.artifacts.upsert_partial("mine", {"n": 2**70})
            return await super().process_batch(batch, ctx)

    failure = await failure_of(role_executor(prepared, attempt(), Writing(BatchResult(success=True), "b1")))
    assert (failure.code, failure.permanent) == ("bad_metrics", True)
    [row] = await documents_of(prepared.metrics_raw)
    assert (row["batch_uid"], row["failed"], row["reason"]) == ("b1", True, "bad_metrics")


LARGE = {"text": "x" * BATCH_META_BYTES}
WRITES: list[Callable[[ArtifactStore, Any], Awaitable[None]]] = [
    lambda store, meta: store.upsert_partial(attempt(), "b1", meta, WORKER, AT),
    lambda store, meta: store.mark_complete(TASK, "a", 1, meta, AT),
    lambda store, meta: store.store_batch(attempt(), "b1", {}, WORKER, AT, artifacts_ref=meta),
]


@pytest.mark.parametrize("write", WRITES, ids=["partial", "marker", "reference"])
async def test_all_writes_of_a_handler_have_the_same_limits(
    db: Any, artifacts: ArtifactStore, write: Callable[[ArtifactStore, Any], Awaitable[None]]
) -> None:
    with pytest.raises(BatchTooLarge):
        await write(artifacts, LARGE)
    with pytest.raises(BadMetrics):
        await write(artifacts, {"n": 2**70})
    assert await documents_of(db.artifacts) == []
