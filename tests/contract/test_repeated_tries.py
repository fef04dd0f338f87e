"""An attempt that Temporal runs again under the same epoch, as it does for a local activity after a crash."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.attempt_executors import Returning, failure_of, role_executor, worker_context
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

from flowkit import reason_codes
from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.adapters.tasks.attempts import TriedBefore
from flowkit.attempt.supervision import run_attempt
from flowkit.core import user_code
from flowkit.errors import EpochTaken, Fenced
from flowkit.models import FailureKind, Quarantine

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from flowkit.activities.role_attempt import RoleExecutor
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput, AttemptResult

pytestmark = pytest.mark.usefixtures("open_task")

LEASE: dict[str, Any] = {"worker_id": WORKER, "lease_id": "first", "deadline_ts_ms": 1}
LATER: dict[str, Any] = {**LEASE, "lease_id": "second"}


def counting(*uids: str) -> Returning:
    """Return a handler with these batches and a final metric."""
    return Returning(
        BatchResult(success=True, metrics={"n": 1}), *uids, final=FinalizeResult(metrics={"n": 1})
    )


async def run_locally(db: Any, given: AttemptInput, executor: RoleExecutor) -> AttemptResult:
    """Run an attempt within a local activity."""
    environment = ActivityEnvironment()
    environment.info = replace(
        environment.info, workflow_id=given.task_id, workflow_run_id=RUN, is_local=True
    )

    async def run() -> AttemptResult:
        return await run_attempt(worker_context(db), given, executor)

    running: Awaitable[AttemptResult] = environment.run(run)
    return await running


async def documents(db: Any) -> list[dict[str, Any]]:
    """Return the documents of the attempt, without ids and times."""
    found = [each for name in ("tasks", "artifacts", "metrics_raw") for each in await documents_of(db[name])]
    times = {"_id", "ts_ms", "created_at", "updated_at"}
    return [{name: value for name, value in each.items() if name not in times} for each in found]


async def test_repeated_write_of_the_same_try_succeeds(db: Any, tasks: TaskStore) -> None:
    for _ in range(2):
        await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)
    assert (await stored_node(db))["lease"]["lease_id"] == "first"


async def test_second_try_of_a_begun_attempt_is_refused_and_changes_nothing(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)
    before = await stored(db)
    with pytest.raises(TriedBefore) as caught:
        await tasks.attempts.begin(attempt(), RUN, LATER, AT + 5, once=True)
    assert not caught.value.finished
    assert await stored(db) == before


async def test_second_try_of_a_finished_attempt_learns_that_it_has_finished(tasks: TaskStore) -> None:
    await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)
    await tasks.attempts.finish(attempt(), RUN, AT)
    with pytest.raises(TriedBefore) as caught:
        await tasks.attempts.begin(attempt(), RUN, LATER, AT, once=True)
    assert caught.value.finished


async def test_epoch_of_another_run_is_taken(tasks: TaskStore) -> None:
    await tasks.attempts.begin(attempt(), "other-run", LEASE, AT, once=True)
    with pytest.raises(EpochTaken) as caught:
        await tasks.attempts.begin(attempt(), RUN, LATER, AT, once=True)
    assert caught.value.current == 1


async def test_first_try_after_the_end_of_the_task_is_fenced(tasks: TaskStore) -> None:
    await tasks.close_task(close())
    with pytest.raises(Fenced):
        await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)


async def test_try_that_was_interrupted_is_a_loss(db: Any, tasks: TaskStore) -> None:
    await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)
    failure = await failure_of(role_executor(db, attempt(), counting("u"), may_repeat=True))
    assert (failure.kind, failure.code) == (FailureKind.LOSS, reason_codes.LEASE_LOST)


class Killed(BaseException):
    """Raised in place of the end of the process."""


class Deadly(Returning):
    """Ends its process without waiting for anything."""

    calls = 0

    async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
        """Count the call, and end the process."""
        self.calls += 1
        raise Killed


async def test_handler_that_ends_its_process_is_called_once_in_each_epoch(
    db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "stops_process", lambda error: isinstance(error, Killed))
    deadly = Deadly(BatchResult(success=True), "u")
    with pytest.raises(Killed):
        await role_executor(db, attempt(), deadly, may_repeat=True).run()
    failure = await failure_of(role_executor(db, attempt(), deadly, may_repeat=True))
    assert (failure.kind, failure.code) == (FailureKind.LOSS, reason_codes.LEASE_LOST)
    assert deadly.calls == 1


async def test_try_after_a_finished_one_succeeds_and_changes_nothing(db: Any) -> None:
    await role_executor(db, attempt(), counting("u", "v"), may_repeat=True).run()
    before = await documents(db)
    result = await role_executor(db, attempt(), counting("u", "v"), may_repeat=True).run()
    assert result.batches == 2
    assert await documents(db) == before


async def test_later_try_completes_the_last_writes_of_a_finished_one(db: Any) -> None:
    await role_executor(db, attempt(), counting("u"), may_repeat=True).run()
    before = await documents(db)
    await db.metrics_raw.delete_one({"batch_uid": "__final__"})
    await role_executor(db, attempt(), counting("u"), may_repeat=True).run()
    assert await documents(db) == before


async def test_later_try_reports_the_batches_that_a_finished_one_has_set_aside(db: Any) -> None:
    """The workflow would otherwise take the node for one without failed batches."""
    given = replace(attempt(), quarantine=Quarantine(attempts=1))
    for _ in range(2):
        failing = Returning(BatchResult(success=False, reason_code="bad"), "u", "v")
        result = await role_executor(db, given, failing, may_repeat=True).run()
        assert (result.batches, result.failed_batches) == (0, 2)


async def test_finished_try_without_a_marker_is_a_loss(db: Any) -> None:
    await role_executor(db, attempt(), counting("u"), may_repeat=True).run()
    await db.artifacts.delete_one({"batch_uid": {"$exists": False}})
    failure = await failure_of(role_executor(db, attempt(), counting("u"), may_repeat=True))
    assert (failure.kind, failure.code) == (FailureKind.LOSS, reason_codes.LEASE_LOST)


class Marking(Returning):
    """Writes the complete marker itself."""

    async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
        """Write the marker."""
        await ctx.artifacts.mark_complete({"own": 1})
        return await super().process_batch(batch, ctx)


async def test_marker_of_the_handler_does_not_complete_a_finished_try(db: Any, tasks: TaskStore) -> None:
    """The metrics of `finalize` are then unknown, so that another attempt must run."""
    freezing = FreezingDatabase(db, "artifacts", 3)
    marking = Marking(BatchResult(success=True), "u", final=FinalizeResult(metrics={"n": 1}))
    first = asyncio.create_task(role_executor(freezing, attempt(), marking, may_repeat=True).run())
    await freezing.reached_by(first)
    first.cancel()
    await asyncio.wait([first])
    assert (await stored_node(db))["status"] == "finished"
    failure = await failure_of(role_executor(db, attempt(), counting("u"), may_repeat=True))
    assert (failure.kind, failure.code) == (FailureKind.LOSS, reason_codes.LEASE_LOST)


async def test_ordinary_attempt_whose_epoch_an_inline_one_has_taken_leaves_it(
    db: Any, tasks: TaskStore
) -> None:
    await tasks.attempts.begin(attempt(), RUN, LEASE, AT, once=True)
    failure = await failure_of(role_executor(db, attempt(), counting("u")))
    assert (failure.kind, failure.current_epoch) == (FailureKind.EPOCH_TAKEN, 1)


async def test_inline_attempt_that_a_later_one_replaces_ends_at_no_charge(db: Any, tasks: TaskStore) -> None:
    class Replaced(Returning):
        async def process_batch(self, batch: Any, ctx: Any) -> BatchResult:
            await tasks.attempts.begin(attempt(epoch=3), RUN, LATER, AT, once=True)
            return await super().process_batch(batch, ctx)

    executor = role_executor(db, attempt(), Replaced(BatchResult(success=True), "u"), may_repeat=True)
    with pytest.raises(ApplicationError) as caught:
        await run_locally(db, attempt(), executor)
    report = caught.value.details[0]
    assert (report["kind"], report["current_epoch"]) == (FailureKind.EPOCH_TAKEN, 3)


async def test_local_attempt_begins_in_time(db: Any) -> None:
    given = replace(attempt(), begin_by=time.time() + 600)
    assert (await run_locally(db, given, role_executor(db, given, counting("u")))).batches == 1


async def test_local_attempt_does_not_begin_late(db: Any) -> None:
    given = replace(attempt(), begin_by=time.time() - 5)
    with pytest.raises(ApplicationError, match="begins .* s too late") as caught:
        await run_locally(db, given, role_executor(db, given, counting("u")))
    assert caught.value.type == reason_codes.NOT_LOCAL
