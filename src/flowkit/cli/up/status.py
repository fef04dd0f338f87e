"""The state that `flowkit up` shows: the health of servers and processes, and the newest tasks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError

from flowkit.cli.kafka import accepts_connections
from flowkit.client import TaskCatalog
from flowkit.connection import TemporalUnavailable, connect
from flowkit.errors import FlowKitError
from flowkit.text import shown_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.client import TaskSummary
    from flowkit.local.process import ServerProcess

MAX_TASKS = 20
TIMEOUT_SEC = 3.0

RUNNING, UNRESPONSIVE, EXITED = "running", "not responding", "exited"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRow:
    """One process or server, for display."""

    name: str
    state: str = RUNNING
    address: str = ""
    detail: str = ""
    """Where its program comes from, or what it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOverview:
    """Counts of open tasks, and the newest tasks."""

    open: dict[str, int]
    """Number of open tasks by status."""
    newest: tuple[TaskSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state at one moment."""

    rows: tuple[ProcessRow, ...]
    tasks: TaskOverview | None = None
    """None while MongoDB does not respond, or if no part uses it."""


class StatusPoller:
    """Polls the servers and processes of one `flowkit up`."""

    def __init__(self, rows: Sequence[tuple[ProcessRow, ServerProcess | None]], db: Any) -> None:
        self._rows = rows
        self._catalog = TaskCatalog(db)
        self._client: Client | None = None

    async def poll(self) -> Snapshot:
        """Return the current state."""
        temporal, tasks, kafka = await asyncio.gather(
            self._temporal_responds(), self._tasks(), self._kafka_responds()
        )
        responds = {"temporal": temporal, "mongo": tasks is not None, "kafka": kafka}
        rows = [_with_state(row, process, responds.get(row.name, True)) for row, process in self._rows]
        return Snapshot(rows=tuple(rows), tasks=tasks)

    async def _temporal_responds(self) -> bool:
        if not self._has_row("temporal"):
            return False
        with suppress(TemporalUnavailable, RPCError, RuntimeError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_SEC):
                self._client = client = self._client or await connect()
                request = DescribeNamespaceRequest(namespace=client.namespace)
                timeout = timedelta(seconds=TIMEOUT_SEC)
                await client.workflow_service.describe_namespace(request, timeout=timeout)
                return True
        return False

    async def _kafka_responds(self) -> bool:
        address = next((row.address for row, _ in self._rows if row.name == "kafka"), None)
        return address is not None and await accepts_connections(address, TIMEOUT_SEC)

    async def _tasks(self) -> TaskOverview | None:
        if not self._has_row("mongo"):
            return None
        reads = asyncio.gather(self._catalog.open_counts(), self._catalog.list_tasks(limit=MAX_TASKS))
        with suppress(FlowKitError, TimeoutError):
            counts, newest = await asyncio.wait_for(reads, TIMEOUT_SEC)
            return TaskOverview(open=counts, newest=tuple(newest))
        return None

    def _has_row(self, name: str) -> bool:
        return any(row.name == name for row, _ in self._rows)


def _with_state(row: ProcessRow, process: ServerProcess | None, responds: bool) -> ProcessRow:
    exited = process is not None and not process.running
    state = EXITED if exited else RUNNING if responds else UNRESPONSIVE
    return ProcessRow(name=row.name, state=state, address=shown_address(row.address), detail=row.detail)
