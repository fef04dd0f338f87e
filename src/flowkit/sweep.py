"""Closes documents whose workflow is gone: terminated, timed out, or lost (spec: end of a task; design: sweep).

Beside that it shows killed workers as offline, which could not say so themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC
from typing import TYPE_CHECKING, Any

from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.presence import WorkerRegistry
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.adapters.store import TaskStore

_logger = logging.getLogger("flowkit.engine")

_NEW_TASK_SEC = 60.0
"""A document this young may still wait for its workflow to be started."""

_AT_ONCE = 10

_SILENT_SEC = 180.0
"""A worker that was not seen for so long, three times its usual interval, is shown as offline."""

_REASONS = {
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
}
_ALIVE = {WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW}
LOST = "lost"


class Sweep:
    """Compares open documents with their workflows."""

    def __init__(self, client: Client, tasks: TaskStore) -> None:
        self._client = client
        self._tasks = tasks
        self._workers = WorkerRegistry(tasks.database)

    async def run(self, every_sec: float) -> None:
        """Sweep at once and then again and again; a store that is away is met again next time."""
        while True:
            try:
                await self.once()
                await self._workers.expire(time.time() - _SILENT_SEC)
            except (FlowKitError, RPCError) as error:
                _logger.warning("the sweep was cut short: %s", error)
            await asyncio.sleep(every_sec)

    async def once(self) -> list[str]:
        """Close what has lost its workflow; answers the task ids."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def look(document: dict[str, Any]) -> str | None:
            async with gate:
                return document["id"] if await self._close_if_gone(document) else None

        found = await asyncio.gather(*map(look, await self._tasks.open_documents()))
        return [task_id for task_id in found if task_id]

    async def _close_if_gone(self, document: dict[str, Any]) -> bool:
        reason = await self._reason(document)
        if reason is None:
            return False
        closed = await self._tasks.abandon(document["id"], document.get("run_id"), reason, time.time())
        if closed:
            _logger.warning("task %s was closed as failed: %s", document["id"], reason)
        return closed

    async def _reason(self, document: dict[str, Any]) -> str | None:
        """Why the document is to be closed; None while its workflow lives, or may still be started."""
        try:
            description = await self._client.get_workflow_handle(document["id"]).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return LOST if document.get("run_id") or self._is_old(document) else None
        if description.status is None or description.status in _ALIVE:
            return None
        return _REASONS.get(description.status, LOST)

    def _is_old(self, document: dict[str, Any]) -> bool:
        updated = document.get("updated_at")
        return updated is None or time.time() - _seconds(updated) > _NEW_TASK_SEC


def _seconds(moment: Any) -> float:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return float(aware.timestamp())
