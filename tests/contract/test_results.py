"""What MongoDB says about the results and the attempts of a task, for the commands that show them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, begun, close, new_task, shown, stored
from tests.contract.builders import record as transition
from tests.unit.bridge_records import record

from flowkit.adapters import worker_events
from flowkit.adapters.artifacts import FailedBatches
from flowkit.adapters.dispatches import Outcome, OutcomeKind, outcome_fields, to_document
from flowkit.adapters.entries import utc
from flowkit.adapters.mongo import moment
from flowkit.adapters.tasks.queries import LatestNodeRun, LoggedAttempt, RunningAttempt, TaskQueries
from flowkit.adapters.worker_registry import WorkerRegistry
from flowkit.models import AttemptFailure, FailureKind, NodeRecord, NodeStatus, TaskStatus

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore


async def test_pages_of_batches_are_in_the_order_in_which_the_batches_were_stored(
    db: Any, artifacts: ArtifactStore
) -> None:
    for number in range(4):
        await artifacts.store_batch(attempt(), f"b{9 - number}", {"n": number}, WORKER, AT + number)
    await artifacts.store_failed_batch(attempt(), "bad", "no such file", AT + 4, worker_id=WORKER)
    await artifacts.mark_complete(TASK, "a", 1, {}, AT + 5)
    queries = TaskQueries(db)
    first, total = await queries.batch_page(TASK, "a", 0, 3)
    last, _ = await queries.batch_page(TASK, "a", 3, 3)
    assert ([each.uid for each in first], total) == (["b9", "b8", "b7"], 5)
    assert [(each.uid, each.status, each.metrics, each.error) for each in last] == [
        ("b6", "ok", {"n": 3}, None),
        ("bad", "failed", {}, "no such file"),
    ]
    assert {(each.attempt, each.worker) for each in first} == {(1, WORKER)}
    assert await queries.batch_page(TASK, "a", 5, 3) == ([], 5)


async def test_batches_that_are_set_aside_are_counted_by_cause(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore
) -> None:
    graph = new_task("a", "b")
    graph["graph"]["nodes"][0]["on_batch_failure"] = {"max": 20}
    await tasks.insert_task(graph)
    queries = TaskQueries(db)
    assert await queries.quarantining(TASK) == ["a"]
    assert await queries.set_aside(TASK) == {}
    assert await artifacts.why_quarantined(attempt()) == ""
    for number, code in enumerate(["slow", "bad", "bad"]):
        error = {"error": f"error {number}", "tries": 2}
        await artifacts.store_failed_batch(attempt(), f"b{number}", code, AT + number, quarantined=error)
    await artifacts.store_failed_batch(attempt(), "fails", "x", AT + 9)
    await artifacts.store_batch(attempt(), "good", {}, WORKER, AT + 9)
    found = await queries.set_aside(TASK)
    assert found == {"a": FailedBatches(codes={"slow": 1, "bad": 2}, latest="bad: error 2")}
    assert await artifacts.why_quarantined(attempt()) == "bad 2, slow 1; latest: bad: error 2"
    await artifacts.skip_quarantined(attempt(), ["b1", "b2"])
    assert (await queries.set_aside(TASK))["a"].causes == "slow 1; latest: slow: error 0"


async def test_results_are_the_final_metrics_and_references_of_finished_nodes(
    db: Any, artifacts: ArtifactStore
) -> None:
    reference = {"key": "s3://x"}
    await artifacts.mark_complete(TASK, "a", 1, {"rows": 2}, AT, artifacts_ref=reference)
    failed = NodeRecord(index=1, node_id="b", status=NodeStatus.FAILED, epoch=1, marker=True)
    await artifacts.mark_ended(TASK, [failed], AT)
    results = await TaskQueries(db).results(TASK)
    assert (results["a"].metrics, results["a"].artifacts_ref) == ({"rows": 2}, reference)
    assert results["b"].metrics == {}


async def test_logs_describe_native_and_external_attempts(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    lease = {"worker_id": WORKER, "lease_id": "l", "deadline_ts_ms": 1}
    failure = AttemptFailure(kind=FailureKind.FAILURE, code="flaky", message="as ordered")
    events = [
        worker_events.accepted(attempt(), lease, AT),
        worker_events.heartbeat(attempt(), lease, 20.0, AT + 1),
        worker_events.failed(attempt(), WORKER, failure, AT + 2),
    ]
    await worker_events.WorkerEvents(db).append(events, AT)
    lost = AttemptFailure(kind=FailureKind.LOSS, code="lease_lost", message="silent")
    ended = Outcome(kind=OutcomeKind.FAILED, at=AT + 9, worker_id="x-1", failure=lost)
    document = to_document(record()) | {"task_id": TASK, "accepted_at": AT + 3}
    await db.dispatches.insert_one(document | {"outcome": outcome_fields(ended)})
    begun, failed, external = await TaskQueries(db).logged_attempts(TASK, None)
    assert begun == LoggedAttempt(node_id="a", epoch=1, worker=WORKER, started_at=AT)
    assert (failed.ended_at, failed.finished, failed.code, failed.error) == (
        AT + 2,
        False,
        "flaky",
        "as ordered",
    )
    assert (external.worker, external.started_at, external.ended_at) == ("x-1", AT + 3, AT + 9)
    assert (external.kind, external.code) == (FailureKind.LOSS, "lease_lost")
    assert await TaskQueries(db).logged_attempts(TASK, "c") == []


async def test_runs_have_the_worker_and_the_times_of_the_latest_attempt(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a", "b"))
    await begun(tasks, attempt())
    await tasks.attempts.finish(attempt(), RUN, AT + 4)
    expected = LatestNodeRun(epoch=1, worker=WORKER, started_at=AT, ended_at=AT + 4)
    assert await TaskQueries(db).node_runs(TASK) == {"a": expected}


async def test_an_attempt_ends_before_a_decision_about_its_failure(db: Any, tasks: TaskStore) -> None:
    """The node ends with the decision, or with the close of the task. Another attempt has its own end."""
    await tasks.insert_task(new_task("a", "b"))
    for index, node_id in enumerate("ab"):
        await begun(tasks, attempt(node_id, index=index))
    held = [
        shown(node_id, NodeStatus.DEFERRED, index=index, epoch=1, held_until=AT + 900)
        for index, node_id in enumerate("ab")
    ]
    await tasks.record(replace(transition(*held), at=AT + 3))
    decided = shown("a", NodeStatus.FAILED, epoch=1, last_error="bad: x", decided=True)
    await tasks.record(replace(transition(decided), at=AT + 600))
    ended = {"a": AT + 3, "b": AT + 3}
    assert {name: run.ended_at for name, run in (await TaskQueries(db).node_runs(TASK)).items()} == ended
    failed = shown("b", NodeStatus.FAILED, index=1, epoch=1, last_error="bad: x", decided=True)
    await tasks.close_task(replace(close(decided, failed, status=TaskStatus.FAILED), at=AT + 900))
    assert {name: run.ended_at for name, run in (await TaskQueries(db).node_runs(TASK)).items()} == ended
    nodes = (await stored(db))["graph"]["nodes"]
    assert [utc(each["finished_at"]).timestamp() for each in nodes] == [AT + 600, AT + 900]


async def test_another_attempt_has_no_end_of_an_earlier_one(db: Any, tasks: TaskStore) -> None:
    await tasks.insert_task(new_task("a"))
    await begun(tasks, attempt())
    await tasks.record(replace(transition(shown("a", NodeStatus.DEFERRED, epoch=1)), at=AT + 3))
    await begun(tasks, attempt(epoch=2))
    assert (await TaskQueries(db).node_runs(TASK))["a"].ended_at is None


async def test_running_attempts_are_those_that_a_worker_holds_in_open_tasks(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.insert_task(new_task("a", "b", "c"))
    for index, node_id in enumerate("ab"):
        await begun(tasks, attempt(node_id, index=index))
    await tasks.attempts.finish(attempt(), RUN, AT + 4)
    expected = RunningAttempt(task_id=TASK, node_id="b", epoch=1, worker=WORKER, started_at=AT)
    assert await TaskQueries(db).running_attempts() == [expected]
    await db.tasks.update_one({"id": TASK}, {"$set": {"status": "failed"}})
    assert await TaskQueries(db).running_attempts() == []


async def test_registered_workers_have_their_roles_versions_and_slots(db: Any) -> None:
    registry = WorkerRegistry(db)
    await registry.register("w-1", ["r", "s"], "1.4", 3, AT, session="s", announce_interval_sec=60.0)
    await registry.record_announcement("x-1", {"type": "t", "capacity": {"cpu": 2}}, AT)
    await registry.mark_offline("w-1", AT + 1, session="s")
    native, external = await registry.list_workers()
    assert (native.worker_id, native.roles, native.version, native.slots) == ("w-1", ("r", "s"), "1.4", 3)
    assert (native.online, native.external, native.announce_interval_sec) == (False, False, 60.0)
    assert (external.worker_id, external.roles, external.slots) == ("x-1", ("t",), None)
    assert (external.online, external.external) == (True, True)
    assert external.last_seen == moment(AT)


async def test_announced_versions_are_those_of_external_workers(db: Any) -> None:
    registry = WorkerRegistry(db)
    await registry.record_announcement("w-1", {"type": "r", "version": "1.4"}, AT)
    await registry.record_announcement("w-2", {"type": "r", "version": ""}, AT)
    await registry.register("w-3", ["r"], "1.5", 1, AT, session="s")
    assert await TaskQueries(db).announced_versions({"w-1", "w-2", "w-3"}) == {"w-1": "1.4"}
