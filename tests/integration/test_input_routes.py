"""Settings of a worker for its input routes, and how a node waits for its sources."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo.monitoring import CommandListener

from flowkit.activities.batches import inputs
from flowkit.activities.batches.puller import Puller
from flowkit.worker import RoleHandler, Worker, WorkerConfig
from tests.integration.handlers import Paced, Quick
from tests.integration.harness import eventually, node, wait_seconds
from tests.unit.test_input_routes import PULL, RECHUNK, ListSource, Proposing, proposing, route, source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.harness import Harness

pytestmark = pytest.mark.server


@asynccontextmanager
async def working(
    harness: Harness, *handlers: RoleHandler, db: Any = None, **settings: Any
) -> AsyncIterator[None]:
    """Start a worker with its own settings."""
    chosen = {handler.role: handler for handler in handlers}
    cfg = WorkerConfig(queue=harness.queue, roles=list(chosen), **settings)
    worker = Worker(db=db if db is not None else harness.db, cfg=cfg, handlers=chosen)
    await worker.start()
    try:
        yield
    finally:
        await worker.stop()


async def test_strict_worker_requires_the_key_of_chunks(harness: Harness) -> None:
    handler = Proposing()
    await harness.engine()
    async with working(harness, ListSource(), handler, strict_input_adapters=True):
        task_id = await harness.create(
            source([1, 2]),
            proposing("ordered", "u", **route(RECHUNK, size=2)),
            proposing("proposed", "u", propose=route(RECHUNK, size=2)),
            proposing("fine", "u", **route(RECHUNK, size=2, meta_list_key="skus")),
            on_node_failure="continue",
        )
        await harness.until_status(task_id, "failed")
    errors = {name: (await harness.node(task_id, name)).get("last_error") for name in ("ordered", "proposed")}
    assert {str(error).partition(" is missing")[0] for error in errors.values()} == {
        "bad_input_args: input_args.meta_list_key"
    }
    assert [*handler.got] == ["fine"]


# --- waiting ----------------------------------------------------------------------------------------------------


async def test_worker_settings_determine_the_poll_interval(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(Puller):
        def __init__(self, **given: Any) -> None:
            seen.append((given["args"].poll_ms, given["args"].backoff_max_ms))
            super().__init__(**given)

    monkeypatch.setattr(inputs, "Puller", Watched)
    await harness.engine()
    async with working(
        harness, ListSource(), Proposing(), pull_poll_ms_default=20, pull_empty_backoff_ms_max=70
    ):
        task_id = await harness.create(
            source([1]),
            proposing("a", "u", **route(PULL)),
            proposing("b", "a", **route(PULL, poll_ms=30, backoff_max_ms=90)),
            proposing("c", "b", propose=route(PULL, poll_ms=40)),
        )
        await harness.result(task_id)
    assert seen == [(20, 70), (30, 90), (40, 70)]


class ReadRecorder(CommandListener):
    """Records when FlowKit reads documents from MongoDB."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def started(self, event: Any) -> None:
        if event.command_name in ("find", "aggregate", "getMore", "count", "distinct"):
            self.at.append(time.monotonic())

    def succeeded(self, event: Any) -> None:
        """Ignore the event."""

    failed = succeeded


async def test_waiting_puller_reads_at_most_five_times_a_second(harness: Harness) -> None:
    reads, seconds = ReadRecorder(), 6.0
    client: Any = AsyncIOMotorClient(harness.environment["MONGO_URL"], event_listeners=[reads])
    await harness.engine()
    async with working(harness, Quick(), Paced()), working(harness, Proposing(), db=client[harness.database]):
        task_id = await harness.create(
            node("u"),
            node("slow", "paced", inline={"pause": 600}),
            {**proposing("z", "u", "slow", **route(PULL, poll_ms=1, backoff_max_ms=1)), "fan_in": "any"},
        )
        await harness.until_batches(task_id, "z", 1)
        began = time.monotonic()
        await wait_seconds(seconds)
        asked = sum(began <= at <= began + seconds for at in reads.at)
        assert await harness.statuses(task_id) == {"u": "finished", "slow": "running", "z": "running"}
        assert 0 < asked <= 5 * seconds
        await harness.coordinator.cancel_task(task_id)
        await harness.until_status(task_id, "cancelled")
    client.close()


async def test_waiting_puller_yields_its_slot_to_its_source(harness: Harness) -> None:
    await harness.engine()
    quick = Quick()
    quick.role = "solo"
    async with working(harness, Paced()), working(harness, quick, max_concurrent=1):
        once = {"retry_policy": {"max": 0}}
        task_id = await harness.create(
            node("first", "solo"),
            node("later", "paced", inline={"pause": 2}),
            node("second", "solo", "later", inline={"batches": 3}),
            node("z", "solo", "first", "second", fan_in="any", inline=route(RECHUNK, size=9), **once),
        )
        await harness.result(task_id)
    assert len(await harness.rows(task_id, "z")) == 1 + 3
    assert (await harness.node(task_id, "z"))["attempt_epoch"] >= 2, "its budget allows no retry"

    async def slot_yielded() -> bool:
        query = {"task_id": task_id, "node_id": "z", "payload.reason_code": "yielded"}
        return await harness.db.worker_events.count_documents(query) > 0

    await eventually(slot_yielded)
