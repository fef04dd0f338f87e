"""The Temporal worker that runs backfills, beside the workers of an engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from flowkit.adapters.backfills import BackfillStore
from flowkit.adapters.tasks.store import is_same_database, show_database
from flowkit.attempt.failures import refusal
from flowkit.attempt.supervision import HEARTBEAT_THROTTLE
from flowkit.backfills.driver import Driver
from flowkit.connection import Namespace
from flowkit.engine.activations import allow_long_workflow_tasks
from flowkit.errors import FlowKitError, WrongDeployment
from flowkit.models import temporal_names
from flowkit.models.backfills import BackfillCounts, RunBackfill
from flowkit.workflows.backfill import Backfill

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.adapters.mongo import Database
    from flowkit.client import TaskClient
    from flowkit.core.loop_portal import LoopPortal

_BEAT_SEC = 1.0
"""Seconds between heartbeats. Without them for ten seconds, another engine takes over."""
_COUNT_BEATS = 10
"""After so many heartbeats, one has new counts for the Web UI."""
_BACKFILLS_AT_ONCE = 1_000
"""Backfills that one engine runs at once. Each of them mostly waits."""


class BackfillActivities:
    """The activity that runs backfills of one database."""

    def __init__(self, db: Database, tasks: TaskClient, portal: LoopPortal) -> None:
        self._tasks = tasks
        self._portal = portal
        self._store = BackfillStore(db)
        self._driver = Driver(tasks, self._store)
        self._namespace = Namespace(tasks.temporal)

    @activity.defn(name=temporal_names.RUN_BACKFILL)
    async def run_backfill(self, given: RunBackfill) -> BackfillCounts:
        """Run a backfill until each of its nominal times has ended."""
        own_id = temporal_names.backfill_workflow_id(given.backfill_id)
        if activity.info().workflow_id != own_id:
            raise _foreign(f"backfill {given.backfill_id!r} is run by workflow {own_id!r} only")
        beats = asyncio.create_task(self._send_heartbeats(given.backfill_id))
        try:
            return await self._portal.run(self._run(given))
        except FlowKitError as error:
            raise refusal(error) from None
        finally:
            beats.cancel()

    async def _run(self, given: RunBackfill) -> BackfillCounts:
        ours = await self._tasks.deployment()
        if not is_same_database(given.deployment, ours):
            raise ApplicationError(
                f"backfill {given.backfill_id!r} is in {show_database(given.deployment)}, but this engine uses "
                f"{show_database(ours)}: set the same MONGO_URL and MONGO_DATABASE for all engines of the queue",
                type=WrongDeployment.code,
            )
        found = await self._store.find(given.backfill_id)
        if found is not None and found.namespace_id != await self._namespace.id():
            raise _foreign(f"backfill {given.backfill_id!r} belongs to another namespace of Temporal")
        if given.cancels:
            await self._store.cancel(given.backfill_id)
        return await self._driver.run(given.backfill_id)

    async def _send_heartbeats(self, backfill_id: str) -> None:
        """Send heartbeats with the counts, which the Web UI shows beside the activity."""
        shown: list[str] = []
        while True:
            for _ in range(_COUNT_BEATS):
                activity.heartbeat(*shown)
                await asyncio.sleep(_BEAT_SEC)
            try:
                shown = [(await self._portal.run(self._store.counts(backfill_id))).text]
            except FlowKitError:
                continue


def _foreign(text: str) -> ApplicationError:
    return ApplicationError(text, type=WrongDeployment.code, non_retryable=True)


def create_backfill_worker(
    client: Client, *, db: Database, tasks: TaskClient, portal: LoopPortal, queue: str, identity: str
) -> Worker:
    """Return the Temporal worker of backfills. Call this on the loop that will run it.

    It has a queue of its own, so that backfills, which last long, hold none of the slots that tasks need.
    """
    worker = Worker(
        client,
        task_queue=temporal_names.backfill_queue(queue),
        workflows=[Backfill],
        activities=[BackfillActivities(db, tasks, portal).run_backfill],
        workflow_runner=UnsandboxedWorkflowRunner(),
        identity=identity,
        max_concurrent_activities=_BACKFILLS_AT_ONCE,
        max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
    )
    return allow_long_workflow_tasks(worker)
