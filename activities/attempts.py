"""One attempt as Temporal sees it: heartbeats, cancellation, hand-over. What it does is its body's matter.

Runs on the loop of Temporal's worker, so that a body that blocks its own loop keeps its lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from flowkit.activities.attendance import FlagWatch, Pulse
from flowkit.activities.failures import failed_attempt, from_error, handed_over, lost
from flowkit.adapters.patience import durably
from flowkit.errors import FlowKitError, WrongDeployment

if TYPE_CHECKING:
    from flowkit.activities.home import HomeLoop
    from flowkit.adapters.store import TaskStore
    from flowkit.models import AttemptFailure, AttemptInput, AttemptResult

_logger = logging.getLogger("flowkit.worker")

_UNATTENDED_SEC = 1.5
"""What ends sooner costs neither a heartbeat nor a look for flags; no cancel waits longer than this."""

_ABORT_PATIENCE_SEC = 5.0
"""How long an aborted body may take before it is left behind."""


class AttemptFailed(Exception):
    """An attempt ended without success; carries what the workflow is to know."""

    def __init__(self, failure: AttemptFailure) -> None:
        self.failure = failure
        super().__init__(failure.message or failure.code)


class Body(Protocol):
    """What an attempt does; all methods are called on the home loop."""

    async def run(self) -> AttemptResult:
        """Do the work. Raises AttemptFailed, or one of our errors."""

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Ask it to stop."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The process that runs attempts."""

    tasks: TaskStore
    home: HomeLoop
    worker_id: str
    hb_interval_sec: float = 20.0
    cancel_poll_sec: float = 0.5

    @cached_property
    def flags(self) -> FlagWatch:
        """Where the attempts of this process see cancel flags."""
        return FlagWatch(self.tasks, self.home, self.cancel_poll_sec)

    @cached_property
    def pulse(self) -> Pulse:
        """How often each attempt of this process beats."""
        return Pulse()


class Attempt:
    """Runs one body under one activity of Temporal."""

    def __init__(self, host: Host, attempt: AttemptInput, body: Body) -> None:
        self._host = host
        self._attempt = attempt
        self._body = body
        self._info = activity.info()
        self._asked_to_stop = False

    async def run(self) -> AttemptResult:
        """Run the body to its end; raises ApplicationError or CancelledError as the workflow expects them."""
        if self._info.attempt > 1:
            raise failed_attempt(lost("lease_lost", "the worker that ran this attempt fell silent"))
        work = asyncio.create_task(self._host.home.run_to_end(guarded(self._host, self._attempt, self._body)))
        attendance = asyncio.create_task(self._attend())
        try:
            with self._host.pulse.attempt():
                return await self._until_done(work)
        except AttemptFailed as error:
            raise failed_attempt(error.failure) from None
        finally:
            attendance.cancel()

    async def _until_done(self, work: asyncio.Task[AttemptResult]) -> AttemptResult:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                await self._interrupted(work)
        if work.cancelled():
            return self._stopped_by_itself()
        result = work.result()
        if self._asked_to_stop:
            raise asyncio.CancelledError
        return result

    def _stopped_by_itself(self) -> AttemptResult:
        if self._asked_to_stop:
            raise asyncio.CancelledError
        raise AttemptFailed(handed_over("the process that ran the attempt is ending"))

    async def _interrupted(self, work: asyncio.Task[AttemptResult]) -> None:
        """Temporal wants the attempt to end; find out why and act on it."""
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            await self._stop_gently(work)
            raise asyncio.CancelledError
        await self._abort(work)
        if details is not None and details.worker_shutdown:
            raise AttemptFailed(handed_over("the worker was stopped"))
        if details is not None and (details.paused or details.reset):
            raise ApplicationError("the attempt was paused or reset", type="worker_shutdown")
        raise asyncio.CancelledError

    async def _stop_gently(self, work: asyncio.Task[AttemptResult]) -> None:
        self._ask_to_stop(await self._cancel_reason())
        await asyncio.wait([work], timeout=self._attempt.cancel_grace_sec)
        await self._abort(work)

    async def _cancel_reason(self) -> str:
        """The reason stands in the document; Temporal does not tell it to activities."""
        try:
            reason = self._host.home.run(self._host.tasks.cancel_flag(self._attempt))
            return await asyncio.wait_for(reason, timeout=1.0) or "cancelled"
        except (FlowKitError, TimeoutError):
            return "cancelled"

    def _ask_to_stop(self, reason: str) -> None:
        self._asked_to_stop = True
        self._host.home.call(self._body.cancel, reason, self._attempt.cancel_grace_sec)

    async def _abort(self, work: asyncio.Task[AttemptResult]) -> None:
        if work.done():
            return
        work.cancel()
        _, hanging = await asyncio.wait([work], timeout=_ABORT_PATIENCE_SEC)
        if hanging:
            _logger.warning("node %s does not stop; its worker goes on without it", self._attempt.node_id)

    async def _attend(self) -> None:
        """Keep the attempt alive and look for flags; an attempt that is over at once costs neither."""
        await asyncio.sleep(min(_UNATTENDED_SEC, self._attempt.lease_ttl_sec / 4))
        async with asyncio.TaskGroup() as group:
            for duty in (self._beat(), self._renew(), self._watch_flag()):
                group.create_task(duty)

    async def _beat(self) -> None:
        pulse, lease_ttl_sec = self._host.pulse, self._attempt.lease_ttl_sec
        pause = pulse.pause_sec(lease_ttl_sec) - _UNATTENDED_SEC
        while True:
            await asyncio.sleep(pause)
            activity.heartbeat()
            pause = pulse.pause_sec(lease_ttl_sec)

    async def _renew(self) -> None:
        """Show in the document that the attempt is alive; nothing depends on it."""
        while True:
            await asyncio.sleep(self._host.hb_interval_sec)
            now = time.time()
            deadline_ms = int((now + self._attempt.lease_ttl_sec) * 1000)
            run_id = self._info.workflow_run_id or ""
            try:
                await self._host.home.run(
                    self._host.tasks.extend_lease(self._attempt, run_id, deadline_ms, now)
                )
            except FlowKitError as error:
                _logger.warning("could not renew the lease of node %s: %s", self._attempt.node_id, error)

    async def _watch_flag(self) -> None:
        """Whoever stops on a flag that somebody raised by hand tells Temporal (spec: cancellation)."""
        with self._host.flags.watching(self._attempt.task_id):
            reason = await self._flag()
            while reason is None:
                await asyncio.sleep(self._host.cancel_poll_sec)
                reason = await self._flag()
        await self._tell_temporal(reason)
        self._host.home.call(self._body.cancel, reason, self._attempt.cancel_grace_sec)

    async def _flag(self) -> str | None:
        try:
            if not await self._host.flags.any_up(self._attempt.task_id):
                return None
            return await self._host.home.run(self._host.tasks.cancel_flag(self._attempt))
        except FlowKitError as error:
            _logger.warning("could not read the cancel flag of task %s: %s", self._attempt.task_id, error)
            return None

    async def _tell_temporal(self, reason: str) -> None:
        try:
            if await self._host.home.run(self._host.tasks.flagged_by_hand(self._attempt)):
                own_run = activity.client().get_workflow_handle(
                    self._attempt.task_id, run_id=self._info.workflow_run_id
                )
                await own_run.cancel(reason=reason)
        except (FlowKitError, RPCError) as error:
            _logger.warning("could not cancel task %s in Temporal: %s", self._attempt.task_id, error)


async def guarded(host: Host, attempt: AttemptInput, body: Body) -> AttemptResult:
    """Run the body on its own database only; our errors leave as AttemptFailed."""
    try:
        await _check_deployment(host, attempt)
        return await body.run()
    except FlowKitError as error:
        raise AttemptFailed(from_error(error)) from None


async def _check_deployment(host: Host, attempt: AttemptInput) -> None:
    ours = await durably(host.tasks.deployment)
    if attempt.deployment and attempt.deployment != ours:
        raise WrongDeployment(
            f"the engine's database is deployment {attempt.deployment}, this worker's is {ours}: "
            "give both the same MongoDB database"
        )
