"""The sweep's heartbeat rules: find running attempts that send no heartbeats, and report them to their workflows.

A native attempt is silent while Temporal receives no heartbeat of it; one of an external worker, while its bridge
receives no event. Time in which an attempt waits for a worker does not count, nor time in which no process serves its
role. The leases of attempts have no part in these rules.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError

from flowkit.adapters.dispatches import last_event_times
from flowkit.adapters.worker_registry import BRIDGE_PREFIX, WorkerRegistry
from flowkit.attempt.pollers import recent_pollers
from flowkit.core.time import LeaseObserver
from flowkit.models import SilenceReport, SilentAttempt, temporal_names
from flowkit.models.temporal_names import role_queue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from temporalio.client import Client, WorkflowExecutionDescription

    from flowkit.adapters.mongo import Database
    from flowkit.config import CoordinatorConfig

_logger = logging.getLogger("flowkit.engine.worker")

_SERVED_SEC = 10.0
"""How long a check of a role counts."""

_RPC_TIMEOUT = timedelta(seconds=10)
_STARTED = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingAttempt:
    """An attempt that a process has started and not ended, according to Temporal."""

    node_id: str
    epoch: int
    name: str
    """Type of the activity: the role, or a coordinator function."""
    queue: str
    """Task queue of the activity."""
    heard_at: float | None
    """When its last heartbeat arrived; None while an external worker has not accepted it."""
    external: bool


def find_running_attempts(pending: Iterable[Any], queue: str) -> Iterator[PendingAttempt]:
    """Yield the attempts among a workflow's pending activities. `queue` is the task queue of the engine."""
    for each in pending:
        node_id, _, epoch = each.activity_id.rpartition(".")
        if each.state != _STARTED or not node_id or not epoch.isdigit():
            continue
        moments = (each.last_heartbeat_time, each.last_started_time)
        yield PendingAttempt(
            node_id=node_id,
            epoch=int(epoch),
            name=each.activity_type.name,
            queue=each.activity_options.task_queue.name or role_queue(queue, each.activity_type.name),
            heard_at=max(moment.ToNanoseconds() / 1e9 for moment in moments),
            external=each.last_worker_identity.startswith(BRIDGE_PREFIX),
        )


class SilenceCheck:
    """Checks the running tasks of one engine's queue."""

    def __init__(self, client: Client, db: Database, config: CoordinatorConfig) -> None:
        self._client = client
        self._db = db
        self._workers = WorkerRegistry(db)
        self._queue = config.queue
        self._soft_sec = config.heartbeat_soft_sec
        self._hard_sec = config.heartbeat_hard_sec
        self._heard = LeaseObserver()
        """Since when this engine has seen the latest heartbeats: the clocks of Temporal and the bridges may differ."""
        self._served: dict[tuple[str, bool], tuple[float, bool]] = {}
        """For each task queue and kind of worker, when it was checked and whether it was served."""
        self._unserved_at: dict[tuple[str, bool], float] = {}
        """When a check last found no process that serves a task queue."""

    async def check(self, document: dict[str, Any], description: WorkflowExecutionDescription) -> None:
        """Report the silent attempts of a task to its workflow, unless its document shows them already."""
        if description.task_queue != self._queue or not (self._soft_sec or self._hard_sec):
            return
        shown = _list_shown(document)
        silent = [attempt async for attempt in self._find_silent(document["id"], description, shown)]
        if shown != {each.node_id for each in silent} or any(map(self._is_lost, silent)):
            await self._report(description, sorted(silent, key=lambda each: each.node_id))

    def _is_lost(self, attempt: SilentAttempt) -> bool:
        return 0 < self._hard_sec <= attempt.silent_sec

    async def _find_silent(
        self, task_id: str, description: WorkflowExecutionDescription, shown: Collection[str]
    ) -> Any:
        """Yield the silent attempts. One that is shown as silent stays so until this engine sees another heartbeat."""
        pending = description.raw_description.pending_activities
        attempts = [*find_running_attempts(pending, self._queue)]
        least, read_at = min(sec for sec in (self._soft_sec, self._hard_sec) if sec), self._heard.now()
        for attempt in await self._add_events(task_id, attempts):
            if attempt.heard_at is None:
                continue
            key = (task_id, attempt.node_id, attempt.epoch)
            is_known = self._heard.value_of(key) in (None, attempt.heard_at) and attempt.node_id in shown
            silent_sec = self._heard.unchanged_sec(key, attempt.heard_at, read_at)
            if not is_known and silent_sec < least:
                continue
            served_sec = read_at - await self._find_unserved_until(attempt)
            silent_sec = min(silent_sec, served_sec)
            if silent_sec >= least or (is_known and served_sec > 0):
                yield SilentAttempt(node_id=attempt.node_id, epoch=attempt.epoch, silent_sec=silent_sec)

    async def _add_events(self, task_id: str, attempts: list[PendingAttempt]) -> list[PendingAttempt]:
        """Return the attempts; those of external workers with the time of their workers' last events."""
        if not any(attempt.external for attempt in attempts):
            return attempts
        heard = await last_event_times(self._db, task_id)
        return [
            replace(attempt, heard_at=heard.get((attempt.node_id, attempt.epoch)))
            if attempt.external
            else attempt
            for attempt in attempts
        ]

    async def _find_unserved_until(self, attempt: PendingAttempt) -> float:
        """Return when a check last found no process that serves the attempt's role, by the clock of this process."""
        key, now = (attempt.queue, attempt.external), self._heard.now()
        checked_at, served = self._served.get(key, (-math.inf, True))
        if now - checked_at >= _SERVED_SEC or not served:
            served = await self._is_served(attempt)
            self._served[key] = now, served
        if not served:
            self._unserved_at[key] = now
        return self._unserved_at.get(key, -math.inf)

    async def _is_served(self, attempt: PendingAttempt) -> bool:
        """Return whether a worker of the role is registered as online, or a process polls its queue.

        A native worker without a free slot does not poll. A bridge polls even if the role has no external worker.
        """
        if await self._workers.is_served(attempt.name):
            return True
        return not attempt.external and await self._is_polled(attempt.queue)

    async def _is_polled(self, queue: str) -> bool:
        try:
            return bool(await recent_pollers(self._client, queue))
        except RPCError as error:
            _logger.info("the pollers of queue %s are unknown: %s", queue, error.message)
            return False

    async def _report(self, description: WorkflowExecutionDescription, silent: list[SilentAttempt]) -> None:
        run_id = description.run_id
        report = SilenceReport(run_id=run_id, silent=silent, hard_sec=self._hard_sec)
        handle = self._client.get_workflow_handle(description.id, run_id=run_id)
        try:
            await handle.execute_update(temporal_names.REPORT_SILENCE, report, rpc_timeout=_RPC_TIMEOUT)
        except (WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError, RPCError) as error:
            why = error.cause if isinstance(error, WorkflowUpdateFailedError) else error
            _logger.info("task %s did not take the report of silent attempts: %s", description.id, why)


def _list_shown(document: dict[str, Any]) -> set[str]:
    """Return the ids of the nodes that the task document shows as silent."""
    found = (document.get("coordinator") or {}).get("liveness") or {}
    return {*(found.get("silent_nodes") or ())}
