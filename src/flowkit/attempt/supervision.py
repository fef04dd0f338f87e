"""Runs an attempt as a Temporal activity: heartbeats, cancellation, time limit, hand-over. An executor does the work.

This code runs on the event loop of Temporal's worker. An executor that blocks its own loop therefore keeps its lease
and still times out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit import reason_codes
from flowkit.adapters.retry import AttemptClock, measured_by, retry_while_unavailable
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.attempt.cancelling import pending, request_cancel
from flowkit.attempt.failures import failed_attempt, from_error, handed_over, lost, timed_out, unexpected
from flowkit.attempt.liveness import CancelFlagPoller, HeartbeatThrottle, restart_on_error
from flowkit.attempt.steps import check_database
from flowkit.errors import FlowKitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.models import AttemptFailure, AttemptInput, AttemptResult

_logger = logging.getLogger("flowkit.worker")

_UNSUPERVISED_SEC = 1.5
"""An attempt that ends within this time sends no heartbeat and does not read cancel flags, which limits the load.

It is also the longest time that a cancel flag waits before a new attempt reads it.
"""

_ABORT_TIMEOUT_SEC = 5.0
"""How long to wait for an aborted executor before abandoning it."""

_DELIVERY_SEC = 30.0
"""How long an attempt that a cancel flag stopped waits for Temporal to cancel it."""


class AttemptFailed(Exception):
    """Raised when an attempt does not succeed; carries the failure to report to the workflow."""

    def __init__(self, failure: AttemptFailure) -> None:
        self.failure = failure
        super().__init__(failure.message or failure.code)


class AttemptExecutor(Protocol):
    """Does the work of an attempt. All methods are called on the portal's loop."""

    async def run(self) -> AttemptResult:
        """Do the work and return the result. Raise AttemptFailed or a FlowKitError."""

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Request that the work stop within `grace_sec` seconds."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What all attempts of one process share: its task store, its loop portal and its settings."""

    tasks: TaskStore
    portal: LoopPortal
    worker_id: str
    hb_interval_sec: float = 20.0
    cancel_poll_sec: float = 0.5

    @cached_property
    def flags(self) -> CancelFlagPoller:
        """Return the poller that reads cancel flags for all attempts of this process."""
        return CancelFlagPoller(self.tasks, self.portal, self.cancel_poll_sec)

    @cached_property
    def heartbeats(self) -> HeartbeatThrottle:
        """Return the throttle that limits the heartbeats of this process."""
        return HeartbeatThrottle()


class Attempt:
    """Runs one executor within one Temporal activity."""

    def __init__(
        self,
        worker: WorkerContext,
        attempt: AttemptInput,
        executor: AttemptExecutor,
        waits_for: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Prepare the attempt. `waits_for` returns what it waits for at the moment; the heartbeats show it."""
        self._worker = worker
        self._attempt = attempt
        self._executor = executor
        self._waits_for = waits_for
        self._info = activity.info()
        self._clock = AttemptClock()
        self._forced_end: asyncio.Future[AttemptFailure] = asyncio.get_running_loop().create_future()
        """Resolved when the attempt must end although Temporal has not cancelled it."""
        self._flag_failure: asyncio.Task[AttemptFailure] | None = None
        """Determines the failure of an attempt that a cancel flag stopped, in case Temporal does not cancel it."""
        self._supervision: asyncio.Task[None] | None = None

    async def run(self) -> AttemptResult:
        """Run the executor and return its result. Raise ApplicationError or CancelledError, as the workflow expects."""
        if self._info.attempt > 1:
            raise failed_attempt(
                lost(reason_codes.LEASE_LOST, "the worker that ran this attempt stopped sending heartbeats")
            )
        with measured_by(self._clock):
            guard = run_checked(self._worker, self._attempt, self._executor)
            work = asyncio.create_task(self._worker.portal.run_to_end(guard))
        supervision = self._start_supervision()
        try:
            with self._worker.heartbeats.attempt():
                return await self._until_done(work)
        except AttemptFailed as error:
            raise failed_attempt(error.failure) from None
        finally:
            supervision.cancel()
            for task in (work, self._supervision, self._flag_failure):
                if task is not None:
                    task.cancel()

    def _start_supervision(self) -> asyncio.TimerHandle:
        """Return the timer that starts the supervision. A very short attempt ends before it, and costs no task."""
        after_sec = min(_UNSUPERVISED_SEC, self._attempt.lease_ttl_sec / 4)
        return asyncio.get_running_loop().call_later(after_sec, self._begin_supervision)

    def _begin_supervision(self) -> None:
        self._supervision = asyncio.create_task(self._supervise())

    async def _until_done(self, work: asyncio.Task[AttemptResult]) -> AttemptResult:
        limit = self._attempt.timeout_sec
        ends: list[asyncio.Future[Any]] = [work, self._forced_end]
        while not work.done():
            try:
                await asyncio.wait(
                    ends, timeout=self._clock.next_check(limit), return_when=asyncio.FIRST_COMPLETED
                )
            except asyncio.CancelledError:
                await self._interrupted(work)
            if not work.done() and (failure := self._overdue()):
                await self._abort(work)
                raise AttemptFailed(failure)
        return await self._outcome(work)

    def _overdue(self) -> AttemptFailure | None:
        """Return the failure with which the attempt must end now, or None if it may continue."""
        if self._forced_end.done():
            return self._forced_end.result()
        limit = self._attempt.timeout_sec
        return timed_out(limit) if limit is not None and self._clock.spent() >= limit else None

    async def _outcome(self, work: asyncio.Task[AttemptResult]) -> AttemptResult:
        if not work.cancelled():
            try:
                return work.result()
            except Flagged as error:
                return await self._stopped_for(error.flag)
        if self._flag_failure is not None:
            return await self._await_cancel(self._flag_failure)
        raise AttemptFailed(handed_over("the process that runs the attempt is shutting down"))

    async def _stopped_for(self, flag: CancelFlag) -> AttemptResult:
        self._flag_failure = self._flag_failure or asyncio.create_task(self._report_flag(flag))
        return await self._await_cancel(self._flag_failure)

    async def _await_cancel(self, flag_failure: asyncio.Task[AttemptFailure]) -> AttemptResult:
        """Wait until Temporal cancels the attempt, or until `flag_failure` shows that it does not."""
        try:
            failure = await asyncio.shield(flag_failure)
        except asyncio.CancelledError:
            raise self._interruption_error() from None
        raise AttemptFailed(failure)

    async def _report_flag(self, flag: CancelFlag) -> AttemptFailure:
        """Report the flag to Temporal. Return the failure to use if Temporal does not cancel the attempt."""
        refused = await request_cancel(self._attempt, flag)
        if refused is not None:
            return refused
        await asyncio.sleep(_DELIVERY_SEC)
        return pending(flag)

    async def _interrupted(self, work: asyncio.Task[AttemptResult]) -> None:
        """Stop the executor after Temporal cancelled the activity, and raise the error that fits the reason."""
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            await self._stop_gently(work)
        else:
            await self._abort(work)
        raise self._interruption_error()

    def _interruption_error(self) -> BaseException:
        details = activity.cancellation_details()
        if details is None or details.cancel_requested:
            return asyncio.CancelledError()
        if details.worker_shutdown:
            return AttemptFailed(handed_over("the worker is shutting down"))
        if details.paused or details.reset:
            return ApplicationError("the attempt was paused or reset", type=reason_codes.WORKER_SHUTDOWN)
        return asyncio.CancelledError()

    async def _stop_gently(self, work: asyncio.Task[AttemptResult]) -> None:
        self._request_stop(await self._cancel_reason())
        await asyncio.wait([work], timeout=self._attempt.cancel_grace_sec)
        await self._abort(work)

    async def _cancel_reason(self) -> str:
        """Return the reason of the cancel from the task document, since Temporal does not pass it to activities."""
        try:
            reason = self._worker.portal.run(self._worker.tasks.cancel_flag(self._attempt))
            return await asyncio.wait_for(reason, timeout=1.0) or "cancelled"
        except (FlowKitError, TimeoutError):
            return "cancelled"

    def _request_stop(self, reason: str) -> None:
        self._worker.portal.call(self._executor.cancel, reason, self._attempt.cancel_grace_sec)

    async def _abort(self, work: asyncio.Task[AttemptResult]) -> None:
        if work.done():
            return
        work.cancel()
        _, hanging = await asyncio.wait([work], timeout=_ABORT_TIMEOUT_SEC)
        if hanging:
            _logger.warning("node %s does not stop; its worker continues without it", self._attempt.node_id)

    async def _supervise(self) -> None:
        """Send heartbeats, renew the lease and watch the cancel flag."""
        loops = (self._send_heartbeats, self._renew_lease, self._watch_flag)
        await asyncio.gather(*(restart_on_error(loop, self._attempt.node_id) for loop in loops))

    async def _send_heartbeats(self) -> None:
        heartbeats, lease_ttl_sec = self._worker.heartbeats, self._attempt.lease_ttl_sec
        pause = heartbeats.pause_sec(lease_ttl_sec) - _UNSUPERVISED_SEC
        while True:
            await asyncio.sleep(pause)
            waits_for = self._waits_for()
            activity.heartbeat(*([{"state": "running", "waits_for": waits_for}] if waits_for else []))
            pause = heartbeats.pause_sec(lease_ttl_sec)

    async def _renew_lease(self) -> None:
        """Extend the lease in the task document before it expires.

        Temporal enforces the real lease by heartbeats. By the document, a parent with `max_ahead` sees whether the node
        still runs.
        """
        pause = min(self._worker.hb_interval_sec, self._attempt.lease_ttl_sec / 2)
        while True:
            await asyncio.sleep(pause)
            now = time.time()
            deadline_ms = int((now + self._attempt.lease_ttl_sec) * 1000)
            run_id = self._info.workflow_run_id or ""
            try:
                await self._worker.portal.run(
                    self._worker.tasks.extend_lease(self._attempt, run_id, deadline_ms, now)
                )
            except FlowKitError as error:
                _logger.warning("could not renew the lease of node %s: %s", self._attempt.node_id, error)

    async def _watch_flag(self) -> None:
        """Stop the executor when a cancel flag is set, and end the attempt if Temporal does not cancel it in time."""
        with self._worker.flags.watching(self._attempt.task_id):
            flag = await self._flag()
            while flag is None:
                await asyncio.sleep(self._worker.cancel_poll_sec)
                flag = await self._flag()
        self._request_stop(flag.reason)
        self._flag_failure = self._flag_failure or asyncio.create_task(self._report_flag(flag))
        failure = await asyncio.shield(self._flag_failure)
        await asyncio.sleep(self._attempt.cancel_grace_sec)
        if not self._forced_end.done():
            self._forced_end.set_result(failure)

    async def _flag(self) -> CancelFlag | None:
        """Return the cancel flag that applies to this attempt, or None. A flag of another run is stale and ignored."""
        try:
            if not await self._worker.flags.any_set(self._attempt.task_id):
                return None
            flag = await self._worker.portal.run(self._worker.tasks.raised_flag(self._attempt))
        except FlowKitError as error:
            _logger.warning("could not read the cancel flag of task %s: %s", self._attempt.task_id, error)
            return None
        return flag if flag is not None and flag.concerns(self._info.workflow_run_id) else None


async def run_checked(
    worker: WorkerContext, attempt: AttemptInput, executor: AttemptExecutor
) -> AttemptResult:
    """Check that engine and worker share a database, then run the executor. Raise AttemptFailed, or Flagged as is."""
    try:
        await _check_deployment(worker, attempt)
        return await executor.run()
    except (AttemptFailed, Flagged):
        raise
    except FlowKitError as error:
        raise AttemptFailed(from_error(error)) from None
    except Exception as error:
        _logger.exception("the attempt of node %s failed unexpectedly", attempt.node_id)
        raise AttemptFailed(unexpected(error)) from None


async def _check_deployment(worker: WorkerContext, attempt: AttemptInput) -> None:
    check_database(attempt, await retry_while_unavailable(worker.tasks.deployment), "worker")
