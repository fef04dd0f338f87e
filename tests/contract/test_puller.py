"""Pulling delivers every batch of every source once, in order, until all sources have ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, TASK, WORKER, attempt, batches, begun, documents_of, opened
from tests.contract.pulling_node import Pull, WatchedArtifacts, end, ended_source
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC

from flowkit.activities.batches.puller import split
from flowkit.core.utils import stable_hash

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


@pytest.fixture
async def artifacts(db: Any) -> WatchedArtifacts:
    store = WatchedArtifacts(db)
    await store.prepare()
    return store


# --- what is delivered ------------------------------------------------------------------------------------------


async def test_batches_are_delivered_unchanged(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", skus=["x"])
    [delivery] = await pull.all("u")
    ref = {"task_id": TASK, "node_id": "u", "batch_uid": "b1"}
    assert delivery == ("b1", {"from_node": "u", "ref": ref, "meta": {"skus": ["x"]}})


async def test_batches_are_delivered_by_source_and_oldest_first(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await ended_source(artifacts, "z", "y", "x", node="u")
    await ended_source(artifacts, "w", "v", node="t")
    assert await pull.uids("u", "t") == ["z", "y", "x", "w@t", "v@t"]


async def test_equal_uids_of_two_sources_stay_distinct(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", "b2", node="u")
    await ended_source(artifacts, "b1", "b2", "b3", node="t")
    assert await pull.uids("u", "t") == ["b1", "b2", "b1@t", "b2@t", "b3@t"]
    assert len(set(await pull.uids("u", "t", size=1))) == 5


async def test_every_delivery_is_claimed(db: Any, artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", "b2")
    await pull.all("u", epoch=3)
    claims = await documents_of(db.stream_progress)
    assert sorted(claim["batch_uid"] for claim in claims) == ["b1", "b2"]
    assert {(claim["consumer_node"], claim["from_node"], claim["attempt_epoch"]) for claim in claims} == {
        ("sink", "u", 3)
    }


async def test_new_attempt_gets_only_batches_without_a_result(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await ended_source(artifacts, "b1", "b2", "b3")
    assert await pull.uids("u", epoch=1) == ["b1", "b2", "b3"]
    await batches(artifacts, "sink", "b1", "b3")
    assert await pull.uids("u", epoch=2) == ["b2"]


async def test_result_of_another_consumer_does_not_count(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1")
    await batches(artifacts, "other-sink", "b1")
    assert await pull.uids("u") == ["b1"]


async def test_more_batches_than_one_page_are_all_delivered(artifacts: WatchedArtifacts, pull: Pull) -> None:
    uids = [f"b{number:03}" for number in range(210)]
    for number, uid in enumerate(uids):
        await artifacts.upsert_partial(attempt("u"), uid, {}, WORKER, AT + number / 1000)
    await end(artifacts, "u")
    assert await pull.uids("u") == uids


# --- chunks -----------------------------------------------------------------------------------------------------


def test_payload_hash_equals_that_of_the_protocol() -> None:
    value = {"td": "7f0c2a4e-3b1d-4c55-9a6e-0d2f8b7c1e90", "n": "extract", "e": 1}
    assert stable_hash(value) == "66bb98b308392a419eb9aa348dc96402f46a8e40"


def test_payload_hash_keeps_non_ascii_text() -> None:
    assert stable_hash({"ü": 1}) != stable_hash({"\\u00fc": 1})
    assert stable_hash({"b": 1, "a": "é"}) == stable_hash({"a": "é", "b": 1})


def test_slices_keep_the_order_and_the_remainder() -> None:
    assert list(split([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]


async def test_chunks_never_span_two_batches_and_keep_the_remainder(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await ended_source(artifacts, "b1", "b2", skus=[1, 2, 3])
    found = [payload for _, payload in await pull.all("u", size=2, meta_list_key="skus")]
    assert [payload["items"] for payload in found] == [[1, 2], [3], [1, 2], [3]]
    assert [payload["parent"]["ref"]["batch_uid"] for payload in found] == ["b1", "b1", "b2", "b2"]
    assert {payload["from_node"] for payload in found} == {"u"}
    assert {payload["parent"]["meta_list_key"] for payload in found} == {"skus"}


async def test_chunks_have_the_uids_of_the_protocol(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", skus=[1, 2, 3])
    first, second = await pull.uids("u", size=2, meta_list_key="skus")
    assert first == "ad2b7bfd0ae8f741de96ce46937202d382868d69"
    assert second == stable_hash({"src": "u", "parent": "b1", "idx": 1})


@pytest.mark.parametrize("key", ["text", "absent", None])
async def test_value_that_is_not_a_list_is_one_item(
    artifacts: WatchedArtifacts, pull: Pull, key: str | None
) -> None:
    await ended_source(artifacts, "b1", text="abc")
    [(_, payload)] = await pull.all("u", size=2, meta_list_key=key)
    assert payload["items"] == [{"text": "abc"}]
    assert payload["parent"] == {"ref": {"batch_uid": "b1"}, "meta_list_key": None}


async def test_empty_list_yields_nothing(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", skus=[])
    assert await pull.all("u", size=2, meta_list_key="skus") == []


async def test_new_attempt_gets_only_chunks_without_a_result(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await ended_source(artifacts, "b1", skus=[1, 2, 3])
    first, second = await pull.uids("u", size=2, meta_list_key="skus")
    await batches(artifacts, "sink", first)
    assert await pull.uids("u", size=2, meta_list_key="skus", epoch=2) == [second]


# --- the end ----------------------------------------------------------------------------------------------------


async def test_pull_without_sources_ends(pull: Pull) -> None:
    assert await pull.all() == []


async def test_source_that_ended_without_batches_ends_the_pull(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await end(artifacts, "u")
    assert await pull.all("u") == []


async def test_running_source_is_awaited_and_its_later_batches_are_delivered(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    running = pull.start("u")
    for number in (1, 2):
        await artifacts.next_scan()
        await artifacts.upsert_partial(attempt("u"), f"b{number}", {}, WORKER, AT + number)
    await artifacts.next_scan()
    assert not running.done()
    await end(artifacts, "u")
    assert [uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)] == ["b1", "b2"]


async def test_one_of_two_ended_sources_does_not_end_the_pull(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await ended_source(artifacts, "b1", node="u")
    running = pull.start("u", "t")
    await artifacts.next_scan()
    assert not running.done()
    await ended_source(artifacts, "b2", node="t")
    assert [uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)] == ["b1", "b2@t"]


async def test_marker_of_an_older_epoch_does_not_end_the_pull(
    artifacts: WatchedArtifacts, tasks: TaskStore, pull: Pull
) -> None:
    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u", epoch=2))
    await end(artifacts, "u", epoch=1)
    running = pull.start("u")
    await artifacts.next_scan()
    assert not running.done()
    await end(artifacts, "u", epoch=2)
    assert await asyncio.wait_for(running, TIMEOUT_SEC) == []


async def test_pull_trusts_the_epochs_of_the_workflow(artifacts: WatchedArtifacts, pull: Pull) -> None:
    await end(artifacts, "u", epoch=1)
    running = pull.start("u", sources={"u": 2})
    await artifacts.next_scan()
    assert not running.done()
    await end(artifacts, "u", epoch=2)
    assert await asyncio.wait_for(running, TIMEOUT_SEC) == []


async def test_pull_without_an_end_continues_after_the_marker(
    artifacts: WatchedArtifacts, pull: Pull
) -> None:
    await end(artifacts, "u")
    running = pull.start("u", eof_on_task_done=False)
    await artifacts.next_scan()
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_batch_that_disappears_during_the_read_is_delivered_if_it_returns(
    db: Any, artifacts: WatchedArtifacts, pull: Pull, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """A rerun of a source deletes its batches and creates them again."""
    read = artifacts.metas

    async def disappearing(*args: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(artifacts, "metas", read)
        await db.artifacts.delete_one({"batch_uid": "b1"})
        found = await read(*args)
        if comes_back:
            await batches(artifacts, "u", "b1")
        return found

    await ended_source(artifacts, "b1", "b2")
    monkeypatch.setattr(artifacts, "metas", disappearing)
    assert sorted(await pull.uids("u")) == (["b1", "b2"] if comes_back else ["b2"])
