"""The test harness: a queue and a database for one test, and the processes that it starts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from motor.motor_asyncio import AsyncIOMotorClient
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetStickyTaskQueueRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import Coordinator, CoordinatorConfig, WorkerConfig
from flowkit.connection import connect
from flowkit.testing import ExternalWorker
from flowkit.worker import Worker
from flowkit.workflows.task import Task
from tests.fork_server import fork_server
from tests.integration.handlers import ALL
from tests.servers import drop_database

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from temporalio.api.history.v1 import HistoryEvent
    from temporalio.client import Client, WorkflowHandle

    from flowkit.models import TaskResult
    from flowkit.testing.external.journal import Entry
    from flowkit.worker import RoleHandler
    from tests.fork_server import ForkedProcess

T = TypeVar("T")

EVENT_TIMEOUT_SEC = 200.0
"""Seconds after which an expected event counts as missing: ten times what the slowest one needs on a quiet machine.

The time limit of a test, `timeout` in pyproject.toml, is longer.
"""
QUERY_SEC = 5
"""How long a query waits for an engine."""

ROOT = Path(__file__).parents[2]
FLOWKIT = Path(sys.executable).parent / "flowkit"


async def eventually(look: Callable[[], Awaitable[T | None]], timeout_sec: float = EVENT_TIMEOUT_SEC) -> T:
    """Call `look` until it returns a truthy value, and return that. Raise AssertionError after the timeout."""
    end = time.monotonic() + timeout_sec
    while time.monotonic() < end:
        if found := await look():
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"nothing came of {look} within {timeout_sec} s")


async def wait_seconds(seconds: float) -> None:
    """Wait for a number of seconds, in tests of the time itself, such as an outage."""
    await asyncio.sleep(seconds)


class PatientWorker(ExternalWorker):
    """An external worker on a machine that may be busy."""

    async def wait_for(self, kind: str, *, within: float = EVENT_TIMEOUT_SEC, **about: Any) -> Entry:
        """Return an entry as soon as it exists."""
        return await super().wait_for(kind, within=within, **about)


class Harness:
    """Starts engines, workers and tasks for a test, and reads the results."""

    def __init__(self, *, temporal: str, mongo: str) -> None:
        name = uuid.uuid4().hex[:10]
        self.queue = f"q-{name}"
        self.database = f"test_{name}"
        self.environment = {
            **os.environ,
            "TEMPORAL_ADDRESS": temporal,
            "MONGO_URL": mongo,
            "MONGO_DATABASE": self.database,
            "FLOWKIT_QUEUE": self.queue,
        }
        self._mongo: Any = AsyncIOMotorClient(mongo, tz_aware=True, serverSelectionTimeoutMS=2_000)
        self.db = self._mongo[self.database]
        self.deployment = str(uuid.uuid4())
        """The id of the database, once `name_deployment` was called."""
        self.settings: dict[str, Any] = {"lease_ttl_sec": 10, "cancel_grace_sec": 5, "sweep_sec": 0.5}
        self._client: Client | None = None
        self._coordinator: Coordinator | None = None
        self._started: list[Coordinator | Worker] = []
        self._processes: list[ForkedProcess] = []

    @property
    def config(self) -> CoordinatorConfig:
        """Return settings for the engines of this harness, with shorter intervals than the defaults."""
        return CoordinatorConfig(queue=self.queue, **self.settings)

    async def name_deployment(self) -> None:
        """Give the database its id before an engine does, so that a test can predict ids that contain it."""
        named = {"$set": {"value": self.deployment}}
        await self.db.flowkit_meta.update_one({"_id": "deployment"}, named, upsert=True)

    @property
    def coordinator(self) -> Coordinator:
        """Return a coordinator that creates tasks. It runs none unless `engine` was called."""
        if self._coordinator is None:
            self._coordinator = Coordinator(db=self.db, cfg=self.config)
        return self._coordinator

    async def client(self) -> Client:
        """Return a Temporal client, always the same."""
        if self._client is None:
            self._client = await connect()
        return self._client

    async def engine(self, handlers: dict[str, RoleHandler] | None = None, **adapters: Any) -> Coordinator:
        """Start an engine in this process, which hosts `handlers`."""
        engine = Coordinator(db=self.db, cfg=self.config, adapters=adapters, handlers=handlers)
        await engine.start()
        self._started.append(engine)
        self._coordinator = self._coordinator or engine
        return engine

    async def worker(self, handlers: dict[str, RoleHandler] | None = None, concurrency: int = 4) -> Worker:
        """Start a worker in this process."""
        chosen = handlers or ALL
        cfg = WorkerConfig(
            roles=list(chosen), queue=self.queue, max_concurrent=concurrency, db_cancel_poll_ms=200
        )
        worker = Worker(db=self.db, cfg=cfg, handlers=chosen)
        await worker.start()
        self._started.append(worker)
        return worker

    def process(self, *arguments: str, module: str = "flowkit", **environment: str) -> ForkedProcess:
        """Start a `flowkit` process, or `python -m module`, which the test can kill."""
        env = {**self.environment, **environment}
        started = fork_server().start(arguments, ROOT, env, module=module)
        self._processes.append(started)
        return started

    def engine_process(self, *handlers: str) -> ForkedProcess:
        """Start an engine in its own process, which hosts these handlers of `handlers.py`."""
        config = Path(self.environment.get("TMPDIR", "/tmp")) / f"{self.queue}.json"
        config.write_text(self.config_json())
        roles = [part for name in handlers for part in ("--role", f"tests.integration.handlers:{name}")]
        return self.process("engine", "--config", str(config), *roles)

    async def release_tasks(self) -> None:
        """Let another engine continue the open tasks of a killed one. Temporal waits for that one for ten seconds."""
        client = await self.client()
        query = f"TaskQueue = '{self.queue}' AND ExecutionStatus = 'Running'"
        async for each in client.list_workflows(query):
            execution = WorkflowExecution(workflow_id=each.id, run_id=each.run_id)
            request = ResetStickyTaskQueueRequest(namespace=client.namespace, execution=execution)
            try:
                await client.workflow_service.reset_sticky_task_queue(request)
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:  # it has ended since it was listed
                    raise

    def config_json(self) -> str:
        """Return the engine settings of this harness as JSON text."""
        return json.dumps(self.settings)

    def worker_process(self, *handlers: str) -> ForkedProcess:
        """Start a worker in its own process, for handlers of `handlers.py`."""
        return self.process("worker", *(f"tests.integration.handlers:{name}" for name in handlers))

    async def command(self, *arguments: str) -> str:
        """Return what a `flowkit` command prints, with its errors, on lines of up to 200 characters."""
        env = self.environment | {"COLUMNS": "200"}
        run = fork_server().run
        _, printed, errors = await asyncio.to_thread(run, arguments, ROOT, env, EVENT_TIMEOUT_SEC)
        return printed + errors

    async def create(self, *nodes: dict[str, Any], **graph: Any) -> str:
        """Start a task of these nodes."""
        return await self.coordinator.create_task(params={}, graph={"nodes": list(nodes), **graph})

    async def handle(self, task_id: str) -> WorkflowHandle[Task, TaskResult]:
        """Return Temporal's handle of a task."""
        return (await self.client()).get_workflow_handle_for(Task.run, task_id)

    async def result(self, task_id: str) -> TaskResult:
        """Wait for the end of a task."""
        try:
            return await asyncio.wait_for((await self.handle(task_id)).result(), EVENT_TIMEOUT_SEC)
        except WorkflowFailureError as error:
            error.add_note(f"{error.cause!r}; {await self.statuses(task_id)}")
            raise
        except TimeoutError as error:
            history = await (await self.handle(task_id)).fetch_history()
            events = [f"{each.event_time.ToJsonString()} {each.event_type}" for each in history.events[-12:]]
            error.add_note(f"{events}; {await self.db.tasks.find_one({'id': task_id})}")
            raise

    async def document(self, task_id: str) -> dict[str, Any]:
        """Return a task document."""
        found: Any = await self.db.tasks.find_one({"id": task_id})
        assert found is not None, f"task {task_id} has no document"
        return dict(found)

    async def node(self, task_id: str, node_id: str) -> dict[str, Any]:
        """Return a node's entry in its task document."""
        nodes = (await self.document(task_id))["graph"]["nodes"]
        found: dict[str, Any] = next(node for node in nodes if node["node_id"] == node_id)
        return found

    async def until_status(self, task_id: str, *statuses: str) -> dict[str, Any]:
        """Wait until the task has one of `statuses`, and return its document."""

        async def look() -> dict[str, Any] | None:
            candidate: dict[str, Any] | None = await self.db.tasks.find_one({"id": task_id})
            return candidate if candidate and candidate["status"] in statuses else None

        return await self._eventually(task_id, look)

    async def until_node(self, task_id: str, node_id: str, status: str, epoch: int = 1) -> dict[str, Any]:
        """Wait until the node has `status` at `epoch` or later, and return its entry.

        An attempt writes that it has finished before its workflow knows it, and may reject an action: wait for both.
        """

        async def look() -> dict[str, Any] | None:
            node: dict[str, Any] = await self.node(task_id, node_id)
            return node if node["status"] == status and node["attempt_epoch"] >= epoch else None

        found = await self._eventually(task_id, look)
        if status == "finished":
            await self._eventually(task_id, lambda: self._does_workflow_know_end(task_id, node_id))
        return found

    async def _does_workflow_know_end(self, task_id: str, node_id: str) -> bool:
        """Return whether a node is over for its workflow, too. One that has ended, or has no engine, is not asked."""
        handle = await self.handle(task_id)
        if (await handle.describe()).status is not WorkflowExecutionStatus.RUNNING:
            return True
        try:
            view = await handle.query(Task.status, rpc_timeout=timedelta(seconds=QUERY_SEC))
        except (RPCError, WorkflowQueryFailedError):
            return True
        return all(
            each["status"] not in ("queued", "running")
            for each in view["nodes"]
            if each["node_id"] == node_id
        )

    async def until_batches(self, task_id: str, node_id: str, count: int) -> None:
        """Wait until the node has stored `count` batches."""

        async def look() -> bool:
            return len(await self.rows(task_id, node_id)) >= count

        await self._eventually(task_id, look)

    async def _eventually(self, task_id: str, look: Callable[[], Awaitable[T | None]]) -> T:
        """Wait as `eventually` does. The error shows the state of the task."""
        try:
            return await eventually(look)
        except AssertionError as error:
            raise AssertionError(f"{error}: {await self.db.tasks.find_one({'id': task_id})}") from None

    async def rows(self, task_id: str, node_id: str) -> list[dict[str, Any]]:
        """Return the node's metrics rows, without the final one."""
        query = {"task_id": task_id, "node_id": node_id, "batch_uid": {"$ne": "__final__"}}
        return [row async for row in self.db.metrics_raw.find(query)]

    async def statuses(self, task_id: str) -> dict[str, str]:
        """Return the status of each node."""
        return {n["node_id"]: n["status"] for n in (await self.document(task_id))["graph"]["nodes"]}

    async def close(self) -> None:
        """Stop all processes and remove the data."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(EVENT_TIMEOUT_SEC)
        await asyncio.gather(*(started.stop() for started in reversed(self._started)))
        await drop_database(self._mongo, self.database)
        self._mongo.close()


def node(node_id: str, role: str = "quick", *parents: str, **fields: Any) -> dict[str, Any]:
    """Return a node; `inline` becomes its inline input."""
    inline = fields.pop("inline", None)
    io = {"io": {"input_inline": inline}} if inline is not None else {}
    return {"node_id": node_id, "type": role, "depends_on": list(parents), **io, **fields}


ENGINE_WORK = {"open_task", "record", "close_task"}


def is_local_attempt(event: HistoryEvent) -> bool:
    """Return whether an event is a local activity that ran an attempt. The SDK records the type in a marker."""
    details = event.marker_recorded_event_attributes.details
    if "data" not in details:
        return False
    types = {json.loads(payload.data)["activity_type"] for payload in details["data"].payloads}
    return not types & ENGINE_WORK
