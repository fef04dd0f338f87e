"""Concurrency limits for roles that external workers serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from flowkit.testing.external.handlers import scripted
from tests.integration.counted import holders
from tests.integration.harness import eventually, node
from tests.integration.test_concurrency_limits import until_all_slots_are_free, until_requests

pytestmark = pytest.mark.server

if TYPE_CHECKING:
    from tests.integration.bridge.external_tasks import ExternalTasks


async def test_external_role_gets_slots_once_a_worker_is_connected(external: ExternalTasks) -> None:
    external.settings["max_global_running"] = 1
    await external.served_engine()
    await external.worker()
    tasks = [await external.create(node("a", external.role)) for _ in range(3)]
    await until_requests(external, 3)
    native = await external.create(node("b"))
    assert (await external.result(native)).status == "finished"
    state = await (await external.handle(tasks[0])).query("status")
    assert "no worker serves the role" in state["nodes"][0]["waits_for"]
    most = asyncio.create_task(most_holders(external))
    await external.external(scripted)
    await external.external(scripted)
    results = await asyncio.gather(*map(external.result, tasks))
    assert {result.status for result in results} == {"finished"}
    assert await most == 1
    await until_all_slots_are_free(external)


async def most_holders(external: ExternalTasks) -> int:
    """Read the slots until none is in use any more. Return the largest number that was in use at once."""
    seen: list[int] = []

    async def look() -> bool:
        seen.append(len(await holders(external)))
        return seen[-1] == 0 and max(seen) > 0

    await eventually(look)
    return max(seen)
