"""Task documents in a database in memory, and stand-ins for Temporal, for tests of the page's server."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from temporalio.converter import DataConverter
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.fields import new_task
from flowkit.attempt.workflows import ABSENT, FoundWorkflow
from flowkit.client import TaskCatalog, TaskClient
from flowkit.core.handler_lines import HandlerLine
from flowkit.errors import ActionRejected, StoreUnavailable
from flowkit.models import AttemptInput
from flowkit.observe.log_buffer import LineBuffer, WaitingBytes
from flowkit.observe.log_store import LogStore
from flowkit.reading.state import Servers
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from temporalio.client import Client

    from flowkit.products import PendingTask

LONG_AGO = 3_600.0
AFFECTED: dict[str, Any] = {
    "affected": [{"node_id": "a", "from": "running", "to": "queued"}],
    "notes": ["a note"],
}
STATE = "0123456789abcdef"
"""The state of the affected nodes in each preview."""


class Tasks:
    """Stands in for TaskClient: Temporal knows no workflow any more. Notes the actions it was called with."""

    def __init__(self) -> None:
        self.temporal_is_down = False
        self.pending: PendingTask | None = None
        self.acted: list[tuple[str, str, Mapping[str, Any]]] = []

    async def look_up(self, task_id: str, *, rpc_timeout: timedelta) -> FoundWorkflow:
        """Return that there is no workflow."""
        if self.temporal_is_down:
            raise RPCError("down", RPCStatusCode.UNAVAILABLE, b"")
        return ABSENT

    async def find_pending(self, task_id: str) -> PendingTask | None:
        """Return how the task waits for admission."""
        return self.pending

    @property
    def steering(self) -> Any:
        """What applies actions: this stand-in."""
        return self

    async def preview(self, task_id: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Reject `resume`, and accept any other action."""
        if name == "resume":
            raise ActionRejected("the task is not paused")
        return {**AFFECTED, "revision": 0, "state": STATE}

    async def rerun(self, task_id: str, nodes: list[str] | None, **given: Any) -> dict[str, Any]:
        """Note the rerun."""
        dry_run = given.pop("dry_run")
        if not dry_run:
            self.acted.append((task_id, "rerun", {"nodes": nodes, **given}))
        return {**AFFECTED, "task_id": task_id, "run_seq": 2, **({"state": STATE} if dry_run else {})}

    async def act(
        self, task_id: str, name: str, given: Mapping[str, Any], *, wait_sec: float
    ) -> dict[str, Any]:
        """Note the action."""
        self.acted.append((task_id, name, given))
        await self.preview(task_id, name, given)
        return {**AFFECTED, "revision": 1}

    async def cancel_task(self, task_id: str, *, reason: str, if_state: str | None) -> bool:
        """Note the cancellation, as if the task had ended."""
        self.acted.append((task_id, "cancel", {"reason": reason, "if_state": if_state}))
        return False


class Catalog(TaskCatalog):
    """Counts reads, and fails while the database is said to be down."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self.reads: Counter[str] = Counter()
        self.is_down = False

    def _count(self, what: str) -> None:
        self.reads[what] += 1
        if self.is_down:
            raise StoreUnavailable("no server responds")

    async def document(self, task_id: str) -> dict[str, Any] | None:
        """Return a whole document."""
        self._count("document")
        return await super().document(task_id)

    async def change_mark(self, task_id: str) -> dict[str, Any] | None:
        """Return the mark of a document."""
        self._count("mark")
        return await super().change_mark(task_id)


class Stage:
    """A database with task documents, and what a page server reads it with."""

    def __init__(self) -> None:
        self.db = memory_database()
        self.catalog = Catalog(self.db)
        self.tasks = Tasks()
        temporal = cast("Client", SimpleNamespace(namespace="default", data_converter=DataConverter.default))
        self.servers = Servers(
            temporal=temporal, tasks=cast("TaskClient", self.tasks), catalog=self.catalog, db=self.db
        )

    async def add(self, task_id: str, nodes: list[dict[str, Any]], **fields: Any) -> None:
        """Insert the document of a task that has begun an hour ago."""
        graph = {"name": "nightly", "nodes": nodes}
        document = new_task(task_id, fields.pop("params", {}), graph, time.time() - LONG_AGO)
        await self.db.tasks.insert_one(document | fields)

    async def replace(self, task_id: str, nodes: list[dict[str, Any]]) -> None:
        """Delete the document of a task, and create another one with its id."""
        await self.db.tasks.delete_one({"id": task_id})
        await self.add(task_id, nodes)

    async def grow(self, task_id: str, nodes: list[dict[str, Any]]) -> None:
        """Give a task another graph, as an action would."""
        graph = new_task(task_id, {}, {"name": "nightly", "nodes": nodes}, time.time())["graph"]
        changes = {"graph": graph, "last_event_recv_ms": time.time_ns()}
        await self.db.tasks.update_one({"id": task_id}, {"$set": changes})

    async def set_node(self, task_id: str, place: int, **fields: Any) -> None:
        """Change a node, as an engine would."""
        changes = {f"graph.nodes.{place}.{key}": value for key, value in fields.items()}
        stamp = {"last_event_recv_ms": time.time_ns()}
        await self.db.tasks.update_one({"id": task_id}, {"$set": changes | stamp})

    async def store_batch(self, task_id: str, node_id: str, uid: str, status: str = "complete") -> None:
        """Store a batch, as a worker would."""
        named = {"task_id": task_id, "node_id": node_id, "batch_uid": uid}
        given = {"status": status, "meta": {"rows": 1}, "updated_at": datetime.now(UTC)}
        await self.db.artifacts.insert_one(named | given)


async def store_lines(
    db: Any, task_id: str, node_id: str, epoch: int, texts: list[str], level: int = logging.INFO
) -> None:
    """Store lines of an attempt, as a worker would."""
    attempt = AttemptInput(task_id=task_id, node_id=node_id, index=0, role="quick", epoch=epoch)
    buffer = LineBuffer(
        attempt,
        "w-1",
        level=level,
        prints=False,
        lock=threading.Lock(),
        room=WaitingBytes(),
        changed=lambda each: None,
    )
    for text in texts:
        buffer.add(HandlerLine(time.time(), level, "shop", text))
    await LogStore(db).append([row.document for row in buffer.take()[0]])


def nodes(*names: str) -> list[dict[str, Any]]:
    """Return a chain of nodes."""
    return [
        {"node_id": name, "type": "quick", "depends_on": [names[place - 1]] if place else []}
        for place, name in enumerate(names)
    ]
