"""The sweep, which closes documents of terminated, timed-out or lost tasks (spec: end of a task; design: sweep).

A sweep checks the documents of its own Temporal namespace. A workflow that Temporal does not know counts as lost only
if a second check does not find it either, and only if the document names this namespace: another engine may share the
database but use a different Temporal server. The sweep also marks killed workers as offline, logs
roles of which workers run different versions, and applies the heartbeat rules (`silence`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.adapters.worker_registry import WorkerRegistry, find_mixed_versions
from flowkit.attempt.background import BackgroundLoop, Expected, new_owner, release_turn
from flowkit.attempt.workflows import is_absent, look_up
from flowkit.errors import FlowKitError, StoreUnavailable
from flowkit.limits import LAST_ERROR_CHARS
from flowkit.text import truncate

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowExecutionDescription

    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.adapters.worker_registry import MixedVersions
    from flowkit.attempt.background import LoopHealth
    from flowkit.connection import Namespace
    from flowkit.engine.silent_attempts import SilenceCheck

    Document = dict[str, Any]

_logger = logging.getLogger("flowkit.engine.worker")

_NEW_TASK_SEC = 60.0
"""Age below which a task document may still be waiting for its workflow to start."""

_SECOND_CHECK_SEC = 5.0
"""Time after the first check for which Temporal must still not find the workflow."""

_TURN_SEC = 15.0
"""Extra time for which an engine keeps its turn after the next pass is due, in case the pass is late."""

_CONCURRENT_CHECKS = 10

_OF_ONE_DOCUMENT = {
    RPCStatusCode.INVALID_ARGUMENT,
    RPCStatusCode.FAILED_PRECONDITION,
    RPCStatusCode.OUT_OF_RANGE,
    RPCStatusCode.INTERNAL,
    RPCStatusCode.UNKNOWN,
}
"""Temporal errors that concern a single document."""

CLOSE_REASONS = {
    WorkflowExecutionStatus.TERMINATED: reason_codes.TERMINATED,
    WorkflowExecutionStatus.TIMED_OUT: reason_codes.TIMED_OUT,
}
"""The reasons that the sweep writes to a document, by the status of its closed workflow."""
_ALIVE = {None, WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW}


class Sweep:
    """Compares open task documents with their workflows. Only one engine of a namespace sweeps at a time."""

    def __init__(
        self,
        client: Client,
        tasks: TaskStore,
        namespace: Namespace,
        *,
        every_sec: float,
        second_check_sec: float = _SECOND_CHECK_SEC,
        silence: SilenceCheck | None = None,
    ) -> None:
        """Sweep every `every_sec` seconds. `silence` checks the attempts of each task whose workflow runs."""
        self._client = client
        self._store = tasks
        self._tasks = OpenTasks(tasks.database)
        self._workers = WorkerRegistry(tasks.database)
        self._namespace = namespace
        self._namespace_id = ""
        self._every_sec = every_sec
        self._second_check_sec = second_check_sec
        self._silence = silence
        self._owner = new_owner()
        self._missing: dict[str, float] = {}
        """When a check first found no workflow for a document, in seconds of the monotonic clock."""
        self._mixed: list[MixedVersions] = []
        """The roles of which workers ran different versions at the last check."""
        self._reported: set[str] = set()
        """Documents that could not be checked; each is logged once."""
        log = partial(_logger.warning, "the sweep stopped early and continues next time: %s")
        outages = Expected(errors=(FlowKitError, RPCError), log=log)
        self._loop = BackgroundLoop("the sweep", self._sweep_once, pause_sec=every_sec, expected=outages)

    @property
    def health(self) -> LoopHealth:
        """The health of the sweep's background loop."""
        return self._loop.health

    async def run(self) -> None:
        """Sweep immediately and then periodically. Errors are logged, and the next pass retries."""
        try:
            await self._loop.run()
        finally:
            ending = self._tasks.end_turn(self._namespace_id, self._owner)
            await asyncio.shield(release_turn(ending, "to sweep"))

    async def _sweep_once(self) -> None:
        await self._workers.expire_silent()
        await self._log_mixed_versions()
        await self.once()

    async def _log_mixed_versions(self) -> None:
        """Log the roles of which online workers run different versions, once for each change."""
        mixed = find_mixed_versions(await self._workers.list_workers())
        for each in mixed:
            if each not in self._mixed:
                _logger.warning("%s", each)
        self._mixed = mixed

    async def once(self) -> list[str]:
        """Close documents without a workflow, if it is this engine's turn. Return the ids of the closed tasks."""
        self._namespace_id = await self._namespace.id()
        if not await self._take_turn():
            return []
        seen: dict[str, float] = {}
        closed: list[str] = []
        database_id = await self._store.database_id()
        async for page in self._tasks.pages(namespace_id=self._namespace_id, database_id=database_id):
            closed += await self._check_page(page, seen)
            if not await self._take_turn():
                break
        self._missing = seen
        return closed

    async def _take_turn(self) -> bool:
        seconds = self._every_sec + _TURN_SEC
        return await self._tasks.take_turn(self._namespace_id, self._owner, seconds)

    async def _check_page(self, page: list[Document], seen: dict[str, float]) -> list[str]:
        slots = asyncio.Semaphore(_CONCURRENT_CHECKS)

        async def check(document: Document) -> str | None:
            async with slots:
                return document["id"] if await self._close_if_gone(document, seen) else None

        found = await asyncio.gather(*map(check, page), return_exceptions=True)
        for document, ended in zip(page, found, strict=True):
            if isinstance(ended, BaseException):
                self._report(document, ended)
        return [task_id for task_id in found if isinstance(task_id, str)]

    def _report(self, document: Document, error: BaseException) -> None:
        """Log an error that concerns one document, so that the sweep continues. Raise any other error."""
        if not _is_about_one_document(error):
            raise error
        self._loop.failed(error)
        name = str(document.get("id", document["_id"]))
        if name not in self._reported:
            _logger.error("the sweep cannot process the document of task %s", name, exc_info=error)
        self._reported.add(name)

    async def _close_if_gone(self, document: Document, seen: dict[str, float]) -> bool:
        reason = await self._reason(document, seen)
        if reason is None:
            return False
        closed = await self._tasks.close_orphan(document["id"], document.get("run_id"), reason, time.time())
        if closed:
            _logger.warning("task %s was closed as failed: %s", document["id"], reason)
        return closed

    async def _reason(self, document: Document, seen: dict[str, float]) -> str | None:
        """Return why to close the document, or None if its workflow is running or may still start."""
        own = bool(self._namespace_id) and document.get("namespace_id") == self._namespace_id
        description = await self._describe(document["id"])
        if description is not None and not belongs(document, description, own=own):
            run_id = document.get("run_id")
            if run_id is None:
                return None
            description = await self._describe(document["id"], run_id)
        if description is None:
            return reason_codes.LOST if own and self._is_missing_for_long(document, seen) else None
        if self._silence is not None and description.status is WorkflowExecutionStatus.RUNNING:
            await self._silence.check(document, description)
        return await self._end_of(description)

    async def _describe(self, task_id: str, run_id: str | None = None) -> WorkflowExecutionDescription | None:
        return (await look_up(self._client, task_id, run_id=run_id)).description

    async def _end_of(self, description: WorkflowExecutionDescription) -> str | None:
        """Return how a workflow ended, or None while it is running."""
        if description.status in _ALIVE:
            return None
        if description.status is WorkflowExecutionStatus.FAILED:
            return await self._failure(description) or reason_codes.LOST
        return CLOSE_REASONS.get(description.status, reason_codes.LOST) if description.status else None

    async def _failure(self, description: WorkflowExecutionDescription) -> str | None:
        handle = self._client.get_workflow_handle(description.id, run_id=description.run_id)
        try:
            await handle.result(follow_runs=False)
        except WorkflowFailureError as error:
            return failure_text(error.cause)
        except RPCError as error:
            if not is_absent(error):
                raise
        return None

    def _is_missing_for_long(self, document: Document, seen: dict[str, float]) -> bool:
        """Return whether an earlier check found no workflow either, and the document is old enough to have one."""
        now, key = time.monotonic(), f"{document['id']}\0{document.get('run_id')}"
        first = seen[key] = self._missing.get(key, now)
        if key not in self._missing or now - first < self._second_check_sec:
            return False
        updated = _to_seconds(document.get("updated_at"), default=time.time() - (now - first))
        return time.time() - updated > _NEW_TASK_SEC


def _is_about_one_document(error: BaseException) -> TypeGuard[Exception]:
    if isinstance(error, RPCError):
        return error.status in _OF_ONE_DOCUMENT
    return isinstance(error, Exception) and not isinstance(error, StoreUnavailable)


def belongs(document: Document, description: WorkflowExecutionDescription, *, own: bool) -> bool:
    """Return whether a workflow with the task's id is the one that the document mirrors.

    A document that no run has claimed belongs to the workflow with its id if it names this namespace (`own`).
    """
    claimed = {document.get("first_run_id"), document.get("run_id")} - {None}
    first_run_id = description.raw_description.workflow_execution_info.first_run_id
    if not claimed or not first_run_id:
        return own or description.run_id in claimed
    return bool(claimed & {first_run_id, description.run_id})


def failure_text(cause: BaseException | None) -> str | None:
    """Return the reason of a failed workflow, as the workflow itself would have written it to the document."""
    if not isinstance(cause, ApplicationError):
        return truncate(str(cause), LAST_ERROR_CHARS) if cause else None
    named = cause.type and cause.type != reason_codes.TASK_FAILED
    return truncate(f"{cause.type}: {cause.message}" if named else cause.message, LAST_ERROR_CHARS)


def _to_seconds(moment: Any, *, default: float) -> float:
    """Return a stored date in seconds since the Unix epoch, or `default` if the value is not a date."""
    if not isinstance(moment, datetime):
        return default
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
