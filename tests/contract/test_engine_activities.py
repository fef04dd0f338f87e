"""The engine's own activities: which database they write, what they retry, and their heartbeats."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import RUN, TASK, close, documents_of, opening, record, shown, stored

from flowkit.activities import tasks as activities
from flowkit.activities.tasks import TaskActivities
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import StoreRefused, StoreTooLarge
from flowkit.models import NodeStatus, Settings, TaskStatus
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.models import CloseTask


def engine(tasks: TaskStore, namespace_id: str = "ns-1") -> TaskActivities:
    """The activities over one database."""

    async def namespace() -> str:
        return namespace_id

    return TaskActivities(
        tasks=tasks,
        artifacts=ArtifactStore(tasks.database),
        portal=LoopPortal(),
        settings=Settings(),
        functions={},
        max_nodes=10,
        namespace_id=namespace,
    )


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


@pytest.mark.parametrize("name", ["record", "close_task"])
async def test_task_of_another_database_is_not_written_and_can_be_retried_by_another_engine(
    db: Any, tasks: TaskStore, name: str
) -> None:
    own = engine(tasks)
    await call(own.open_task, opening("a"))
    before = await stored(db)
    ended = shown("a", NodeStatus.SKIPPED, marker=True)
    given = {
        "record": replace(record(ended), deployment="elsewhere"),
        "close_task": close(ended, status=TaskStatus.FAILED, deployment="elsewhere"),
    }
    error = await refused(getattr(own, name), given[name])
    assert (error.type, error.non_retryable) == ("wrong_database", False)
    assert (
        f"of task {TASK!r} is in the database with id elsewhere, but this engine uses {await tasks.database_id()}"
        in str(error)
    )
    assert await stored(db) == before
    assert await documents_of(db.artifacts) == []


async def test_task_of_the_same_database_or_an_earlier_release_is_written(db: Any, tasks: TaskStore) -> None:
    own = engine(tasks)
    await call(own.open_task, opening("a"))
    await call(own.record, replace(record(), deployment=await tasks.database_id()))
    assert await call(own.close_task, close(deployment=""))
    assert (await stored(db))["status"] == "finished"


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
    await asyncio.wait_for(beats.wait(), 10)
    assert not closing.done()
    tasks.ends.set()
    assert await closing
    assert (await stored(tasks.database))["closed_run_id"] == RUN
