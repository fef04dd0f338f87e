"""The user's own functions have their own task queue, slots and threads."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.worker import Worker

from flowkit import Coordinator, CoordinatorConfig
from flowkit.attempt.pollers import recent_pollers
from flowkit.engine.worker import make_settings
from flowkit.errors import ConfigError
from flowkit.models import TaskStatus
from flowkit.plugin import FlowKitPlugin
from flowkit.testing import memory_database
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node
from tests.integration.test_functions import ONCE, SOON, call
from tests.integration.test_plugin import connected, plugin_of, running

if TYPE_CHECKING:
    from tests.integration.harness import Harness

CALLS = 60
"""Nodes in each of two tasks. Together they exceed the 100 slots of an engine's Temporal worker."""


def test_task_keeps_its_function_queue() -> None:
    settings = make_settings(
        CoordinatorConfig(queue="jobs"), deployment="d", search_attributes=(), functions={}
    )
    assert settings.function_queue == "jobs.coordinator_fn"


async def until_polled(harness: Harness) -> None:
    """Wait until a worker polls the queue of functions."""
    client = await harness.client()
    await eventually(lambda: recent_pollers(client, f"{harness.queue}.coordinator_fn"))


@pytest.mark.server
async def test_engine_polls_the_function_queue(harness: Harness) -> None:
    await harness.engine()
    await until_polled(harness)


@pytest.mark.server
async def test_plugin_worker_polls_the_function_queue_until_it_stops(harness: Harness) -> None:
    plugin = plugin_of(harness)
    worker = Worker(await connected(harness, plugin), task_queue=harness.queue)
    async with running(harness, worker):
        await until_polled(harness)
    assert [task for task in asyncio.all_tasks() if "SideWorker" in repr(task)] == []


@pytest.mark.server
async def test_many_slow_functions_do_not_delay_other_tasks(harness: Harness) -> None:
    gate = asyncio.Event()

    begun = asyncio.Semaphore(0)

    async def hold(task_id: str) -> None:
        begun.release()
        await gate.wait()

    harness.settings["function_slots"] = 20
    await harness.engine(hold=hold)
    await harness.worker()
    slow = [await harness.create(*(call(f"f{n}", "hold", **ONCE) for n in range(CALLS))) for _ in range(2)]
    for _ in range(20):
        await begun.acquire()
    await harness.until_status(slow[1], "running")
    other = await harness.create(
        node("a", "failing", inline={"failures": 1}, **SOON), node("b", "quick", "a")
    )
    assert (await harness.result(other)).status is TaskStatus.FINISHED
    gate.set()
    for task_id in slow:
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED


@pytest.mark.server
async def test_as_many_plain_functions_run_concurrently_as_there_are_slots(harness: Harness) -> None:
    """Asyncio's default executor has fewer than twenty threads on this machine."""
    together = threading.Barrier(20)

    def wait_at_barrier(task_id: str) -> None:
        together.wait(EVENT_TIMEOUT_SEC)

    harness.settings["function_slots"] = 20
    await harness.engine(wait_at_barrier=wait_at_barrier)
    task_id = await harness.create(*(call(f"f{n}", "wait_at_barrier", **ONCE) for n in range(20)))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED


# --- reserved names -----------------------------------------------------------------------------------------------


async def nothing(task_id: str, **_: Any) -> None:
    """A function that does nothing."""


@pytest.mark.parametrize("name", ["open_task", "record", "close_task"])
def test_function_cannot_have_the_name_of_an_engine_activity(name: str) -> None:
    refused = pytest.raises(ConfigError, match=f"the coordinator function name '{name}' is reserved")
    with refused:
        Coordinator(db=memory_database(), cfg=CoordinatorConfig(), adapters={name: nothing})
    with refused:
        FlowKitPlugin(functions={name: nothing})


@pytest.mark.server
async def test_graph_that_calls_an_engine_activity_is_rejected(harness: Harness) -> None:
    engine = await harness.engine()
    engine.adapters["record"] = nothing
    with pytest.raises(
        ValueError, match="node 'r': io.fn is 'record', a name that is reserved for the engine"
    ):
        await harness.create(call("r", "record"))
