"""A reset starts a new generation of a node: what earlier ones have written, or write late, no longer counts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.builders import (
    AT,
    FIRST_RUN,
    RUN,
    TASK,
    WORKER,
    attempt,
    begun,
    close,
    opened,
    opening,
    record,
    shown,
    stored,
    stored_node,
)
from tests.contract.recording_database import RecordingDatabase
from tests.unit.measured import measuring

from flowkit.adapters.aggregates import Aggregates
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.external_inputs import ExternalInputs
from flowkit.adapters.metrics import BadMetrics
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.adapters.tasks.reset import read_first_epochs
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt import storage
from flowkit.client import TaskCatalog
from flowkit.core import instruments
from flowkit.errors import Fenced, FlowKitError, RerunOutdated
from flowkit.graph.input_adapters import PullArgs
from flowkit.models import NodeOutcome, NodeReset, NodeStatus, Rerun, ResetNodes, TaskStatus
from flowkit.models.actions import AppliedAction
from flowkit.models.waits import for_decision
from flowkit.protocol.messages import FINAL_UID
from flowkit.reading.state import read_document
from flowkit.reading.timeline import HistoryWaits, make_timeline

PULL = PullArgs(from_nodes=("a",))


@pytest.fixture
async def tasks(db: Any) -> TaskStore:
    """A task of the nodes a, b and c."""
    store = TaskStore(db)
    await store.prepare()
    await opened(store, "a", "b", "c")
    return store


@pytest.fixture
async def artifacts(db: Any) -> ArtifactStore:
    store = ArtifactStore(db)
    await store.prepare()
    return store


def reset(*nodes: NodeReset, revision: int = 1, run: str = RUN, run_seq: int = 1) -> ResetNodes:
    return ResetNodes(task_id=TASK, run_id=run, run_seq=run_seq, revision=revision, at=AT, nodes=[*nodes])


def again(node_id: str = "a", index: int = 0, epoch: int = 2, **more: Any) -> NodeReset:
    return NodeReset(index=index, node_id=node_id, epoch=epoch, generation=1, **more)


async def finished(tasks: TaskStore, artifacts: ArtifactStore, *uids: str) -> None:
    """Let the first attempt of `a` store these batches and finish."""
    first = attempt()
    await begun(tasks, first)
    for uid in uids:
        await artifacts.store_batch(first, uid, {"n": 1}, WORKER, AT)
    await artifacts.mark_complete(TASK, "a", 1, {}, AT)
    await tasks.attempts.finish(first, RUN, AT)


async def rows_of(db: Any, name: str, **wanted: Any) -> int:
    return int(await db[name].count_documents({"task_id": TASK, **wanted}))


async def test_reset_reserves_the_next_epoch_and_removes_what_the_earlier_generation_left(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await finished(tasks, artifacts, "1", "2")
    await artifacts.claims.make(attempt(), "x", ["9"], AT)
    changed = again(io={"input_inline": {"limit": 5}}, fields={"timeout_sec": 7})
    assert await tasks.reset_nodes(reset(changed), artifacts) == [2]
    entry = await stored_node(db)
    assert (entry["status"], entry["attempt_epoch"], entry["first_epoch"], entry["generation"]) == (
        "queued",
        2,
        2,
        1,
    )
    assert (entry["io"], entry["timeout_sec"]) == ({"input_inline": {"limit": 5}}, 7)
    assert not {"finished_at", "started_at", "skip_reason"} & entry.keys()
    for name in ("artifacts", "metrics_raw", "stream_progress"):
        assert await rows_of(db, name) == 0
    assert await tasks.reset_nodes(reset(changed), artifacts) == [2]


@pytest.mark.parametrize("io", [None, "absent", {"input_ref": {"x": 1}}])
async def test_reset_changes_the_input_of_a_node_whatever_it_had(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore, io: Any
) -> None:
    change = {"$unset": {"graph.nodes.0.io": ""}} if io == "absent" else {"$set": {"graph.nodes.0.io": io}}
    await db.tasks.update_one({"id": TASK}, change)
    await tasks.reset_nodes(reset(again(io={"input_inline": {"limit": 5}})), artifacts)
    kept = io if isinstance(io, dict) else {}
    assert (await stored_node(db))["io"] == {**kept, "input_inline": {"limit": 5}}


async def test_a_repeated_reset_returns_its_epoch_although_an_attempt_has_begun(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await tasks.reset_nodes(reset(again()), artifacts)
    await begun(tasks, attempt(epoch=3))
    assert await tasks.reset_nodes(reset(again()), artifacts) == [2]
    assert (await stored_node(db))["attempt_epoch"] == 3
    assert await tasks.reset_nodes(reset(again(), run="other-run"), artifacts) == [4]


async def test_epoch_that_the_workflow_does_not_know_is_skipped(
    tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await begun(tasks, attempt(epoch=6))
    assert await tasks.reset_nodes(reset(again(epoch=2)), artifacts) == [7]


async def test_reset_beside_attempts_that_begin_gives_every_node_one_epoch(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    nodes = [again(name, index, epoch=1) for index, name in enumerate("abc")]
    begins = [begun(tasks, attempt(name, index=index)) for index, name in enumerate("abc")]
    epochs, *_ = await asyncio.gather(
        tasks.reset_nodes(reset(*nodes), artifacts), *begins, return_exceptions=True
    )
    assert isinstance(epochs, list)
    entries = (await stored(db))["graph"]["nodes"]
    assert [entry["first_epoch"] for entry in entries] == epochs
    assert all(entry["attempt_epoch"] == entry["first_epoch"] for entry in entries)


async def test_an_attempt_of_the_earlier_generation_writes_nothing_that_counts(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    late = attempt()
    await begun(tasks, late)
    await tasks.reset_nodes(reset(again()), artifacts)
    with pytest.raises(Fenced):
        await tasks.attempts.finish(late, RUN, AT)
    await tasks.record(record(shown("a", NodeStatus.FAILED, epoch=1)))
    assert (await stored_node(db))["status"] == "queued"
    await artifacts.store_batch(late, "late", {"n": 1}, WORKER, AT)
    await artifacts.mark_complete(TASK, "a", 1, {}, AT)
    now = replace(attempt(epoch=3), first_epoch=2)
    scan = await artifacts.scan(TASK, ["a"], first_epochs={"a": 2})
    assert (scan.batches, scan.markers) == ({"a": {}}, {})
    assert await artifacts.batch_uids(TASK, "a", 2) == set()
    assert await artifacts.stored_uids(TASK, "a", 2) == set()
    assert not await artifacts.has_batches(TASK, "a", 2)
    assert [page async for page in artifacts.pages(TASK, "a", first_epoch=2)] == []
    assert await TaskQueries(db).batches(TASK) == {}
    assert await TaskQueries(db).results(TASK) == {}
    assert await TaskQueries(db).batch_page(TASK, "a", 0, 10) == ([], 0)
    aggregates = Aggregates(db)
    assert await aggregates.aggregated(TASK, "a", "sum") == {}
    assert (await aggregates.merged(TASK, ["a"], AT))["partial_batches"] == 0
    puller = replace(attempt("b"), source_first_epochs={"a": 2})
    assert await ExternalInputs(db).find_unfinished(puller, PULL) == {}
    await storage.begin(tasks, artifacts, now, RUN, WORKER)
    assert await rows_of(db, "artifacts") == await rows_of(db, "metrics_raw") == 0


async def test_the_new_generation_stores_batches_with_the_uids_of_the_earlier_one(
    tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await finished(tasks, artifacts, "1")
    await tasks.reset_nodes(reset(again()), artifacts)
    await artifacts.store_batch(attempt(), "1", {"n": 1}, WORKER, AT)
    new = replace(attempt(epoch=3), first_epoch=2)
    await artifacts.store_batch(new, "1", {"n": 2}, WORKER, AT)
    with pytest.raises(Fenced):
        await artifacts.store_batch(attempt(), "1", {"n": 1}, WORKER, AT)
    assert await artifacts.batch_uids(TASK, "a", 2) == {"1"}


async def test_claims_of_an_earlier_generation_do_not_count(artifacts: ArtifactStore) -> None:
    await artifacts.claims.make(attempt("b"), "a", ["1", "2"], AT)
    await artifacts.claims.make(attempt("b", epoch=3), "a", ["1"], AT)
    assert await artifacts.claims.counts(TASK, "a", ["b"]) == {"b": 2}
    assert await artifacts.claims.counts(TASK, "a", ["b"], {"b": 2}) == {"b": 1}


async def test_late_rows_of_a_source_are_deleted_without_the_claims_of_its_external_worker(
    db: Any, artifacts: ArtifactStore
) -> None:
    await artifacts.store_batch(attempt("b"), "late", {"n": 1}, WORKER, AT)
    await artifacts.store_batch(attempt("b", epoch=3), "new", {"n": 1}, WORKER, AT)
    claim = {"task_id": TASK, "consumer_node": "b", "from_node": "a", "batch_uid": "1"}
    await db.stream_progress.insert_one({**claim})
    await artifacts.delete_earlier_rows(TASK, {"b": 2})
    assert await rows_of(db, "stream_progress") == await rows_of(db, "artifacts") == 1
    await artifacts.delete_earlier_generations(TASK, {"b": 2}, time.time() + 60)
    assert await rows_of(db, "stream_progress") == 0


async def test_a_late_clean_up_keeps_rows_of_external_workers_that_no_bridge_has_confirmed(
    db: Any, artifacts: ArtifactStore
) -> None:
    raw = {"task_id": TASK, "node_id": "b", "batch_uid": "1", "status": "partial", "meta": {}}
    await db.artifacts.insert_one({**raw})
    claim = {"task_id": TASK, "consumer_node": "b", "from_node": "a", "batch_uid": "1"}
    await db.stream_progress.insert_one({**claim})
    await artifacts.delete_earlier_rows(TASK, {"b": 2})
    await artifacts.delete_earlier_generations(TASK, {"b": 2}, time.time() - 60)
    assert await rows_of(db, "stream_progress") == await rows_of(db, "artifacts") == 1
    await artifacts.delete_earlier_generations(TASK, {"b": 2}, time.time() + 60)
    assert await rows_of(db, "stream_progress") == await rows_of(db, "artifacts") == 0


async def test_an_outcome_is_stored_with_the_epoch_of_the_generation(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await finished(tasks, artifacts, "old")
    outcome = NodeOutcome(
        metrics={"total": 3}, artifacts_ref={"s3": "x"}, batches=[{"batch_uid": "1", "metrics": {"n": 3}}]
    )
    assert await tasks.reset_nodes(reset(again(outcome=outcome)), artifacts) == [2]
    scan = await artifacts.scan(TASK, ["a"], first_epochs={"a": 2})
    assert ([*scan.batches["a"]], scan.markers, scan.unconfirmed) == (["1"], {"a": 2}, set())
    entry = await stored_node(db)
    assert (entry["status"], "finished_at" in entry) == ("finished", True)
    assert (await TaskQueries(db).results(TASK))["a"].artifacts_ref == {"s3": "x"}


async def test_an_outcome_that_cannot_be_stored_changes_nothing(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await finished(tasks, artifacts, "old")
    before = await stored_node(db)
    deep: dict[str, Any] = {}
    for _ in range(120):
        deep = {"x": deep}
    outcome = NodeOutcome(batches=[{"batch_uid": "1", "metrics": {}}, {"batch_uid": "2", "metrics": deep}])
    with pytest.raises(BadMetrics):
        await tasks.reset_nodes(reset(again(outcome=outcome)), artifacts)
    assert await stored_node(db) == before


@pytest.mark.parametrize("how", ["closed", "newer run", "another graph", "gone"])
async def test_reset_of_a_task_that_is_not_its_own_is_fenced(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore, how: str
) -> None:
    record_ = reset(again())
    if how == "closed":
        await tasks.close_task(close())
    elif how == "newer run":
        await opened(tasks, "a", "b", "c", run="next")
    elif how == "another graph":
        record_ = reset(again("z"))
    else:
        await db.tasks.delete_many({})
    with pytest.raises(Fenced):
        await tasks.reset_nodes(record_, artifacts)


async def test_reset_of_many_nodes_takes_few_calls(db: Any, artifacts: ArtifactStore) -> None:
    recording = RecordingDatabase(db)
    store = TaskStore(recording)
    await opened(store, *(f"n{i}" for i in range(450)))
    recording.updates.clear()
    nodes = [again(f"n{i}", i, epoch=1) for i in range(450)]
    assert await store.reset_nodes(reset(*nodes), artifacts) == [1] * 450
    assert len(recording.updates) == 5
    assert await read_first_epochs(db.tasks, TASK, ["n1"]) == {"n1": 1}


@pytest.mark.parametrize("end", ["record", "close"])
async def test_a_held_node_shows_its_wait_until_it_ends(db: Any, tasks: TaskStore, end: str) -> None:
    await begun(tasks, attempt())
    held = shown(
        "a",
        NodeStatus.DEFERRED,
        epoch=1,
        wait=for_decision("failed with x").began(AT),
        held_until=AT + 5,
        last_error="x: y",
    )
    await tasks.record(record(held))
    entry = await stored_node(db)
    assert (entry["waits_for"], entry["held_until_ms"]) == ("a decision: failed with x", int((AT + 5) * 1000))
    assert (entry["wait_kind"], entry["waits_since_ms"]) == ("decision", int(AT * 1000))
    failed = shown("a", NodeStatus.FAILED, epoch=1, reason_code="x", last_error="x: y", decided=True)
    if end == "record":
        await tasks.record(record(failed))
    else:
        await tasks.close_task(close(failed, status=TaskStatus.FAILED))
    entry = await stored_node(db)
    assert (entry["status"], entry["reason_code"]) == ("failed", "x")
    assert not {"waits_for", "held_until_ms"} & entry.keys()


async def test_a_rerun_takes_over_how_nodes_ended_and_only_one_of_two_opens_the_document(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    await finished(tasks, artifacts, "1")
    skipped = shown("b", NodeStatus.SKIPPED, index=1, skip_reason="upstream_failed")
    failed = shown("c", NodeStatus.FAILED, index=2, epoch=4, reason_code="x")
    await tasks.close_task(close(skipped, failed, status=TaskStatus.FAILED))
    rerun = Rerun(run_seq=1, closed_run_id=RUN, nodes=["c"])
    runs = [
        replace(opening("a", "b", "c", first_run=f"f{n}", run=f"r{n}"), rerun=rerun, params={"n": 2})
        for n in "12"
    ]
    both = await asyncio.gather(*(tasks.open_rerun(each, rerun) for each in runs), return_exceptions=True)
    won = [each for each in both if isinstance(each, tuple)]
    assert [type(each) for each in both if not isinstance(each, tuple)] == [RerunOutdated]
    ((run_seq, earlier),) = won
    assert (run_seq, earlier.statuses, earlier.epochs) == (2, "fsx", [1, 0, 4])
    assert (earlier.skip_reasons, earlier.reason_codes) == ({1: "upstream_failed"}, {2: "x"})
    document = await stored(db)
    assert (document["status"], document["params"], document["finished_at"]) == ("running", {"n": 2}, None)
    winner = next(each for each in runs if each.run_id == document["run_id"])
    assert await tasks.open_rerun(winner, rerun) == (2, earlier)


async def test_the_end_of_a_node_counts_once_and_not_with_each_rerun(
    tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    """A node counts again only if an action of the rerun, or an action since, has started it again."""
    await opened(tasks, "a", "b", "c")
    rest = [shown("a", NodeStatus.FINISHED), shown("b", NodeStatus.SKIPPED, index=1)]
    failed = shown("c", NodeStatus.FAILED, index=2, reason_code="x")
    with measuring() as measured:
        await tasks.close_task(close(*rest, failed, status=TaskStatus.FAILED))
        closed_run_id = RUN
        for run_seq, again in ((1, 2), (2, 1), (3, 2)):
            run = f"r{run_seq}"
            rerun = Rerun(run_seq=run_seq, closed_run_id=closed_run_id, nodes=[])
            opens = replace(opening("a", "b", "c", first_run=f"f{run_seq}", run=run), rerun=rerun)
            assert (await tasks.open_rerun(opens, rerun))[0] == run_seq + 1
            reset = NodeReset(index=again, node_id="abc"[again], epoch=run_seq, generation=run_seq)
            resets = ResetNodes(
                task_id=TASK, run_id=run, run_seq=run_seq + 1, revision=run_seq, at=AT, nodes=[reset]
            )
            await tasks.reset_nodes(resets, artifacts)
            ends = shown("abc"[again], NodeStatus.FAILED, index=again, epoch=run_seq, reason_code="x")
            closing = replace(
                close(ends, status=TaskStatus.FAILED, run=run, run_seq=run_seq + 1),
                unfinished={NodeStatus.FAILED: [2], NodeStatus.SKIPPED: [1]},
                applied=[AppliedAction(revision=run_seq, action="rerun", at=AT, what="task")],
            )
            await tasks.close_task(closing)
            await tasks.close_task(closing)
            closed_run_id = run
    assert measured.counted(instruments.TASKS_CLOSED) == {("failed",): 4}
    assert measured.counted(instruments.NODES_CLOSED) == {
        ("crawler", "finished"): 1,
        ("crawler", "skipped"): 1,
        ("crawler", "failed"): 4,
    }


async def test_after_a_rerun_lists_views_and_explanations_have_the_same_duration(
    db: Any, tasks: TaskStore
) -> None:
    ended = shown("a", NodeStatus.FINISHED, epoch=1)
    await tasks.close_task(replace(close(ended), at=AT + 3))
    catalog = TaskCatalog(db)

    async def durations() -> set[tuple[float | None, float | None]]:
        document = await stored(db)
        (listed,) = await catalog.list_tasks()
        view, times = read_document(document, {}), await catalog.times(TASK)
        timeline, _ = make_timeline(document, [], HistoryWaits([]), AT + 50, complete=True)
        run = round(timeline.ended_at - timeline.began_at, 2)
        assert times is not None
        return {
            *((each.seconds, each.total_seconds) for each in (listed, view)),
            (run, times.total_seconds(AT + 50)),
        }

    assert await durations() == {(3.0, 3.0)}
    rerun = Rerun(run_seq=1, closed_run_id=RUN, nodes=["a"])
    again = replace(opening("a", "b", "c", first_run="f2", run="r2"), rerun=rerun, at=AT + 20)
    await tasks.open_rerun(again, rerun)
    await tasks.open_rerun(replace(again, at=AT + 29), rerun)  # a repetition changes nothing
    await tasks.close_task(replace(close(ended, run="r2"), run_seq=2, at=AT + 22))
    assert await durations() == {(2.0, 22.0)}


async def test_a_rerun_of_a_task_that_runs_is_outdated(tasks: TaskStore) -> None:
    rerun = Rerun(run_seq=1, closed_run_id=RUN, nodes=["a"])
    with pytest.raises(FlowKitError, match="is not at run 1 any more"):
        await tasks.open_rerun(replace(opening("a", first_run=f"{FIRST_RUN}2", run="r2"), rerun=rerun), rerun)


async def test_what_an_outdated_external_worker_has_overwritten_is_restored(
    db: Any, artifacts: ArtifactStore
) -> None:
    outcome = NodeOutcome(metrics={"rows": 2}, batches=[{"batch_uid": "b", "metrics": {"rows": 1}}])
    await artifacts.store_outcome(attempt(epoch=4), outcome, AT)
    before = await db.artifacts.find({}, {"_id": 0}).sort("batch_uid", 1).to_list(None)
    for uid in ("b", {"$exists": False}):
        own = {"task_id": TASK, "node_id": "a", "batch_uid": uid}
        await db.artifacts.update_one(own, {"$set": {"meta": {"late": 1}}})
    for epoch in (4, 3):
        assert await db.artifacts.count_documents({"meta": {"late": 1}}) == 2
        await artifacts.restore_batch(attempt(epoch=epoch), "b")
        await artifacts.restore_batch(attempt(epoch=epoch), FINAL_UID)
    assert await db.artifacts.find({}, {"_id": 0}).sort("batch_uid", 1).to_list(None) == before
