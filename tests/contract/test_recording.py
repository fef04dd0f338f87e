"""`record` writes what only the workflow knows, in one update if possible, and never sets the document back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    CHANGES,
    RUN,
    TASK,
    attempt,
    begun,
    close,
    opened,
    opening,
    record,
    seconds,
    shown,
    stored,
    stored_node,
    stored_statuses,
)
from tests.contract.recording_database import RecordingDatabase
from tests.contract.size_limited_database import SizeLimitedDatabase

from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.limits import APPLIED_ACTIONS
from flowkit.models import NodeStatus, SkipReason, TaskStatus
from flowkit.models.actions import ActionRecord, AppliedAction, PausedScope
from flowkit.models.waits import for_decision

if TYPE_CHECKING:
    from flowkit.models import NodeRecord

MANY = 250


@pytest.fixture
def recording(db: Any) -> RecordingDatabase:
    """`db`, recording its updates."""
    return RecordingDatabase(db)


@pytest.fixture
async def tasks(recording: RecordingDatabase) -> TaskStore:
    """A task of three nodes."""
    store = TaskStore(recording)
    await store.prepare()
    await opened(store, "a", "b", "c")
    recording.updates.clear()
    return store


@pytest.mark.parametrize("end", ["record", "close", "sweep"])
async def test_cancelled_node_loses_the_error_of_an_earlier_attempt(
    db: Any, tasks: TaskStore, end: str
) -> None:
    await tasks.record(record(shown("a", NodeStatus.DEFERRED, epoch=1, next_retry_at=AT, last_error="boom")))
    cancelled = shown("a", NodeStatus.CANCELLED, epoch=1)
    if end == "record":
        await tasks.record(record(cancelled))
    elif end == "close":
        await tasks.close_task(close(cancelled, status=TaskStatus.CANCELLED))
    else:
        assert await OpenTasks(tasks.database).close_orphan(TASK, RUN, "terminated", AT)
    node = await stored_node(db)
    assert (node["status"], node["last_error"]) == ("cancelled", None)


async def test_record_finds_the_nodes_that_an_attempt_has_finished(tasks: TaskStore) -> None:
    """The worker of `a` was lost before it could report the end, and that of `b` before a reset of the workflow."""
    for node_id, index, run in (("a", 0, RUN), ("b", 1, "discarded")):
        await begun(tasks, attempt(node_id, index=index), run=run)
        await tasks.attempts.finish(attempt(node_id, index=index), run, AT)
    await begun(tasks, attempt("c", index=2))
    open_nodes = [
        shown("a", NodeStatus.CANCELLING, epoch=1),
        shown("b", NodeStatus.DEFERRED, index=1, epoch=1),
        shown("c", NodeStatus.CANCELLING, index=2, epoch=1),
    ]
    found = await tasks.record(record(*open_nodes))
    assert [(node.node_id, node.epoch) for node in found] == [("a", 1)]
    assert await stored_statuses(tasks.database) == ["finished", "finished", "cancelling"]
    [later] = await tasks.record(
        record(shown("a", NodeStatus.CANCELLING, epoch=2))
    )  # the next one has not begun
    assert later.epoch == 1
    assert await tasks.record(record(shown("a", NodeStatus.CANCELLED, epoch=1))) == []


async def test_transitions_of_several_nodes_are_one_update(
    db: Any, tasks: TaskStore, recording: RecordingDatabase
) -> None:
    deferred = shown("a", NodeStatus.DEFERRED, epoch=1, next_retry_at=AT + 1.5, last_error="boom")
    skipped = shown("b", NodeStatus.SKIPPED, index=1, skip_reason=SkipReason.ROUTING)
    await tasks.record(record(deferred, skipped, status=TaskStatus.DEFERRED))
    first, second, third = (await stored(db))["graph"]["nodes"]
    assert (first["status"], first["attempt_epoch"], first["last_error"]) == ("deferred", 1, "boom")
    assert (first["next_retry_at_ms"], first.get("finished_at")) == (int((AT + 1.5) * 1000), None)
    assert (second["status"], second["skip_reason"], seconds(second["finished_at"])) == (
        "skipped",
        "routing",
        AT,
    )
    assert third["status"] == "queued"
    assert len(recording.updates) == 1


async def test_history_is_written_completely_with_the_status(db: Any, tasks: TaskStore) -> None:
    for _ in range(2):
        await tasks.record(record(status=TaskStatus.DEFERRED))
    document = await stored(db)
    assert document["status"] == "deferred"
    assert [(change["from"], change["to"]) for change in document["status_history"]] == [
        (change.from_, change.to) for change in CHANGES
    ]
    assert all(change["at"].endswith("+00:00") for change in document["status_history"])
    assert seconds(document["updated_at"]) == AT


async def test_node_being_cancelled_has_the_flag_that_workers_poll(db: Any, tasks: TaskStore) -> None:
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=1)))
    node = await stored_node(db)
    assert (node["status"], node["coordinator"]) == ("cancelling", {"cancelled": True})
    assert seconds(node["cancel_requested_at"]) == AT
    assert "coordinator" not in await stored_node(db, 1)


async def test_flags_are_set_in_the_same_update_as_the_failed_node(
    db: Any, tasks: TaskStore, recording: RecordingDatabase
) -> None:
    failed = shown("a", NodeStatus.FAILED, epoch=1, last_error="boom")
    cancelling = shown("b", NodeStatus.CANCELLING, index=1, epoch=1)
    await tasks.record(record(failed, cancelling, status=TaskStatus.FAILED, cancel="hard_fail:boom"))
    document = await stored(db)
    assert len(recording.updates) == 1
    assert await stored_statuses(db) == ["failed", "cancelling", "queued"]
    assert (document["status"], document["finished_at"]) == ("failed", None)
    flags = document["coordinator"]
    assert (flags["cancelled"], flags["cancel_reason"]) == (True, "hard_fail:boom")
    assert seconds(flags["cancelled_at"]) == AT


async def test_no_flag_is_set_without_a_reason(db: Any, tasks: TaskStore) -> None:
    await tasks.record(record(shown("a", NodeStatus.FAILED, epoch=1)))
    assert (await stored(db))["coordinator"].keys() == {"liveness", "recorded_at"}


# --- outdated records -------------------------------------------------------------------------------------------


async def test_outdated_change_of_one_node_loses_no_changes_of_others(db: Any, tasks: TaskStore) -> None:
    await begun(tasks, attempt("b", index=1, epoch=3))
    outdated = shown("b", NodeStatus.DEFERRED, index=1, epoch=2)
    others = shown("a", NodeStatus.DEFERRED, epoch=1), shown("c", NodeStatus.SKIPPED, index=2)
    await tasks.record(record(others[0], outdated, others[1], status=TaskStatus.DEFERRED, cancel="stop"))
    assert await stored_statuses(db) == ["deferred", "running", "skipped"]
    assert (await stored_node(db, 1))["attempt_epoch"] == 3
    document = await stored(db)
    assert (document["status"], document["coordinator"]["cancel_reason"]) == ("deferred", "stop")


async def test_outdated_change_of_one_node_loses_no_changes_when_the_task_fails(
    db: Any, tasks: TaskStore
) -> None:
    await begun(tasks, attempt("b", index=1, epoch=1))
    await tasks.attempts.finish(attempt("b", index=1, epoch=1), RUN, AT)
    failed, outdated = (
        shown("a", NodeStatus.FAILED, epoch=1),
        shown("b", NodeStatus.CANCELLING, index=1, epoch=1),
    )
    running = shown("c", NodeStatus.CANCELLING, index=2, epoch=1)
    await tasks.record(record(failed, outdated, running, status=TaskStatus.FAILED, cancel="hard_fail:x"))
    assert await stored_statuses(db) == ["failed", "finished", "cancelling"]
    assert (await stored(db))["status"] == "failed"


@pytest.mark.parametrize("ended", [NodeStatus.FINISHED, NodeStatus.FAILED, NodeStatus.SKIPPED])
async def test_closed_node_is_never_reopened(db: Any, tasks: TaskStore, ended: NodeStatus) -> None:
    await tasks.record(record(shown("a", ended, epoch=1)))
    for status in (NodeStatus.QUEUED, NodeStatus.CANCELLING):
        await tasks.record(record(shown("a", status, epoch=2)))
    assert await stored_statuses(db) == [ended.value, "queued", "queued"]


async def test_different_node_at_the_same_index_is_not_changed(db: Any, tasks: TaskStore) -> None:
    await tasks.record(record(shown("stranger", NodeStatus.FAILED, epoch=1)))
    assert await stored_statuses(db) == ["queued"] * 3


async def test_closed_task_is_not_changed(db: Any, tasks: TaskStore) -> None:
    await tasks.close_task(close(*(shown(node, NodeStatus.SKIPPED, index=i) for i, node in enumerate("abc"))))
    before = await stored(db)
    await tasks.record(record(shown("a", NodeStatus.RUNNING, epoch=9), cancel="late"))
    assert await stored(db) == before


async def test_older_run_changes_nothing(db: Any, tasks: TaskStore) -> None:
    assert await opened(tasks, "a", "b", "c", run="run-2") == 2
    before = await stored(db)
    await tasks.record(record(shown("a", NodeStatus.FAILED, epoch=1), run_seq=1, cancel="late"))
    assert await stored(db) == before


async def test_missing_document_is_not_created(db: Any, tasks: TaskStore) -> None:
    await db.tasks.delete_many({})
    await tasks.record(record(shown("a", NodeStatus.FAILED, epoch=1)))
    assert await db.tasks.find_one({}) is None


# --- many nodes -------------------------------------------------------------------------------------------------


def many(status: NodeStatus, **more: Any) -> list[NodeRecord]:
    return [shown(f"n{index}", status, index=index, **more) for index in range(MANY)]


@pytest.fixture
async def large(tasks: TaskStore, db: Any, recording: RecordingDatabase) -> TaskStore:
    """The same store with a task of many nodes."""
    await db.tasks.delete_many({"id": TASK})
    await opened(tasks, *(f"n{index}" for index in range(MANY)))
    recording.updates.clear()
    return tasks


async def test_many_nodes_are_written_in_few_updates(
    db: Any, large: TaskStore, recording: RecordingDatabase
) -> None:
    await large.record(record(*many(NodeStatus.SKIPPED, skip_reason=SkipReason.CONDITION)))
    assert await stored_statuses(db) == ["skipped"] * MANY
    assert len(recording.updates) == 3


async def test_outdated_change_of_one_node_costs_one_more_update_of_its_chunk(
    db: Any, large: TaskStore, recording: RecordingDatabase
) -> None:
    await begun(large, attempt("n120", index=120, epoch=4))
    recording.updates.clear()
    await large.record(record(*many(NodeStatus.DEFERRED, epoch=1)))
    statuses = await stored_statuses(db)
    assert statuses.pop(120) == "running"
    assert set(statuses) == {"deferred"}
    assert len(recording.updates) == 3 + 1


async def test_all_nodes_of_a_large_failed_task_are_written(db: Any, large: TaskStore) -> None:
    await large.record(
        record(*many(NodeStatus.CANCELLING, epoch=1), status=TaskStatus.FAILED, cancel="hard_fail:x")
    )
    assert set(await stored_statuses(db)) == {"cancelling"}


async def test_flags_of_a_large_task_are_set_with_the_failed_node(
    large: TaskStore, recording: RecordingDatabase
) -> None:
    nodes = many(NodeStatus.CANCELLING, epoch=1)
    nodes[-1] = shown(f"n{MANY - 1}", NodeStatus.FAILED, index=MANY - 1, epoch=1)
    await large.record(record(*nodes, cancel="hard_fail:x"))
    [flags] = [update["$set"] for update in recording.updates if "coordinator.cancelled" in update["$set"]]
    assert flags.get(f"graph.nodes.{MANY - 1}.status") == "failed"


async def test_number_of_omitted_status_changes_is_recorded(db: Any, tasks: TaskStore) -> None:
    await tasks.record(record())
    assert "status_history_omitted" not in await stored(db)
    await tasks.record(replace(record(), status_history_omitted=3))
    assert (await stored(db))["status_history_omitted"] == 3
    await opened(tasks, "a", "b", "c", run="run-2")
    assert "status_history_omitted" not in await stored(db)


async def test_repeated_write_contains_only_what_is_missing(
    db: Any, large: TaskStore, recording: RecordingDatabase
) -> None:
    await large.record(record(*many(NodeStatus.SKIPPED)[:100]))
    recording.updates.clear()
    await large.record(record(*many(NodeStatus.SKIPPED)))
    assert set(await stored_statuses(db)) == {"skipped"}
    paths = [[path for path in update["$set"] if path.endswith(".status")] for update in recording.updates]
    assert [len(each) for each in paths[1:]] == [100, 50], "the first fails as a whole"


async def test_errors_are_omitted_if_they_make_the_document_too_large(
    db: Any, recording: RecordingDatabase
) -> None:
    tasks = TaskStore(SizeLimitedDatabase(recording, bytes_at_most=4_000))
    await opened(tasks, "a", "b")
    failed = shown("a", NodeStatus.FAILED, epoch=1, last_error="x" * 5_000)
    await tasks.record(record(failed))
    node = await stored_node(db)
    assert (node["status"], node.get("last_error")) == ("failed", None)


@pytest.mark.parametrize("after_finish", [False, True])
@pytest.mark.parametrize("others", [0, 1])
async def test_failure_replaces_a_finish_only_if_the_workflow_decided_after_it(
    db: Any, tasks: TaskStore, after_finish: bool, others: int
) -> None:
    """The parents of a streaming node failed, so the workflow fails a node whose attempt has finished it."""
    await begun(tasks, attempt("a", epoch=1))
    await tasks.attempts.finish(attempt("a", epoch=1), RUN, AT)
    error = "upstream_failed: a parent failed later"
    failed = shown("a", NodeStatus.FAILED, epoch=1, last_error=error, after_finish=after_finish)
    await tasks.record(record(failed, *[shown("b", NodeStatus.SKIPPED, index=1)] * others))
    node = await stored_node(db)
    expected = ("failed", error) if after_finish else ("finished", None)
    assert (node["status"], node.get("last_error")) == expected
    await tasks.record(record(shown("a", NodeStatus.FAILED, after_finish=True)))
    assert (await stored_node(db))["attempt_epoch"] == 1


def applied(*revisions: int, history: float = 0.0) -> ActionRecord:
    """Return a record of actions. `history` tells those of one history from those of another."""
    entries = [
        AppliedAction(revision=each, action="pause", at=AT + each + history + 0.4567, by="ada")
        for each in revisions
    ]
    return ActionRecord(revision=revisions[-1], applied=entries, paused=[PausedScope(scope="task", since=AT)])


async def write_actions(tasks: TaskStore, *records: ActionRecord) -> None:
    for each in records:
        await tasks.record(replace(record(), actions=each))


async def listed(db: Any) -> list[int]:
    """Return the revisions of the actions that the document lists, the last of which is its own."""
    coordinator = (await stored(db))["coordinator"]
    revisions = [each["revision"] for each in coordinator["actions"]]
    assert coordinator["revision"] == revisions[-1]
    return revisions


async def test_only_new_actions_are_written(recording: RecordingDatabase, db: Any, tasks: TaskStore) -> None:
    await write_actions(tasks, applied(1), applied(2, 3))
    assert await listed(db) == [1, 2, 3]
    pushed = [change["$push"] for change in recording.updates if "$push" in change]
    assert [len(each["coordinator.actions"]["$each"]) for each in pushed] == [1, 2]
    assert [each["scope"] for each in (await stored(db))["coordinator"]["paused"]] == ["task"]


async def test_a_repeated_or_late_record_adds_no_action(db: Any, tasks: TaskStore) -> None:
    await write_actions(tasks, applied(1), applied(2), applied(2), applied(3, 4), applied(2), applied(3, 4))
    assert await listed(db) == [1, 2, 3, 4]


async def test_a_record_that_arrives_late_changes_nothing(db: Any, tasks: TaskStore) -> None:
    held = shown("a", NodeStatus.DEFERRED, held_until=AT + 5, wait=for_decision("failed with x"))
    paused = replace(record(held, status=TaskStatus.DEFERRED), actions=applied(1))
    again = shown("a", NodeStatus.QUEUED, decided=True)
    resumed = replace(record(again), actions=replace(applied(2), paused=[]), at=paused.at + 0.001)
    await tasks.record(paused)
    await tasks.record(resumed)
    before = await stored(db)
    assert (before["status"], before["coordinator"]["paused"]) == ("running", [])
    await tasks.record(paused)
    assert await stored(db) == before


async def test_a_run_that_opens_a_task_again_has_no_pause_and_no_record_of_an_earlier_run(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.record(replace(record(), actions=applied(1), at=AT + 60))
    await tasks.open_task(opening("a", "b", "c", run="run-2"))
    assert not {"paused", "recorded_at"} & (await stored(db))["coordinator"].keys()


async def test_the_document_keeps_the_latest_actions(db: Any, tasks: TaskStore) -> None:
    last = APPLIED_ACTIONS + 5
    await write_actions(tasks, applied(*range(1, APPLIED_ACTIONS + 1)), applied(last - 1, last), applied(1))
    assert await listed(db) == [*range(3, APPLIED_ACTIONS + 1), last - 1, last]


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_actions_after_a_reset_replace_those_of_the_discarded_history(
    db: Any, tasks: TaskStore, kept: int
) -> None:
    await write_actions(tasks, applied(1), applied(2), applied(3), applied(4))
    first = kept + 1
    await write_actions(tasks, applied(first, history=0.001), applied(first + 1, history=0.001))
    assert await listed(db) == [*range(1, first + 2)]
    at = [seconds(each["at"]) for each in (await stored(db))["coordinator"]["actions"]]
    assert at == pytest.approx(
        [AT + each + (0.001 if each >= first else 0) + 0.456 for each in range(1, first + 2)], abs=1e-4
    )


async def test_a_list_that_changes_while_it_is_corrected_is_read_again(
    recording: RecordingDatabase, db: Any, tasks: TaskStore
) -> None:
    await write_actions(tasks, applied(1), applied(2))

    async def late() -> None:
        await db.tasks.update_one({"id": TASK}, {"$set": {"coordinator.revision": 3}})

    recording.before["tasks"] += [let_pass, late]
    await write_actions(tasks, applied(2, history=0.001))
    assert await listed(db) == [1, 2]


async def let_pass() -> None:
    """Let a write happen."""


async def test_the_close_writes_the_whole_list(db: Any, tasks: TaskStore) -> None:
    await write_actions(tasks, applied(4))
    await tasks.close_task(close(applied=applied(1, 2, 3, 4).applied))
    assert await listed(db) == [1, 2, 3, 4]
