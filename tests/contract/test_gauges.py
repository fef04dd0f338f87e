"""Which engine reports what is open, and what it reads for that."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
from temporalio.api.workflowservice.v1 import DescribeTaskQueueResponse
from temporalio.service import RPCError, RPCStatusCode
from tests.contract.builders import graph
from tests.unit.measured import Measured, measuring

from flowkit.adapters.dispatches import Dispatch, DispatchStore
from flowkit.adapters.slots import SlotStore
from flowkit.adapters.tasks import fields
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_registry import HostedHandler, WorkerRegistry
from flowkit.config import CoordinatorConfig
from flowkit.connection import TemporalUnavailable
from flowkit.core import instruments
from flowkit.engine import gauges
from flowkit.engine.gauges import Gauges
from flowkit.engine.slot_grants import SlotGrants
from flowkit.errors import StoreUnavailable
from flowkit.models import AttemptInput, SlotRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

OWN, QUEUE = "ns-own", "q"


class FakeTemporal:
    """A server whose namespace has the id OWN, and on whose task queues activities wait for so many seconds."""

    namespace = "default"

    def __init__(self) -> None:
        self.backlogs: dict[str, float] = {}
        self.workflow_service = self

    async def id(self) -> str:
        """Return the id of the namespace."""
        return OWN

    async def describe_task_queue(
        self, request: DescribeTaskQueueRequest, **_: timedelta
    ) -> DescribeTaskQueueResponse:
        """Describe a task queue as Temporal does."""
        assert request.report_stats
        described, age = DescribeTaskQueueResponse(), self.backlogs.get(request.task_queue.name, 0.0)
        described.stats.approximate_backlog_age.FromTimedelta(timedelta(seconds=age))
        return described


@pytest.fixture
def measured() -> Iterator[Measured]:
    """What this process measures during the test."""
    with measuring() as found:
        yield found


@pytest.fixture
def temporal() -> FakeTemporal:
    """A server on which nothing waits."""
    return FakeTemporal()


@pytest.fixture
async def tasks(db: Any) -> TaskStore:
    """A store with its indexes."""
    store = TaskStore(db)
    await store.prepare()
    return store


def gauges_of(tasks: TaskStore, temporal: FakeTemporal, **settings: Any) -> Gauges:
    """Return the gauges of one more engine."""
    client: Any = temporal
    grants = SlotGrants(client, tasks.database, temporal.id, CoordinatorConfig(queue=QUEUE, **settings))
    return Gauges(tasks, client, grants, QUEUE)


async def insert(tasks: TaskStore, task_id: str, *statuses: str, **more: Any) -> None:
    """Insert a running task whose crawlers have these statuses."""
    document = fields.new_task(
        task_id, {}, graph(*map(str, range(len(statuses)))), time.time(), namespace_id=OWN
    )
    for node, status in zip(document["graph"]["nodes"], statuses, strict=True):
        node["status"] = status
    await tasks.insert_task(document | {"status": "running"} | more)


async def change(tasks: TaskStore, task_id: str, **more: Any) -> None:
    """Change a task, now."""
    changed = {
        "updated_at": datetime.now(UTC),
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    await tasks.database.tasks.update_one({"id": task_id}, {"$set": changed})


async def test_open_tasks_and_nodes_of_the_namespace_are_counted(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured
) -> None:
    await insert(tasks, "own", "running", "queued", "finished")
    await insert(tasks, "other", "queued", namespace_id="ns-other")
    await insert(tasks, "copied", "queued", database_id="db-other")
    await insert(tasks, "ended", "finished", status="finished", finished_at=datetime.now(UTC))
    assert await gauges_of(tasks, temporal).report()
    assert measured.shown(instruments.OPEN_TASKS)["running",] == 1
    assert measured.shown(instruments.OPEN_NODES) == {("crawler", "running"): 1, ("crawler", "queued"): 1}
    assert measured.shown(instruments.ROLE_WORKERS) == {("crawler",): 0}


async def test_later_counts_read_only_what_has_changed(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured
) -> None:
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    for task_id in ("idle", "busy", "ends"):
        await insert(tasks, task_id, "queued", updated_at=long_ago)
    engine = gauges_of(tasks, temporal)
    await engine.report()
    await change(tasks, "busy", graph__nodes__0__status="running")
    await change(
        tasks, "ends", graph__nodes__0__status="finished", status="finished", finished_at=datetime.now(UTC)
    )
    # Another program removes what the engine must not read again.
    await tasks.database.tasks.update_one({"id": "idle"}, {"$set": {"graph.nodes": []}})
    await engine.report()
    assert measured.shown(instruments.OPEN_NODES) == {("crawler", "queued"): 1, ("crawler", "running"): 1}
    assert measured.shown(instruments.OPEN_TASKS)["running",] == 2


async def test_all_open_documents_are_read_again_from_time_to_time(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(tasks, "t", "queued")
    engine = gauges_of(tasks, temporal)
    await engine.report()
    monkeypatch.setattr(gauges, "_FULL_COUNT_SEC", 0.0)
    await tasks.database.tasks.delete_one({"id": "t"})
    await engine.report()
    assert measured.shown(instruments.OPEN_NODES) == {}


async def test_one_engine_reports_and_one_that_has_lost_its_turn_shows_nothing(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured
) -> None:
    await insert(tasks, "t", "queued")
    first, second = (gauges_of(tasks, temporal) for _ in range(2))
    assert await first.report()
    assert not await second.report()
    assert measured.shown(instruments.OPEN_NODES) == {}
    await tasks.database.flowkit_meta.delete_many({"_id": {"$regex": "^gauges:"}})
    assert await second.report()
    assert measured.shown(instruments.OPEN_NODES) == {("crawler", "queued"): 1}
    assert not await first.report()
    shown = [measured.shown(each) for each in instruments.ALL if isinstance(each, instruments.Gauge)]
    assert not any(shown)


async def test_workers_of_the_queue_and_external_ones_count_by_role(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured
) -> None:
    registry, now = WorkerRegistry(tasks.database), time.time()
    for worker_id, queue in {"w-1": QUEUE, "w-2": QUEUE, "w-3": "another"}.items():
        handlers = [HostedHandler(role=role, version="1", engine=False) for role in ("crawler", "indexer")]
        await registry.register(
            worker_id, ["crawler", "indexer"], "1", 2, now, session="s", queue=queue, handlers=handlers
        )
    await registry.mark_offline("w-2", now, session="s")
    await registry.record_announcement("external", {"type": "crawler,mailer"}, now)
    assert await gauges_of(tasks, temporal).report()
    assert measured.shown(instruments.ROLE_WORKERS) == {("crawler",): 2, ("indexer",): 1, ("mailer",): 1}


async def test_nodes_wait_for_workers_for_slots_and_for_external_workers(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured
) -> None:
    await insert(tasks, "t", "queued")
    now = time.time()
    temporal.backlogs["q.crawler"] = 40.0
    slots = SlotStore(tasks.database, namespace_id=OWN, queue=QUEUE)
    await slots.prepare()
    for number in range(2):
        request = SlotRequest(task_id=f"t{number}", node_id="n", epoch=1, role="page", asked_at=now)
        await slots.enqueue(request, now - 20 * number)
    for node_id, accepted_at in {"a": None, "b": now - 90}.items():
        sent = Dispatch(
            attempt=AttemptInput(task_id="t", node_id=node_id, index=0, role="mailer", epoch=1),
            run_id="r",
            queue=QUEUE,
            topic="c",
            partition=0,
            end_offset=0,
            dedup_id=node_id,
            cancel_token="",
            owner="bridge",
            created_at=now - 70,
            accepted_at=accepted_at,
        )
        await DispatchStore(tasks.database).insert(sent)
    limited = {"max_type_concurrency": {"page": 3}}
    assert await gauges_of(tasks, temporal, **limited).report()
    assert measured.shown(instruments.OLDEST_READY) == {
        ("crawler",): 40.0,
        ("page",): pytest.approx(20, abs=5),
        ("mailer",): pytest.approx(70, abs=5),
    }
    assert measured.shown(instruments.SLOTS) == {
        ("page", "used"): 0,
        ("page", "waiting"): 2,
        ("page", "size"): 3,
    }


async def test_engine_that_cannot_count_shows_nothing(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(tasks, "t", "queued")
    engine = gauges_of(tasks, temporal)
    await engine._step()
    assert measured.shown(instruments.OPEN_NODES)
    monkeypatch.setattr(gauges, "EVERY_SEC", 0.0)
    monkeypatch.setattr(engine, "_pause_sec", 0.0)
    monkeypatch.setattr(temporal, "id", AsyncMock(return_value=""))
    with pytest.raises(TemporalUnavailable):
        await engine._step()
    assert measured.shown(instruments.OPEN_NODES) == {}


async def test_values_disappear_when_mongodb_freezes_between_two_counts(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next count is due in an hour."""
    await insert(tasks, "t", "queued")
    engine = gauges_of(tasks, temporal)
    await engine._step()
    assert measured.shown(instruments.OPEN_NODES)
    monkeypatch.setattr(engine, "_pause_sec", 3_600.0)
    monkeypatch.setattr(gauges, "_CHECK_SEC", 0.05)
    monkeypatch.setattr(engine, "_turns", Mock(take=lambda *_: asyncio.Event().wait()))
    async with asyncio.timeout(60):
        with pytest.raises(StoreUnavailable, match="did not respond within 0.05 s"):
            await engine._step()
    assert measured.shown(instruments.OPEN_NODES) == {}


async def test_taken_nominal_times_are_counted_every_few_minutes_by_the_engine_whose_turn_it_is(
    tasks: TaskStore, temporal: FakeTemporal, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_taken = AsyncMock(return_value={"nightly": 2})
    engine, other = (gauges_of(tasks, temporal) for _ in range(2))
    for each in (engine, other):
        monkeypatch.setattr(each, "_count_taken", count_taken)
    monkeypatch.setattr(gauges, "EVERY_SEC", 0.0)
    for _ in range(2):
        monkeypatch.setattr(engine, "_pause_sec", 0.0)
        await engine._step()
    assert measured.shown(instruments.TAKEN_TIMES) == {("nightly",): 2}
    await other._step()
    assert count_taken.await_count == 1
    count_taken.side_effect = RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    monkeypatch.setattr(engine, "_taken_due_at", 0.0)
    monkeypatch.setattr(engine, "_pause_sec", 0.0)
    await engine._step()
    assert measured.shown(instruments.TAKEN_TIMES) == {}
    assert measured.shown(instruments.OPEN_TASKS)


async def test_engine_counts_nothing_while_nobody_measures(tasks: TaskStore, temporal: FakeTemporal) -> None:
    await gauges_of(tasks, temporal)._step()
    assert await tasks.database.flowkit_meta.count_documents({"_id": {"$regex": "^gauges:"}}) == 0
