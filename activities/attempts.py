"""One attempt as Temporal sees it: heartbeats, cancellation, time limit, hand-over. What it does is its executor's matter.

Runs on the loop of Temporal's worker, so that a executor that blocks its own loop keeps its lease and still times out.
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

from flowkit.activities.cancelling import pending, request_cancel
from flowkit.activities.liveness import CancelFlagPoller, HeartbeatThrottle, steadily
from flowkit.adapters.retry import AttemptClock, measured_by, retry_while_unavailable
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.attempt.failures import failed_attempt, from_error, handed_over, lost, timed_out, unexpected
from flowkit.errors import FlowKitError, WrongDeployment

if TYPE_CHECKING:
    from flowkit.activities.loop_portal import LoopPortal
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.models import AttemptFailure, AttemptInput, AttemptResult

_logger = logging.getLogger("flowkit.worker")

_UNSUPERVISED_SEC = 1.5
"""What ends sooner costs neither a heartbeat nor a look for flags; no cancel waits longer than this."""

_ABORT_TIMEOUT_SEC = 5.0
"""How long an aborted executor may take before it is left behind."""

_DELIVERY_SEC = 30.0
"""How long an attempt that a flag has stopped waits for Temporal to cancel it."""


class AttemptFailed(Exception):
    """An attempt ended without success; carries what the workflow is to know."""

    def __init__(self, failure: AttemptFailure) -> None:
        self.failure = failure
        super().__init__(failure.message or failure.code)


class AttemptExecutor(Protocol):
    """What an attempt does; all methods are called on the portal's loop."""

    async def run(self) -> AttemptResult:
        """Do the work. Raises AttemptFailed, or one of our errors."""

    def cancel(self, reason: str, grace_sec: float) -> None:
        """Ask it to stop."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The process that runs attempts."""

    tasks: TaskStore
    portal: LoopPortal
    worker_id: str
    hb_interval_sec: float = 20.0
    cancel_poll_sec: float = 0.5

    @cached_property
    def flags(self) -> CancelFlagPoller:
        """Where the attempts of this process see cancel flags."""
        return CancelFlagPoller(self.tasks, self.portal, self.cancel_poll_sec)

    @cached_property
    def heartbeats(self) -> HeartbeatThrottle:
        """How often each attempt of this process beats."""
        return HeartbeatThrottle()


class Attempt:
    """Runs one executor under one activity of Temporal."""

    def __init__(self, host: WorkerContext, attempt: AttemptInput, executor: AttemptExecutor) -> None:
        self._host = host
        self._attempt = attempt
        self._executor = executor
        self._info = activity.info()
        self._clock = AttemptClock()
        self._given_up: asyncio.Future[AttemptFailure] = asyncio.get_running_loop().create_future()
        """Set when the attempt must end although Temporal does not cancel it."""
        self._verdict: asyncio.Task[AttemptFailure] | None = None
        """What becomes of the attempt that a flag stops, unless Temporal cancels it meanwhile."""

    async def run(self) -> AttemptResult:
        """Run the executor to its end; raises ApplicationError or CancelledError as the workflow expects them."""
        if self._info.attempt > 1:
            raise failed_attempt(lost("lease_lost", "the worker that ran this attempt fell silent"))
        with measured_by(self._clock):
            guard = run_checked(self._host, self._attempt, self._executor)
            work = asyncio.create_task(self._host.portal.run_to_end(guard))
        supervision = asyncio.create_task(self._supervise())
        try:
            with self._host.heartbeats.attempt():
                return await self._until_done(work)
        except AttemptFailed as error:
            raise failed_attempt(error.failure) from None
        finally:
            for each in (work, supervision, self._verdict):
                if each is not None:
                    each.cancel()

    async def _until_done(self, work: asyncio.Task[AttemptResult]) -> AttemptResult:
        limit = self._attempt.timeout_sec
        ends: list[asyncio.Future[Any]] = [work, self._given_up]
        while not work.done():
            try:
                await asyncio.wait(
                    ends, timeout=self._clock.next_look(limit), return_when=asyncio.FIRST_COMPLETED
                )
            except asyncio.CancelledError:
                await self._interrupted(work)
            if not work.done() and (failure := self._overdue()):
                await self._abort(work)
                raise AttemptFailed(failure)
        return await self._outcome(work)

    def _overdue(self) -> AttemptFailure | None:
        """Return why the attempt has to end now, if it has to."""
        if self._given_up.done():
            return self._given_up.result()
        limit = self._attempt.timeout_sec
        return timed_out(limit) if limit is not None and self._clock.spent() >= limit else None

    async def _outcome(self, work: asyncio.Task[AttemptResult]) -> AttemptResult:
        if not work.cancelled():
            try:
                return work.result()
            except Flagged as error:
                return await self._stopped_for(error.flag)
        if self._verdict is not None:
            return await self._give_way(self._verdict)
        raise AttemptFailed(handed_over("the process that ran the attempt is ending"))

    async def _stopped_for(self, flag: CancelFlag) -> AttemptResult:
        self._verdict = self._verdict or asyncio.create_task(self._judged(flag))
        return await self._give_way(self._verdict)

    async def _give_way(self, verdict: asyncio.Task[AttemptFailure]) -> AttemptResult:
        """Wait until Temporal cancels the attempt, or until it is clear that it does not."""
        try:
            failure = await asyncio.shield(verdict)
        except asyncio.CancelledError:
            raise self._why_interrupted() from None
        raise AttemptFailed(failure)

    async def _judged(self, flag: CancelFlag) -> AttemptFailure:
        """Let Temporal know of the flag; return why the attempt ends when Temporal does not cancel it then."""
        refused = await request_cancel(self._attempt, flag)
        if refused is not None:
            return refused
        await asyncio.sleep(_DELIVERY_SEC)
        return pending(flag)

    async def _interrupted(self, work: asyncio.Task[AttemptResult]) -> None:
        """Temporal wants the attempt to end; find out why and act on it."""
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            await self._stop_gently(work)
        else:
            await self._abort(work)
        raise self._why_interrupted()

    def _why_interrupted(self) -> BaseException:
        details = activity.cancellation_details()
        if details is None or details.cancel_requested:
            return asyncio.CancelledError()
        if details.worker_shutdown:
            return AttemptFailed(handed_over("the worker was stopped"))
        if details.paused or details.reset:
            return ApplicationError("the attempt was paused or reset", type="worker_shutdown")
        return asyncio.CancelledError()

    async def _stop_gently(self, work: asyncio.Task[AttemptResult]) -> None:
        self._ask_to_stop(await self._cancel_reason())
        await asyncio.wait([work], timeout=self._attempt.cancel_grace_sec)
        await self._abort(work)

    async def _cancel_reason(self) -> str:
        """The reason stands in the document; Temporal does not tell it to activities."""
        try:
            reason = self._host.portal.run(self._host.tasks.cancel_flag(self._attempt))
            return await asyncio.wait_for(reason, timeout=1.0) or "cancelled"
        except (FlowKitError, TimeoutError):
            return "cancelled"

    def _ask_to_stop(self, reason: str) -> None:
        self._host.portal.call(self._executor.cancel, reason, self._attempt.cancel_grace_sec)

    async def _abort(self, work: asyncio.Task[AttemptResult]) -> None:
        if work.done():
            return
        work.cancel()
        _, hanging = await asyncio.wait([work], timeout=_ABORT_TIMEOUT_SEC)
        if hanging:
            _logger.warning("node %s does not stop; its worker goes on without it", self._attempt.node_id)

    async def _supervise(self) -> None:
        """Keep the attempt alive and look for flags; an attempt that is over at once costs neither."""
        await asyncio.sleep(min(_UNSUPERVISED_SEC, self._attempt.lease_ttl_sec / 4))
        duties = (self._send_heartbeats, self._renew_lease, self._watch_flag)
        await asyncio.gather(*(steadily(duty, self._attempt.node_id) for duty in duties))

    async def _send_heartbeats(self) -> None:
        heartbeats, lease_ttl_sec = self._host.heartbeats, self._attempt.lease_ttl_sec
        pause = heartbeats.pause_sec(lease_ttl_sec) - _UNSUPERVISED_SEC
        while True:
            await asyncio.sleep(pause)
            activity.heartbeat()
            pause = heartbeats.pause_sec(lease_ttl_sec)

    async def _renew_lease(self) -> None:
        """Show in the document that the attempt is alive; nothing depends on it."""
        while True:
            await asyncio.sleep(self._host.hb_interval_sec)
            now = time.time()
            deadline_ms = int((now + self._attempt.lease_ttl_sec) * 1000)
            run_id = self._info.workflow_run_id or ""
            try:
                await self._host.portal.run(
                    self._host.tasks.extend_lease(self._attempt, run_id, deadline_ms, now)
                )
            except FlowKitError as error:
                _logger.warning("could not renew the lease of node %s: %s", self._attempt.node_id, error)

    async def _watch_flag(self) -> None:
        """Stop the executor when a flag is up; end the attempt after the grace when Temporal does not cancel it."""
        with self._host.flags.watching(self._attempt.task_id):
            flag = await self._flag()
            while flag is None:
                await asyncio.sleep(self._host.cancel_poll_sec)
                flag = await self._flag()
        self._ask_to_stop(flag.reason)
        self._verdict = self._verdict or asyncio.create_task(self._judged(flag))
        failure = await asyncio.shield(self._verdict)
        await asyncio.sleep(self._attempt.cancel_grace_sec)
        if not self._given_up.done():
            self._given_up.set_result(failure)

    async def _flag(self) -> CancelFlag | None:
        """Return the flag that this attempt must obey; one of another run is left over."""
        try:
            if not await self._host.flags.any_set(self._attempt.task_id):
                return None
            flag = await self._host.portal.run(self._host.tasks.raised_flag(self._attempt))
        except FlowKitError as error:
            _logger.warning("could not read the cancel flag of task %s: %s", self._attempt.task_id, error)
            return None
        own = flag is not None and flag.run_id in (None, self._info.workflow_run_id)
        return flag if own else None


async def run_checked(host: WorkerContext, attempt: AttemptInput, executor: AttemptExecutor) -> AttemptResult:
    """Run the executor on its own database only; all errors but Flagged leave as AttemptFailed."""
    try:
        await _check_deployment(host, attempt)
        return await executor.run()
    except (AttemptFailed, Flagged):
        raise
    except FlowKitError as error:
        raise AttemptFailed(from_error(error)) from None
    except Exception as error:
        _logger.exception("the attempt of node %s failed unexpectedly", attempt.node_id)
        raise AttemptFailed(unexpected(error)) from None


async def _check_deployment(host: WorkerContext, attempt: AttemptInput) -> None:
    ours = await retry_while_unavailable(host.tasks.deployment)
    if attempt.deployment and attempt.deployment != ours:
        raise WrongDeployment(
            f"the engine's database is deployment {attempt.deployment}, this worker's is {ours}: "
            "give both the same MongoDB database"
        )
