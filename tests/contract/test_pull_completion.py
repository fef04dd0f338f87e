"""When a puller may end: every source has ended, and none has started again since."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, RUN, TASK, attempt, batches, begun, opened, record, shown
from tests.contract.pulling_node import Pull, WatchedArtifacts, end, ended_source
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC

from flowkit.adapters.tasks.store import TaskStore
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.fixture
async def artifacts(db: Any) -> WatchedArtifacts:
    store = WatchedArtifacts(db)
    await store.prepare()
    return store


class TasksWithConcurrentChange(TaskStore):
    """Runs a function after all sources seem to have ended and before the puller checks them for the last time."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self.before_last_scan: list[Callable[[], Awaitable[None]]] = []

    async def have_restarted(self, *args: Any) -> bool:
        if self.before_last_scan:
            await self.before_last_scan.pop()()
        return await super().have_restarted(*args)


@pytest.fixture
async def tasks(db: Any) -> TasksWithConcurrentChange:
    store = TasksWithConcurrentChange(db)
    await store.prepare()
    return store


@pytest.fixture
def pull(artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange) -> Pull:
    return Pull(artifacts, tasks)


async def rerun(artifacts: WatchedArtifacts, running: asyncio.Task[Any], *uids: str) -> list[str]:
    """End the second attempt of `u` after the puller's check, and return all uids that the puller received."""
    await artifacts.next_scan()
    assert not running.done()
    await batches(artifacts, "u", *uids, epoch=2)
    await end(artifacts, "u", epoch=2)
    return sorted(uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC))


@pytest.mark.parametrize("reported", [{}, {"u": 1}])
async def test_source_that_restarts_before_the_last_check_is_awaited(
    artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange, pull: Pull, reported: dict[str, int]
) -> None:
    """The old marker still exists: the new attempt takes its epoch before it removes the marker."""
    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u"))
    await ended_source(artifacts, "b1")
    await tasks.attempts.finish(attempt("u"), RUN, AT)
    tasks.before_last_scan = [lambda: begun(tasks, attempt("u", epoch=2))]
    assert await rerun(artifacts, pull.start("u", sources=reported), "b1", "b2") == ["b1", "b2"]


async def test_failed_source_that_is_retried_is_awaited(
    artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange, pull: Pull
) -> None:
    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u"))
    await tasks.record(record(shown("u", NodeStatus.FAILED, epoch=1)))
    tasks.before_last_scan = [lambda: begun(tasks, attempt("u", epoch=2))]
    assert await rerun(artifacts, pull.start("u"), "b1") == ["b1"]


async def test_failed_source_that_reopens_with_the_same_epoch_is_awaited(
    db: Any, artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange, pull: Pull
) -> None:
    async def reopened() -> None:
        await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.0.status": "deferred"}})

    await opened(tasks, "u", "sink")
    await begun(tasks, attempt("u"))
    await tasks.record(record(shown("u", NodeStatus.FAILED, epoch=1)))
    tasks.before_last_scan = [reopened]
    running = pull.start("u")
    await artifacts.next_scan()
    await begun(tasks, attempt("u", epoch=2))
    assert await rerun(artifacts, running, "b1") == ["b1"]


@pytest.mark.parametrize("status", [NodeStatus.FAILED, NodeStatus.SKIPPED, NodeStatus.CANCELLED])
async def test_source_that_ended_without_success_ends_the_pull(
    artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange, pull: Pull, status: NodeStatus
) -> None:
    await opened(tasks, "u", "sink")
    await tasks.record(record(shown("u", status)))
    assert await pull.all("u") == []


async def test_summary_that_a_function_wrote_for_a_queued_node_does_not_end_the_pull(
    artifacts: WatchedArtifacts, tasks: TasksWithConcurrentChange, pull: Pull
) -> None:
    """`merge.generic` writes the complete artifact of its target, which may not have started."""
    await opened(tasks, "u", "sink")
    await artifacts.mark_complete(TASK, "u", 0, {"merged_from": []}, AT)
    running = pull.start("u")
    await artifacts.next_scan()
    assert not running.done()
    await begun(tasks, attempt("u"))
    await ended_source(artifacts, "b1")
    assert [uid for uid, _ in await asyncio.wait_for(running, TIMEOUT_SEC)] == ["b1"]


async def test_batches_stored_together_with_the_marker_are_delivered(
    artifacts: WatchedArtifacts, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read of many documents is not a snapshot: it may include the marker but miss earlier writes."""
    scan = artifacts.scan

    async def no_batches(*args: Any) -> Any:
        monkeypatch.setattr(artifacts, "scan", scan)
        found = await scan(*args)
        missed = {uid: entry for uid, entry in found.batches["u"].items() if uid != "b2"}
        return replace(found, batches={"u": missed})

    await ended_source(artifacts, "b1", "b2")
    monkeypatch.setattr(artifacts, "scan", no_batches)
    assert await pull.uids("u") == ["b1", "b2"]


@pytest.mark.parametrize("args", [{}, {"eof_on_task_done": False}, {"size": 3}])
async def test_pull_without_sources_ends_immediately(
    pull: Pull, artifacts: WatchedArtifacts, args: Any
) -> None:
    assert await pull.all(**args) == []
    assert artifacts._looks == 0
