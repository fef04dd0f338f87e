"""Where inline roles run: in a Coordinator, in a process of `flowkit engine`, and in a user's own Temporal worker."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.worker import Worker as TemporalWorker

from flowkit import Coordinator, CoordinatorConfig
from flowkit.errors import ConfigError
from flowkit.models import TaskStatus
from tests.integration.handlers import Gated, InlineQuick, Paced
from tests.integration.harness import eventually, node
from tests.integration.test_inline_roles import INLINE, attempts, chain, counts
from tests.integration.test_plugin import connected, plugin_of, running

if TYPE_CHECKING:
    from flowkit.worker import RoleHandler
    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


@pytest.mark.usefixtures("patient")
async def test_plugin_hosts_inline_handlers_on_the_worker_that_runs_tasks(harness: Harness) -> None:
    client = await connected(harness, plugin_of(harness, handlers={**INLINE, "paced": Paced()}))
    workers = [
        TemporalWorker(client, task_queue=queue) for queue in (harness.queue, f"{harness.queue}.paced")
    ]
    async with running(harness, *workers):
        task_id = await harness.create(*chain(3), node("end", "paced", "n2"))
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await counts(harness, task_id) == (3, 0)
    [row] = [row async for row in harness.db.worker_registry.find({"type": "inline"})]
    assert (row["status"], row["handlers"][0]["engine"]) == ("offline", True)


async def test_plugin_engine_without_the_role_falls_back(harness: Harness) -> None:
    host = await harness.engine(handlers=INLINE)
    gated = Gated()
    worker = await harness.worker({"gated": gated, **INLINE})
    task_id = await harness.create(node("long", "gated"), node("after", "inline", "long"))
    await harness.until_node(task_id, "long", "running")
    await host.stop()
    gated.gate.set()
    client = await connected(harness, plugin_of(harness))
    async with running(harness, TemporalWorker(client, task_queue=harness.queue)):
        assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert (await attempts(harness, task_id))["after"] == ("finished", 2)
    assert (await harness.node(task_id, "after"))["lease"]["worker_id"] == worker.worker_id


async def test_engine_process_hosts_roles_and_is_a_worker_of_them(harness: Harness) -> None:
    process = harness.engine_process("InlineQuick", "Paced")
    task_id = await harness.create(*chain(2), node("end", "paced", "n1"))
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert await counts(harness, task_id) == (2, 0)
    row: Any = await harness.db.worker_registry.find_one({})
    assert (row["type"], row["status"]) == ("inline,paced", "online")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 20) == 0
    await eventually(lambda: harness.db.worker_registry.find_one({"status": "offline"}))


async def test_stopping_the_engine_during_an_inline_attempt_loses_no_budget(harness: Harness) -> None:
    host = await harness.engine(handlers=INLINE)
    loaded = {"noted": True, "pause": 1.0}
    task_id = await harness.create(node("a", "inline", inline=loaded, retry_policy={"max": 0}))
    await eventually(lambda: harness.db.notes.find_one({"node_id": "a"}))
    await host.stop()
    await harness.engine(handlers=INLINE)
    assert (await harness.result(task_id)).status is TaskStatus.FINISHED
    assert len(await harness.rows(task_id, "a")) == 1


@pytest.mark.usefixtures("patient")
async def test_slow_coroutine_of_a_handler_does_not_delay_other_tasks(harness: Harness) -> None:
    await harness.engine(handlers={"inline": InlineQuick()})
    slow = await harness.create(*(node(f"n{i}", "inline", inline={"pause": 8.0}) for i in range(3)))
    await harness.until_node(slow, "n0", "running")
    quick = await harness.create(*chain(2))
    await harness.result(quick)
    assert (await harness.document(slow))["status"] == "running"
    await harness.result(slow)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"own_thread": False}, "own_thread is False, but handlers are given"),
        ({"worker_types": ["inline"]}, "role 'inline' has both a handler and external workers"),
        ({"handlers": ["InlineQuick"]}, "handlers is"),
    ],
    ids=["loop", "external", "no mapping"],
)
async def test_coordinator_rejects_handlers_that_it_cannot_host(
    harness: Harness, options: dict[str, Any], problem: str
) -> None:
    given = {"db": harness.db, "cfg": CoordinatorConfig(), "handlers": INLINE, **options}
    with pytest.raises(ConfigError, match=problem):
        Coordinator(**given)


@pytest.mark.parametrize(("handlers", "limit"), [(INLINE, 50), ({"paced": Paced()}, None), (None, None)])
async def test_engine_with_inline_roles_runs_fewer_workflow_tasks_at_once(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    handlers: dict[str, RoleHandler] | None,
    limit: int | None,
) -> None:
    created: list[TemporalWorker] = []

    class Recorded(TemporalWorker):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            created.append(self)

    monkeypatch.setattr("flowkit.engine.worker.Worker", Recorded)
    await harness.engine(handlers=handlers)
    assert workflow_tasks(created[0]) == limit


@pytest.mark.parametrize(
    ("handlers", "own", "limit"),
    [(INLINE, {}, 50), (INLINE, {"max_concurrent_workflow_tasks": 7}, 7), ({}, {}, None)],
)
async def test_plugin_limits_workflow_tasks_unless_the_worker_does(
    harness: Harness, handlers: dict[str, RoleHandler], own: dict[str, Any], limit: int | None
) -> None:
    client = await connected(harness, plugin_of(harness, handlers=handlers))
    assert workflow_tasks(TemporalWorker(client, task_queue=harness.queue, **own)) == limit


def workflow_tasks(worker: TemporalWorker) -> int | None:
    """Return how many workflow tasks a worker runs at once; None for the default of Temporal's SDK."""
    return worker.config(active_config=True).get("max_concurrent_workflow_tasks")
