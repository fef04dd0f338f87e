"""Stored values by expression: written by the latest evaluation, kept by a generation that has run attempts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from pymongo.errors import DuplicateKeyError
from temporalio.testing import ActivityEnvironment
from tests.contract.builders import AT, TASK, attempt, begun

from flowkit.activities.conditions import ConditionActivities
from flowkit.adapters.input_values import InputValues
from flowkit.adapters.vars.sensitive import Detector
from flowkit.attempt.storage import resolve
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import BadExpression
from flowkit.graph.expressions import divide
from flowkit.models import EvaluateConditions, NodeIO, NodeState, NodeStatus
from flowkit.workflows.scheduling.conditions import facts_of

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

VALUES = {"params.$day": {"a.b": [1, None], "$set": "ä"}}
IO = NodeIO(input_inline={"day": {"$cel": "params.$day"}})


async def put(
    tasks: TaskStore, values: Any, *, generation: int = 0, scheduled: float = AT, tried: int = 1
) -> None:
    """Store values of node `a`."""
    await tasks.values.put((TASK, "a", generation), values, 1.0, (scheduled, tried))


async def test_attempts_of_a_generation_read_its_values(tasks: TaskStore) -> None:
    await put(tasks, VALUES)
    await put(tasks, {"params.$day": 2}, generation=1)
    given = replace(attempt("a"), io=IO, by_expression=True)
    resolved, mask = await resolve(tasks, given)
    assert (resolved.io.input_inline, mask.values) == ({"day": VALUES["params.$day"]}, VALUES)
    again, _ = await resolve(tasks, replace(given, generation=1, epoch=7))
    assert again.io.input_inline == {"day": 2}


async def test_input_without_expressions_needs_no_values(tasks: TaskStore) -> None:
    given = attempt("a")
    resolved, mask = await resolve(tasks, given)
    assert (resolved, mask.values) == (given, {})


async def test_missing_values_fail_the_attempt(tasks: TaskStore) -> None:
    with pytest.raises(BadExpression, match="node 'a' are not in MongoDB"):
        await resolve(tasks, replace(attempt("a"), io=IO, by_expression=True))


@pytest.mark.parametrize(
    ("scheduled", "tried", "expected"),
    [(AT, 1, "late"), (AT, 3, "new"), (AT - 1, 3, "late"), (AT + 1, 1, "new")],
    ids=["earlier-try", "later-try", "earlier-evaluation", "later-evaluation"],
)
async def test_a_later_try_or_evaluation_replaces_the_values_and_an_earlier_one_does_not(
    tasks: TaskStore, scheduled: float, tried: int, expected: str
) -> None:
    await put(tasks, {"x": "late"}, tried=2)
    await put(tasks, {"x": "new"}, scheduled=scheduled, tried=tried)
    assert await tasks.values.get(attempt("a")) == ({"x": expected}, None)


async def test_items_take_effect_with_the_values_of_their_evaluation(tasks: TaskStore) -> None:
    items = tasks.values.items
    with pytest.raises(BadExpression, match="the items of node 'a' are not in MongoDB"):
        await tasks.values.item_set(attempt("a"))
    lost = await items.put((TASK, "a", 0), "run.1", divide(["lost"] * 5, 2), 2, AT)
    given = [{"$a.b": number, "text": "ä"} for number in range(7)]
    valid = await items.put((TASK, "a", 0), "run.2", divide(given, 3), 3, AT)
    assert (valid.items, valid.batches, valid.largest) == (7, 3, 70)
    assert await items.put((TASK, "a", 0), "run.2", divide(given, 3), 3, AT) == valid
    await tasks.values.put((TASK, "a", 0), {}, AT, (AT, 2), valid)
    await tasks.values.put((TASK, "a", 0), {}, AT, (AT, 1), lost)
    assert await tasks.values.item_set(attempt("a")) == valid
    found = await items.read(attempt("a"), valid.token, [2, 0, 9])
    assert found == {0: given[:3], 2: given[6:]}
    assert await tasks.values.batches(TASK) == {("a", 0): 3}


async def test_many_and_large_items_take_several_writes(tasks: TaskStore) -> None:
    items, key = tasks.values.items, (TASK, "a", 0)
    many = await items.put(key, "many", divide([*range(2_500)], 1), 1, AT)
    large = await items.put(key, "large", divide(["x" * 3_000_000] * 3, 2), 2, AT)
    assert (many.batches, large.batches, large.largest) == (2_500, 2, 6_000_007)
    assert await items.read(attempt("a"), "many", [0, 2_499]) == {0: [0], 2_499: [2_499]}
    assert [len(each) for each in (await items.read(attempt("a"), "large", [0, 1])).values()] == [2, 1]
    empty = await items.put(key, "empty", divide([], 1), 1, AT)
    assert (empty.items, empty.batches, empty.largest) == (0, 0, 0)


async def evaluate(db: Any, tasks: TaskStore, number: int, *texts: str, **more: Any) -> dict[str, Any]:
    """Set `params.n`, let the engine evaluate the values and the items of node `a`, and return them."""
    await db.tasks.update_one({"id": TASK}, {"$set": {"params.n": number}})
    activities = ConditionActivities(tasks=tasks, portal=LoopPortal(), detector=Detector())
    fields = {"texts": [*texts], "node_id": "a", "map_over": "[params.n]"} | more
    due = EvaluateConditions(task_id=TASK, **fields)
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, activity_id=str(number))
    found = await environment.run(activities.evaluate_conditions, due)
    assert found.results == [True] * (len(texts) + 1)
    given = replace(attempt("a"), generation=due.generation)
    items = await tasks.values.item_set(given)
    values, _ = await tasks.values.get(given)
    return {**values, "items": (await tasks.values.items.read(given, items.token, [0]))[0]}


@pytest.mark.usefixtures("open_task")
async def test_a_generation_that_has_run_attempts_keeps_its_values_and_items(
    db: Any, tasks: TaskStore
) -> None:
    assert await evaluate(db, tasks, 1, "params.n") == {"params.n": 1, "items": [1]}
    await begun(tasks, attempt("a"))
    kept = {"params.n": 1, "items": [1]}
    assert await evaluate(db, tasks, 2, "params.n", keeps=True) == kept
    changed = await evaluate(db, tasks, 3, "params.n", "params.n * 10", keeps=True)
    assert changed == {**kept, "params.n * 10": 30}
    renewed = await evaluate(db, tasks, 4, "params.n", generation=1)
    assert renewed == {"params.n": 4, "items": [4]}


@pytest.mark.usefixtures("open_task")
async def test_items_stay_when_another_run_evaluates_the_values_of_the_generation_anew(
    db: Any, tasks: TaskStore
) -> None:
    await evaluate(db, tasks, 1, "params.n")
    assert await evaluate(db, tasks, 2, "params.n") == {"params.n": 2, "items": [2]}
    await begun(tasks, attempt("a"))
    assert await evaluate(db, tasks, 3, "params.n") == {"params.n": 3, "items": [2]}


@pytest.mark.usefixtures("open_task")
async def test_values_read_stats_of_the_document_and_statuses_of_the_workflow(
    db: Any, tasks: TaskStore
) -> None:
    await db.tasks.update_one({"id": TASK}, {"$set": {"graph.nodes.1.stats": {"rows": 7}}})
    text = r"[nodes.b.status, nodes['b']['\x73tats'].rows]"
    facts = facts_of({"b": NodeState(status=NodeStatus.FINISHED)})
    activities = ConditionActivities(tasks=tasks, portal=LoopPortal(), detector=Detector())
    due = EvaluateConditions(task_id=TASK, texts=[text], nodes=facts, node_id="a")
    assert (await ActivityEnvironment().run(activities.evaluate_conditions, due)).results == [True]
    assert await tasks.values.get(attempt("a")) == ({text: ["finished", 7]}, None)


class Overtaken:
    """The collection of a server on which another evaluation inserts its row between the search and the insert."""

    def __init__(self, rows: Any, other: Any) -> None:
        self._rows, self._other = rows, other

    async def update_one(self, *given: Any, **options: Any) -> Any:
        """Fail once, as an upsert does whose row exists by then."""
        if (other := self._other) is not None:
            self._other = None
            await other()
            raise DuplicateKeyError("E11000 duplicate key error", 11000)
        return await self._rows.update_one(*given, **options)


async def test_the_later_of_two_concurrent_evaluations_is_kept(tasks: TaskStore) -> None:
    rows, other = tasks.values._rows, InputValues(tasks.database)
    earlier = {"a": "earlier"}
    overtaken = Overtaken(rows, lambda: other.put((TASK, "a", 0), earlier, 1.0, (AT, 1)))
    with mock.patch.object(tasks.values, "_rows", overtaken):
        await put(tasks, {"a": "later"}, scheduled=AT + 1)
    assert (await other.stored((TASK, "a", 0)))[0] == {"a": "later"}
