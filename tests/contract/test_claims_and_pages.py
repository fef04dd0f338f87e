"""Claims record a delivery once; pages return a node's batches in the order of their creation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, documents_of, seconds

from flowkit.errors import Fenced

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore


async def pages(artifacts: ArtifactStore, **options: Any) -> list[list[str]]:
    return [
        [batch["batch_uid"] for batch in page] async for page in artifacts.pages(TASK, "source", **options)
    ]


# --- claims -----------------------------------------------------------------------------------------------------


async def test_claim_records_consumer_source_and_batch(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.claims.make(attempt("sink", epoch=2), "source", ["b1"], AT)
    [claim] = await documents_of(db.stream_progress)
    del claim["_id"]
    assert seconds(claim.pop("claimed_at")) == AT
    assert claim == {
        "task_id": TASK,
        "consumer_node": "sink",
        "from_node": "source",
        "batch_uid": "b1",
        "attempt_epoch": 2,
    }


async def test_repeated_claim_keeps_one_row_and_adds_new_ones(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.claims.make(attempt("sink"), "source", ["b1", "b2"], AT)
    await artifacts.claims.make(attempt("sink"), "source", ["b0", "b1", "b2", "b3"], AT)
    rows = await documents_of(db.stream_progress)
    assert sorted(row["batch_uid"] for row in rows) == ["b0", "b1", "b2", "b3"]


async def test_consumers_and_sources_claim_independently(db: Any, artifacts: ArtifactStore) -> None:
    for consumer, source in (("x", "source"), ("y", "source"), ("x", "other")):
        await artifacts.claims.make(attempt(consumer), source, ["b1"], AT)
    assert len(await documents_of(db.stream_progress)) == 3


async def test_counts_of_claims_are_those_of_one_source_and_task(artifacts: ArtifactStore) -> None:
    x, y = attempt("x"), attempt("y")
    for claiming, source, uids in ((x, "a", ["b1", "b2"]), (y, "a", ["b1"]), (x, "z", ["b9"])):
        await artifacts.claims.make(claiming, source, uids, AT)
    await artifacts.claims.make(replace(x, task_id="another"), "a", ["b1", "b2", "b3"], AT)
    assert await artifacts.claims.counts(TASK, "a", ["x", "y", "q"]) == {"x": 2, "y": 1, "q": 0}


async def test_empty_claim_does_nothing(db: Any, artifacts: ArtifactStore) -> None:
    await artifacts.claims.make(attempt("sink"), "source", [], AT)
    assert await documents_of(db.stream_progress) == []


async def test_claim_of_a_higher_epoch_replaces_the_earlier_one(db: Any, artifacts: ArtifactStore) -> None:
    for epoch in (1, 2):
        await artifacts.claims.make(attempt("sink", epoch=epoch), "source", ["b1"], AT)
    [claim] = await documents_of(db.stream_progress)
    assert claim["attempt_epoch"] == 2


async def test_a_claim_of_a_lower_epoch_is_fenced(artifacts: ArtifactStore) -> None:
    await artifacts.claims.make(attempt("sink", epoch=2), "source", ["b1"], AT)
    with pytest.raises(Fenced):
        await artifacts.claims.make(attempt("sink", epoch=1), "source", ["b1"], AT)


# --- pages ------------------------------------------------------------------------------------------------------


async def test_batches_are_returned_oldest_first_in_any_order_of_writes(
    artifacts: ArtifactStore,
) -> None:
    for uid, age in (("young", 3), ("old", 1), ("middle", 2)):
        await artifacts.upsert_partial(attempt("source"), uid, {}, WORKER, AT + age)
    assert await pages(artifacts) == [["old", "middle", "young"]]


async def test_many_batches_are_returned_in_order_over_several_pages(artifacts: ArtifactStore) -> None:
    uids = [f"b{number:03}" for number in range(45)]
    await batches(artifacts, "source", *uids)
    found = await pages(artifacts)
    assert len(found) > 1
    assert [uid for page in found for uid in page] == uids


async def test_claimed_batches_are_omitted(artifacts: ArtifactStore) -> None:
    uids = [f"b{number:03}" for number in range(45)]
    await batches(artifacts, "source", *uids)
    found = await pages(artifacts, skip=set(uids[::2]))
    assert [uid for page in found for uid in page] == uids[1::2]


async def test_more_than_two_hundred_batches_are_all_returned(artifacts: ArtifactStore) -> None:
    uids = [f"b{number:03}" for number in range(230)]
    for number, uid in enumerate(uids):
        await artifacts.upsert_partial(attempt("source"), uid, {}, WORKER, AT + number / 1000)
    found = await pages(artifacts)
    assert [uid for page in found for uid in page] == uids


async def test_page_contains_only_metas_of_the_batches_of_its_node(artifacts: ArtifactStore) -> None:
    await batches(artifacts, "source", "b1")
    await batches(artifacts, "other", "b2")
    await artifacts.mark_complete(TASK, "source", 1, {"total": 1}, AT)
    assert [page async for page in artifacts.pages(TASK, "source")] == [
        [{"batch_uid": "b1", "meta": {"uid": "b1"}}]
    ]


async def test_a_node_without_batches_has_no_pages(artifacts: ArtifactStore) -> None:
    assert await pages(artifacts) == []
