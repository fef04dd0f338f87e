"""What the loss of an attempt reports: how many batches the generation of its node has stored or set aside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from tests.contract.attempt_executors import Returning, role_executor, worker_context
from tests.contract.builders import AT, WORKER, attempt, begun

from flowkit.activities.handlers import BatchResult
from flowkit.attempt.supervision import run_attempt

if TYPE_CHECKING:
    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput

pytestmark = pytest.mark.usefixtures("open_task")


async def report_loss(db: Any, lost: AttemptInput) -> int:
    """Let Temporal try the activity of an attempt again, and return the number of batches that it reports."""
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=2)
    executor = role_executor(db, lost, Returning(BatchResult(success=True)))
    with pytest.raises(ApplicationError, match="stopped sending heartbeats") as caught:
        await environment.run(run_attempt, worker_context(db), lost, executor)
    settled: int = caught.value.details[0]["settled"]
    return settled


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_loss_reports_batches_that_are_stored_or_set_aside_once(
    db: Any, tasks: TaskStore, artifacts: ArtifactStore, shard: int
) -> None:
    first = replace(attempt("a", epoch=1), shard=shard)
    await begun(tasks, first)
    assert await report_loss(db, first) == 0
    await artifacts.store_batch(first, "b1", {"n": 1}, WORKER, AT)
    await artifacts.upsert_partial(first, "b2", {}, WORKER, AT)
    await artifacts.store_failed_batch(first, "b3", "error", AT)
    await artifacts.store_failed_batch(first, "b4", "error", AT, quarantined={"error": "no", "tries": 3})
    assert await report_loss(db, first) == 3
    again = replace(first, epoch=2)
    for uid in ("b1", "b2"):
        await artifacts.store_batch(again, uid, {"n": 1}, WORKER, AT)
    assert await report_loss(db, again) == 3
    await artifacts.store_batch(again, "b3", {}, WORKER, AT)
    assert await report_loss(db, again) == 4
    assert await report_loss(db, replace(again, epoch=4, first_epoch=3)) == 0


async def test_a_shard_that_was_taken_for_lost_reports_the_batches_of_its_node(
    db: Any, artifacts: ArtifactStore
) -> None:
    slow, other = (replace(attempt("a", epoch=epoch), shard=epoch, parallel=2) for epoch in (1, 2))
    await artifacts.store_batch(other, "b1", {"n": 1}, WORKER, AT)
    executor = role_executor(db, slow, Returning(BatchResult(success=True), "b0", "b1"))
    with pytest.raises(ApplicationError) as caught:
        await ActivityEnvironment().run(run_attempt, worker_context(db), slow, executor)
    assert (caught.value.type, caught.value.details[0]["settled"]) == ("fenced", 2)
