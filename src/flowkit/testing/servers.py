"""Real engines and workers for tests, with Temporal's local server."""

from __future__ import annotations

import os
import uuid
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from temporalio.client import Client

from flowkit.config import CoordinatorConfig, WorkerConfig
from flowkit.connection import connect
from flowkit.coordinator import Coordinator
from flowkit.local.temporal import TemporalServer
from flowkit.payload_converter import configured_converter
from flowkit.reading.state import list_roles
from flowkit.testing.graphs import Pipeline
from flowkit.testing.memory import memory_database
from flowkit.testing.runs import read_run
from flowkit.worker import Worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from flowkit.adapters.mongo import Database
    from flowkit.testing.graphs import TypedGraph
    from flowkit.testing.runs import GraphRun
    from flowkit.worker import RoleHandler

_GRACE_SEC = 1.0
"""How long an attempt that is cancelled may take to stop, so that a test that fails ends soon."""


@dataclass(frozen=True, kw_only=True)
class LocalTemporal:
    """A Temporal server for tests."""

    address: str
    """Its address; empty for the one of `TEMPORAL_*`."""
    ui_url: str
    """The address of its Web UI; empty if it is unknown."""

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator[LocalTemporal]:
        """Yield the server of `TEMPORAL_ADDRESS`, or one that runs until the end of the block.

        Raise InstallFailed if there is no program for it, as `flowkit up` does.
        """
        if os.environ.get("TEMPORAL_ADDRESS"):
            yield cls(address="", ui_url=os.environ.get("TEMPORAL_UI_URL", ""))
            return
        with TemporalServer(folder) as server:
            yield cls(address=server.address, ui_url=server.ui_url)

    async def connect(self) -> Client:
        """Return a client of the server."""
        if not self.address:
            return await connect()
        return await Client.connect(self.address, data_converter=configured_converter())


class TestEngine:
    """An engine with workers that run the handlers of a graph, until the end of a block."""

    __test__ = False

    def __init__(
        self, coordinator: Coordinator, pipeline: Pipeline, server: LocalTemporal, namespace: str
    ) -> None:
        self.coordinator = coordinator
        """The coordinator, whose methods act on tasks: `retry_node`, `decide`, `pause`, `cancel_task` and others."""
        self.db: Database = coordinator.db
        """The database of the engine."""
        self._pipeline = pipeline
        self._server = server
        self._namespace = namespace

    async def submit(
        self,
        params: Any = None,
        *,
        graph: dict[str, Any] | None = None,
        task_id: str | None = None,
    ) -> str:
        """Start a task with the graph of the engine, or another one with its roles, and return its id."""
        given = self._pipeline.dump_params(params) if graph is None else params or {}
        return await self.coordinator.create_task(
            params=given, graph=graph or self._pipeline.graph, task_id=task_id
        )

    async def wait(self, task_id: str, timeout_sec: float = 60.0) -> GraphRun:
        """Wait until a task has ended, and return its outcome. Raise TimeoutError after `timeout_sec` seconds."""
        await self.coordinator.wait(task_id, timeout=timeout_sec)
        return await read_run(self.db, task_id, web_ui=self.web_ui(task_id))

    async def status(self, task_id: str) -> str:
        """Return the status of a task."""
        document = await self.db.tasks.find_one({"id": task_id})
        return str(document["status"])

    def web_ui(self, task_id: str) -> str:
        """Return the address of a task in Temporal's Web UI; empty if that of the server is unknown."""
        ui_url = self._server.ui_url
        return ui_url and f"{ui_url}/namespaces/{self._namespace}/workflows/{task_id}"


@asynccontextmanager
async def start_engine(
    server: LocalTemporal,
    graph: dict[str, Any] | TypedGraph,
    handlers: tuple[RoleHandler, ...],
    functions: Mapping[str, Any] | None = None,
    db: Database | None = None,
) -> AsyncIterator[TestEngine]:
    """Yield an engine with a task queue of its own, and a worker for the roles of the graph."""
    pipeline, queue = Pipeline.of(graph, handlers, functions), f"test-{uuid.uuid4().hex[:12]}"
    client = await server.connect()
    async with _database(db) as database:
        coordinator = Coordinator(
            db=database,
            cfg=CoordinatorConfig(queue=queue, cancel_grace_sec=_GRACE_SEC),
            client=client,
            adapters=pipeline.functions,
        )
        worker = Worker(
            db=database,
            cfg=WorkerConfig(queue=queue),
            client=client,
            roles=list_roles(pipeline.graph),
            handlers={each.role: each for each in pipeline.handlers},
        )
        await coordinator.start()
        try:
            await worker.start()
            yield TestEngine(coordinator, pipeline, server, client.namespace)
        finally:
            await worker.stop()
            await coordinator.stop()


@asynccontextmanager
async def _database(given: Database | None) -> AsyncIterator[Database]:
    """Yield the database of the test: the given one, one of `MONGO_URL` that is deleted afterward, or one in memory."""
    url = os.environ.get("MONGO_URL")
    if given is not None or not url:
        yield memory_database() if given is None else given
        return
    client: Any = AsyncIOMotorClient(url)
    name = f"flowkit_test_{uuid.uuid4().hex[:12]}"
    try:
        yield client[name]
    finally:
        await client.drop_database(name)
        client.close()
