"""Inline attempts whose tries are killed or frozen before any of their writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import (
    attempt,
    close,
    documents_of,
    stored_node,
)
from tests.contract.freezing_database import FreezingDatabase
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.attempt_log import AttemptEventLog
from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import FailureKind

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

pytestmark = pytest.mark.usefixtures("open_task")

AT_EACH_WRITE = pytest.mark.parametrize(
    ("collection", "number"),
    [
        pytest.param("tasks", 1, id="begin"),
        pytest.param("artifacts", 1, id="artifact"),
        pytest.param("metrics_raw", 1, id="metrics"),
        pytest.param("artifacts", 2, id="marker"),
        pytest.param("metrics_raw", 2, id="final metrics"),
        pytest.param("tasks", 2, id="end"),
    ],
)
"""The writes of an attempt with one batch: the begin, then the two rows, then the marker, the final metrics
and the end."""

WITH_BATCHES = pytest.mark.parametrize(
    "uids", [("u",), ("u", "v"), ()], ids=["one batch", "two batches", "no batch"]
)


def numbered(number: int, *uids: str) -> Returning:
    """Return a handler whose results contain the number of the try."""
    metrics = {"try": number}
    return Returning(BatchResult(success=True, metrics=metrics), *uids, final=FinalizeResult(metrics=metrics))


def inline(db: Any, handler: Returning, epoch: int = 1, **options: Any) -> Any:
    """Return an inline attempt."""
    return role_executor(db, attempt(epoch=epoch), handler, may_repeat=True, **options)


async def finished_by_later_tries(db: Any, *uids: str) -> None:
    """Run the next try and, if it ends at no success, the next attempt, as the workflow does."""
    try:
        await inline(db, numbered(2, *uids)).run()
    except AttemptFailed as error:
        assert error.failure.kind is FailureKind.LOSS
        await inline(db, numbered(3, *uids), epoch=2).run()


async def end_of(first: asyncio.Task[Any]) -> None:
    """Wait for a try that may end with the stored result, or with an error for which the workflow takes a new epoch."""
    try:
        await asyncio.wait_for(first, EVENT_TIMEOUT_SEC)
    except (EpochTaken, Fenced):
        pass
    except AttemptFailed as error:
        assert error.failure.kind is FailureKind.LOSS


async def results(db: Any) -> list[Any]:
    """Return what the rows contain, and the state of the node."""
    rows = [
        (row["batch_uid"], row["attempt_epoch"], row["metrics"]) for row in await documents_of(db.metrics_raw)
    ]
    artifacts = [
        (row.get("batch_uid", ""), row["attempt_epoch"], row["meta"])
        for row in await documents_of(db.artifacts)
    ]
    return [sorted(rows), sorted(artifacts), await stored_node(db)]


async def assert_counted_once(db: Any, *uids: str) -> None:
    """Check that the node has finished, and that all its rows are from one try."""
    rows, artifacts = await documents_of(db.metrics_raw), await documents_of(db.artifacts)
    assert (await stored_node(db))["status"] == "finished"
    assert sorted(row["batch_uid"] for row in rows) == sorted([*uids, "__final__"])
    assert sorted(row.get("batch_uid", "") for row in artifacts) == sorted([*uids, ""])
    tries = {row["metrics"]["try"] for row in rows} | {row["meta"]["try"] for row in artifacts}
    assert len(tries) == 1


# --- killed and frozen tries ------------------------------------------------------------------------------------------


@WITH_BATCHES
@AT_EACH_WRITE
async def test_kill_before_any_write_counts_nothing_twice(
    db: Any, collection: str, number: int, uids: tuple[str, ...]
) -> None:
    freezing = FreezingDatabase(db, collection, number)
    first = asyncio.create_task(inline(freezing, numbered(1, *uids)).run())
    await freezing.reached_by(first)
    first.cancel()
    await asyncio.wait([first])
    await finished_by_later_tries(db, *uids)
    await assert_counted_once(db, *uids)


@WITH_BATCHES
@AT_EACH_WRITE
async def test_frozen_try_changes_nothing_after_later_tries(
    db: Any, collection: str, number: int, uids: tuple[str, ...]
) -> None:
    freezing = FreezingDatabase(db, collection, number)
    first = asyncio.create_task(inline(freezing, numbered(1, *uids)).run())
    await freezing.reached_by(first)
    await finished_by_later_tries(db, *uids)
    before = await results(db)
    freezing.thaw()
    await end_of(first)
    assert await results(db) == before
    await assert_counted_once(db, *uids)


@AT_EACH_WRITE
async def test_frozen_try_changes_nothing_after_a_later_epoch(db: Any, collection: str, number: int) -> None:
    freezing = FreezingDatabase(db, collection, number)
    first = asyncio.create_task(inline(freezing, numbered(1, "u")).run())
    await freezing.reached_by(first)
    await role_executor(db, attempt(epoch=2), numbered(2, "u")).run()
    freezing.thaw()
    await end_of(first)
    await assert_counted_once(db, "u")
    assert {row["attempt_epoch"] for row in await documents_of(db.artifacts)} == {2}
    assert (await stored_node(db))["attempt_epoch"] == 2


@AT_EACH_WRITE
async def test_two_tries_at_the_same_time_count_every_batch_once(
    db: Any, collection: str, number: int
) -> None:
    freezing = FreezingDatabase(db, collection, number)
    first = asyncio.create_task(inline(freezing, numbered(1, "u")).run())
    await freezing.reached_by(first)
    second = asyncio.create_task(finished_by_later_tries(db, "u"))
    await let_other_tasks_run()
    freezing.thaw()
    await end_of(first)
    await second
    await assert_counted_once(db, "u")


async def test_same_uid_twice_is_one_batch_if_the_handler_allows_it(db: Any) -> None:
    handler = numbered(1, "u", "u")
    handler.allow_duplicate_uids = True
    await inline(db, handler).run()
    await assert_counted_once(db, "u")


async def test_attempts_are_logged_and_refused_ones_are_not(db: Any, tasks: TaskStore) -> None:
    log = AttemptEventLog(WorkerEvents(db))
    await inline(db, numbered(1, "u"), events=log).run()
    await tasks.close_task(close())
    refused = role_executor(db, attempt("b", index=1), numbered(1, "u"), may_repeat=True, events=log)
    await failure_of(refused)
    await log.flush()
    [event] = await documents_of(db.worker_events)
    assert event["payload"]["kind"] == "TASK_DONE"
