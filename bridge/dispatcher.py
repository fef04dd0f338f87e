"""The activity that starts an attempt of an external role: it writes the dispatch record and sends TASK_START.

The activity completes asynchronously: a bridge completes it when the worker's events have arrived. If no bridge sends
heartbeats meanwhile, Temporal runs the activity again. This second try of the same attempt *adopts* the dispatch
record: its bridge supervises the attempt from then on, and does not send the command again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit import reason_codes
from flowkit.adapters.dispatches import Dispatch, key_of
from flowkit.adapters.tasks.cancel_flags import Flagged
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.attempt.failures import failed_attempt, from_error, lost, unexpected
from flowkit.attempt.storage import begin, check_database, resolve
from flowkit.attempt.supervision import HeartbeatThrottle, count_begin, report_flag, sending_heartbeats
from flowkit.bridge.commands import LateCommands
from flowkit.bridge.rules.messages import pull_of, task_start
from flowkit.bridge.rules.outcomes import cancelled, dispatch_lost, not_in_topic, outcome_of_error
from flowkit.core.instruments import DISPATCHES
from flowkit.errors import BadInput, EpochTaken, FlowKitError, GraphError
from flowkit.graph.submission import pin_problem
from flowkit.models import AttemptInput, AttemptResult, NodeIO
from flowkit.models.waits import for_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from flowkit.adapters.dispatches import Outcome
    from flowkit.bridge.commands import CommandSender, Placement
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.delivery import Delivery, FirstBatches
    from flowkit.bridge.pulled_inputs import PulledInputs
    from flowkit.bridge.signals import WorkerSignals
    from flowkit.bridge.supervisor import AttemptSupervisor

_logger = logging.getLogger("flowkit.bridge")

CONCURRENT_STARTS = 100
"""Number of attempts of a role that a bridge starts, or adopts, at the same time."""

_STOP_SEC = 5.0


class AttemptDispatcher:
    """Starts and adopts attempts of external roles."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: WorkerSignals,
        supervisor: AttemptSupervisor,
        inputs: PulledInputs,
        first_batches: FirstBatches,
        placement: Placement,
        sender: CommandSender,
    ) -> None:
        self._context = context
        self._stores = context.stores
        self._dispatches = context.stores.dispatches
        self._delivery = delivery
        self._signals = signals
        self._supervisor = supervisor
        self._inputs = inputs
        self._first_batches = first_batches
        self._placement = placement
        self._sender = sender
        self._late = LateCommands(context, signals)
        self._throttle = HeartbeatThrottle()
        self._background: set[asyncio.Task[None]] = set()
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(CONCURRENT_STARTS))
        """The turns of each role. Attempts that wait for an earlier one need none, so that they do not delay others."""

    def activity_for(self, role: str) -> Callable[[AttemptInput], Coroutine[Any, Any, AttemptResult]]:
        """Return the activity that runs attempts of `role`."""

        @activity.defn(name=role)
        async def dispatch(attempt: AttemptInput) -> AttemptResult:
            return await self.run(attempt)

        return dispatch

    async def run(self, attempt: AttemptInput) -> AttemptResult:
        """Start or adopt the attempt of the current activity. Always raises: an error, or `raise_complete_async`."""
        # Heartbeats report a cancel while the dispatch waits for Kafka or MongoDB.
        async with sending_heartbeats(lambda: self._throttle.pause_sec(attempt.lease_ttl_sec)):
            await self._run(attempt)
        activity.raise_complete_async()

    async def _run(self, attempt: AttemptInput) -> None:
        try:
            with self._throttle.attempt():
                await self._start_or_adopt(attempt)
        except asyncio.CancelledError:
            self._end_if_cancelled(attempt)
            raise
        except Flagged as error:
            raise failed_attempt(await report_flag(attempt, error.flag)) from None
        except FlowKitError as error:
            raise failed_attempt(from_error(error)) from None
        except ApplicationError:
            raise
        except Exception as error:
            _logger.exception("node %s was not dispatched", attempt.node_id)
            raise failed_attempt(unexpected(error)) from None

    def _end_if_cancelled(self, attempt: AttemptInput) -> None:
        """End the record of an attempt that Temporal cancels. Raise an error, for another try, if the bridge stops.

        Otherwise this try is outdated: another one continues with the record.
        """
        details = activity.cancellation_details()
        if details is not None and details.worker_shutdown:
            raise ApplicationError("the bridge is stopping", type=reason_codes.BRIDGE_STOPPING) from None
        if details is not None and details.cancel_requested:
            self._in_background(self._end_cancelled(attempt))

    async def _end_cancelled(self, attempt: AttemptInput) -> None:
        key = key_of(attempt.task_id, attempt.node_id, attempt.epoch)
        ended = await self._end_own(key, cancelled(self._context.now()))
        if ended is not None:
            self._supervisor.drop(key)
            self._signals.stop_owner(ended)

    async def _start_or_adopt(self, attempt: AttemptInput) -> None:
        """Start the attempt if it has no dispatch record, otherwise adopt it."""
        check_database(attempt, self._context.deployment, "bridge")
        if attempt.pin:
            raise GraphError([pin_problem(attempt.node_id, attempt.role)])
        info = activity.info()
        run_id, is_second_try = info.workflow_run_id or "", info.attempt > 1
        record = None
        if is_second_try:
            task_id, node_id, epoch = attempt.task_id, attempt.node_id, attempt.epoch
            record = await self._context.db(lambda: self._dispatches.find(task_id, node_id, epoch))
            if record is None:
                await self._check_not_begun(attempt)
        if record is None and attempt.epoch > 1:
            await self._await_earlier(attempt, run_id)
        async with self._turns[attempt.role]:
            if record is None:
                record = await self._start(attempt, run_id)
            if record is not None:
                await self._adopt(record, run_id)

    async def _check_not_begun(self, attempt: AttemptInput) -> None:
        """Raise a loss if a native worker has begun the attempt, before its role moved to external workers.

        A bridge that has begun it without a record has not sent its command.
        """
        holder = await self._context.db(lambda: self._stores.tasks.attempts.find_holder(attempt))
        if holder is not None and not holder[0].startswith(BRIDGE_PREFIX):
            text = "the native worker that ran the attempt is gone, and external workers run the role now"
            stored = self._stores.artifacts
            settled = await self._context.db(lambda: stored.count_settled(attempt))
            raise failed_attempt(lost(reason_codes.LEASE_LOST, text, settled=settled))

    async def _start(self, attempt: AttemptInput, run_id: str) -> Dispatch | None:
        """Dispatch a new attempt. If it has a record already, return that one instead."""
        lease = self._context.leases[attempt.role]
        if not lease.is_held:
            await lease.check()
        attempt, mask = await self._context.portal.run(resolve(self._stores.tasks, attempt))
        try:
            record = await self._new_record(attempt, run_id)
        except BadInput as error:
            raise BadInput(mask.error(str(error)), code=error.reason_code) from None
        offset: int | None = None
        try:
            stored = await self._insert_and_begin(attempt, record)
            if stored.cancel_token != record.cancel_token:
                return stored
            count_begin(attempt)
            await self._prepare(attempt, record)
            offset = await self._sender.send(attempt, record)
        except FlowKitError as error:
            await self._end_own(record.key, outcome_of_error(error, self._context.now()))
            raise
        finally:
            self._placement.note_sent(attempt.role, record.partition, offset)
        DISPATCHES.add(attempt.role)
        self._supervisor.watch(replace(record, offset=offset))
        self._in_background(self._store_offset(record, offset))
        return None

    async def _new_record(self, attempt: AttemptInput, run_id: str) -> Dispatch:
        """Return the record of a new attempt. It is not stored yet."""
        pull = pull_of(attempt)
        partition, end_offset = await self._placement.choose(attempt.role)
        token, now = str(uuid.uuid4()), self._context.now()
        return Dispatch(
            attempt=replace(attempt, io=NodeIO()),
            run_id=run_id,
            queue=self._context.config.queue,
            topic=self._context.topics.cmd(attempt.role),
            partition=partition,
            end_offset=end_offset,
            dedup_id=task_start(attempt, token, now).dedup_id,
            cancel_token=token,
            owner=self._context.bridge_id,
            created_at=now,
            pull=pull,
        )

    async def _insert_and_begin(self, attempt: AttemptInput, record: Dispatch) -> Dispatch:
        """Store the record, and concurrently take the epoch in the task document. Return the stored record."""
        stored: Dispatch | BaseException
        stored, begun = await asyncio.gather(
            self._context.db(lambda: self._dispatches.insert(record)),
            self._begin(attempt, record.run_id),
            return_exceptions=True,
        )
        if isinstance(stored, BaseException):
            raise stored
        if isinstance(begun, BaseException) and stored.cancel_token == record.cancel_token:
            raise begun
        return stored

    async def _begin(self, attempt: AttemptInput, run_id: str) -> None:
        """Take the epoch in the task document. The same run may do that again."""
        stores, bridge_id = self._stores, self._context.bridge_id
        await self._context.db(lambda: begin(stores.tasks, stores.artifacts, attempt, run_id, bridge_id))

    async def _prepare(self, attempt: AttemptInput, record: Dispatch) -> None:
        """End earlier attempts of the node, and prepare its inputs."""
        if attempt.epoch > 1:
            await self._end_earlier(attempt)
            await self._first_batches.resumed(record)
        problem = await self._inputs.prepare(record) if record.pull is not None else None
        if problem is not None and problem.failure is not None:
            await self._end_own(record.key, problem)
            raise failed_attempt(problem.failure)

    async def _find_open(self, attempt: AttemptInput) -> list[Dispatch]:
        task_id, node_id, epoch = attempt.task_id, attempt.node_id, attempt.epoch
        return await self._context.db(lambda: self._dispatches.find_open_before(task_id, node_id, epoch))

    async def _end_earlier(self, attempt: AttemptInput) -> None:
        """End records of earlier epochs, which a *Reset* of the workflow leaves open, and stop their workers."""
        for record in await self._find_open(attempt):
            await self._end_undelivered(record.key, cancelled(self._context.now()))
            self._signals.stop_owner(record)

    async def _await_earlier(self, attempt: AttemptInput, run_id: str) -> None:
        """End earlier attempts of the node, and wait until no worker can run one of them that was cancelled.

        The attempt has no record meanwhile, so that another bridge waits on if this one stops.
        """
        if not await self._late.find(attempt) and not await self._find_open(attempt):
            return
        await self._begin(attempt, run_id)
        await self._end_earlier(attempt)
        late = await self._late.find(attempt)
        if not late:
            return
        epochs = ", ".join(str(each.attempt.epoch) for each in late)
        text = f"an external worker of role {attempt.role}, which has to skip the cancelled attempt {epochs} first"
        await self._show_wait(attempt, run_id, text)
        try:
            await self._late.settle(attempt)
        finally:
            self._in_background(self._show_wait(attempt, run_id, None))

    async def _show_wait(self, attempt: AttemptInput, run_id: str, text: str | None) -> None:
        attempts, wait = self._stores.tasks.attempts, None if text is None else for_worker(text)
        await self._context.db(lambda: attempts.show_wait(attempt, run_id, wait, holders=BRIDGE_PREFIX))

    async def _adopt(self, record: Dispatch, run_id: str) -> None:
        """Continue an attempt that this or another bridge has dispatched."""
        if record.run_id != run_id:
            raise EpochTaken(record.attempt.epoch)
        if not record.active:
            await self._delivery.deliver(record)
            return
        bridge_id, now = self._context.bridge_id, self._context.now()
        adopted = await self._context.db(lambda: self._dispatches.adopt(record.key, bridge_id, now))
        if adopted is None:
            raise failed_attempt(not_in_topic())
        if adopted.offset is None and adopted.lease is None:
            adopted = await self._locate(adopted)
        if adopted is not None:
            self._supervisor.watch(adopted)
            await self._first_batches.resumed(adopted)

    async def _locate(self, record: Dispatch) -> Dispatch | None:
        """Find the command, and return the record with its offset. If it was never sent, end the attempt."""
        found = await self._sender.search(record)
        if found is not None:
            await self._store_offset(record, found)
            return replace(record, offset=found)
        why = "the bridge stopped before it sent the command"
        outcome = dispatch_lost(why, self._context.now())
        ended = await self._context.db(lambda: self._dispatches.end_unchanged(record, outcome))
        if ended is not None:
            await self._delivery.deliver(ended)
        return None

    async def _store_offset(self, record: Dispatch, offset: int) -> None:
        await self._context.db(lambda: self._dispatches.store_offset(record.key, record.partition, offset))

    async def _end_own(self, key: str, outcome: Outcome) -> Dispatch | None:
        """End a record, as `_end_undelivered` does, unless another bridge has adopted it."""
        return await self._end_undelivered(key, outcome, owner=self._context.bridge_id)

    async def _end_undelivered(self, key: str, outcome: Outcome, owner: str | None = None) -> Dispatch | None:
        """End a record without delivery: the current activity raises the outcome, or the epoch is outdated."""

        async def end() -> Dispatch | None:
            ended = await self._dispatches.end(key, outcome, owner=owner)
            if ended is not None:
                await self._dispatches.mark_reported(key)
            return ended

        return await self._context.db(end)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """Finish the writes in progress. Drop those that take longer than five seconds: MongoDB is unavailable."""
        if self._background:
            await asyncio.wait([*self._background], timeout=_STOP_SEC)
        left = [*self._background]
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
