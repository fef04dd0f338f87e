"""Which source batches an external node has still to read."""

from __future__ import annotations

from typing import Any

from tests.contract.builders import AT, TASK, attempt

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.external_inputs import ExternalInputs
from flowkit.adapters.mongo import moment
from flowkit.graph.input_adapters import PullArgs

PULL = PullArgs(from_nodes=("u",))


async def test_claimed_batch_without_a_result_is_unfinished(db: Any) -> None:
    """A worker that runs an outdated attempt may claim a batch; the bridge ignores its result."""
    artifacts, inputs = ArtifactStore(db), ExternalInputs(db)
    sink = attempt("sink")
    for uid in ("b1", "b2"):
        await artifacts.upsert_partial(attempt("u"), uid, {}, "w", AT)
        await db.stream_progress.insert_one(
            {"task_id": TASK, "consumer_node": "sink", "from_node": "u", "batch_uid": uid}
        )
    await artifacts.upsert_partial(sink, "b1", {}, "w", AT)
    assert await inputs.find_unfinished(sink, PULL) == {"u": {"b2"}}
    await inputs.release_claims(sink, PULL)
    claims = [claim["batch_uid"] async for claim in db.stream_progress.find({})]
    assert claims == ["b1"]


async def test_batch_whose_metrics_no_bridge_has_stored_is_unfinished(db: Any) -> None:
    """The worker stores the artifact itself.

    Its event may arrive after the attempt was cancelled, and is then ignored.
    """
    artifacts, inputs = ArtifactStore(db), ExternalInputs(db)
    sink = attempt("sink")
    for uid in ("lost", "measured", "without"):
        await artifacts.upsert_partial(attempt("u"), uid, {}, "w", AT)
        await db.stream_progress.insert_one(
            {"task_id": TASK, "consumer_node": "sink", "from_node": "u", "batch_uid": uid}
        )
        await artifacts.upsert_partial(sink, uid, {} if uid == "without" else {"n": 1}, "w", AT)
    await artifacts.store_batch(sink, "measured", {"n": 1}, "w", AT)
    assert await inputs.find_unfinished(sink, PULL) == {"u": {"lost"}}


async def test_batch_that_failed_before_an_outdated_worker_stored_it_is_unfinished(db: Any) -> None:
    """The worker replaces the artifact of the failed batch.

    Its event is ignored, so that the metrics row says: failed.
    """
    artifacts, inputs = ArtifactStore(db), ExternalInputs(db)
    sink, claim = attempt("sink"), {"task_id": TASK, "consumer_node": "sink", "from_node": "u"}
    for uid, meta in (("lost", {"n": 1}), ("empty", {})):
        await artifacts.upsert_partial(attempt("u"), uid, {}, "w", AT)
        await artifacts.store_failed_batch(sink, uid, "unexpected_error", AT)
        await db.stream_progress.insert_one({**claim, "batch_uid": uid})
        overwritten = {"status": "partial", "meta": meta}
        await db.artifacts.update_one({"node_id": "sink", "batch_uid": uid}, {"$set": overwritten})
    assert await inputs.find_unfinished(sink, PULL) == {"u": {"lost", "empty"}}
    await inputs.release_claims(sink, PULL)
    assert await db.stream_progress.count_documents({}) == 0


# --- the oldest batches (H20) -------------------------------------------------------------------------------------


async def stored_and_claimed(db: Any, stored: int, claimed: int) -> None:
    """Store batches of the source `u`, the oldest of which its child has claimed."""
    uids = [f"b{number:04}" for number in range(stored)]
    base = {"task_id": TASK, "node_id": "u", "status": "partial"}
    await db.artifacts.insert_many(
        [{**base, "batch_uid": uid, "created_at": moment(AT + at)} for at, uid in enumerate(uids)]
    )
    claim = {"task_id": TASK, "consumer_node": "a", "from_node": "u"}
    await db.stream_progress.insert_many([{**claim, "batch_uid": uid} for uid in uids[:claimed]])


async def test_only_the_batches_that_a_worker_reads_are_moved(db: Any) -> None:
    await stored_and_claimed(db, stored=450, claimed=300)
    inputs, later = ExternalInputs(db), AT + 1_000
    assert await inputs.show_unclaimed_first(attempt(), PULL, later) == 300
    seen = await inputs._read_oldest(TASK, "u")
    assert {f"b{number:04}" for number in range(300, 450)} < set(seen)
    assert await inputs.show_unclaimed_first(attempt(), PULL, later + 1) == 50


async def test_claimed_batches_stay_where_they_are_if_no_other_follows(db: Any) -> None:
    await stored_and_claimed(db, stored=250, claimed=250)
    assert await ExternalInputs(db).show_unclaimed_first(attempt(), PULL, AT + 1_000) == 0


async def test_marker_of_a_completed_node_outlives_the_check_of_its_earlier_attempt(db: Any) -> None:
    """The worker's own marker has no epoch until a bridge has confirmed it."""
    artifacts, inputs = ArtifactStore(db), ExternalInputs(db)
    key = {"task_id": TASK, "node_id": "sink", "status": "complete"}
    await db.artifacts.insert_one({**key, "meta": {"of": "worker"}})
    await inputs.delete_marker(attempt("sink"))
    assert await db.artifacts.find_one(key) is None
    await artifacts.mark_complete(TASK, "sink", 1, {"of": "worker"}, AT)
    await inputs.delete_marker(attempt("sink"))
    assert await db.artifacts.find_one(key) is None
    await artifacts.mark_complete(TASK, "sink", 2, {"by": "operator"}, AT)
    await inputs.delete_marker(attempt("sink"))
    marker = await db.artifacts.find_one(key)
    assert marker is not None
    assert marker["meta"] == {"by": "operator"}
