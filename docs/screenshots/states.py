"""Bring one task into each state that the screenshots show. Every wait is for a condition, not for a time."""

from __future__ import annotations

import operator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from temporalio.api.enums.v1 import PendingActivityState
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from flowkit import Coordinator, CoordinatorConfig, WorkerConfig
from flowkit.client import TaskCatalog
from flowkit.connection import connect
from flowkit.models import TaskStatus
from flowkit.worker import Worker
from screenshots.pipeline import (
    FORECAST,
    NAME,
    RateService,
    graph,
    handlers,
    held_graph,
    pulling,
    routed_graph,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from temporalio.client import Client

QUEUE = "flowkit"
DATABASE = "screenshots"
TIMEOUT_SEC = 120.0
_POLL_SEC = 0.1
_SCHEDULED = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED


class Pipeline:
    """Runs tasks of the pipeline, with an engine and a worker in this process."""

    def __init__(self, client: Client, db: Any) -> None:
        self._client = client
        self._catalog = TaskCatalog(db)
        self._rates = RateService()
        self._engine = Coordinator(db=db, cfg=CoordinatorConfig(queue=QUEUE), client=client)
        handlers_by_role = handlers(self._rates)
        cfg = WorkerConfig(
            roles=list(handlers_by_role), queue=QUEUE, max_concurrent=4, worker_id="orders-worker-1"
        )
        self._worker = Worker(db=db, cfg=cfg, handlers=handlers_by_role, client=client)

    async def start(self) -> None:
        """Start the engine and the worker."""
        await self._engine.start()
        await self._worker.start()

    async def stop(self) -> None:
        """Stop the worker and the engine; open tasks stay open."""
        await self._worker.stop()
        await self._engine.stop()

    async def all_states(self) -> dict[str, str]:
        """Create one task in each state; returns their ids by state."""
        makers = {
            "finished": self.finished,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "waiting-for-retry": self.waiting,
            "no-worker": self.no_worker,
            "running": self.running,
        }
        return {state: await maker() for state, maker in makers.items()}

    async def finished(self) -> str:
        """Create a task that finishes: the second attempt of `enrich_orders` succeeds."""
        self._rates.refuses["2026-01-26"] = 1
        return await self._ended(await self._start("2026-01-26"), TaskStatus.FINISHED)

    async def failed(self) -> str:
        """Create a task that fails because one order has an invalid amount."""
        return await self._ended(await self._start("2026-01-27", damaged="lisbon"), TaskStatus.FAILED)

    async def cancelled(self) -> str:
        """Create a task and cancel it while `enrich_orders` runs."""
        task_id = await self._halfway("2026-01-28")
        await self._engine.cancel_task(task_id, reason="exchange rates of the wrong day")
        return await self._ended(task_id, TaskStatus.CANCELLED)

    async def waiting(self) -> str:
        """Create a task that waits ten minutes for its retry, because the rate service is unavailable."""
        self._rates.refuses["2026-01-29"] = 9
        task_id = await self._start("2026-01-29", backoff_sec=600)
        await wait_until(lambda: self._has(task_id, "enrich_orders", "deferred"))
        return task_id

    async def no_worker(self) -> str:
        """Create a task with a node whose role has no worker."""
        wanted = graph("2026-01-30")
        wanted["nodes"].append(pulling("forecast_demand", FORECAST, "group_by_country"))
        task_id = await self._create("2026-01-30", wanted)
        await wait_until(lambda: self._has(task_id, "announce_report", "finished"))
        await wait_until(lambda: self._is_scheduled(task_id, FORECAST))
        return task_id

    async def running(self) -> str:
        """Create a task that has enriched two of six shops and waits for the rates of the third."""
        return await self._halfway("2026-01-31")

    async def routing(self) -> str:
        """Create a task whose nodes wait for a route from `enrich_orders`, which hangs like that of `running`."""
        return await self._halfway("2026-02-01", routed_graph("2026-02-01"))

    async def held(self) -> str:
        """Create a task that waits for two decisions: about its failed node, and about an approval."""
        task_id = await self._create("2026-02-02", held_graph("2026-02-02"))

        async def is_held() -> bool:
            view = await self._client.get_workflow_handle(task_id).query("status")
            waits = [str(node.get("waits_for")) for node in view["nodes"]]
            return sum(each.startswith("a decision") for each in waits) == 2

        await wait_until(is_held)
        return task_id

    async def _ended(self, task_id: str, wanted: TaskStatus) -> str:
        status = await self._engine.wait(task_id, timeout=TIMEOUT_SEC)
        if status is not wanted:
            raise RuntimeError(f"task {task_id} is {status}, expected {wanted}")
        return task_id

    async def _halfway(self, day: str, wanted: dict[str, Any] | None = None) -> str:
        self._rates.hangs.add(day)
        task_id = await self._create(day, wanted or graph(day))

        async def stored() -> bool:
            return (await self._catalog.batches(task_id)).get("enrich_orders", 0) >= 2

        await wait_until(stored)
        return task_id

    async def _start(self, day: str, **options: Any) -> str:
        return await self._create(day, graph(day, **options))

    async def _create(self, day: str, wanted: dict[str, Any]) -> str:
        params = {"pipeline_name": NAME, "day": day}
        return await self._engine.create_task(params=params, graph=wanted, task_id=f"orders-{day}")

    async def _has(self, task_id: str, node_id: str, status: str) -> bool:
        view = await self._client.get_workflow_handle(task_id).query("status")
        return any(node["node_id"] == node_id and node["status"] == status for node in view["nodes"])

    async def _is_scheduled(self, task_id: str, activity: str) -> bool:
        description = await self._client.get_workflow_handle(task_id).describe()
        pending = description.raw_description.pending_activities
        return any(each.activity_type.name == activity and each.state == _SCHEDULED for each in pending)


@retry(
    wait=wait_fixed(_POLL_SEC),
    stop=stop_after_delay(TIMEOUT_SEC),
    retry=retry_if_result(operator.not_),
)
async def wait_until(condition: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until `condition` is true; raises RetryError after TIMEOUT_SEC."""
    return await condition()


@asynccontextmanager
async def pipeline(mongo_url: str) -> AsyncIterator[Pipeline]:
    """Start the pipeline on the servers that the environment names, and stop it at the end."""
    mongo: Any = AsyncIOMotorClient(mongo_url, tz_aware=True)
    try:
        running = Pipeline(await connect(), mongo[DATABASE])
        await running.start()
        try:
            yield running
        finally:
            await running.stop()
    finally:
        mongo.close()
