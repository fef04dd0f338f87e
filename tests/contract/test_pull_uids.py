"""A node that pulls from several sources receives every batch under a unique uid, also when an attempt resumes."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from bson import ObjectId
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, documents_of
from tests.contract.pulling_node import Pull, end, ended_source
from tests.unit.property_examples import examples

from flowkit.core.utils import stable_hash

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore


async def test_equal_uids_of_several_sources_are_qualified_by_their_source(
    artifacts: ArtifactStore, pull: Pull, caplog: pytest.LogCaptureFixture
) -> None:
    for node in ("u", "t", "s/1"):
        await ended_source(artifacts, "b1", "b2", node=node)
    expected = ["b1", "b2", "b1@t", "b2@t", "b1@s%2F1", "b2@s%2F1"]
    assert await pull.uids("u", "t", "s/1") == expected
    assert caplog.records == [], "there is nothing to warn of"


async def test_uid_with_an_at_sign_is_qualified_even_for_the_first_source(
    artifacts: ArtifactStore, pull: Pull
) -> None:
    await ended_source(artifacts, "b1@t", node="u")
    await ended_source(artifacts, "b1", node="t")
    assert await pull.uids("u", "t") == ["b1%40t@u", "b1@t"]


async def test_claims_and_references_keep_the_uid_of_the_source(
    db: Any, artifacts: ArtifactStore, pull: Pull
) -> None:
    await ended_source(artifacts, "b1", node="u")
    await ended_source(artifacts, "b1", node="t")
    refs = [payload["ref"] for _, payload in await pull.all("u", "t")]
    assert refs == [{"task_id": TASK, "node_id": node, "batch_uid": "b1"} for node in ("u", "t")]
    claims = await documents_of(db.stream_progress)
    assert sorted((claim["from_node"], claim["batch_uid"]) for claim in claims) == [("t", "b1"), ("u", "b1")]


@pytest.mark.parametrize("uid", ["b1", "b1@u", "a b"])
async def test_single_source_keeps_every_uid(artifacts: ArtifactStore, pull: Pull, uid: str) -> None:
    await ended_source(artifacts, uid)
    assert await pull.uids("u") == [uid]
    assert await pull.uids("u", "u") == [uid], "the same source twice is one source"


async def test_first_of_repeated_sources_is_the_first_listed(artifacts: ArtifactStore, pull: Pull) -> None:
    await ended_source(artifacts, "b1", node="u")
    await ended_source(artifacts, "b1", node="t")
    assert await pull.uids("t", "u", "t") == ["b1", "b1@u"]


async def test_chunks_keep_the_uids_of_the_protocol(artifacts: ArtifactStore, pull: Pull) -> None:
    await ended_source(artifacts, "b1", node="u", skus=[1])
    await ended_source(artifacts, "b1", node="t", skus=[1])
    expected = [stable_hash({"src": source, "parent": "b1", "idx": 0}) for source in ("u", "t")]
    assert await pull.uids("u", "t", size=2, meta_list_key="skus") == expected


async def test_new_attempt_resumes_each_source_separately(artifacts: ArtifactStore, pull: Pull) -> None:
    for node in ("u", "t"):
        await ended_source(artifacts, "b1", "b2", node=node)
    await batches(artifacts, "sink", "b1", "b2@t")
    assert await pull.uids("u", "t", epoch=2) == ["b2", "b1@t"]


async def test_every_batch_arrives_exactly_once_in_any_graph() -> None:
    """The sources use the same few uids. The node fails and resumes until all batches are stored."""
    for seed in range(examples(15)):
        from flowkit.adapters.artifacts import ArtifactStore
        from flowkit.adapters.tasks.store import TaskStore
        from flowkit.testing import memory_database

        chance, db = random.Random(seed), memory_database()
        artifacts = ArtifactStore(db)
        await artifacts.prepare()
        made = {
            node: chance.sample(["b1", "b2", "b1@v", "b1@u", "b@", "@", "%40", "b1%40v"], chance.randrange(6))
            for node in chance.sample(["u", "v", "w@v", "v@"], chance.randrange(1, 5))
        }
        for node, uids in made.items():
            await ended_source(artifacts, *uids, node=node)
        seen: list[tuple[str, str]] = []
        pull = Pull(artifacts, TaskStore(db))
        for epoch in range(1, 4):
            got = await pull.all(*made, epoch=epoch)
            stored = got if epoch == 3 else got[: chance.randrange(len(got) + 1)]
            for uid, payload in stored:
                seen.append((payload["from_node"], payload["ref"]["batch_uid"]))
                await artifacts.store_batch(attempt("sink", epoch=epoch), uid, {"n": 1}, WORKER, AT)
        assert sorted(seen) == sorted((node, uid) for node, uids in made.items() for uid in uids)
        assert await db.artifacts.count_documents({"node_id": "sink"}) == len(seen)


# --- batches of other programs ----------------------------------------------------------------------------------


async def foreign(db: Any, uid: Any, **fields: Any) -> None:
    """Store a batch as a program without FlowKit does."""
    await db.artifacts.insert_one(
        {"task_id": TASK, "node_id": "u", "batch_uid": uid, "status": "partial", "meta": {"n": 1}, **fields}
    )


async def test_external_batches_of_any_type_arrive_once(
    db: Any, artifacts: ArtifactStore, pull: Pull
) -> None:
    """Uids of other types, and dates of other types or none, neither lose a batch nor fail the node."""
    await foreign(db, 5)
    await foreign(db, "5", created_at=datetime(2024, 1, 1, tzinfo=UTC))
    await foreign(db, ObjectId("5" * 24), created_at="yesterday")
    await foreign(db, b"5", created_at=1_700_000_000)
    await foreign(db, "", created_at=None)
    await ended_source(artifacts, "b1")
    got = await pull.all("u")
    uids = [uid for uid, _ in got]
    assert len(set(uids)) == len(uids) == 6
    assert uids[-2:] == ["5", "b1"]
    assert ObjectId("5" * 24) in [payload["ref"]["batch_uid"] for _, payload in got]
    await batches(artifacts, "sink", *uids)
    assert await pull.uids("u", epoch=2) == []


async def test_external_artifacts_without_status_or_uid_are_not_batches(
    db: Any, artifacts: ArtifactStore, pull: Pull
) -> None:
    await db.artifacts.insert_one({"task_id": TASK, "node_id": "u", "batch_uid": "odd"})
    await db.artifacts.insert_one({"task_id": TASK, "node_id": "t", "status": "partial", "meta": {}})
    await end(artifacts, "u")
    assert await pull.uids("u") == []
    assert (await artifacts.scan(TASK, ["u", "t"])).batches == {"u": {}, "t": {}}


@pytest.mark.parametrize("meta", [None, [1, 2], "text", 7])
async def test_external_meta_that_is_not_an_object_is_one_item(
    db: Any, artifacts: ArtifactStore, pull: Pull, meta: Any
) -> None:
    await foreign(db, "b1", meta=meta)
    await end(artifacts, "u")
    [(_, payload)] = await pull.all("u", size=1, meta_list_key="skus")
    assert payload["items"] == [meta or {}]


async def test_external_claim_without_an_epoch_is_taken_over(db: Any, artifacts: ArtifactStore) -> None:
    claim = {"task_id": TASK, "consumer_node": "sink", "from_node": "u", "batch_uid": "b1"}
    await db.stream_progress.insert_one({**claim, "attempt_epoch": None})
    await artifacts.claims.make(attempt("sink"), "u", ["b1"], AT)
    [found] = await documents_of(db.stream_progress)
    assert found["attempt_epoch"] == 1


async def test_external_artifact_without_an_epoch_is_replaced(db: Any, artifacts: ArtifactStore) -> None:
    await foreign(db, "b1")
    await batches(artifacts, "u", "b1")
    [found] = await documents_of(db.artifacts)
    assert (found["attempt_epoch"], found["meta"]) == (1, {"uid": "b1"})
