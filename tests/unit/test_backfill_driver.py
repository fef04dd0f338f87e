"""The driver of backfills beside cancels and other engines: what it starts, and whose tasks it awaits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.service import RPCError, RPCStatusCode
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run, until

from flowkit.adapters.backfills import BackfillStore
from flowkit.adapters.tasks.stored_graphs import pack_task
from flowkit.attempt.workflows import ABSENT, FoundWorkflow, WorkflowState
from flowkit.backfills import driver
from flowkit.backfills.driver import Driver
from flowkit.errors import TaskCancelled, TaskIdTaken
from flowkit.models import TaskStatus
from flowkit.models.admission import Admission
from flowkit.models.backfills import (
    BackfillOutcome,
    BackfillRunStatus,
    BackfillState,
    Existing,
    Order,
    StoredBackfill,
)
from flowkit.products import PendingTask
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from flowkit.models.ownership import Owner

START = datetime(2026, 11, 1, tzinfo=UTC)
PACKED = pack_task({"graph": {}, "params": {}})
IDS = [f"hourly-2026-11-01T{hour:02}:00:00Z" for hour in range(5)]


def waiting() -> PendingTask:
    """Return a request that waits for admission."""
    return PendingTask(product="admission", state="queued", text="it waits", fields={}, started=False)


class Tasks:
    """A client of tasks without servers. Each task runs until its event is set, or until its owner cancels it."""

    def __init__(self, when_started: Callable[[], Awaitable[None]] | None = None) -> None:
        self.owners: dict[str, Owner] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []
        self.requests: dict[str, PendingTask] = {}
        self.when_started = when_started
        self.foreign: set[str] = set()
        """The ids of workflows that something else has started."""
        self.failed: set[str] = set()
        """The ids of tasks that have failed earlier."""
        self.errors: list[Exception] = []
        """What the next starts raise."""

    @property
    def steering(self) -> Any:
        """What applies actions: this stand-in."""
        return self

    async def deployment(self) -> str:
        """Return the id of the only database."""
        return "d"

    async def look_up(self, task_id: str) -> FoundWorkflow:
        """Return a task, with its owner for its description."""
        if task_id not in self.owners:
            return ABSENT
        state = WorkflowState.CLOSED if self.ends[task_id].is_set() else WorkflowState.OPEN
        described: Any = self.owners[task_id]
        return FoundWorkflow(state=state, description=described)

    async def status_of(self, task_id: str) -> TaskStatus | None:
        """Return that a task has finished or runs."""
        if task_id not in self.ends:
            return TaskStatus.FAILED if task_id in self.failed else None
        return TaskStatus.FINISHED if self.ends[task_id].is_set() else TaskStatus.RUNNING

    async def find_pending(self, task_id: str) -> PendingTask | None:
        """Return a request for admission that waits."""
        return self.requests.get(task_id)

    async def submit_task(self, admission: Admission, *, task_id: str, **given: Any) -> None:
        """Submit a task, during which something else may happen."""
        if self.when_started is not None:
            await self.when_started()
        self.requests[task_id] = waiting()

    async def cancel_task(self, task_id: str, *, reason: str) -> None:
        """Cancel a request."""
        self.cancelled.append(task_id)
        self.requests[task_id] = replace(waiting(), error=TaskCancelled(task_id, reason))

    async def start_task(self, task_id: str, *, owner: Owner, **given: Any) -> bool:
        """Start a task."""
        if self.errors:
            raise self.errors.pop(0)
        if task_id in self.foreign:
            raise TaskIdTaken("taken")
        self.owners[task_id], self.ends[task_id] = owner, asyncio.Event()
        if self.when_started is not None:
            await self.when_started()
        return True

    async def run_again(self, task_id: str, **given: Any) -> bool:
        """Start an ended task again."""
        if task_id in self.foreign:
            raise TaskIdTaken("taken")
        return True

    async def cancel_workflow(self, task_id: str, *, owner: Owner, reason: str) -> bool:
        """End a task."""
        assert self.owners[task_id] == owner
        self.cancelled.append(task_id)
        self.ends[task_id].set()
        return True

    async def find_ended(self, task_ids: Collection[str]) -> list[str]:
        """Return those that have ended."""
        return [each for each in task_ids if self.ends[each].is_set()]

    def end_all(self) -> None:
        """Let all tasks finish that run."""
        for each in self.ends.values():
            each.set()

    async def result(self, task_id: str) -> None:
        """Raise the error of a task that was cancelled."""
        if task_id in self.cancelled:
            raise TaskCancelled(task_id, "asked")


@pytest.fixture(autouse=True)
def _read_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_marker(owner: Owner) -> Owner:
        return owner

    monkeypatch.setattr(driver, "read_marker", read_marker)
    monkeypatch.setattr(driver, "_CLOSING_SEC", 0.0)
    monkeypatch.setattr(driver, "_LONGEST_WAIT_SEC", 0.0)
    monkeypatch.setattr(driver, "_LOOK_SEC", 0.0)
    monkeypatch.setattr(driver, "_CREATION_LOOK_SEC", 0.0)
    monkeypatch.setattr(driver, "_PAUSES_SEC", (0.0,))
    monkeypatch.setattr(driver, "_START_PAUSES_SEC", (0.0, 0.0))


def of_hours(count: int, **fields: Any) -> StoredBackfill:
    """Return a backfill of so many hours, two at once."""
    given: dict[str, Any] = {
        "backfill_id": "b",
        "schedule": "hourly",
        "start": START,
        "end": START + timedelta(hours=count),
        "timezone": "UTC",
        "order": Order.OLDEST,
        "max_active": 2,
        "existing": Existing.NONE,
        "total": count,
        "queue": "flowkit",
        "namespace_id": "n",
        "state": BackfillState.RUNNING,
        "created_at": START,
    }
    return StoredBackfill(**{**given, **fields})


async def stored(count: int, **fields: Any) -> tuple[BackfillStore, StoredBackfill]:
    """Store a backfill of so many hours, two at once."""
    store, backfill = BackfillStore(memory_database()), of_hours(count, **fields)
    await store.insert(backfill, PACKED, [START + timedelta(hours=hour) for hour in range(count)])
    await store.complete(backfill)
    return store, backfill


async def outcome(tasks: Any, store: BackfillStore) -> str:
    """Run the backfill without servers, and return its counts."""
    async with asyncio.timeout(EVENT_TIMEOUT_SEC):
        return (await Driver(tasks, store).run("b")).text


async def test_an_engine_completes_a_backfill_whose_creator_was_killed() -> None:
    store, backfill = BackfillStore(memory_database()), of_hours(3, max_active=3)
    runs = asyncio.create_task(outcome(tasks := Tasks(), store))
    await let_other_tasks_run()
    assert await store.insert(backfill, PACKED, [START + timedelta(hours=hour) for hour in range(3)])
    await until(lambda: len(tasks.owners) == 3)
    tasks.end_all()
    assert await runs == "3 succeeded"


async def test_a_workflow_whose_backfill_was_never_stored_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_CREATION_LOOKS", 3)
    assert await outcome(Tasks(), BackfillStore(memory_database())) == "no nominal times"


async def test_a_time_whose_id_something_else_has_fails_with_what_helps() -> None:
    store, _ = await stored(2, max_active=2)
    tasks = Tasks()
    tasks.foreign.add(IDS[0])
    runs = asyncio.create_task(outcome(tasks, store))
    await until(lambda: IDS[1] in tasks.owners)
    tasks.end_all()
    assert await runs == "1 succeeded, 1 failed"
    [failed] = await store.runs("b", BackfillRunStatus.FAILED)
    assert (failed.task_id, failed.code) == (IDS[0], "task_id_taken")
    assert f"workflow {IDS[0]!r} has the id of a nominal time" in (failed.reason or "")


async def test_a_failed_task_whose_id_something_else_runs_with_fails_instead_of_waiting_for_ever() -> None:
    store, _ = await stored(1, existing=Existing.FAILED)
    tasks = Tasks()
    tasks.failed.add(IDS[0])
    tasks.foreign.add(IDS[0])
    assert await outcome(tasks, store) == "1 failed"
    [failed] = await store.runs("b", BackfillRunStatus.FAILED)
    assert f"workflow {IDS[0]!r} has the id of a nominal time" in (failed.reason or "")


async def test_a_start_that_temporal_refuses_for_good_fails_the_time_and_others_are_repeated() -> None:
    store, _ = await stored(1)
    tasks = Tasks()
    tasks.errors = [
        RPCError("away", RPCStatusCode.UNAVAILABLE, b""),
        RPCError("too large", RPCStatusCode.INVALID_ARGUMENT, b""),
    ]
    assert await outcome(tasks, store) == "1 failed"
    [failed] = await store.runs("b", BackfillRunStatus.FAILED)
    assert failed.reason == "too large"


async def test_nothing_of_a_cancelled_backfill_starts_that_became_pending_after_the_cancel() -> None:
    store, backfill = await stored(2)
    run = await store.claim(backfill)
    assert run is not None
    await store.end_run("b", run, BackfillOutcome(status=BackfillRunStatus.FAILED))
    await store.cancel("b")
    cancelled = await store.find("b")
    assert cancelled is not None
    assert await store.close(cancelled)
    rows = {
        "$set": {"status": "pending"},
        "$inc": {"tries": 1},
    }  # A `retry-failed` that was slower than the cancel.
    await store._rows.update_many({"status": "failed"}, rows)
    tasks = Tasks()
    assert await outcome(tasks, store) == "2 cancelled"
    assert tasks.owners == {}


async def test_a_task_is_cancelled_whose_start_was_under_way_when_its_backfill_was_cancelled() -> None:
    store, _ = await stored(3, max_active=1)
    tasks = Tasks(lambda: store.cancel("b"))
    assert await outcome(tasks, store) == "3 cancelled"
    assert tasks.cancelled == [IDS[0]]


async def test_a_row_that_another_engine_has_taken_counts_as_a_slot_and_is_awaited() -> None:
    store, backfill = await stored(5)
    tasks = Tasks()
    runs = asyncio.create_task(outcome(tasks, store))
    await until(lambda: sorted(tasks.owners) == IDS[:2])
    late = await store.claim(backfill)
    assert late is not None
    tasks.ends[IDS[0]].set()
    await until(lambda: len(tasks.owners) > 2)
    assert sorted(tasks.owners) == IDS[:3]
    assert (await store.counts("b")).text == "2 pending, 2 running, 1 succeeded"
    while len(tasks.ends) < 5:
        tasks.end_all()
        await let_other_tasks_run()
    tasks.end_all()
    assert await runs == "5 succeeded"


async def test_a_later_backfill_of_the_same_id_does_not_take_the_tasks_of_the_purged_one_for_its_own() -> (
    None
):
    store, _ = await stored(1)
    tasks = Tasks()

    async def end_at_once() -> None:
        tasks.end_all()

    tasks.when_started = end_at_once
    assert await outcome(tasks, store) == "1 succeeded"
    assert await store.remove(["b"]) == 1
    again, _ = await stored(1, created_at=START + timedelta(days=1))
    assert await outcome(tasks, again) == "1 skipped"


async def test_a_request_for_admission_of_something_else_is_left_alone_and_an_own_one_found_again() -> None:
    store, _ = await stored(2, admission=Admission(user_id="ada"), max_active=1)
    tasks = Tasks()
    tasks.requests[IDS[0]] = waiting()
    first = asyncio.create_task(outcome(tasks, store))
    await until(lambda: IDS[1] in tasks.requests)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await store.cancel("b")
    assert await outcome(tasks, store) == "1 cancelled, 1 skipped"
    assert tasks.cancelled == [IDS[1]]


async def test_a_cancel_during_a_submission_leaves_no_request_queued() -> None:
    store, _ = await stored(1, admission=Admission(user_id="ada"))
    tasks = Tasks(lambda: store.cancel("b"))
    assert await outcome(tasks, store) == "1 cancelled"
    assert tasks.cancelled == [IDS[0]]
