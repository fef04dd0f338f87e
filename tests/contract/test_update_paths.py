"""No update names a path twice, or a path and its parent: MongoDB rejects that, but its stand-ins do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    WORKER,
    attempt,
    begun,
    close,
    new_task,
    opened,
    opening,
    record,
    shown,
    stored,
)
from tests.contract.recording_database import RecordingDatabase, Update, conflicts
from tests.contract.variables import hold, write

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.tasks.store import TaskStore
from flowkit.coordinator.adapters import CoordinatorAdapters
from flowkit.models import NodeStatus, SkipReason, TaskStatus
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.parametrize(
    ("update", "found"),
    [
        ({"$set": {"a.b": 1}, "$unset": {"a.b": ""}}, True),
        ({"$set": {"a": {}}, "$max": {"a.b": 1}}, True),
        ({"$set": {"a": {}, "a.b.c": 1}}, True),
        ({"$set": {"a.b": 1, "a.bc": 1}, "$setOnInsert": {"a.c": 1, "ab": 1}}, False),
    ],
)
def test_check_finds_updates_that_mongodb_rejects(update: Update, *, found: bool) -> None:
    assert bool(conflicts(update)) is found


async def task_from_start_to_end(db: RecordingDatabase) -> None:
    """Run one task through every change that its document can undergo."""
    tasks, artifacts = TaskStore(db), ArtifactStore(db)
    await tasks.database_id()
    await tasks.insert_task(new_task("a", "b", "c"))
    run_seq = await opened(tasks, "a", "b", "c")
    await begun(tasks, attempt("a"))
    await tasks.attempts.extend_lease(attempt("a"), RUN, 5, AT)
    await leave_batches(artifacts)
    await tasks.attempts.finish(attempt("a"), RUN, AT)
    deferred = shown("b", NodeStatus.DEFERRED, index=1, epoch=1, next_retry_at=AT, last_error="boom")
    skipped = shown("c", NodeStatus.SKIPPED, index=2, skip_reason=SkipReason.ROUTING, last_error="no")
    await tasks.record(record(deferred, skipped, status=TaskStatus.DEFERRED))
    await begun(tasks, attempt("b", index=1, epoch=2))
    await tasks.record(record(shown("b", NodeStatus.CANCELLING, index=1, epoch=2), cancel="stop"))
    await tasks.record(record(shown("b", NodeStatus.CANCELLING, index=1, epoch=1), cancel="behind"))
    cancelled = shown("b", NodeStatus.CANCELLED, index=1, epoch=2)
    for status in (TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.FINISHED):
        await tasks.close_task(close(cancelled, status=status, run_seq=run_seq, truncated=True, reason="x"))
    await begun(tasks, attempt("b", index=1, epoch=3), run="run-2")
    await opened(tasks, "a", "b", "c", run="run-3")
    assert await OpenTasks(tasks.database).close_orphan(TASK, "run-3", "lost", AT)


async def concurrent_attempts(db: RecordingDatabase) -> None:
    """Run many attempts of two tasks concurrently, so that they share their writes."""
    tasks = TaskStore(db)
    ids = ("task-1", "task-2")
    for task_id in ids:
        await tasks.open_task(opening(*"abcdef", task_id=task_id))
    attempts = [
        replace(attempt(n, index=i), task_id=task_id) for task_id in ids for i, n in enumerate("abcdef")
    ]
    await asyncio.gather(*(begun(tasks, each) for each in attempts))
    again = [replace(each, epoch=2) for each in attempts[::2]]
    finishing = [tasks.attempts.finish(each, RUN, AT) for each in attempts[1::2]]
    await asyncio.gather(*(begun(tasks, each) for each in again), *finishing)


async def leave_batches(artifacts: ArtifactStore) -> None:
    await artifacts.drop_marker(attempt("a"))
    await artifacts.store_batch(attempt("a"), "b1", {"n": 1}, WORKER, AT)
    await artifacts.store_failed_batch(attempt("a"), "b2", "boom", AT)
    await artifacts.store_final(attempt("a"), {"n": 1}, AT)
    await artifacts.mark_complete(TASK, "a", 1, {"n": 1}, AT, worker_id=WORKER, artifacts_ref={"url": "x"})


async def test_no_update_of_a_whole_task_names_a_path_twice() -> None:
    db = RecordingDatabase(memory_database())
    await task_from_start_to_end(db)
    assert len(db.updates) > 10
    assert {operator for update in db.updates for operator in update} == {
        "$set",
        "$unset",
        "$inc",
        "$max",
        "$min",
        "$push",
        "$setOnInsert",
    }
    assert [update for update in db.updates if conflicts(update)] == []


async def test_no_update_of_a_group_names_a_path_twice() -> None:
    db = RecordingDatabase(memory_database())
    await concurrent_attempts(db)
    nodes = [
        {path.split(".")[2] for path in update.get("$set", {}) if "nodes" in path} for update in db.updates
    ]
    assert max(map(len, nodes)) > 3
    assert [update for update in db.updates if conflicts(update)] == []


FUNCTIONS: dict[str, Callable[[CoordinatorAdapters], Awaitable[dict[str, Any]]]] = {
    "set": lambda a: a.vars_set(TASK, kv={"a.b": 1, "a.c": {"d": {}}, "e": {"f": 2}}),
    "set nothing": lambda a: a.vars_set(TASK),
    "merge": lambda a: a.vars_merge(TASK, a={"b": 2, "x": {"y": 3}}, z=4),
    "incr": lambda a: a.vars_incr(TASK, key="a.b", by=5),
    "unset": lambda a: a.vars_unset(TASK, "a.b", "e.f", keys=["nobody"]),
    "unset nothing": lambda a: a.vars_unset(TASK),
    "prune": lambda a: a.vars_unset(TASK, "gone"),
    "noop": lambda a: a.noop(TASK),
    "merge_generic": lambda a: a.merge_generic(TASK, ["a", "b"], {"node_id": "c"}),
    "metrics_aggregate": lambda a: a.metrics_aggregate(TASK, "a"),
}


async def variable_operations(db: RecordingDatabase) -> None:
    """Call every coordinator function from Python, and in several attempts of a node."""
    tasks, artifacts, adapters = TaskStore(db), ArtifactStore(db), CoordinatorAdapters(db=db)
    await opened(tasks, "a", "b", "c")
    await leave_batches(artifacts)
    for epoch, call in enumerate(FUNCTIONS.values()):
        await hold(db, {"a": {"b": 1}, "e": {"f": {"g": 1}}, "empty": {"er": {}}, "gone": 1})
        await call(adapters)
        own = write(2 * epoch + 1, generation=epoch, node="b", index=1)
        await begun(tasks, own.attempt)
        await call(adapters.for_node(own))
        again = write(2 * epoch + 2, generation=epoch, node="b", index=1)
        await begun(tasks, again.attempt)
        await call(adapters.for_node(again))


async def test_no_update_of_a_coordinator_function_names_a_path_twice() -> None:
    db = RecordingDatabase(memory_database())
    await variable_operations(db)
    assert (await stored(db))["graph"]["nodes"][1]["attempt_epoch"] == 2 * len(FUNCTIONS)
    assert len(db.updates) > 5 * len(FUNCTIONS)
    named = {path for update in db.updates for fields in update.values() for path in fields}
    assert {"coordinator.vars.a.b", "coordinator.vars.empty", "graph.nodes.1.applied_generation"} <= named
    assert [update for update in db.updates if conflicts(update)] == []
