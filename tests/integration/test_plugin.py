"""FlowKit as a plugin of a user's own Temporal workers."""

from __future__ import annotations

import asyncio
import importlib
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.converter import DataConverter, PayloadCodec
from temporalio.worker import Worker

from flowkit import Coordinator, WorkerConfig
from flowkit.errors import StoreUnavailable
from flowkit.models import TaskResult, TaskStatus
from flowkit.plugin import FlowKitPlugin
from flowkit.workflows.task import Task
from tests.integration.handlers import ALL
from tests.integration.world import CEILING, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.integration.world import World

pytestmark = pytest.mark.server

ONCE = {"retry_policy": {"max": 0}}


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the user's module by itself, because the sandbox imports it again."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("foreign")


def plugin_of(world: World, **options: Any) -> FlowKitPlugin:
    """Return a plugin with this World's database and queue and the tests' handlers."""
    defaults: dict[str, Any] = {
        "db": world.db,
        "config": world.config,
        "handlers": ALL,
        "worker_config": WorkerConfig(queue=world.queue, max_concurrent=4, db_cancel_poll_ms=200),
    }
    return FlowKitPlugin(**{**defaults, **options})


async def connected(world: World, *plugins: FlowKitPlugin, **options: Any) -> Client:
    """Return a client with plugins."""
    return await Client.connect(world.environment["TEMPORAL_ADDRESS"], plugins=plugins, **options)


@asynccontextmanager
async def running(world: World, *workers: Worker) -> AsyncIterator[None]:
    """Run workers until the end of the block, which starts when the database is prepared."""

    async def is_prepared() -> bool:
        return await world.db.flowkit_meta.find_one({"_id": "deployment"}) is not None

    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
            await eventually(is_prepared)
        yield


def workers_of(world: World, client: Client, *roles: str) -> list[Worker]:
    """Return an engine's worker and one worker for each role, all without workflows or activities of their own."""
    queues = [world.queue, *(f"{world.queue}.{role}" for role in roles)]
    return [Worker(client, task_queue=queue) for queue in queues]


# --- running tasks ------------------------------------------------------------------------------------------------


async def test_a_task_of_two_roles_runs_on_plugin_workers_only(world: World) -> None:
    client = await connected(world, plugin_of(world))
    async with running(world, *workers_of(world, client, "quick", "failing")):
        task_id = await world.create(
            node("a", inline={"batches": 3}),
            node("b", "failing", "a", inline={"failures": 1}, retry_policy={"max": 1, "backoff_sec": 0.1}),
            node("end", "coordinator_fn", "b"),
        )
        assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert set((await world.statuses(task_id)).values()) == {"finished"}
    assert (await world.node(task_id, "b"))["attempt_epoch"] == 2
    assert len(await world.rows(task_id, "a")) == 3


async def test_functions_of_the_user_are_called_with_their_arguments(world: World) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def report(task_id: str, **arguments: Any) -> None:
        calls.append((task_id, arguments))

    client = await connected(world, plugin_of(world, functions={"report": report}))
    async with running(world, *workers_of(world, client)):
        io = {"fn": "report", "fn_args": {"to": "ada"}}
        task_id = await world.create({"node_id": "r", "type": "coordinator_fn", "io": io})
        await world.result(task_id)
    assert calls == [(task_id, {"to": "ada"})]


async def test_a_foreign_workflow_runs_beside_ours_and_a_task_as_its_child(
    world: World, foreign: Any
) -> None:
    client = await connected(world, plugin_of(world))
    ours_and_theirs = Worker(
        client, task_queue=world.queue, workflows=[foreign.Order], activities=[foreign.greet]
    )
    task_id = f"child-{uuid.uuid4()}"
    order = {"name": "Ada", "queue": world.queue, "task_id": task_id, "graph": {"nodes": [node("a")]}}
    async with running(world, ours_and_theirs, Worker(client, task_queue=f"{world.queue}.quick")):
        handle = await client.start_workflow(
            foreign.Order.run, order, id=f"o-{task_id}", task_queue=world.queue
        )
        answer = await asyncio.wait_for(handle.result(), CEILING)
    assert answer == ["hello Ada", "finished"]
    assert (await world.document(task_id))["status"] == "finished"


async def test_a_worker_on_another_queue_only_shares_the_client(world: World, foreign: Any) -> None:
    client = await connected(world, plugin_of(world))
    theirs = Worker(
        client, task_queue=f"theirs-{world.queue}", workflows=[foreign.Order], activities=[foreign.greet]
    )
    assert theirs.config(active_config=True)["workflows"] == [foreign.Order]
    task_id = f"child-{uuid.uuid4()}"
    order = {"name": "Alan", "queue": world.queue, "task_id": task_id, "graph": {"nodes": [node("a")]}}
    async with running(world, *workers_of(world, client, "quick"), theirs):
        handle = await client.start_workflow(
            foreign.Order.run, order, id=f"o-{task_id}", task_queue=theirs.task_queue
        )
        assert await asyncio.wait_for(handle.result(), CEILING) == ["hello Alan", "finished"]


async def test_the_sweep_of_a_plugin_closes_documents_of_terminated_workflows(world: World) -> None:
    client = await connected(world, plugin_of(world))
    async with running(world, *workers_of(world, client)):
        task_id = await world.create(node("a"))
        await world.until_status(task_id, "running")
        await (await world.handle(task_id)).terminate()
        assert (await world.until_status(task_id, "failed"))["reason"] == "terminated"


# --- stopping -----------------------------------------------------------------------------------------------------


async def test_a_stopped_role_worker_hands_its_node_over_at_no_charge(world: World) -> None:
    client = await connected(world, plugin_of(world))
    queue = f"{world.queue}.paced"
    engine, first = Worker(client, task_queue=world.queue), Worker(client, task_queue=queue, identity="first")
    async with running(world, engine):
        async with running(world, first):
            task_id = await world.create(node("a", "paced", inline={"batches": 6, "pause": 0.5}, **ONCE))
            await world.until_batches(task_id, "a", 1)
            assert (await world.node(task_id, "a"))["lease"]["worker_id"] == "first"
        assert first.is_shutdown
        async with running(world, Worker(client, task_queue=queue, identity="second")):
            assert (await world.result(task_id)).status is TaskStatus.FINISHED
    ended = await world.node(task_id, "a")
    assert (ended["attempt_epoch"], len(await world.rows(task_id, "a"))) == (2, 6)


async def test_a_task_goes_on_with_the_next_engine(world: World) -> None:
    client = await connected(world, plugin_of(world))
    async with AsyncExitStack() as stack:
        async with running(world, Worker(client, task_queue=world.queue)):
            await stack.enter_async_context(Worker(client, task_queue=f"{world.queue}.paced"))
            task_id = await world.create(
                node("a", "paced", inline={"batches": 3, "pause": 0.5}), node("b", "paced", "a")
            )
            await world.until_batches(task_id, "a", 1)
        async with running(world, Worker(client, task_queue=world.queue)):
            assert (await world.result(task_id)).status is TaskStatus.FINISHED
    assert (await world.node(task_id, "a"))["attempt_epoch"] == 1


async def test_a_cancel_reaches_a_handler_that_runs_in_a_plugin(world: World) -> None:
    client = await connected(world, plugin_of(world))
    async with running(world, *workers_of(world, client, "paced")):
        task_id = await world.create(node("a", "paced", inline={"pause": 600}))
        await world.until_node(task_id, "a", "running")
        await world.coordinator.cancel_task(task_id, reason="enough")
        document = await world.until_status(task_id, "cancelled")
    assert document["coordinator"]["cancel_reason"] == "enough"
    assert await world.statuses(task_id) == {"a": "cancelled"}


# --- plugin given twice -------------------------------------------------------------------------------------------


async def test_the_plugin_may_be_on_client_and_worker_and_task_be_listed(world: World) -> None:
    plugin = plugin_of(world)
    client = await connected(world, plugin)
    with pytest.warns(UserWarning, match="same plugin type"):
        engine = Worker(client, task_queue=world.queue, workflows=[Task], plugins=[plugin])
    with pytest.warns(UserWarning, match="same plugin type"):
        role = Worker(client, task_queue=f"{world.queue}.quick", plugins=[plugin])
    assert engine.config(active_config=True)["workflows"] == [Task]
    async with running(world, engine, role):
        assert (await world.result(await world.create(node("a")))).status is TaskStatus.FINISHED


async def test_a_workers_own_plugin_goes_before_that_of_its_client(world: World) -> None:
    client = await connected(world, FlowKitPlugin())
    with pytest.warns(UserWarning, match="same plugin type"):
        workers = [
            Worker(client, task_queue=queue, plugins=[plugin_of(world)])
            for queue in (world.queue, f"{world.queue}.quick")
        ]
    async with running(world, *workers):
        assert (await world.result(await world.create(node("a")))).status is TaskStatus.FINISHED


async def test_an_engine_of_flowkit_may_use_a_client_with_the_plugin(world: World) -> None:
    client = await connected(world, FlowKitPlugin(config=world.config))
    engine = Coordinator(db=world.db, cfg=world.config, client=client)
    await engine.start()
    try:
        task_id = await engine.create_task(params={}, graph={"nodes": [node("f", "coordinator_fn")]})
        assert (await world.result(task_id)).status is TaskStatus.FINISHED
    finally:
        await engine.stop()


# --- data converter ------------------------------------------------------------------------------------------------


class Upside(PayloadCodec):
    """A codec that reverses the bytes of every payload."""

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return what Temporal stores."""
        return [
            Payload(metadata={"encoding": b"test/upside"}, data=payload.SerializeToString()[::-1])
            for payload in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Return what the program reads."""
        return [Payload.FromString(payload.data[::-1]) for payload in payloads]


async def test_a_payload_codec_of_the_users_survives(world: World) -> None:
    converter = replace(DataConverter.default, payload_codec=Upside())
    client = await connected(world, plugin_of(world), data_converter=converter)
    creator = Coordinator(db=world.db, cfg=world.config, client=client)
    async with running(world, *workers_of(world, client, "quick")):
        task_id = await creator.create_task(params={"secret": "sesame"}, graph={"nodes": [node("a")]})
        handle = client.get_workflow_handle(task_id, result_type=TaskResult)
        assert (await asyncio.wait_for(handle.result(), CEILING)).status is TaskStatus.FINISHED
    history = b"".join(e.SerializeToString() for e in (await handle.fetch_history()).events)
    assert b"test/upside" in history
    assert b"sesame" not in history


# --- failed starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["", ".quick"])
async def test_a_database_that_does_not_answer_ends_the_worker_with_one_line(world: World, role: str) -> None:
    nowhere: Any = AsyncIOMotorClient("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    client = await connected(world, plugin_of(world, db=nowhere.none))
    worker = Worker(client, task_queue=f"{world.queue}{role}")
    with pytest.raises(StoreUnavailable, match="MongoDB is unavailable") as caught:
        await asyncio.wait_for(worker.run(), CEILING)
    assert "\n" not in str(caught.value)
    await asyncio.wait_for(worker.shutdown(), CEILING)
    nowhere.close()


async def test_a_failed_start_ends_an_async_with_block(world: World) -> None:
    nowhere: Any = AsyncIOMotorClient("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    client = await connected(world, plugin_of(world, db=nowhere.none))

    async def use() -> None:
        async with Worker(client, task_queue=world.queue):
            await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(use(), CEILING)
    nowhere.close()


# --- settings of the worker ---------------------------------------------------------------------------------------


async def test_a_role_worker_has_its_config_and_what_the_user_sets_wins(world: World) -> None:
    client = await connected(
        world, plugin_of(world, worker_config=WorkerConfig(queue=world.queue, worker_id="w-9"))
    )
    queue, quick = f"{world.queue}.quick", timedelta(seconds=0.2)
    plain = Worker(client, task_queue=queue).config(active_config=True)
    assert (plain["identity"], plain["max_concurrent_activities"]) == ("w-9", 1)
    assert plain["max_heartbeat_throttle_interval"] == timedelta(seconds=1)
    own = Worker(
        await connected(world, plugin_of(world)),
        task_queue=queue,
        identity="mine",
        max_concurrent_activities=7,
        max_heartbeat_throttle_interval=quick,
    ).config(active_config=True)
    assert (own["identity"], own["max_concurrent_activities"]) == ("mine", 7)
    assert own["max_heartbeat_throttle_interval"] == quick
