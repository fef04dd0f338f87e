"""Increments that `finalize` returns: they count once for a generation of the node, in the update that ends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.attempt_executors import Returning, failure_of, role_executor
from tests.contract.builders import attempt, documents_of, record, shown, stored, stored_node
from tests.contract.freezing_database import FreezingDatabase
from tests.contract.test_killed_tries import AT_EACH_WRITE, end_of
from tests.contract.variables import held, hold

from flowkit.activities.handlers import BatchResult, FinalizeResult
from flowkit.attempt.supervision import AttemptFailed
from flowkit.errors import Fenced
from flowkit.models import FailureKind, NodeStatus

if TYPE_CHECKING:
    from flowkit.activities.role_attempt import RoleExecutor
    from flowkit.adapters.tasks.store import TaskStore

pytestmark = pytest.mark.usefixtures("open_task")

BY = {"counts.done": 3, "euros": 0.5}


def counting(db: Any, epoch: int = 1, *, generation: int = 0, incr: Any = BY) -> RoleExecutor:
    """Return an inline attempt with one batch and final metrics, which increments variables."""
    final = FinalizeResult(metrics={"n": 1}, vars={"incr": incr})
    handler = Returning(BatchResult(success=True, metrics={"n": 1}), "u", final=final)
    given = replace(attempt(epoch=epoch), generation=generation)
    return role_executor(db, given, handler, may_repeat=True)


async def test_end_of_the_node_adds_to_variables(db: Any) -> None:
    await hold(db, {"counts": {"done": 4}})
    await counting(db).run()
    assert await held(db) == {"counts": {"done": 7}, "euros": 0.5}
    assert (await stored_node(db))["status"] == "finished"


async def test_retry_of_a_node_counts_once_and_a_rerun_counts_again(db: Any) -> None:
    for epoch, generation in ((1, 0), (2, 0), (3, 1)):
        await counting(db, epoch, generation=generation).run()
        node = await stored_node(db)
        assert (node["status"], node["attempt_epoch"]) == ("finished", epoch)
    assert await held(db) == {"counts": {"done": 6}, "euros": 1.0}


async def finished_by_later_tries(db: Any) -> None:
    """Run the next try and, if it ends as a loss, the next attempt, as the workflow does."""
    try:
        await counting(db).run()
    except AttemptFailed as error:
        assert error.failure.kind is FailureKind.LOSS
        await counting(db, 2).run()


@AT_EACH_WRITE
@pytest.mark.parametrize("thaws", [False, True], ids=["killed", "frozen"])
async def test_repeated_tries_and_attempts_count_once(
    db: Any, collection: str, number: int, thaws: bool
) -> None:
    freezing = FreezingDatabase(db, collection, number)
    first = asyncio.create_task(counting(freezing).run())
    await freezing.reached_by(first)
    if not thaws:
        first.cancel()
        await asyncio.wait([first])
    await finished_by_later_tries(db)
    if thaws:
        freezing.thaw()
        await end_of(first)
    assert await held(db) == {"counts": {"done": 3}, "euros": 0.5}
    assert (await stored_node(db))["status"] == "finished"
    marked = [row for row in await documents_of(db.artifacts) if row["status"] == "complete"]
    assert len(marked) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"incr": {"counts..done": 1}}, "'coordinator.vars.counts..done' has a segment"),
        ({"incr": {"n": "3"}}, "'by' must be int or float, not str: coordinator.vars.n"),
        ({"incr": {"n": float("nan")}}, "'by' must be finite: coordinator.vars.n"),
        ({"incr": {"n": 1, "n.m": 1}}, "coordinator.vars.n.m is below coordinator.vars.n"),
        ({"incr": {"sla": 1}}, "coordinator.vars.sla holds a str, not a number"),
        ({"incr": {"n": 1, "sla.level": 1}}, "coordinator.vars.sla holds a str, so it cannot contain"),
        ({"incr": {f"n{i}": 1 for i in range(257)}}, "257 keys in one operation"),
        ({"incr": [1]}, 'vars must be {"incr": {path: number}}'),
        ({"set": {"n": 1}}, 'vars must be {"incr": {path: number}}; set other variables with ctx.vars.set'),
        ("n", 'vars must be {"incr": {path: number}}'),
    ],
)
async def test_increments_that_are_not_possible_fail_the_node_and_write_nothing(
    db: Any, given: Any, text: str
) -> None:
    await hold(db, {"sla": "gold"})
    final = FinalizeResult(metrics={"n": 1}, vars=given)
    failed = await failure_of(role_executor(db, attempt(), Returning(BatchResult(success=True), final=final)))
    assert (failed.code, failed.permanent) == ("bad_vars", True)
    assert failed.message.startswith("the result of finalize: ")
    assert text in failed.message
    assert await held(db) == {"sla": "gold"}
    assert (await stored_node(db))["status"] == "running"
    assert "applied_generation" not in await stored_node(db)
    assert await documents_of(db.artifacts) == await documents_of(db.metrics_raw) == []


@pytest.mark.parametrize("given", [None, {}, {"incr": {}}])
async def test_result_without_increments_ends_the_node_as_before(db: Any, given: Any) -> None:
    final = FinalizeResult(vars=given)
    await role_executor(db, attempt(), Returning(BatchResult(success=True), final=final)).run()
    assert (await stored_node(db))["status"] == "finished"
    assert "vars" not in (await stored(db))["coordinator"]


async def test_node_that_is_being_cancelled_does_not_count(db: Any, tasks: TaskStore) -> None:
    freezing = FreezingDatabase(db, "tasks", 2)
    running = asyncio.create_task(counting(freezing).run())
    await freezing.reached_by(running)
    await tasks.record(record(shown("a", NodeStatus.CANCELLING, epoch=1), cancel="enough"))
    freezing.thaw()
    await running
    assert await held(db) is None
    assert (await stored_node(db))["status"] == "cancelling"


async def test_outdated_attempt_does_not_count(db: Any) -> None:
    freezing = FreezingDatabase(db, "tasks", 2)
    outdated = asyncio.create_task(counting(freezing, incr={"n": 100}).run())
    await freezing.reached_by(outdated)
    await counting(db, 2, incr={"n": 1}).run()
    freezing.thaw()
    with pytest.raises(Fenced):
        await outdated
    assert await held(db) == {"n": 1}
