"""Helpers for the contract tests of task variables."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.contract.builders import AT, RUN, TASK, WORKER, attempt, stored

from flowkit.adapters.tasks.attempts import NodeWrite
from flowkit.adapters.vars.changes import size
from flowkit.adapters.vars.rules import BOUND
from flowkit.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable


LOGGER = "flowkit.coord.adapters"

SECRET = "s3cret-mark-of-a-value"
"""A value that must not appear in any log record or error."""


async def held(db: Any, task_id: str = TASK) -> Any:
    """Return the task's variables; None while there are none."""
    return (await stored(db, task_id))["coordinator"].get("vars")


async def hold(db: Any, variables: Any, task_id: str = TASK, *, bound: bool = True) -> None:
    """Store these variables without any checks, with the bound of their size unless an earlier release wrote them."""
    held: dict[str, Any] = {"coordinator.vars": variables}
    if bound and isinstance(variables, dict):
        held[BOUND] = size(variables) - size({})
    await db.tasks.update_one({"id": task_id}, {"$set": held})


@asynccontextmanager
async def unchanged(db: Any) -> AsyncIterator[None]:
    """Check that the block does not change the task document."""
    before = await stored(db)
    yield
    assert await stored(db) == before


async def refused(call: Awaitable[object], *named: str) -> str:
    """Check that the call raises an AdapterError that names these paths and no value. Return its text."""
    with pytest.raises(AdapterError) as caught:
        await call
    text = str(caught.value)
    assert SECRET not in text
    assert [path for path in named if f"coordinator.vars.{path}" not in text] == []
    return text


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the adapters' log records, oldest first, and check that they show no value."""
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
    """Run one attempt of a function node."""
    of_node = replace(attempt(node, epoch=epoch, index=index), generation=generation)
    return NodeWrite(attempt=of_node, run_id=run, lease={"worker_id": WORKER, "deadline_ts_ms": 1}, at=at)
