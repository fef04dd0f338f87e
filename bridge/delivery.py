"""Reports the results of attempts to Temporal: the first batch by a signal, the outcome by completing the activity.

Each report may happen more than once. The workflow ignores the repetition of a signal. The effects of an outcome are
written to MongoDB first, by idempotent writes, and Temporal rejects a second completion.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from cachetools import LRUCache
from temporalio.service import RPCError, RPCStatusCode
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential_jitter

from flowkit.adapters.dispatches import DispatchState, OutcomeKind
from flowkit.adapters.mongo import gather_writes
from flowkit.attempt.failures import failed_attempt
from flowkit.attempt.signals import signal_first_batch
from flowkit.attempt.storage import mark
from flowkit.attempt.supervision import cancel_pending
from flowkit.attempt.workflows import WorkflowState, is_absent, look_up
from flowkit.bridge.context import REMEMBERED, activity_id
from flowkit.bridge.rules.outcomes import not_requested, outcome_of_error, withdrawn
from flowkit.errors import FlowKitError
from flowkit.models import AttemptResult, FailureKind
from flowkit.text import clean, visible

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.adapters.dispatches import Dispatch, Outcome
    from flowkit.adapters.tasks.cancel_flags import CancelFlag
    from flowkit.bridge.context import BridgeContext
    from flowkit.models import AttemptFailure

T = TypeVar("T")
_logger = logging.getLogger("flowkit.bridge")

_RPC_TIMEOUT = timedelta(seconds=10)

_CANCEL_DELIVERY_SEC = 30.0
"""How long to wait for Temporal to request a cancel whose flag is already set in MongoDB."""

_NOT_TRANSIENT = (RPCStatusCode.INVALID_ARGUMENT, RPCStatusCode.FAILED_PRECONDITION)


class FirstBatches:
    """Sends the signals in the background, one for each attempt.

    Another bridge, or this one after a restart, may send a signal again. The workflow ignores the repetition.
    """

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._sent = LRUCache[str, None](REMEMBERED)
        self._sending: dict[str, asyncio.Task[None]] = {}

    def batch_stored(self, record: Dispatch) -> None:
        """Send the signal of an attempt, if it is wanted and this process has not sent it."""
        key = record.key
        if not record.attempt.signal_first_batch or key in self._sent:
            return
        self._sent[key] = None
        sending = asyncio.create_task(signal_first_batch(self._context.client, record.attempt, record.run_id))
        self._sending[key] = sending
        sending.add_done_callback(lambda _: self._sending.pop(key, None))

    async def resumed(self, record: Dispatch) -> None:
        """Send the signal of an attempt that begins or that this bridge adopts, if its node has stored
        batches before.
        """
        attempt, artifacts = record.attempt, self._context.stores.artifacts
        if attempt.signal_first_batch:
            stored = await self._context.db(
                lambda: artifacts.batch_uids(attempt.task_id, attempt.node_id, attempt.first_epoch)
            )
            if stored:
                self.batch_stored(record)

    async def stop(self) -> None:
        """Drop the signals that Temporal has not accepted yet. The bridge that adopts the attempts sends them."""
        sending = [*self._sending.values()]
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


class NotRequested(Exception):
    """Raised when Temporal rejects the report of a cancellation because no cancel was requested."""


class Delivery:
    """Delivers outcomes in the background, so that the processing of status events never waits for Temporal."""

    def __init__(self, context: BridgeContext) -> None:
        self._context = context
        self._running: dict[str, asyncio.Task[None]] = {}

    def start(self, record: Dispatch, *, overdue: bool = False) -> None:
        """Deliver the outcome of a record in the background, unless its delivery is in progress already.

        An `overdue` outcome may have been delivered by a bridge that ended before it stored that.
        """
        if record.key in self._running:
            return
        delivering = asyncio.create_task(self._deliver_or_log(record, overdue=overdue))
        self._running[record.key] = delivering
        delivering.add_done_callback(lambda _: self._running.pop(record.key, None))

    async def stop(self, grace_sec: float = 5.0) -> None:
        """Finish the deliveries in progress. If one takes longer than `grace_sec`, another bridge repeats it later."""
        if self._running:
            await asyncio.wait([*self._running.values()], timeout=grace_sec)
        left = [*self._running.values()]
        for delivering in left:
            delivering.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _deliver_or_log(self, record: Dispatch, *, overdue: bool) -> None:
        try:
            if overdue and not await self._is_pending(record):
                await self._context.db(lambda: self._context.stores.dispatches.mark_reported(record.key))
            else:
                await self.deliver(record)
        except Exception:
            _logger.exception(
                "outcome of node %s (task %s, epoch %d) was not delivered; the next attempt delivers it",
                record.attempt.node_id,
                record.attempt.task_id,
                record.attempt.epoch,
            )

    async def deliver(self, record: Dispatch) -> None:
        """Apply the effects of the outcome of an ended record, and report it to Temporal."""
        outcome = record.outcome
        assert outcome is not None
        # A reported record no longer has its metrics; its effects are in MongoDB.
        if outcome.kind is OutcomeKind.DONE and record.state is not DispatchState.REPORTED:
            try:
                await self._finish_node(record, outcome)
            except FlowKitError as error:
                outcome = outcome_of_error(error, outcome.at, outcome.worker_id)
        if await self._report(record, outcome):
            await self._context.db(lambda: self._record_report(record, outcome.kind))

    async def _finish_node(self, record: Dispatch, outcome: Outcome) -> None:
        """Write final metrics, complete marker and the end of the node concurrently."""
        stores, attempt = self._context.stores, record.attempt

        async def write() -> None:
            worker_id, ref = outcome.worker_id, outcome.artifacts_ref
            writes = [
                mark(stores.artifacts, attempt, outcome.metrics, worker_id, ref, exists=True),
                stores.tasks.attempts.finish(attempt, record.run_id, outcome.at),
            ]
            if outcome.metrics:
                writes.append(stores.artifacts.store_final(attempt, outcome.metrics, outcome.at))
            await gather_writes(*writes)

        await self._context.db(write)

    async def _record_report(self, record: Dispatch, kind: OutcomeKind) -> None:
        """Record that Temporal knows the outcome, and the number of batches of a finished run.

        The record's own number may be wrong: too high if a bridge was killed before it committed events, which then
        arrive again, and too low if another bridge changed the lease before the number was written.
        """
        stores, batches = self._context.stores, None
        if kind is OutcomeKind.DONE:
            batches = await stores.artifacts.count_batches(record.attempt)
        await stores.dispatches.mark_reported(record.key, batches)

    async def _report(self, record: Dispatch, outcome: Outcome) -> bool:
        """Report the outcome to Temporal. Return False if the next try of the activity must deliver it."""
        handle = self._context.activity(record)
        try:
            if outcome.kind is OutcomeKind.DONE:
                result = AttemptResult(worker_id=outcome.worker_id, batches=record.batches)
                await self._call(lambda: handle.complete(result, rpc_timeout=_RPC_TIMEOUT))
            elif outcome.kind is OutcomeKind.CANCELLED:
                await self._report_cancelled_outcome(record, outcome)
            elif outcome.failure is not None:
                await self._fail(record, _name_worker(outcome.failure, outcome.worker_id))
        except RPCError as error:
            if not is_absent(error):
                raise
            return not await self._is_pending(record)
        return True

    async def _report_cancelled_outcome(self, record: Dispatch, outcome: Outcome) -> None:
        try:
            await self._report_cancellation(record)
            return
        except NotRequested:
            flag = await self._context.db(lambda: self._context.stores.tasks.flags.find_flag(record.attempt))
        if flag is not None:
            await self._report_after_flag(record, flag)
        elif record.cancel is None:
            unrequested = not_requested(outcome.at, outcome.worker_id)
            await self._report(record, unrequested)
        else:
            await self._fail(record, withdrawn())

    async def _report_after_flag(self, record: Dispatch, flag: CancelFlag) -> None:
        """Report the cancellation once Temporal has requested it.

        A flag without a run id was set by another program; FlowKit then requests the cancel of the task itself.
        """
        if flag.run_id is None:
            run = self._context.client.get_workflow_handle(record.attempt.task_id, run_id=record.run_id)
            await self._call(lambda: run.cancel(reason=clean(flag.reason), rpc_timeout=_RPC_TIMEOUT))
        end = self._context.now() + _CANCEL_DELIVERY_SEC
        while self._context.now() < end:
            try:
                return await self._report_cancellation(record)
            except NotRequested:
                await asyncio.sleep(0.2)
        await self._fail(record, cancel_pending(flag))

    async def _fail(self, record: Dispatch, failure: AttemptFailure) -> None:
        error = failed_attempt(failure)
        await self._call(lambda: self._context.activity(record).fail(error, rpc_timeout=_RPC_TIMEOUT))

    async def _report_cancellation(self, record: Dispatch) -> None:
        try:
            await self._call(
                lambda: self._context.activity(record).report_cancellation(rpc_timeout=_RPC_TIMEOUT)
            )
        except RPCError as error:
            if error.status is RPCStatusCode.INVALID_ARGUMENT:
                raise NotRequested from None
            raise

    async def _is_pending(self, record: Dispatch) -> bool:
        """Return whether the activity is pending. Temporal rejects a report between two tries of a pending activity."""
        client, task_id = self._context.client, record.attempt.task_id
        found = await self._call(
            lambda: look_up(client, task_id, run_id=record.run_id, rpc_timeout=_RPC_TIMEOUT)
        )
        if found.description is None or found.state is not WorkflowState.OPEN:
            return False
        pending_ids = {each.activity_id for each in found.description.raw_description.pending_activities}
        return activity_id(record) in pending_ids

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call()`. Retry it while Temporal is unavailable."""
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
            reraise=True,
        ):
            with attempt:
                return await call()
        raise AssertionError("tenacity stopped although it has no limit")


def _name_worker(failure: AttemptFailure, worker_id: str) -> AttemptFailure:
    """Return the failure of a handler with its worker.

    What external workers announce, such as versions, is not copied.
    """
    is_of_handler = failure.kind is FailureKind.FAILURE
    return replace(failure, worker=visible(worker_id)) if is_of_handler else failure


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) or (
        isinstance(error, RPCError) and error.status not in _NOT_TRANSIENT and not is_absent(error)
    )
