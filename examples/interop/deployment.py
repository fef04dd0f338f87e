"""The deployment of the check: an engine with a bridge and a native worker in this process, and external workers."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Self

from motor.motor_asyncio import AsyncIOMotorClient

from deployment import wait_until
from flowkit import Coordinator, CoordinatorConfig, WorkerConfig
from flowkit.worker import Worker
from flowkit.worker.handlers.base import Batch, BatchResult, RoleHandler, RunContext
from interop.errors import InteropError
from interop.handlers import HANDLERS
from interop.process import WorkerProcess

if TYPE_CHECKING:
    from pathlib import Path

    from flowkit.local import Stack

QUEUE = "interop"
DATABASE = "interop"


class Doubler(RoleHandler):
    """The native role of the graph: doubles the numbers that it pulls."""

    role = "doubler"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return twice each number."""
        items = [2 * item for item in batch.payload["items"]]
        return BatchResult(success=True, metrics={"items": items, "count": len(items)})


class Deployment:
    """Starts everything at the beginning of its context, and stops it at the end."""

    def __init__(self, folder: Path, command: list[str], stack: Stack, bootstrap: str) -> None:
        os.environ.update(stack.exports)
        self._folder = folder
        self._command = command
        self._environment = {
            **stack.exports,
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
            "MONGO_DATABASE": DATABASE,
            "FLOWKIT_QUEUE": QUEUE,
        }
        mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
        self.db = mongo[DATABASE]
        roles = list(HANDLERS)
        cfg = CoordinatorConfig(kafka_bootstrap=bootstrap, queue=QUEUE, worker_types=roles)
        self.coordinator = Coordinator(db=self.db, cfg=cfg)
        native = WorkerConfig(queue=QUEUE, roles=[Doubler.role])
        self._native = Worker(db=self.db, cfg=native, handlers={Doubler.role: Doubler()})
        self.workers: list[WorkerProcess] = []

    async def __aenter__(self) -> Self:
        """Start the engine, which creates the topics, then the workers."""
        await self.coordinator.start()
        await self._native.start()
        await wait_until(self._served)
        for number in (1, 2):
            self.start_worker(f"worker-{number}")
        try:
            await self._workers_online()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            await asyncio.to_thread(worker.stop)
        await self._native.stop()
        await self.coordinator.stop()

    def start_worker(self, name: str) -> None:
        """Start an external worker."""
        self.workers.append(WorkerProcess(self._folder, name, self._command, self._environment))

    async def create(self, *nodes: dict[str, Any]) -> str:
        """Start a task."""
        return await self.coordinator.create_task(params={}, graph={"nodes": list(nodes)})

    async def _served(self) -> bool:
        """Return whether the bridge serves all roles.

        Workers notice topics that are created later only after minutes.
        """
        bridge = self.coordinator.health().bridge
        return bridge is not None and bridge.served

    async def _workers_online(self) -> None:
        """Wait until all external workers have announced themselves; raise InteropError if one exits before."""

        async def look() -> bool:
            for worker in self.workers:
                if worker.exit_code is not None:
                    raise InteropError(f"{worker.name} exited with {worker.exit_code}")
            online = await self.db.worker_registry.count_documents({"status": "online"})
            return bool(online >= len(self.workers))

        try:
            await wait_until(look)
        except TimeoutError:
            raise InteropError("the workers have not announced themselves within 60 s") from None
