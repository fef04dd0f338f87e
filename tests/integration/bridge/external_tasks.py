"""Tasks with external roles: a harness with topics of its own, and external workers on the test's broker."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from flowkit.connection import WorkerThread
from tests.integration.harness import EVENT_TIMEOUT_SEC, Harness, PatientWorker, eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from flowkit import CoordinatorConfig
    from flowkit.bridge.service import Bridge
    from flowkit.testing.external import Misbehavior
    from tests.integration.bridge.conftest import Names

T = TypeVar("T")

QUICK_WORKER = {
    "hb_interval_sec": 0.3,
    "lease_ttl_sec": 3.0,
    "announce_interval_sec": 1.0,
    "db_cancel_poll_ms": 200,
}
"""Intervals of external workers in tests."""

SESSION_MS = 6_000
"""The shortest session timeout that brokers accept by default."""


class ExternalTasks(Harness):
    """A harness whose engine has a bridge. Roles, topics and groups belong to one test."""

    def __init__(self, names: Names, *, temporal: str, mongo: str) -> None:
        super().__init__(temporal=temporal, mongo=mongo)
        self.names = names
        self.role = names.role("indexer")
        self.other_role = names.role("enricher")
        self.roles = [self.role, self.other_role]
        """The roles that external workers run."""
        self._workers = AsyncExitStack()

    @property
    def config(self) -> CoordinatorConfig:
        """Return settings for the engine and its bridge."""
        given = {"worker_types": self.roles, "discovery_window_sec": 0.5, **self.settings}
        return self.names.config(queue=self.queue, **given)

    @property
    def topics(self) -> dict[str, Any]:
        """The topic settings of external workers."""
        return {name: value for name, value in vars(self.config).items() if name.startswith("topic_")}

    @property
    def bridge(self) -> Bridge:
        """The bridge of the engine in this process."""
        found = self.coordinator._bridge
        assert found is not None, "start the engine first"
        return found

    async def served_engine(self) -> None:
        """Start an engine, and wait until its bridge serves all of its roles."""
        await self.engine()
        await self.until_served()

    async def until_served(self) -> None:
        """Wait until the bridge dispatches all of its roles."""

        async def look() -> bool:
            services = self.bridge.services if self.coordinator._bridge else []
            return bool(services) and all(service.waits_for is None for service in services)

        await eventually(look)

    def new_external(
        self, *handlers: Any, misbehavior: Misbehavior | None = None, **settings: Any
    ) -> PatientWorker:
        """Return a worker that is not started, whose handlers run the roles of this test in their order."""
        return PatientWorker(
            self.db,
            dict(zip(self.roles, handlers, strict=False)),
            bootstrap_servers=self.names.bootstrap,
            consumer={"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 300},
            misbehavior=misbehavior,
            **{**QUICK_WORKER, **self.topics, **settings},
        )

    async def external(self, *handlers: Any, **options: Any) -> PatientWorker:
        """Start an external worker, which stops with the harness."""
        return await self._workers.enter_async_context(self.new_external(*handlers, **options))

    async def dispatch(self, task_id: str, node_id: str, epoch: int = 1) -> dict[str, Any]:
        """Wait for the dispatch record of an attempt, and return it."""

        async def look() -> dict[str, Any] | None:
            wanted = {"task_id": task_id, "node_id": node_id, "attempt_epoch": epoch}
            found: dict[str, Any] | None = await self.db.dispatches.find_one(wanted)
            return found

        return await eventually(look)

    async def dispatches(self, task_id: str) -> list[dict[str, Any]]:
        """Return the dispatch records of a task, by node and epoch."""
        found = [record async for record in self.db.dispatches.find({"task_id": task_id})]
        return sorted(found, key=lambda record: (record["node_id"], record["attempt_epoch"]))

    async def until_reported(self, task_id: str, node_id: str, epoch: int = 1) -> None:
        """Wait until the record of an attempt says that Temporal knows its outcome."""

        async def look() -> bool:
            return bool((await self.dispatch(task_id, node_id, epoch))["state"] == "reported")

        await eventually(look)

    async def on_bridge(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the event loop of the bridge, and return its result."""
        thread = self.coordinator._thread
        assert isinstance(thread, WorkerThread)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, thread._loop))

    async def close(self) -> None:
        """Stop workers, processes and engines, and remove the data."""
        await asyncio.wait_for(self._workers.aclose(), EVENT_TIMEOUT_SEC)
        await super().close()


async def codes(external: ExternalTasks, task_id: str, node_id: str) -> list[str | None]:
    """Return how the attempts of a node failed, by epoch; None for an attempt that did not fail."""
    records = [each for each in await external.dispatches(task_id) if each["node_id"] == node_id]
    return [(each["outcome"].get("failure") or {}).get("code") for each in records]
