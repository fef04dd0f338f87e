"""Limits across tasks: how many attempts are in flight together, over all tasks and engines of a queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.models import TaskStatus
from tests.integration.counted import Counted, holders, most, requests, started
from tests.integration.harness import eventually, node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

PACED: dict[str, Any] = {"inline": {"pause": 0.05}}


def wide(count: int, role: str = "counted", **fields: Any) -> list[dict[str, Any]]:
    """Return nodes that can all run at once."""
    return [node(f"{role}{number}", role, **{**PACED, **fields}) for number in range(count)]


async def finished(harness: Harness, *task_ids: str) -> None:
    """Wait until the tasks have finished."""
    results = await asyncio.gather(*map(harness.result, task_ids))
    assert {result.status for result in results} == {TaskStatus.FINISHED}


async def until_all_slots_are_free(harness: Harness, seconds: float = 10.0) -> None:
    """Wait until no attempt holds a slot and no request waits."""

    async def look() -> bool:
        return not await holders(harness) and not await requests(harness)

    await eventually(look, seconds)


async def test_never_more_attempts_run_than_the_global_limit_over_tasks_and_engines(harness: Harness) -> None:
    harness.settings["max_global_running"] = 3
    await harness.engine()
    await harness.engine()
    for _ in range(2):
        await harness.worker({"counted": Counted(harness.db)}, concurrency=8)
    tasks = [await harness.create(*wide(6)) for _ in range(4)]
    await finished(harness, *tasks)
    assert await most(harness) == 3
    await until_all_slots_are_free(harness)
