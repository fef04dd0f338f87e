"""Runs an attempt as a Temporal activity: heartbeats, cancellation, time limit, hand-over. An executor does the work.

`run_attempt` is the way of every attempt of a role or function, ordinary or local. A local one runs as a local activity
of an engine. It ends soon, so it sends no heartbeats and reads no cancel flags.

This code runs on the event loop of Temporal's worker. An executor that blocks its own loop therefore keeps its lease
and still times out.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError

from flowkit import reason_codes
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.outages import AttemptClock, measured_by, retry_while_unavailable
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.attempt.failures import (
    failed_attempt,
    failure,
    from_error,
    handed_over,
    lost,
    timed_out,
    unexpected,
    yielded,
)
from flowkit.attempt.storage import check_database
from flowkit.core.handler_lines import begin_attempt, end_attempt
from flowkit.core.instruments import (
    ATTEMPT_TIME,
    ATTEMPTS_ENDED,
    ATTEMPTS_STARTED,
    BATCHES,
    FENCED_WRITES,
    LATE_HEARTBEATS,
    NODE_WAIT,
    SHARDS_STARTED,
    is_measured,
)
from flowkit.core.loop_portal import IGNORED_SEC, cancel_until_done
from flowkit.core.user_code import Contained, contain_tasks, error_text, warn_of_blocked_loops
from flowkit.errors import EpochTaken, Fenced, FlowKitError, RoleHeld
from flowkit.models import COORDINATOR_FN, FailureKind
from flowkit.models.waits import TEXT
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from flowkit.adapters.tasks.cancel_flags import CancelFlag, CancelFlags
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.core.handler_lines import LineSinks
    from flowkit.core.loop_portal import LoopPortal
    from flowkit.models import AttemptFailure, AttemptInput, AttemptResult

_logger = logging.getLogger("flowkit.worker")

_UNSUPERVISED_SEC = 1.5
"""An attempt that ends within this time sends no heartbeat and does not read cancel flags, which limits the load.

It is also the longest time that a cancel flag waits before a new attempt reads it.
"""

_PROBE_SEC = 0.1
_PROBE_TIMEOUT_SEC = 2.0
"""How long an attempt that was cancelled without a known reason looks whether the loop of the handlers goes on."""

_DELIVERY_SEC = 30.0
"""How long an attempt that a cancel flag stopped waits for Temporal to cancel it."""


_RPC_TIMEOUT = timedelta(seconds=10)

HEARTBEAT_THROTTLE = timedelta(seconds=1)
"""Maximum time until an attempt sees a cancel or Terminate. Temporal's default is most of the lease."""

_HEARTBEAT_SEC = 1.0
_MAX_HEARTBEATS_PER_SEC = 20
"""Limit for all attempts of a process together. With more attempts, each sends fewer heartbeats.

Cancels are not delayed, because the cancel flags also report them.
"""

_AFTER_ERROR_SEC = 1.0

_FENCED = FailureKind.FENCED.outcome


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

    def show_end(self, reason: str, grace_sec: float) -> None:
        """Show the user's code that the attempt is ended by force, for plain functions that ask for a cancel."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What all attempts of one process share: its task store, its loop portal and its settings."""

    tasks: TaskStore
    portal: LoopPortal
    worker_id: str
    hb_interval_sec: float = 20.0
    cancel_poll_sec: float = 0.5
    lines: LineSinks | None = None
    """Takes what the attempts log; None if nothing does."""

    @cached_property
    def flags(self) -> CancelFlagPoller:
        """Return the poller that reads cancel flags for all attempts of this process."""
        return CancelFlagPoller(self.tasks.flags, self.portal, self.cancel_poll_sec)

    @cached_property
    def heartbeats(self) -> HeartbeatThrottle:
        """Return the throttle that limits the heartbeats of this process."""
        return HeartbeatThrottle()


async def run_attempt(
    worker: WorkerContext,
    attempt: AttemptInput,
    executor: AttemptExecutor,
    waits_for: Callable[[], str | None] = lambda: None,
) -> AttemptResult:
    """Run the executor within the current activity, local or not, and return its result.

    `waits_for` returns what the attempt waits for at the moment; the heartbeats show it. Raise ApplicationError or
    CancelledError, as the workflow expects.
    """
    info = activity.info()
    if info.is_local:
        _check_age(attempt)
    begun = time.monotonic() if info.attempt == 1 else None
    if begun is not None:
        count_begin(attempt)
    kind = LocalAttempt if info.is_local else Attempt
    try:
        result = await kind(worker, attempt, executor, waits_for).run()
    except BaseException as error:
        _count_end(attempt, begun, *outcome_of(error, activity.cancellation_details()))
        raise
    _count_end(attempt, begun, "succeeded", "")
    return result


def count_begin(attempt: AttemptInput) -> None:
    """Count an attempt that begins."""
    ATTEMPTS_STARTED.add(attempt.role, which_try(attempt))
    if attempt.shard:
        SHARDS_STARTED.add(attempt.role)


def expect_losses(role: str) -> None:
    """Let the counts of lost attempts and set-aside batches begin at 0: Prometheus then sees the first as an increase.

    A worker that each attempt kills counts one loss in each of its lives.
    """
    ATTEMPTS_ENDED.add(role, FailureKind.LOSS.outcome, reason_codes.LEASE_LOST, amount=0)
    BATCHES.add(role, "set_aside", amount=0)


def which_try(attempt: AttemptInput) -> str:
    """Return whether an attempt is the first one of its node, a retry, or the first one after a reset of the node.

    The epochs of shards show no retry: those of one node run at the same time.
    """
    later = attempt.failures > 0 or (attempt.parallel == 1 and attempt.epoch > attempt.first_epoch + 1)
    return "retry" if later else "rerun" if attempt.first_epoch else "first"


def _count_end(attempt: AttemptInput, begun: float | None, outcome: str, reason: str) -> None:
    """Count the end of an attempt. `begun` is None for one that was lost in an earlier try."""
    ATTEMPTS_ENDED.add(attempt.role, outcome, reason)
    if outcome == _FENCED and reason:
        FENCED_WRITES.add(attempt.role)
    if begun is not None:
        ATTEMPT_TIME.observe(time.monotonic() - begun, attempt.role, outcome)


def outcome_of(error: BaseException, details: activity.ActivityCancellationDetails | None) -> tuple[str, str]:
    """Return outcome and reason, for metrics, of an attempt that has ended with an error.

    One that Temporal no longer knows, because it was lost or its task was terminated, counts as fenced.
    """
    if isinstance(error, ApplicationError):
        kind = error.details[0]["kind"] if error.details else FailureKind.HANDOVER
        return FailureKind(kind).outcome, error.type or ""
    if not isinstance(error, asyncio.CancelledError):
        return FailureKind.FAILURE.outcome, reason_codes.UNEXPECTED_ERROR
    if details is not None and (details.not_found or details.timed_out):
        return _FENCED, ""
    return "cancelled", ""


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
            raise failed_attempt(await self._describe_loss())
        self._measure_wait()
        is_limited = self._attempt.timeout_sec is not None
        with measured_by(self._clock) if is_limited else nullcontext():
            work = self._worker.portal.start(self._run_checked())
        supervision = self._start_supervision()
        try:
            with self._worker.heartbeats.attempt():
                return await self._wait_until_done(work)
        except AttemptFailed as error:
            raise failed_attempt(self._name_worker(error.failure)) from None
        finally:
            supervision.cancel()
            cancel_until_done(work)
            for task in (self._supervision, self._flag_failure):
                if task is not None:
                    task.cancel()

    def _measure_wait(self) -> None:
        """Note how long the node has waited. Of shards, the first one counts: one of the others may always wait."""
        if is_measured() and self._attempt.shard <= 1:
            scheduled_at = self._info.current_attempt_scheduled_time.timestamp()
            waited = time.time() - (self._attempt.ready_at or scheduled_at)
            NODE_WAIT.observe(max(0.0, waited), self._attempt.role)

    def _name_worker(self, failure: AttemptFailure) -> AttemptFailure:
        """Return the failure of a handler with its worker and its version."""
        version = self._attempt.version
        if not version or failure.kind is not FailureKind.FAILURE:
            return failure
        return replace(failure, worker=self._worker.worker_id, version=version)

    async def _describe_loss(self) -> AttemptFailure:
        """Return the loss of the worker that ran an earlier try of this attempt; the document names it.

        MongoDB says how many batches are settled: the last heartbeat may be older than the last batch.
        """
        holder, settled, attempt, tasks = None, 0, self._attempt, self._worker.tasks
        with suppress(FlowKitError):
            store = tasks.shards if attempt.shard else tasks.attempts
            holder = await self._worker.portal.run(store.find_holder(attempt))
            artifacts = ArtifactStore(tasks.database)
            settled = await self._worker.portal.run(artifacts.count_settled(attempt))
        worker_id, version = holder or ("", "")
        shown = f"worker {worker_id} (version {version})" if version else f"worker {worker_id}"
        named = f"{shown}, which ran this attempt," if worker_id else "the worker that ran this attempt"
        noticed_at = self._info.current_attempt_scheduled_time.timestamp()
        text = f"{named} stopped sending heartbeats"
        return lost(reason_codes.LEASE_LOST, text, noticed_at, settled=settled)

    async def _run_checked(self) -> AttemptResult:
        """Check that engine and worker share a database, then run the executor.

        Raise AttemptFailed, or Flagged as is.
        """
        try:
            tasks = self._worker.tasks
            if (ours := tasks.known_deployment) is None:
                ours = await retry_while_unavailable(tasks.deployment)
            check_database(self._attempt, ours, "worker")
            return await self._run_executor()
        except (AttemptFailed, Flagged, ApplicationError):
            raise
        except FlowKitError as error:
            raise AttemptFailed(from_error(error)) from None
        except Exception as error:
            _logger.exception("the attempt of node %s failed unexpectedly", self._attempt.node_id)
            raise AttemptFailed(unexpected(error)) from None

    async def _run_executor(self) -> AttemptResult:
        contain_tasks(f"node {self._attempt.node_id!r} of task {self._attempt.task_id}")
        worker, run_id = self._worker, self._info.workflow_run_id or ""
        begin_attempt(self._attempt, worker.worker_id, run_id, worker.lines)
        try:
            return await Contained(self._executor.run())
        finally:
            end_attempt()

    def _start_supervision(self) -> asyncio.TimerHandle:
        """Return the timer that starts the supervision. A very short attempt ends before it, and costs no task."""
        after_sec = min(_UNSUPERVISED_SEC, self._attempt.lease_ttl_sec / 4)
        return asyncio.get_running_loop().call_later(after_sec, self._begin_supervision)

    def _begin_supervision(self) -> None:
        self._supervision = asyncio.create_task(self._supervise())

    async def _wait_until_done(self, work: asyncio.Future[AttemptResult]) -> AttemptResult:
        limit = self._attempt.timeout_sec
        ends: list[asyncio.Future[Any]] = [work, self._forced_end]
        while not work.done():
            try:
                await asyncio.wait(
                    ends, timeout=self._clock.next_check(limit), return_when=asyncio.FIRST_COMPLETED
                )
            except asyncio.CancelledError:
                await self._handle_interruption(work)
            if not work.done() and (failure := self._find_overdue()):
                await self._abort(work, failure.code)
                raise AttemptFailed(failure)
        return await self._get_outcome(work)

    def _find_overdue(self) -> AttemptFailure | None:
        """Return the failure with which the attempt must end now, or None if it may continue."""
        if self._forced_end.done():
            return self._forced_end.result()
        limit = self._attempt.timeout_sec
        return timed_out(limit) if limit is not None and self._clock.spent() >= limit else None

    async def _get_outcome(self, work: asyncio.Future[AttemptResult]) -> AttemptResult:
        if not work.cancelled():
            try:
                return work.result()
            except Flagged as error:
                return await self._end_flagged(error.flag)
        if self._flag_failure is not None:
            return await self._await_cancel(self._flag_failure)
        if await self._loop_goes_on():
            text = "the user's code cancelled its own task, although FlowKit did not cancel it"
            raise AttemptFailed(failure(reason_codes.CANCELLED_BY_WORKER, text, permanent=False))
        raise AttemptFailed(handed_over("the process that runs the attempt is shutting down"))

    async def _loop_goes_on(self) -> bool:
        """Return whether the loop of the handlers still runs tasks. One that ends cancels all of them, or has ended."""
        probe = asyncio.create_task(self._worker.portal.run(asyncio.sleep(_PROBE_SEC)))
        await asyncio.wait([probe], timeout=_PROBE_TIMEOUT_SEC)
        if not probe.done():
            probe.cancel()
            return False
        return not probe.cancelled() and probe.exception() is None

    async def _end_flagged(self, flag: CancelFlag) -> AttemptResult:
        return await self._await_cancel(self._report_flag_once(flag))

    def _report_flag_once(self, flag: CancelFlag) -> asyncio.Task[AttemptFailure]:
        """Return the task that reports the flag to Temporal. The executor and the poller may both see a flag."""
        if self._flag_failure is None:
            self._flag_failure = asyncio.create_task(
                report_flag(self._attempt, flag, delivery_sec=_DELIVERY_SEC)
            )
        return self._flag_failure

    async def _await_cancel(self, flag_failure: asyncio.Task[AttemptFailure]) -> AttemptResult:
        """Wait until Temporal cancels the attempt, or until `flag_failure` shows that it does not."""
        try:
            failure = await asyncio.shield(flag_failure)
        except asyncio.CancelledError:
            raise self._make_interruption_error() from None
        raise AttemptFailed(failure)

    async def _handle_interruption(self, work: asyncio.Future[AttemptResult]) -> None:
        """Stop the executor after Temporal cancelled the activity, and raise the error that fits the reason."""
        details = activity.cancellation_details()
        if details is not None and details.cancel_requested:
            await self._stop_gently(work)
        elif details is not None and details.worker_shutdown:
            await self._abort(work, reason_codes.WORKER_SHUTDOWN)
        else:
            await self._abort(work, reason_codes.FENCED)
        raise self._make_interruption_error()

    def _make_interruption_error(self) -> BaseException:
        details = activity.cancellation_details()
        if details is None or details.cancel_requested:
            return asyncio.CancelledError()
        if details.worker_shutdown:
            return AttemptFailed(handed_over("the worker is shutting down"))
        if details.paused or details.reset:
            return ApplicationError("the attempt was paused or reset", type=reason_codes.WORKER_SHUTDOWN)
        return asyncio.CancelledError()

    async def _stop_gently(self, work: asyncio.Future[AttemptResult]) -> None:
        reason = await self._cancel_reason()
        self._request_stop(reason)
        await asyncio.wait([work], timeout=self._attempt.cancel_grace_sec)
        await self._abort(work, reason)

    async def _cancel_reason(self) -> str:
        """Return the reason of the cancel from the task document, since Temporal does not pass it to activities."""
        try:
            async with asyncio.timeout(1.0):
                flag = await self._worker.portal.run(self._worker.tasks.flags.find_flag(self._attempt))
        except (FlowKitError, TimeoutError):
            flag = None
        return flag.reason if flag else "cancelled"

    def _request_stop(self, reason: str) -> None:
        self._worker.portal.call(self._executor.cancel, reason, self._attempt.cancel_grace_sec)

    async def _abort(self, work: asyncio.Future[AttemptResult], reason: str) -> None:
        """Cancel the work, and wait a while for its end. Functions on threads must ask for the cancel."""
        if work.done():
            return
        self._worker.portal.cancel(work, partial(self._executor.show_end, reason, IGNORED_SEC))
        _, hanging = await asyncio.wait([work], timeout=IGNORED_SEC)
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
            due = time.monotonic() + pause
            await asyncio.sleep(pause)
            late_sec, pause = time.monotonic() - due, heartbeats.pause_sec(lease_ttl_sec)
            count_late_heartbeat(self._attempt.role, late_sec, pause)
            warn_of_blocked_loops()
            waits_for = self._waits_for()
            activity.heartbeat(*([{"state": "running", TEXT: waits_for}] if waits_for else []))

    async def _renew_lease(self) -> None:
        """Extend the lease in the task document before it expires.

        Temporal enforces the real lease by heartbeats. By the document, a parent with `max_ahead` sees whether the node
        still runs.
        """
        longest = min(self._worker.hb_interval_sec, self._attempt.lease_ttl_sec / 2)
        loop, shift = asyncio.get_running_loop(), zlib.crc32(self._worker.worker_id.encode())
        while True:
            await asyncio.sleep(renewal_pause_sec(loop.time() + shift, longest))
            now = time.time()
            try:
                await self._worker.portal.run(self._extend_lease(now, now + self._attempt.lease_ttl_sec))
            except FlowKitError as error:
                _logger.warning("could not renew the lease of node %s: %s", self._attempt.node_id, error)

    async def _extend_lease(self, now: float, until: float) -> None:
        tasks, attempt, run_id = self._worker.tasks, self._attempt, self._info.workflow_run_id or ""
        if attempt.shard:
            await tasks.shards.extend_lease(attempt, run_id, until)
        else:
            await tasks.attempts.extend_lease(attempt, run_id, int(until * 1000), now)

    async def _watch_flag(self) -> None:
        """Stop the executor when a cancel flag is set, and end the attempt if Temporal does not cancel it in time."""
        with self._worker.flags.watching(self._attempt.task_id):
            flag = await self._read_flag()
            while flag is None:
                await asyncio.sleep(self._worker.cancel_poll_sec)
                flag = await self._read_flag()
        self._request_stop(flag.reason)
        failure = await asyncio.shield(self._report_flag_once(flag))
        await asyncio.sleep(self._attempt.cancel_grace_sec)
        if not self._forced_end.done():
            self._forced_end.set_result(failure)

    async def _read_flag(self) -> CancelFlag | None:
        """Return the cancel flag that applies to this attempt, or None. A flag of another run is stale and ignored."""
        try:
            if not await self._worker.flags.any_set(self._attempt.task_id):
                return None
            flag = await self._worker.portal.run(self._worker.tasks.flags.find_flag(self._attempt))
        except FlowKitError as error:
            _logger.warning("could not read the cancel flag of task %s: %s", self._attempt.task_id, error)
            return None
        return flag if flag is not None and flag.concerns(self._info.workflow_run_id) else None


class LocalAttempt(Attempt):
    """Runs one executor within one local activity.

    Temporal's time limit of the local activity cancels the executor, as a shutdown of the engine does. The engine may
    also be frozen so long that another engine continues the workflow.
    """

    async def _run_executor(self) -> AttemptResult:
        """Run the executor. An attempt that another one has replaced uses no retry, because both may be current."""
        try:
            return await super()._run_executor()
        except RoleHeld as error:
            raise refuse_local(str(error)) from None
        except Fenced as error:
            attempts, attempt = self._worker.tasks.attempts, self._attempt
            current = await retry_while_unavailable(lambda: attempts.read_epoch(attempt))
            raise (EpochTaken(current) if current > attempt.epoch else error) from None

    async def _supervise(self) -> None:
        """Do nothing: a local activity cannot send heartbeats, and it ends before its lease would be renewed."""

    async def _end_flagged(self, flag: CancelFlag) -> AttemptResult:
        """Report the flag, and yield: Temporal cannot cancel a local activity, but it cancels the next attempt."""
        raise AttemptFailed(await report_flag(self._attempt, flag))

    def _make_interruption_error(self) -> BaseException:
        """Return the error that ends the attempt. After the time limit, Temporal no longer waits for it."""
        details = activity.cancellation_details()
        if details is not None and (details.cancel_requested or details.worker_shutdown):
            return super()._make_interruption_error()
        attempt, advice = self._attempt, ""
        if attempt.role != COORDINATOR_FN:
            advice = (
                f". If most attempts of role {attempt.role} take a second or more, its handler "
                "should not be inline"
            )
        text = f"the attempt of node {attempt.node_id} inside the engine took too long"
        _logger.warning("%s; an ordinary attempt follows%s", text, advice)
        return refuse_local(text)


def _check_age(attempt: AttemptInput) -> None:
    """Raise ApplicationError if a local attempt must not begin any more. An ordinary attempt follows."""
    late = time.time() - attempt.begin_by
    if attempt.begin_by and late > 0:
        raise refuse_local(
            f"the attempt of node {attempt.node_id} inside the engine begins {late:.1f} s too late: the engine is "
            "overloaded, was suspended, or its clock differs from that of the Temporal server"
        )


def refuse_local(message: str) -> ApplicationError:
    """Return the error with which an engine refuses a local attempt. An ordinary attempt follows.

    It is expected, so Temporal's log shows no traceback for it.
    """
    return ApplicationError(
        message, type=reason_codes.NOT_LOCAL, non_retryable=True, category=ApplicationErrorCategory.BENIGN
    )


async def report_flag(
    attempt: AttemptInput, flag: CancelFlag, *, delivery_sec: float = 0.0
) -> AttemptFailure:
    """Report a cancel flag to Temporal. Return the failure of the attempt, which must stop because of it.

    If the workflow set the flag, Temporal is about to deliver the cancel. If another client wrote the flag into the
    document, request that Temporal cancel the run. Temporal has `delivery_sec` seconds to cancel the attempt itself.
    Otherwise the attempt yields: the workflow retries it later and shows the reason in the task document.
    """
    refused = await _request_cancel(attempt, flag)
    if refused is None:
        await asyncio.sleep(delivery_sec)
    return refused or cancel_pending(flag)


async def _request_cancel(attempt: AttemptInput, flag: CancelFlag) -> AttemptFailure | None:
    """Request that Temporal cancel the attempt's own run, unless the workflow itself set the flag.

    Return the failure of the attempt if Temporal rejects the request, otherwise None.
    """
    if flag.run_id is not None:
        return None
    try:
        await _cancel_own_run(attempt.task_id, flag.reason)
    except (RPCError, RuntimeError) as error:
        why = error_text(error)
        _logger.warning(
            "task %s has a cancel flag, but Temporal rejects the cancel request: %s", attempt.task_id, why
        )
        text = (
            f"coordinator.cancelled is set in the task document, but Temporal rejected the cancel of the "
            f"workflow ({why}): allow this worker to cancel workflows, or unset the flag"
        )
        return yielded(reason_codes.CANCEL_REFUSED, text)
    return None


async def _cancel_own_run(task_id: str, reason: str) -> None:
    run = activity.client().get_workflow_handle(task_id, run_id=activity.info().workflow_run_id)
    await run.cancel(reason=clean(reason), rpc_timeout=_RPC_TIMEOUT)


def cancel_pending(flag: CancelFlag) -> AttemptFailure:
    """Return the failure of an attempt that stopped because of a cancel flag before Temporal cancelled it."""
    raised_by = "the task document" if flag.run_id is None else f"run {flag.run_id} of the workflow"
    return yielded(
        reason_codes.CANCEL_PENDING,
        f"cancel requested by {raised_by} ({flag.reason}); Temporal has not cancelled the attempt yet",
    )


async def restart_on_error(loop: Callable[[], Awaitable[None]], node_id: str) -> None:
    """Run one of the background loops of an attempt. Log an unexpected error and run the loop again.

    An error in one loop must not end the attempt or its other loops, such as its heartbeats.
    """
    while True:
        try:
            await loop()
        except Exception:
            _logger.exception("background work for node %s failed; retrying", node_id)
            await asyncio.sleep(_AFTER_ERROR_SEC)
        else:
            return


class HeartbeatThrottle:
    """Limits the rate of the heartbeats of a process, however many attempts it runs."""

    def __init__(self) -> None:
        self._attempts = 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Count an attempt while it runs."""
        self._attempts += 1
        try:
            yield
        finally:
            self._attempts -= 1

    def pause_sec(self, lease_ttl_sec: float) -> float:
        """Return the seconds between two heartbeats of an attempt, at most a quarter of its lease."""
        return heartbeat_pause_sec(self._attempts, lease_ttl_sec)


def heartbeat_pause_sec(attempts: int, lease_ttl_sec: float) -> float:
    """Return the seconds between two heartbeats of each of `attempts` attempts, at most a quarter of the lease."""
    return min(max(_HEARTBEAT_SEC, attempts / _MAX_HEARTBEATS_PER_SEC), lease_ttl_sec / 4)


def count_late_heartbeat(role: str, late_sec: float, pause_sec: float) -> None:
    """Count a heartbeat that is sent more than one pause after its moment."""
    if late_sec > pause_sec:
        LATE_HEARTBEATS.add(role)


def renewal_pause_sec(now: float, longest_sec: float) -> float:
    """Return the seconds until an attempt renews its lease: at most `longest_sec`, and more than half of them.

    Attempts with the same clock renew their leases at the same moments, which are half as far apart. They then share
    the updates of the task document. Each process shifts its clock by a number of its own.
    """
    apart = longest_sec / 2
    return (now // apart + 2) * apart - now


@asynccontextmanager
async def sending_heartbeats(pause_sec: Callable[[], float]) -> AsyncIterator[None]:
    """Send a heartbeat for the running activity after each pause, on Temporal's loop, while the block runs.

    A busy portal loop does not delay them. A local activity has none.
    """
    if activity.info().is_local:
        yield
        return
    sending = asyncio.create_task(_send_heartbeats(pause_sec))
    try:
        yield
    finally:
        sending.cancel()


async def _send_heartbeats(pause_sec: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(pause_sec())
        activity.heartbeat()


class CancelFlagPoller:
    """Reads the cancel flags of all tasks that have attempts in this process with a single query."""

    def __init__(self, flags: CancelFlags, portal: LoopPortal, every_sec: float) -> None:
        self._flags = flags
        self._portal = portal
        self._every_sec = every_sec
        self._watched: Counter[str] = Counter()
        self._read: asyncio.Task[set[str]] | None = None
        self._read_at = 0.0

    @contextmanager
    def watching(self, task_id: str) -> Iterator[None]:
        """Include the flags of this task in the reads while the block runs."""
        self._watched[task_id] += 1
        try:
            yield
        finally:
            self._watched[task_id] -= 1
            if not self._watched[task_id]:
                del self._watched[task_id]

    async def any_set(self, task_id: str) -> bool:
        """Return whether the task had a cancel flag at the latest read, which ended at most `every_sec` seconds ago.

        Only one read is in progress at a time: those of a large document may take longer than `every_sec`, and would
        pile up in MongoDB.
        """
        due = time.monotonic() - self._read_at >= self._every_sec
        if self._read is None or (self._read.done() and due):
            self._read = asyncio.create_task(self._portal.run(self._flags.find_flagged([*self._watched])))
            self._read.add_done_callback(self._note_read)
        return task_id in await asyncio.shield(self._read)

    def _note_read(self, read: asyncio.Task[set[str]]) -> None:
        """Note when a read ended. A caller that waits for it receives its error."""
        self._read_at = time.monotonic()
        if not read.cancelled():
            read.exception()
