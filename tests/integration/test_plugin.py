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
from tests.integration.harness import EVENT_TIMEOUT_SEC, eventually, node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server

ONCE = {"retry_policy": {"max": 0}}


@pytest.fixture
def user_workflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the user's module by itself, because the sandbox imports it again."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("user_workflow")


def plugin_of(harness: Harness, **options: Any) -> FlowKitPlugin:
    """Return a plugin with the database and queue of the harness and the handlers of the tests."""
    defaults: dict[str, Any] = {
        "db": harness.db,
        "config": harness.config,
        "handlers": ALL,
        "worker_config": WorkerConfig(queue=harness.queue, max_concurrent=4, db_cancel_poll_ms=200),
    }
    return FlowKitPlugin(**{**defaults, **options})


async def connected(harness: Harness, *plugins: FlowKitPlugin, **options: Any) -> Client:
    """Return a client with plugins."""
    return await Client.connect(harness.environment["TEMPORAL_ADDRESS"], plugins=plugins, **options)


@asynccontextmanager
async def running(harness: Harness, *workers: Worker) -> AsyncIterator[None]:
    """Run workers until the end of the block, which starts when the database is prepared."""

    async def is_prepared() -> bool:
        return await harness.db.flowkit_meta.find_one({"_id": "deployment"}) is not None

    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
            await eventually(is_prepared)
        yield


def workers_of(harness: Harness, client: Client, *roles: str) -> list[Worker]:
    """Return an engine's worker and one worker for each role, all without workflows or activities of their own."""
    queues = [harness.queue, *(f"{harness.queue}.{role}" for role in roles)]
    return [Worker(client, task_queue=queue) for queue in queues]


# --- running tasks ------------------------------------------------------------------------------------------------


async def test_task_of_two_roles_runs_on_plugin_workers_only(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    async with running(harness, *workers_of(harness, client, "quick", "failing")):
        task_id = await harness.create(
            node("a", inline={"batches": 3}),
            node("b", "failing", "a", inline={"failures": 1}, retry_policy={"max": 1, "backoff_sec": 0.1}),
            node("end", "coordinator_fn", "b"),
        )
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert set((await harness.statuses(task_id)).values()) == {"finished"}
    assert (await harness.node(task_id, "b"))["attempt_epoch"] == 2
    assert len(await harness.rows(task_id, "a")) == 3


async def test_engine_in_a_plugin_worker_grants_slots(harness: Harness) -> None:
    harness.settings["max_global_running"] = 1
    client = await connected(harness, plugin_of(harness))
    async with running(harness, *workers_of(harness, client, "quick")):
        task_id = await harness.create(node("a"), node("b"), node("c", "quick", "a", "b"))
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    slots: Any = await harness.db.slots.find_one({})
    assert (slots["total"], slots["holders"]) == (0, [])


async def test_engine_in_a_plugin_worker_evaluates_conditions(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    async with running(harness, *workers_of(harness, client, "quick")):
        task_id = await harness.create(
            node("a"), node("b", "quick", "a", when="false"), node("c", "quick", "a")
        )
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await harness.statuses(task_id) == {"a": "finished", "b": "skipped", "c": "finished"}


async def test_user_functions_receive_their_arguments(harness: Harness) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def report(task_id: str, **arguments: Any) -> None:
        calls.append((task_id, arguments))

    client = await connected(harness, plugin_of(harness, functions={"report": report}))
    async with running(harness, *workers_of(harness, client)):
        io = {"fn": "report", "fn_args": {"to": "ada"}}
        task_id = await harness.create({"node_id": "r", "type": "coordinator_fn", "io": io})
        await harness.result(task_id)
    assert calls == [(task_id, {"to": "ada"})]


async def test_user_workflow_runs_next_to_flowkit_and_starts_a_task_as_its_child(
    harness: Harness, user_workflow: Any
) -> None:
    client = await connected(harness, plugin_of(harness))
    ours_and_theirs = Worker(
        client, task_queue=harness.queue, workflows=[user_workflow.Order], activities=[user_workflow.greet]
    )
    task_id = f"child-{uuid.uuid4()}"
    order = {"name": "Ada", "queue": harness.queue, "task_id": task_id, "graph": {"nodes": [node("a")]}}
    async with running(harness, ours_and_theirs, Worker(client, task_queue=f"{harness.queue}.quick")):
        handle = await client.start_workflow(
            user_workflow.Order.run, order, id=f"o-{task_id}", task_queue=harness.queue
        )
        response = await asyncio.wait_for(handle.result(), EVENT_TIMEOUT_SEC)
    assert response == ["hello Ada", "finished"]
    assert (await harness.document(task_id))["status"] == "finished"


async def test_worker_on_another_queue_only_shares_the_client(harness: Harness, user_workflow: Any) -> None:
    client = await connected(harness, plugin_of(harness))
    theirs = Worker(
        client,
        task_queue=f"theirs-{harness.queue}",
        workflows=[user_workflow.Order],
        activities=[user_workflow.greet],
    )
    assert theirs.config(active_config=True)["workflows"] == [user_workflow.Order]
    task_id = f"child-{uuid.uuid4()}"
    order = {"name": "Alan", "queue": harness.queue, "task_id": task_id, "graph": {"nodes": [node("a")]}}
    async with running(harness, *workers_of(harness, client, "quick"), theirs):
        handle = await client.start_workflow(
            user_workflow.Order.run, order, id=f"o-{task_id}", task_queue=theirs.task_queue
        )
        assert await asyncio.wait_for(handle.result(), EVENT_TIMEOUT_SEC) == ["hello Alan", "finished"]


async def test_plugin_sweep_closes_documents_of_terminated_workflows(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    async with running(harness, *workers_of(harness, client)):
        task_id = await harness.create(node("a"))
        await harness.until_status(task_id, "running")
        await (await harness.handle(task_id)).terminate()
        assert (await harness.until_status(task_id, "failed"))["reason"] == "terminated"


# --- stopping -----------------------------------------------------------------------------------------------------


async def test_stopped_role_worker_hands_its_node_over_without_using_budget(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    queue = f"{harness.queue}.paced"
    engine, first = (
        Worker(client, task_queue=harness.queue),
        Worker(client, task_queue=queue, identity="first"),
    )
    async with running(harness, engine):
        async with running(harness, first):
            task_id = await harness.create(node("a", "paced", inline={"batches": 6, "pause": 0.5}, **ONCE))
            await harness.until_batches(task_id, "a", 1)
            assert (await harness.node(task_id, "a"))["lease"]["worker_id"] == "first"
        assert first.is_shutdown
        async with running(harness, Worker(client, task_queue=queue, identity="second")):
            assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    ended = await harness.node(task_id, "a")
    assert (ended["attempt_epoch"], len(await harness.rows(task_id, "a"))) == (2, 6)


async def test_next_engine_continues_the_task(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    async with AsyncExitStack() as stack:
        async with running(harness, Worker(client, task_queue=harness.queue)):
            await stack.enter_async_context(Worker(client, task_queue=f"{harness.queue}.paced"))
            task_id = await harness.create(
                node("a", "paced", inline={"batches": 3, "pause": 0.5}), node("b", "paced", "a")
            )
            await harness.until_batches(task_id, "a", 1)
        async with running(harness, Worker(client, task_queue=harness.queue)):
            assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await harness.node(task_id, "a"))["attempt_epoch"] == 1


async def test_cancel_reaches_a_handler_in_a_plugin_worker(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness))
    async with running(harness, *workers_of(harness, client, "paced")):
        task_id = await harness.create(node("a", "paced", inline={"pause": 600}))
        await harness.until_node(task_id, "a", "running")
        await harness.coordinator.cancel_task(task_id, reason="enough")
        document = await harness.until_status(task_id, "cancelled")
    assert document["coordinator"]["cancel_reason"] == "enough"
    assert await harness.statuses(task_id) == {"a": "cancelled"}


# --- plugin given twice -------------------------------------------------------------------------------------------


async def test_plugin_can_be_on_client_and_worker_and_task_can_be_listed(harness: Harness) -> None:
    plugin = plugin_of(harness)
    client = await connected(harness, plugin)
    with pytest.warns(UserWarning, match="same plugin type"):
        engine = Worker(client, task_queue=harness.queue, workflows=[Task], plugins=[plugin])
    with pytest.warns(UserWarning, match="same plugin type"):
        role = Worker(client, task_queue=f"{harness.queue}.quick", plugins=[plugin])
    assert engine.config(active_config=True)["workflows"] == [Task]
    async with running(harness, engine, role):
        assert (await harness.result(await harness.create(node("a")))).status is TaskStatus.FINISHED


async def test_worker_plugin_takes_precedence_over_the_client_plugin(harness: Harness) -> None:
    client = await connected(harness, FlowKitPlugin())
    with pytest.warns(UserWarning, match="same plugin type"):
        workers = [
            Worker(client, task_queue=queue, plugins=[plugin_of(harness)])
            for queue in (harness.queue, f"{harness.queue}.quick")
        ]
    async with running(harness, *workers):
        assert (await harness.result(await harness.create(node("a")))).status is TaskStatus.FINISHED


async def test_coordinator_can_use_a_client_with_the_plugin(harness: Harness) -> None:
    client = await connected(harness, FlowKitPlugin(config=harness.config))
    engine = Coordinator(db=harness.db, cfg=harness.config, client=client)
    await engine.start()
    try:
        task_id = await engine.create_task(params={}, graph={"nodes": [node("f", "coordinator_fn")]})
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    finally:
        await engine.stop()


# --- data converter ------------------------------------------------------------------------------------------------


class ReversingCodec(PayloadCodec):
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


async def test_payload_codec_of_the_user_is_kept(harness: Harness) -> None:
    converter = replace(DataConverter.default, payload_codec=ReversingCodec())
    client = await connected(harness, plugin_of(harness), data_converter=converter)
    creator = Coordinator(db=harness.db, cfg=harness.config, client=client)
    async with running(harness, *workers_of(harness, client, "quick")):
        task_id = await creator.create_task(params={"secret": "sesame"}, graph={"nodes": [node("a")]})
        handle = client.get_workflow_handle(task_id, result_type=TaskResult)
        assert (await asyncio.wait_for(handle.result(), EVENT_TIMEOUT_SEC)).status is TaskStatus.FINISHED
    history = b"".join(e.SerializeToString() for e in (await handle.fetch_history()).events)
    assert b"test/upside" in history
    assert b"sesame" not in history


# --- failed starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["", ".quick"])
async def test_unreachable_database_ends_the_worker_with_a_one_line_error(
    harness: Harness, role: str
) -> None:
    nowhere: Any = AsyncIOMotorClient("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    client = await connected(harness, plugin_of(harness, db=nowhere.none))
    worker = Worker(client, task_queue=f"{harness.queue}{role}")
    with pytest.raises(StoreUnavailable, match="MongoDB is unavailable") as caught:
        await asyncio.wait_for(worker.run(), EVENT_TIMEOUT_SEC)
    assert "\n" not in str(caught.value)
    await asyncio.wait_for(worker.shutdown(), EVENT_TIMEOUT_SEC)
    nowhere.close()


async def test_failed_start_exits_an_async_with_block(harness: Harness) -> None:
    nowhere: Any = AsyncIOMotorClient("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    client = await connected(harness, plugin_of(harness, db=nowhere.none))

    async def use() -> None:
        async with Worker(client, task_queue=harness.queue):
            await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(use(), EVENT_TIMEOUT_SEC)
    nowhere.close()


# --- settings of the worker ---------------------------------------------------------------------------------------


async def test_role_worker_uses_its_config_and_user_settings_take_precedence(harness: Harness) -> None:
    client = await connected(
        harness, plugin_of(harness, worker_config=WorkerConfig(queue=harness.queue, worker_id="w-9"))
    )
    queue, quick = f"{harness.queue}.quick", timedelta(seconds=0.2)
    plain = Worker(client, task_queue=queue).config(active_config=True)
    assert (plain["identity"], plain["max_concurrent_activities"]) == ("w-9", 1)
    assert plain["max_heartbeat_throttle_interval"] == timedelta(seconds=1)
    own = Worker(
        await connected(harness, plugin_of(harness)),
        task_queue=queue,
        identity="mine",
        max_concurrent_activities=7,
        max_heartbeat_throttle_interval=quick,
    ).config(active_config=True)
    assert (own["identity"], own["max_concurrent_activities"]) == ("mine", 7)
    assert own["max_heartbeat_throttle_interval"] == quick
