"""Stored values by expression: written by the latest try, read by attempts of their generation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import RUN, TASK, attempt

from flowkit.attempt.storage import resolve
from flowkit.errors import BadExpression
from flowkit.models import NodeIO

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore

VALUES = {"params.$day": {"a.b": [1, None], "$set": "ä"}}
IO = NodeIO(input_inline={"day": {"$cel": "params.$day"}})


async def put(tasks: TaskStore, values: Any, *, generation: int = 0, run: str = RUN, tried: int = 1) -> None:
    """Store values of node `a`."""
    await tasks.values.put(TASK, "a", generation, values, 1.0, run_id=run, attempt=tried)


async def test_attempts_of_a_generation_read_its_values(tasks: TaskStore) -> None:
    await put(tasks, VALUES)
    await put(tasks, {"params.$day": 2}, generation=1)
    given = replace(attempt("a"), io=IO, by_expression=True)
    resolved, values = await resolve(tasks, given)
    assert (resolved.io.input_inline, values) == ({"day": VALUES["params.$day"]}, VALUES)
    again, _ = await resolve(tasks, replace(given, generation=1, epoch=7))
    assert again.io.input_inline == {"day": 2}


async def test_input_without_expressions_needs_no_values(tasks: TaskStore) -> None:
    given = attempt("a")
    assert await resolve(tasks, given) == (given, {})


async def test_missing_values_fail_the_attempt(tasks: TaskStore) -> None:
    with pytest.raises(BadExpression, match="node 'a' are not in MongoDB"):
        await resolve(tasks, replace(attempt("a"), io=IO, by_expression=True))


@pytest.mark.parametrize(
    ("run", "tried", "expected"), [(RUN, 1, "late"), (RUN, 3, "new"), ("another run", 1, "new")]
)
async def test_a_later_try_or_another_run_replaces_the_values(
    tasks: TaskStore, run: str, tried: int, expected: str
) -> None:
    await put(tasks, {"x": "late"}, tried=2)
    await put(tasks, {"x": "new"}, run=run, tried=tried)
    assert await tasks.values.get(attempt("a")) == {"x": expected}
