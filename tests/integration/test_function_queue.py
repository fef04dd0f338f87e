"""The user's own functions have their own task queue, slots and threads."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.worker import Worker

from flowkit import Coordinator, CoordinatorConfig
from flowkit.cli.tasks.view import polled
from flowkit.engine.worker import settings_of
from flowkit.errors import ConfigError
from flowkit.models import TaskStatus
from flowkit.plugin import FlowKitPlugin
from flowkit.testing import memory_database
from tests.integration.test_functions import ONCE, SOON, call
from tests.integration.test_plugin import connected, plugin_of, running
from tests.integration.world import eventually, node

if TYPE_CHECKING:
    from tests.integration.world import World

CALLS = 60
"""Nodes in each of two tasks. Together they exceed the 100 slots of an engine's Temporal worker."""


def test_a_task_keeps_the_queue_of_its_functions() -> None:
    settings = settings_of(
        CoordinatorConfig(queue="jobs"), deployment="d", search_attributes=(), functions={}
    )
    assert settings.function_queue == "jobs.coordinator_fn"


async def until_polled(world: World) -> None:
    """Wait until a worker polls the queue of functions."""
    client = await world.client()
    await eventually(lambda: polled(client, f"{world.queue}.coordinator_fn", workflows=False))


@pytest.mark.server
async def test_an_engine_polls_the_queue_of_functions(world: World) -> None:
    await world.engine()
    await until_polled(world)


@pytest.mark.server
async def test_a_worker_with_the_plugin_polls_the_queue_of_functions_until_it_stops(world: World) -> None:
    plugin = plugin_of(world)
    worker = Worker(await connected(world, plugin), task_queue=world.queue)
    async with running(world, worker):
        await until_polled(world)
    assert [task for task in asyncio.all_tasks() if "SideWorker" in repr(task)] == []


@pytest.mark.server
async def test_many_slow_functions_hold_up_no_other_task(world: World) -> None:
    gate = asyncio.Event()

    begun = asyncio.Semaphore(0)

    async def hold(task_id: str) -> None:
        begun.release()
        await gate.wait()

    world.settings["function_slots"] = 20
    await world.engine(hold=hold)
    await world.worker()
    slow = [await world.create(*(call(f"f{n}", "hold", **ONCE) for n in range(CALLS))) for _ in range(2)]
    for _ in range(20):
        await begun.acquire()
    await world.until_status(slow[1], "running")
    other = await world.create(node("a", "failing", inline={"failures": 1}, **SOON), node("b", "quick", "a"))
    assert (await world.result(other)).status is TaskStatus.FINISHED
    gate.set()
    for task_id in slow:
        assert (await world.result(task_id)).status is TaskStatus.FINISHED


@pytest.mark.server
async def test_as_many_plain_functions_run_at_once_as_there_are_slots(world: World) -> None:
    """Asyncio's default executor has fewer than twenty threads on this machine."""
    together = threading.Barrier(20)

    def meet(task_id: str) -> None:
        together.wait(60)

    world.settings["function_slots"] = 20
    await world.engine(meet=meet)
    task_id = await world.create(*(call(f"f{n}", "meet", **ONCE) for n in range(20)))
    assert (await world.result(task_id)).status is TaskStatus.FINISHED


# --- reserved names -----------------------------------------------------------------------------------------------


async def nothing(task_id: str, **_: Any) -> None:
    """A function that does nothing."""


@pytest.mark.parametrize("name", ["open_task", "record", "close_task"])
def test_no_function_may_have_the_name_of_an_activity_of_the_engine(name: str) -> None:
    refused = pytest.raises(ConfigError, match=f"the coordinator function name '{name}' is reserved")
    with refused:
        Coordinator(db=memory_database(), cfg=CoordinatorConfig(), adapters={name: nothing})
    with refused:
        FlowKitPlugin(functions={name: nothing})


@pytest.mark.server
async def test_a_graph_that_calls_such_a_name_is_refused(world: World) -> None:
    engine = await world.engine()
    engine.adapters["record"] = nothing
    with pytest.raises(
        ValueError, match="node 'r': io.fn is 'record', a name that is reserved for the engine"
    ):
        await world.create(call("r", "record"))
