"""The engine's own activities: which database they write, what they retry, and their heartbeats."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import bson
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import (
    AT,
    RUN,
    TASK,
    attempt,
    begun,
    close,
    documents_of,
    engine_activities,
    opening,
    record,
    shown,
    stored,
    stored_statuses,
)
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.measured import measuring

from flowkit.activities import tasks as activities
from flowkit.adapters.tasks.fields import new_task
from flowkit.adapters.tasks.store import TaskStore
from flowkit.core.instruments import TASKS_REFUSED
from flowkit.errors import StoreRefused, StoreTooLarge, StoreUnavailable
from flowkit.limits import NODE_STATE_BYTES
from flowkit.models import NodeStatus, TaskStatus
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.activities.tasks import TaskActivities
    from flowkit.models import CloseTask, OpenTask


def engine(tasks: TaskStore, namespace_id: str = "ns-1", **more: Any) -> TaskActivities:
    """The activities over one database."""

    async def namespace() -> str:
        return namespace_id

    return engine_activities(tasks, namespace_id=namespace, **more)


async def call(activity: Callable[..., Any], given: object) -> Any:
    """Run an activity and return its result."""
    return await ActivityEnvironment().run(activity, given)


async def refused(activity: Callable[..., Any], given: object) -> ApplicationError:
    """Run an activity and return the error that Temporal receives."""
    with pytest.raises(ApplicationError) as caught:
        await call(activity, given)
    return caught.value


async def test_opened_task_records_its_namespace_and_its_database(db: Any, tasks: TaskStore) -> None:
    await call(engine(tasks).open_task, opening("a"))
    document = await stored(db)
    assert document["namespace_id"] == "ns-1"
    assert document["database_id"] == await tasks.database_id()


@pytest.mark.parametrize(("chars", "is_large"), [(10, False), (300_000, True)])
async def test_opened_task_knows_the_size_of_a_large_document(
    db: Any, tasks: TaskStore, chars: int, *, is_large: bool
) -> None:
    given = replace(opening("a", "b"), params={"text": "x" * chars})
    opened = await call(engine(tasks).open_task, given)
    for index, node_id in enumerate("ab"):
        await begun(tasks, attempt(node_id, index=index))
        await tasks.attempts.finish(attempt(node_id, index=index), RUN, AT)
    size = len(bson.encode(await stored(db)))
    assert (opened.document_bytes > 0) is is_large
    assert not is_large or abs(opened.document_bytes - size) < 2 * NODE_STATE_BYTES


@pytest.mark.parametrize("name", ["record", "close_task"])
async def test_task_of_another_database_is_not_written_and_can_be_retried_by_another_engine(
    db: Any, tasks: TaskStore, name: str
) -> None:
    own = engine(tasks)
    await call(own.open_task, opening("a"))
    before = await stored(db)
    ended = shown("a", NodeStatus.SKIPPED, marker=True)
    given = {
        "record": replace(record(ended), deployment="elsewhere/shop"),
        "close_task": close(ended, status=TaskStatus.FAILED, deployment="elsewhere/shop"),
    }
    error = await refused(getattr(own, name), given[name])
    assert (error.type, error.non_retryable) == ("wrong_database", False)
    assert (
        str(error)
        == f"wrong_database: the document of task {TASK!r} is in the database 'shop' (id elsewhere), "
        "but this engine uses "
        f"the database {tasks.database.name!r} (id {await tasks.database_id()}): set the same MONGO_URL and "
        "MONGO_DATABASE for all engines of the queue"
    )
    assert await stored(db) == before
    assert await documents_of(db.artifacts) == []


async def test_task_of_the_same_database_or_an_earlier_release_is_written(db: Any, tasks: TaskStore) -> None:
    own = engine(tasks)
    await call(own.open_task, opening("a"))
    await call(own.record, replace(record(), deployment=await tasks.database_id()))
    await call(own.record, replace(record(), deployment=await tasks.deployment()))
    assert await call(own.close_task, close(deployment=""))
    assert (await stored(db))["status"] == "finished"


@pytest.mark.parametrize("marked", [True, False])
async def test_record_completes_the_last_writes_of_an_attempt_whose_worker_was_lost(
    db: Any, tasks: TaskStore, *, marked: bool
) -> None:
    """An attempt that has not written its complete marker has to run again."""
    own, lost = engine(tasks), attempt()
    await call(own.open_task, opening("a"))
    await begun(tasks, lost)
    await tasks.attempts.finish(lost, RUN, AT)
    if marked:
        await own._artifacts.mark_complete(TASK, "a", 1, {"n": 3}, AT, worker_id="w", artifacts_ref=None)
    given = record(shown("a", NodeStatus.CANCELLING, epoch=1, marker=True))
    assert await call(own.record, given) == ([0] if marked else None)
    assert [row["metrics"] for row in await documents_of(db.metrics_raw)] == [{"n": 3}] * marked
    assert await stored_statuses(db) == ["finished"]


async def test_what_follows_the_end_of_a_task_is_called_when_its_end_is_stored(
    db: Any, tasks: TaskStore
) -> None:
    seen: list[tuple[str, str]] = []

    async def follow_up(ended: CloseTask) -> None:
        seen.append((ended.task_id, (await stored(db))["status"]))

    own = engine(tasks, on_closed=[follow_up])
    await call(own.open_task, opening("a"))
    assert await call(own.close_task, close())
    assert seen == [(TASK, "finished")]


@pytest.mark.parametrize(("error", "closes"), [(StoreRefused("no"), True), (StoreUnavailable("no"), False)])
async def test_a_task_closes_although_what_follows_its_end_is_refused(
    db: Any, tasks: TaskStore, error: Exception, closes: bool
) -> None:
    """Temporal tries again only what may succeed later. Otherwise, the workflow of a finished task would fail."""

    async def follow_up(ended: CloseTask) -> None:
        raise error

    own = engine(tasks, on_closed=[follow_up])
    await call(own.open_task, opening("a"))
    if closes:
        assert await call(own.close_task, close())
    else:
        assert not (await refused(own.close_task, close())).non_retryable
    assert (await stored(db))["status"] == "finished"


def unknown_function(task_id: str = TASK) -> OpenTask:
    """Open a task whose graph names a function that the engine does not have."""
    node = {"node_id": "a", "type": "coordinator_fn", "io": {"fn": "nobody.knows"}}
    return replace(opening("a", task_id=task_id), graph={"nodes": [node]})


def written(given: OpenTask, **fields: Any) -> dict[str, Any]:
    """Return the document of a task as its client writes it."""
    return new_task(given.task_id, given.params, given.graph, AT, namespace_id="ns-1") | fields


class LateClient(TaskStore):
    """A store in which the client writes the document of a task only after the engine has looked for it."""

    async def reject_task(self, opening: OpenTask, reason: str, *, namespace_id: str = "") -> bool:
        found = await super().reject_task(opening, reason, namespace_id=namespace_id)
        await self.insert_task(written(opening))
        return found


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_document_of_a_rejected_task_is_closed_with_the_reason(db: Any, *, late: bool) -> None:
    tasks = LateClient(db) if late else TaskStore(db)
    if not late:
        await tasks.insert_task(written(unknown_function()))
    error = await refused(engine(tasks).open_task, unknown_function())
    document = await stored(db)
    assert (document["status"], document["reason"]) == ("failed", f"invalid_graph: {error.message}")
    assert document["finished_at"] is not None
    assert await stored_statuses(db) == ["skipped"]


@pytest.mark.parametrize("task_id", ["payroll-2026-11-26T02:00:00Z", "backfill:lost-week"])
async def test_a_task_that_takes_the_id_of_another_one_is_refused_and_leaves_nothing(
    db: Any, task_id: str
) -> None:
    given = opening("a", task_id=task_id)
    with measuring() as measured:
        error = await refused(engine(TaskStore(db)).open_task, given)
    assert "are reserved for" in error.message
    assert measured.counted(TASKS_REFUSED) == {("task_id_taken",): 1}
    assert await db.tasks.count_documents({}) == 0
    own = replace(given, scheduled_at="2026-11-26T02:00:00Z")
    assert (await ActivityEnvironment().run(engine(TaskStore(db)).open_task, own)).run_seq == 1


async def test_rejected_task_of_a_schedule_has_a_document_with_the_reason_and_its_values(db: Any) -> None:
    params = {"at": {"$cel": "task.scheduled_at"}}
    due = replace(unknown_function(), params=params, scheduled_at="2026-11-26T02:00:00Z")
    with measuring() as measured:
        error = await refused(engine(TaskStore(db)).open_task, due)
    assert measured.counted(TASKS_REFUSED) == {("invalid_graph",): 1}
    document = await stored(db)
    assert (document["status"], document["reason"]) == ("failed", f"invalid_graph: {error.message}")
    assert (document["scheduled_at"], document["params"]) == (due.scheduled_at, {"at": due.scheduled_at})
    assert document["closed_run_id"] == due.run_id, "a rerun can start it again"
    reset = replace(opening("a"), run_id="run-after-reset", params=params, scheduled_at=due.scheduled_at)
    assert (await ActivityEnvironment().run(engine(TaskStore(db)).open_task, reset)).run_seq == 2


@pytest.mark.parametrize(
    "other",
    [
        written(opening("a", "b")),
        written(unknown_function(), namespace_id="ns-2"),
        written(unknown_function(), first_run_id="run-0", status="running"),
    ],
    ids=["another graph", "another namespace", "a task that runs"],
)
async def test_rejected_task_leaves_the_document_of_another_one(db: Any, other: dict[str, Any]) -> None:
    tasks = TaskStore(db)
    await tasks.insert_task(other)
    before = await stored(db)
    error = await refused(engine(tasks).open_task, unknown_function())
    assert error.type == "invalid_graph"
    assert await stored(db) == before


class Failing(TaskStore):
    """A store whose close fails with an error of the test."""

    error: Exception

    async def close_task(self, close: CloseTask) -> bool:
        """Fail."""
        raise self.error


@pytest.mark.parametrize(
    ("error", "given_up"), [(StoreRefused("BadValue"), False), (StoreTooLarge("16 MB"), True)], ids=str
)
async def test_close_fails_permanently_only_if_no_end_fits(error: Exception, *, given_up: bool) -> None:
    tasks = Failing(memory_database())
    tasks.error = error
    assert (await refused(engine(tasks).close_task, close())).non_retryable is given_up


class Slow(TaskStore):
    """A store that writes until the test releases it."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self.ends = asyncio.Event()

    async def close_task(self, close: CloseTask) -> bool:
        """Wait, then close."""
        await self.ends.wait()
        return await super().close_task(close)


async def test_slow_write_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activities, "_BEAT_SEC", 0.001)
    tasks = Slow(memory_database())
    await tasks.open_task(opening("a"))
    environment, beats = ActivityEnvironment(), asyncio.Event()
    environment.on_heartbeat = lambda *_: beats.set()
    closing = asyncio.create_task(environment.run(engine(tasks).close_task, close()))
    await asyncio.wait_for(beats.wait(), EVENT_TIMEOUT_SEC)
    assert not closing.done()
    tasks.ends.set()
    assert await closing
    assert (await stored(tasks.database))["closed_run_id"] == RUN
