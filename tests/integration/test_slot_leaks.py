"""Slots of the concurrency limits become free after kills, cancels and what Temporal's Web UI does to a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.engine.slot_grants import SlotGrants
from flowkit.models.temporal_names import SLOT_ACTIVITIES
from tests.integration.counted import Counted, holders, most
from tests.integration.handlers import Quick
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, eventually, node
from tests.integration.streaming import Source, source
from tests.integration.test_cancel_terminate_reset import reset
from tests.integration.test_concurrency_limits import (
    finished,
    until_all_slots_are_free,
    until_requests,
    wide,
)
from tests.integration.test_large_graphs import run_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.server

LONG: dict[str, Any] = {"inline": {"pause": 600}}
LEAK_SEC = 60.0
"""Time within which a leaked slot becomes free: ten seconds, or longer on a busy machine."""


async def limited(harness: Harness, slots: int = 1) -> None:
    """Start an engine with a limit for all roles."""
    harness.settings["max_global_running"] = slots
    await harness.engine()


async def until_held(harness: Harness, *node_ids: str) -> None:
    """Wait until exactly these nodes hold a slot."""

    async def look() -> bool:
        return {holder["node_id"] for holder in await holders(harness)} == set(node_ids)

    await eventually(look)


@pytest.mark.slow
async def test_killed_engine_leaks_no_slot_and_its_tasks_finish(harness: Harness) -> None:
    harness.settings["max_global_running"] = 2
    killed = harness.engine_process()
    await harness.worker({"counted": Counted(harness.db)}, concurrency=8)
    tasks = [await harness.create(*wide(5)) for _ in range(3)]
    await until_requests(harness, 3)
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    await harness.release_tasks()
    await harness.engine()
    await finished(harness, *tasks)
    assert await most(harness) == 2
    await until_all_slots_are_free(harness, LEAK_SEC)


@pytest.mark.slow(50)
async def test_engines_killed_one_after_another_never_exceed_the_limit(harness: Harness) -> None:
    harness.settings["max_global_running"] = 3
    engines = [harness.engine_process(), harness.engine_process()]
    await harness.worker({"counted": Counted(harness.db)}, concurrency=8)
    tasks = [await harness.create(*wide(6)) for _ in range(3)]
    for number in range(3):
        await until_started(harness, 3 * (number + 1))
        engines[0].kill()
        engines.append(harness.engine_process())
        engines.pop(0).wait(EVENT_TIMEOUT_SEC)
        await harness.release_tasks()
    await finished(harness, *tasks)
    assert await most(harness) == 3
    await until_all_slots_are_free(harness, LEAK_SEC)


async def until_started(harness: Harness, count: int) -> None:
    """Wait until so many attempts have started."""

    async def look() -> bool:
        return int(await harness.db.starts.count_documents({})) >= count

    await eventually(look)


async def test_killed_worker_frees_its_slot_for_the_next_attempt(harness: Harness) -> None:
    harness.settings["lease_ttl_sec"] = 4
    await limited(harness)
    killed = harness.worker_process("Paced")
    task_id = await harness.create(
        node("a", "paced", inline={"pause": 0, "hold_at": 0}, retry_policy={"max": 0})
    )
    await harness.until_node(task_id, "a", "running")
    killed.kill()
    killed.wait(EVENT_TIMEOUT_SEC)
    await harness.worker()
    await finished(harness, task_id)
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 2
    await until_all_slots_are_free(harness, LEAK_SEC)


async def cancelled(harness: Harness, task_id: str) -> None:
    """Cancel a task."""
    await harness.coordinator.cancel_task(task_id)


async def terminated(harness: Harness, task_id: str) -> None:
    """Terminate the workflow of a task."""
    await (await harness.handle(task_id)).terminate()


@pytest.mark.parametrize("end", [cancelled, terminated])
async def test_ended_task_frees_the_slot_that_it_holds(
    harness: Harness, end: Callable[[Harness, str], Coroutine[Any, Any, None]]
) -> None:
    await limited(harness)
    await harness.worker()
    holding = await harness.create(node("holding", "paced", **LONG))
    await harness.until_node(holding, "holding", "running")
    other = await harness.create(node("other"))
    await until_requests(harness, 1)
    await end(harness, holding)
    await asyncio.wait_for(finished(harness, other), LEAK_SEC)
    await until_all_slots_are_free(harness, LEAK_SEC)


@pytest.mark.parametrize("end", [cancelled, terminated])
async def test_ended_task_no_longer_waits(
    harness: Harness, end: Callable[[Harness, str], Coroutine[Any, Any, None]]
) -> None:
    await limited(harness)
    await harness.worker()
    holding = await harness.create(node("holding", "paced", **LONG))
    await harness.until_node(holding, "holding", "running")
    waiting = await harness.create(node("waiting"))
    await until_requests(harness, 1)
    await end(harness, waiting)
    other = await harness.create(node("other"))
    await cancelled(harness, holding)
    await asyncio.wait_for(finished(harness, other), LEAK_SEC)
    await until_all_slots_are_free(harness, LEAK_SEC)


async def test_reset_of_a_task_that_holds_a_slot_keeps_the_limit(harness: Harness) -> None:
    await limited(harness)
    await harness.worker({"counted": Counted(harness.db)})
    task_id = await harness.create(node("a", "counted"), node("b", "counted", "a", inline={"pause": 2}))
    await harness.until_node(task_id, "b", "running")
    other = await harness.create(node("other", "counted"))
    await until_requests(harness, 1)
    await reset(harness, task_id, "b")
    await finished(harness, task_id, other)
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 2
    await until_all_slots_are_free(harness, LEAK_SEC)


async def test_reset_of_a_task_that_waits_lets_it_wait_again(harness: Harness) -> None:
    await limited(harness)
    await harness.worker()
    task_id = await harness.create(node("a"), node("b", "quick", "a"), node("c", "paced", "b", **LONG))
    await until_held(harness, "c")
    blocker = await harness.create(node("blocker", "paced", inline={"pause": 1}))
    await until_requests(harness, 1)
    await reset(harness, task_id, "b")
    await finished(harness, blocker)
    await until_held(harness, "c")
    await cancelled(harness, task_id)
    await until_all_slots_are_free(harness, LEAK_SEC)


async def test_wait_survives_continue_as_new(short_runs: Harness) -> None:
    harness = short_runs
    await limited(harness)
    await harness.worker({"counted": Counted(harness.db)})
    wide_task = await harness.create(*wide(20, inline={"pause": 0}))
    other = await harness.create(*wide(10, inline={"pause": 0}))
    await finished(harness, wide_task, other)
    assert await most(harness) == 1
    assert len(await run_ids(harness, wide_task)) > 1
    await until_all_slots_are_free(harness, LEAK_SEC)


async def test_granted_slot_reaches_its_task_although_the_granting_engine_stopped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(grants: SlotGrants, request: Any) -> None:
        """Do nothing, like an engine that stops between the grant and its delivery."""

    await limited(harness)
    held = Source()
    await harness.worker({"source": held, "quick": Quick()})
    blocker = await harness.create(source("blocker", hold_at=0))
    await harness.until_node(blocker, "blocker", "running")
    waiting = await harness.create(node("waiting"))
    await until_requests(harness, 1)
    monkeypatch.setattr(SlotGrants, "_deliver", stopped)
    held.gates["blocker"].set()
    await finished(harness, blocker)
    await asyncio.wait_for(finished(harness, waiting), LEAK_SEC)


async def test_request_of_a_terminated_task_is_withdrawn(harness: Harness) -> None:
    await limited(harness)
    unserved = await harness.create(node("a", "unserved"))
    await until_requests(harness, 1)
    await terminated(harness, unserved)
    await until_all_slots_are_free(harness, LEAK_SEC)


async def test_cancel_of_a_waiting_task_takes_effect_at_once(harness: Harness) -> None:
    await limited(harness)
    unserved = await harness.create(node("a", "unserved"))
    await until_requests(harness, 1)
    await cancelled(harness, unserved)
    document = await asyncio.wait_for(harness.until_status(unserved, "cancelled"), LEAK_SEC)
    assert await harness.statuses(unserved) == {"a": "skipped"}
    assert document["coordinator"]["cancelled"]
    await until_requests(harness, 0)


async def test_task_that_was_opened_without_limits_needs_no_slots(harness: Harness) -> None:
    await harness.engine()
    await harness.worker()
    task_id = await harness.create(node("a"), node("b", "quick", "a"))
    await finished(harness, task_id)
    history = await (await harness.handle(task_id)).fetch_history()
    scheduled = [event.activity_task_scheduled_event_attributes for event in history.events]
    assert {each.activity_type.name for each in scheduled} & set(SLOT_ACTIVITIES) == set()
    assert await holders(harness) == []
