"""What the contract tests of a task's variables share."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, stored

from flowkit.adapters.tasks.node_writes import NodeWrite
from flowkit.adapters.vars.operations import size
from flowkit.adapters.vars.size_bound import BOUND
from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable


LOGGER = "flowkit.coord.adapters"

SECRET = "s3cret-mark-of-a-value"
"""A value that no record and no error may show."""


async def held(db: Any, task_id: str = TASK) -> Any:
    """The task's variables; None while there are none."""
    return (await stored(db, task_id))["coordinator"].get("vars")


async def hold(db: Any, variables: Any, task_id: str = TASK, *, bound: bool = True) -> None:
    """Give the task these variables, past all rules; with the bound of their size, unless an old release wrote them."""
    held: dict[str, Any] = {"coordinator.vars": variables}
    if bound and isinstance(variables, dict):
        held[BOUND] = size(variables) - size({})
    await db.tasks.update_one({"id": task_id}, {"$set": held})


@asynccontextmanager
async def unchanged(db: Any) -> AsyncIterator[None]:
    """The task's document is afterwards what it was before."""
    before = await stored(db)
    yield
    assert await stored(db) == before


async def refused(call: Awaitable[object], *named: str) -> str:
    """The text of an AdapterError; it names these paths and shows no value."""
    with pytest.raises(AdapterError) as caught:
        await call
    text = str(caught.value)
    assert SECRET not in text
    assert [path for path in named if f"coordinator.vars.{path}" not in text] == []
    return text


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Fields of the adapters' records so far, oldest first; they show no value."""
    found = [record for record in caplog.records if record.name == LOGGER]
    for record in found:
        assert record.levelno == logging.INFO
        assert SECRET not in record.getMessage()
        assert SECRET not in repr(vars(record))
        assert record.getMessage().startswith(str(vars(record)["event"]))
    return [{name: vars(record)[name] for name in _FIELDS if name in vars(record)} for record in found]


_FIELDS = ("event", "task_id", "keys", "n", "key", "by", "sensitive_hits")


def write(
    epoch: int = 1,
    *,
    generation: int = 0,
    run: str = RUN,
    node: str = "a",
    index: int = 0,
    at: float = AT,
) -> NodeWrite:
    """One attempt of a function node."""
    of_node = replace(attempt(node, epoch=epoch, index=index), generation=generation)
    return NodeWrite(attempt=of_node, run_id=run, lease={"worker_id": WORKER, "deadline_ts_ms": 1}, at=at)
