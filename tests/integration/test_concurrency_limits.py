"""Concurrency limits: how many attempts are in flight together, over all tasks and engines of a queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.engine.slot_grants import SlotGrants
from flowkit.errors import StoreUnavailable
from flowkit.models import TaskStatus
from tests.integration.counted import Counted, holders, most, requests, started
from tests.integration.handlers import Gated
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node
from tests.integration.test_web_ui import details

if TYPE_CHECKING:
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

PACED: dict[str, Any] = {"inline": {"pause": 1.0}}


def wide(count: int, role: str = "counted", **fields: Any) -> list[dict[str, Any]]:
    """Return nodes that can all run at once."""
    return [node(f"{role}{number}", role, **{**PACED, **fields}) for number in range(count)]


async def finished(harness: Harness, *task_ids: str) -> None:
    """Wait until the tasks have finished."""
    results = await asyncio.gather(*map(harness.result, task_ids))
    assert {result.status for result in results} == {TaskStatus.FINISHED}


async def until_all_slots_are_free(harness: Harness, seconds: float = EVENT_TIMEOUT_SEC) -> None:
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


async def test_each_role_has_its_own_limit_and_both_workers_of_a_role_get_work(harness: Harness) -> None:
    harness.settings["max_type_concurrency"] = {"slow": 1, "fast": 2}
    await harness.engine()
    workers = [
        await harness.worker({role: Counted(harness.db, role) for role in ("slow", "fast")}, concurrency=1)
        for _ in range(2)
    ]
    tasks = [await harness.create(*wide(2, "slow"), *wide(6, "fast")) for _ in range(2)]
    await finished(harness, *tasks)
    assert (await most(harness, "slow"), await most(harness, "fast")) == (1, 2)
    nodes = [entry for task_id in tasks for entry in (await harness.document(task_id))["graph"]["nodes"]]
    assert {entry["lease"]["worker_id"] for entry in nodes} == {worker.worker_id for worker in workers}


async def test_failed_local_activities_are_repeated_as_regular_ones(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.settings["max_global_running"] = 1
    fails: set[str] = {"acquire", "release"}

    def failing_once(method: str) -> None:
        original = getattr(SlotGrants, method)

        async def call(grants: SlotGrants, *given: Any) -> Any:
            if method in fails:
                fails.remove(method)
                raise StoreUnavailable("MongoDB does not respond")
            return await original(grants, *given)

        monkeypatch.setattr(SlotGrants, method, call)

    failing_once("acquire")
    failing_once("release")
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"))
    await finished(harness, task_id)
    history = await (await harness.handle(task_id)).fetch_history()
    names = [event.activity_task_scheduled_event_attributes.activity_type.name for event in history.events]
    assert [*filter(None, names)] == ["acquire_slots", "quick", "release_slots"]
    await until_all_slots_are_free(harness)


async def test_retry_holds_no_slot_while_it_waits(harness: Harness) -> None:
    harness.settings["max_global_running"] = 1
    await harness.engine()
    await harness.worker()
    later = {"retry_policy": {"max": 1, "backoff_sec": 600}}
    waiting = await harness.create(node("a", "failing", inline={"failures": 1}, **later))
    await harness.until_node(waiting, "a", "deferred")
    other = await harness.create(node("b"))
    await finished(harness, other)


async def test_higher_priority_goes_first_among_waiting_tasks(harness: Harness) -> None:
    harness.settings["max_global_running"] = 1
    await harness.engine()
    await harness.worker({"counted": Counted(harness.db)})
    blocker = await harness.create(node("blocker", "counted", inline={"pause": 60}))
    await harness.until_node(blocker, "blocker", "running")
    waiting = []
    for priority in (0, -1, 7, 3):
        params = {"priority": priority}
        graph = {"nodes": [node(f"p{priority}", "counted", **PACED)]}
        waiting.append(await harness.coordinator.create_task(params=params, graph=graph))
        await until_requests(harness, len(waiting))
    await harness.coordinator.cancel_task(blocker)
    await finished(harness, *waiting)
    assert [row["node"] for row in await started(harness)] == ["blocker", "p7", "p3", "p0", "p-1"]


async def until_requests(harness: Harness, count: int) -> None:
    """Wait until so many requests wait for a slot."""

    async def look() -> bool:
        return len(await requests(harness)) == count

    await eventually(look)


@pytest.mark.slow
async def test_small_task_takes_turns_with_a_wide_one(harness: Harness) -> None:
    harness.settings["max_global_running"] = 1
    await harness.engine()
    await harness.worker({"counted": Counted(harness.db)})
    wide_task = await harness.create(*wide(12))
    await until_requests(harness, 1)
    small = await harness.create(*wide(2))
    await finished(harness, wide_task, small)
    places = [place for place, row in enumerate(await started(harness)) if row["task"] == small]
    assert places[-1] <= 9, f"the small task ran at the places {places} of 14"


async def test_role_without_workers_gets_no_slots(harness: Harness) -> None:
    harness.settings["max_global_running"] = 1
    await harness.engine()
    await harness.worker({"counted": Counted(harness.db)})
    unserved = [await harness.create(node("a", "unserved")) for _ in range(2)]
    await until_requests(harness, 2)
    await finished(harness, await harness.create(*wide(2)))
    handle = await harness.handle(unserved[0])
    state = await handle.query("status")
    assert state["nodes"][0]["waits_for"] == "a slot of role unserved (no worker serves the role)"
    await harness.worker({"unserved": Counted(harness.db, "unserved")})
    await finished(harness, *unserved)


async def test_limits_can_change_while_tasks_run(harness: Harness) -> None:
    harness.settings["max_type_concurrency"] = {"counted": 1}
    engine = await harness.engine()
    await harness.worker({"counted": Counted(harness.db)}, concurrency=8)
    task_id = await harness.create(*wide(4, inline={"pause": 6}))
    await until_requests(harness, 1)
    assert await most(harness) <= 1
    engine.cfg.max_type_concurrency["counted"] = 3

    async def look() -> bool:
        return await most(harness) == 3

    await eventually(look)
    await finished(harness, task_id)
    assert await most(harness) == 3


async def test_wait_is_shown_until_the_node_starts(harness: Harness) -> None:
    harness.settings["max_type_concurrency"] = {"gated": 1}
    await harness.engine()
    gated = Gated()
    await harness.worker({"gated": gated})
    task_id = await harness.create(*wide(2, "gated"))
    await until_requests(harness, 1)
    handle = await harness.handle(task_id)
    text = "a slot of role gated (1 of 1)"

    async def look() -> bool:
        state = await handle.query("status")
        return {entry.get("waits_for") for entry in state["nodes"]} == {None, text}

    await eventually(look)
    assert f"waits for {text}" in await details(harness, task_id)
    gated.gate.set()
    await finished(harness, task_id)
    assert all("waits_for" not in entry for entry in (await handle.query("status"))["nodes"])
