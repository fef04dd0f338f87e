"""Inline attempts that begin and end in a single write, while tries are killed or frozen before any of their writes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import (
    AT,
    RUN,
    WORKER,
    attempt,
    close,
    documents_of,
    stored,
    stored_node,
)
from tests.contract.freezing_database import FreezingDatabase
from tests.unit.event_loop import let_other_tasks_run

from flowkit.activities.attempts import AttemptFailed
from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.activities.worker_registration import EventLog
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.adapters.worker_events import WorkerEvents
from flowkit.attempt import attempt_storage
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import FailureKind

if TYPE_CHECKING:
    from flowkit.adapters.tasks.task_store import TaskStore

pytestmark = pytest.mark.usefixtures("open_task")

AT_EACH_WRITE = pytest.mark.parametrize(
    ("collection", "number"),
    [
        pytest.param("artifacts", 1, id="artifact"),
        pytest.param("metrics_raw", 1, id="metrics"),
        pytest.param("artifacts", 2, id="marker"),
        pytest.param("metrics_raw", 2, id="final metrics"),
        pytest.param("tasks", 1, id="single write"),
    ],
)
"""The writes of an attempt with one batch: the two rows, then the marker, the final metrics and the single write."""

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
        await asyncio.wait_for(first, 30)
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


async def test_rows_of_an_ordinary_attempt_under_the_same_epoch_are_not_replaced(db: Any) -> None:
    """Another engine, which does not host the role, may schedule the epoch as an ordinary attempt."""
    freezing = FreezingDatabase(db, "artifacts", 1)
    first = asyncio.create_task(inline(freezing, numbered(1, "u")).run())
    await freezing.reached_by(first)
    await role_executor(db, attempt(), numbered(2, "u")).run()
    freezing.thaw()
    await end_of(first)
    await assert_counted_once(db, "u")
    [row] = [row for row in await documents_of(db.metrics_raw) if row["batch_uid"] == "u"]
    assert row["metrics"] == {"try": 2}
    assert "lease_id" not in row


# --- refusals -----------------------------------------------------------------------------------------------------------


async def test_epoch_of_another_run_is_taken(db: Any, tasks: TaskStore) -> None:
    await tasks.begin_attempt(attempt(), "other-run", {"lease_id": "other"}, AT)
    failure = await failure_of(inline(db, numbered(1, "u")))
    assert (failure.kind, failure.current_epoch) == (FailureKind.EPOCH_TAKEN, 1)


class Failing(Returning):
    """Raises an error before its first batch, or in it."""

    async def load_input(self, input_ref: Any, input_inline: Any) -> Any:
        """Fail if there are no batches."""
        if not self._uids:
            raise ValueError("no batches")

    async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
        """Fail."""
        raise ValueError("no result")


@pytest.mark.parametrize("uids", [("u",), ()], ids=["in a batch", "before the first batch"])
async def test_taken_epoch_takes_precedence_over_a_failure(
    db: Any, tasks: TaskStore, uids: tuple[str, ...]
) -> None:
    await tasks.begin_attempt(attempt(), "other-run", {"lease_id": "other"}, AT)
    failure = await failure_of(inline(db, Failing(BatchResult(success=True), *uids)))
    assert failure.kind is FailureKind.EPOCH_TAKEN
    assert await documents_of(db.metrics_raw) == []


async def test_attempt_of_a_closed_task_is_fenced(db: Any, tasks: TaskStore) -> None:
    await tasks.close_task(close())
    before = await stored(db)
    with pytest.raises(Fenced, match="has ended"):
        await inline(db, numbered(1, "u")).run()
    assert await stored(db) == before


@pytest.mark.parametrize("waits", [False, True], ids=["at its end", "while it waits"])
async def test_cancel_flag_ends_the_attempt(db: Any, waits: bool) -> None:
    class Waiting(Returning):
        async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
            if waits:
                await asyncio.Event().wait()
            return await super().process_batch(batch, ctx)

    await db.tasks.update_one({}, {"$set": {"coordinator.cancelled": True}})
    with pytest.raises(Flagged):
        await asyncio.wait_for(inline(db, Waiting(BatchResult(success=True), "u")).run(), 30)
    assert (await stored_node(db))["status"] == "queued"


# --- attempts that are not simple -----------------------------------------------------------------------------------------


async def test_attempt_begins_while_its_handler_waits(db: Any) -> None:
    seen: list[str] = []

    class Looking(Returning):
        async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
            while (status := (await stored_node(db))["status"]) == "queued":
                await let_other_tasks_run()
            seen.append(status)
            return await super().process_batch(batch, ctx)

    await asyncio.wait_for(inline(db, Looking(BatchResult(success=True), "u")).run(), 30)
    assert seen == ["running"]


async def test_attempt_begins_before_its_handler_uses_artifacts(db: Any) -> None:
    seen: list[str] = []

    class Storing(Returning):
        async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
            await ctx.artifacts.upsert_partial("own", {"try": 1})
            seen.append((await stored_node(db))["status"])
            return await super().process_batch(batch, ctx)

    await inline(db, Storing(BatchResult(success=True), "u")).run()
    assert seen == ["running"]
    owners = {
        row["batch_uid"]: "lease_id" in row
        for row in await documents_of(db.artifacts)
        if "meta" in row and "batch_uid" in row
    }
    assert owners == {"own": False, "u": False}


async def test_failed_attempt_has_begun(db: Any) -> None:
    failing = Returning(BatchResult(success=False, reason_code="boom"), "u")
    assert (await failure_of(inline(db, failing))).code == "boom"
    found = await stored_node(db)
    assert (found["status"], found["attempt_epoch"], found["run_id"]) == ("running", 1, RUN)
    assert found["lease"]["worker_id"] == WORKER


async def test_attempt_that_has_become_old_begins_before_it_stores_a_batch(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_storage, "LATEST_BEGIN_SEC", -1.0)
    await inline(db, numbered(1, "u")).run()
    assert not any("lease_id" in row for row in await documents_of(db.metrics_raw) if row["batch_uid"] == "u")
    await assert_counted_once(db, "u")


async def test_same_uid_twice_is_one_batch(db: Any) -> None:
    await inline(db, numbered(1, "u", "u")).run()
    await assert_counted_once(db, "u")


async def test_document_shows_when_the_attempt_began_and_ended(db: Any) -> None:
    await inline(db, numbered(1, "u")).run()
    found = await stored_node(db)
    assert (found["status"], found["attempt_epoch"], found["run_id"]) == ("finished", 1, RUN)
    assert found["started_at"] <= found["finished_at"]
    [row] = [row for row in await documents_of(db.metrics_raw) if row["batch_uid"] == "u"]
    assert (row["run_id"], row["lease_id"]) == (RUN, found["lease"]["lease_id"])


async def test_attempts_are_logged_and_refused_ones_are_not(db: Any, tasks: TaskStore) -> None:
    log = EventLog(WorkerEvents(db))
    await inline(db, numbered(1, "u"), events=log).run()
    await tasks.close_task(close())
    refused = role_executor(db, attempt("b", index=1), numbered(1, "u"), may_repeat=True, events=log)
    await failure_of(refused)
    await log.flush()
    [event] = await documents_of(db.worker_events)
    assert event["payload"]["kind"] == "TASK_DONE"
