"""What `flowkit up` shows while it runs: the health of what it uses, and the newest tasks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError

from flowkit.cli.servers import without_password
from flowkit.client import TaskCatalog
from flowkit.connection import TemporalUnavailable, connect
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.client import TaskSummary
    from flowkit.local.process import ServerProcess

TASKS_READ = 20
ANSWER_WITHIN_SEC = 3.0

RUNS, SILENT, ENDED = "runs", "does not answer", "has ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One process or server, as people see it."""

    name: str
    state: str = RUNS
    address: str = ""
    about: str = ""
    """Where its program comes from, or what it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """The tasks there are."""

    open: dict[str, int]
    """How many have which status, of those that have not ended."""
    newest: tuple[TaskSummary, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """All that is shown, at one moment."""

    rows: tuple[Row, ...]
    tasks: Tasks | None = None
    """None while MongoDB does not answer, or is not used."""


class Watcher:
    """Looks again and again at what one `flowkit up` uses."""

    def __init__(self, rows: Sequence[tuple[Row, ServerProcess | None]], db: Any) -> None:
        self._rows = rows
        self._catalog = TaskCatalog(db)
        self._client: Client | None = None

    async def look(self) -> View:
        """Where everything is now."""
        temporal, tasks = await asyncio.gather(self._temporal_answers(), self._tasks())
        answers = {"temporal": temporal, "mongo": tasks is not None}
        rows = [_seen(row, process, answers.get(row.name, True)) for row, process in self._rows]
        return View(rows=tuple(rows), tasks=tasks)

    async def _temporal_answers(self) -> bool:
        if not self._shows("temporal"):
            return False
        with suppress(TemporalUnavailable, RPCError, RuntimeError, TimeoutError):
            async with asyncio.timeout(ANSWER_WITHIN_SEC):
                self._client = client = self._client or await connect()
                request = DescribeNamespaceRequest(namespace=client.namespace)
                within = timedelta(seconds=ANSWER_WITHIN_SEC)
                await client.workflow_service.describe_namespace(request, timeout=within)
                return True
        return False

    async def _tasks(self) -> Tasks | None:
        if not self._shows("mongo"):
            return None
        asking = asyncio.gather(self._catalog.open_counts(), self._catalog.list_tasks(limit=TASKS_READ))
        with suppress(FlowKitError, TimeoutError):
            counts, newest = await asyncio.wait_for(asking, ANSWER_WITHIN_SEC)
            return Tasks(open=counts, newest=tuple(newest))
        return None

    def _shows(self, name: str) -> bool:
        return any(row.name == name for row, _ in self._rows)


def _seen(row: Row, process: ServerProcess | None, answers: bool) -> Row:
    ended = process is not None and not process.running
    state = ENDED if ended else RUNS if answers else SILENT
    return Row(name=row.name, state=state, address=without_password(row.address), about=row.about)
