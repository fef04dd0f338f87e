"""Supervises the attempts of one bridge: sends their heartbeats, and finds what must end them (`attempt_checks`).

The heartbeats have a loop of their own, which waits neither for Kafka nor for MongoDB. The checks handle
the responses.

Other bridges write the same dispatch records, so the supervisor regularly reads those that have changed. It ends an
attempt only by a conditional write, which fails if another bridge has changed the attempt meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio.client import AsyncActivityCancelledError, WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.adapters.dispatches.record import DispatchState
from flowkit.attempt.background import error_summary
from flowkit.attempt.supervision import heartbeat_pause_sec
from flowkit.bridge.attempt_checks import Answer, AttemptChecks, Supervised, update
from flowkit.bridge.rules.outcomes import cancelled, refused
from flowkit.bridge.shown_waits import ShownWaits
from flowkit.errors import FlowKitError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from flowkit.adapters.dispatches.record import Dispatch
    from flowkit.bridge.command_watch import CommandWatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.delivery import Delivery
    from flowkit.bridge.pulled_inputs import PulledInputs
    from flowkit.bridge.signals import Signals

_logger = logging.getLogger("flowkit.bridge")

TICK_SEC = 0.5
_OVERLAP_SEC = 5.0
"""Records are read again if they changed up to this long ago, because the clocks of bridges differ."""

_FULL_READ_SEC = 15.0
_CONCURRENT_HEARTBEATS = 20
_CONCURRENT_CHECKS = 20
_RPC_TIMEOUT = timedelta(seconds=10)
_FLAG_POLL_SEC = 1.0
_FIRST_HEARTBEAT_SEC = 1.5
"""Attempts that end within this time send no heartbeat, which limits the load of short nodes."""

ORPHANS_SEC = 60.0
_ORPHAN_AGE_SEC = 600.0
"""Time since the last change after which the bridge checks whether the workflow of an attempt still runs."""

_RELEASE_SEC = 5.0


class Supervisor:
    """The attempts that one bridge supervises."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: Signals,
        inputs: PulledInputs,
        commands: CommandWatch,
    ) -> None:
        self._context = context
        self._dispatches = context.stores.dispatches
        self._delivery = delivery
        self._commands = commands
        self._checks = AttemptChecks(
            context, delivery=delivery, signals=signals, inputs=inputs, commands=commands, ended=self.drop
        )
        self._waits = ShownWaits(context, commands)
        self._attempts: dict[str, Supervised] = {}
        self._slots = asyncio.Semaphore(_CONCURRENT_HEARTBEATS)
        self._heartbeats: set[asyncio.Task[None]] = set()
        self._read_at = 0.0
        self._full_read_at = 0.0
        self._flags_at = 0.0
        self._orphans_after = ""
        """Key of the last record that was checked by `end_orphans`; the next call continues behind it."""

    @property
    def attempts(self) -> int:
        """Number of supervised attempts."""
        return len(self._attempts)

    @property
    def sending(self) -> int:
        """Number of heartbeats that wait for their turn or for Temporal."""
        return len(self._heartbeats)

    def watch(self, record: Dispatch) -> None:
        """Start to supervise an attempt."""
        now = self._context.monotonic()
        first = now + min(_FIRST_HEARTBEAT_SEC, self._pause_sec(record.attempt.lease_ttl_sec))
        self._attempts[record.key] = Supervised(record=record, heard_at=now, next_heartbeat=first)

    def known(self, key: str) -> Dispatch | None:
        """Return the record of a supervised attempt as this process knows it, or None.

        Another bridge may have changed it. Every write about an attempt is conditional, so such a change is noticed.
        """
        attempt = self._attempts.get(key)
        return None if attempt is None else attempt.record

    def saw(self, record: Dispatch) -> None:
        """Replace the known record of an attempt, after this process has changed it."""
        if (attempt := self._attempts.get(record.key)) is not None:
            update(attempt, record, self._context.monotonic())

    def refresh_soon(self) -> None:
        """Read all records at the next tick, because another bridge or part has changed some."""
        self._full_read_at = 0.0

    def drop(self, key: str) -> None:
        """Stop supervising an attempt, because it has ended."""
        self._attempts.pop(key, None)

    async def tick(self) -> None:
        """Check all attempts once. Runs twice a second."""
        await self._refresh()
        await self._read_flags()
        now = self._context.monotonic()
        await self._commands.refresh(self.records)
        self._waits.refresh(self.records)
        await self._for_each(self._attempts.values(), lambda attempt: self._check(attempt, now))

    async def _for_each(
        self, attempts: Iterable[Supervised], act: Callable[[Supervised], Awaitable[None]]
    ) -> None:
        """Call `act` for each of the attempts, several at a time. The error of one attempt does not affect the others."""
        left = iter([*attempts])

        async def act_on_some() -> None:
            for attempt in left:
                try:
                    await act(attempt)
                    attempt.problem = ""
                except FlowKitError as error:
                    await self._failed(attempt, error)
                except Exception as error:
                    if attempt.problem != (problem := error_summary(error)):
                        attempt.problem = problem
                        _logger.exception("unexpected error in the check of attempt %s", attempt.record.key)

        await asyncio.gather(*(act_on_some() for _ in range(_CONCURRENT_CHECKS)))

    async def _failed(self, attempt: Supervised, error: FlowKitError) -> None:
        """End an attempt if a retry of its check does not help. Log other errors once; the next tick repeats the check."""
        node_id = attempt.record.attempt.node_id
        if not error.retryable:
            try:
                await self._checks.end(attempt, refused(error, self._context.now()), stop_worker=True)
            except FlowKitError as problem:
                error = problem
        if attempt.problem != str(error) and not isinstance(error, KafkaUnavailable):
            _logger.warning("could not check node %s: %s", node_id, error)
        attempt.problem = str(error)

    async def _check(self, attempt: Supervised, now: float) -> None:
        answer, attempt.answer = attempt.answer, None
        if answer is Answer.UNKNOWN:
            await self._unknown_to_temporal(attempt)
        elif answer is Answer.CANCEL:
            await self._request_cancel(attempt, None)
        if self._attempts.get(attempt.record.key) is attempt:
            await self._checks.check(attempt, now)

    async def stop(self) -> None:
        """Stop heartbeats, and return the attempts to Temporal, so that the next bridge adopts them at once."""
        sending = [*self._heartbeats]
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await self._waits.stop()
        releases = [
            asyncio.create_task(self._release(each.record))
            for each in self._attempts.values()
            if not each.record.cancel
        ]
        if releases:
            _, pending = await asyncio.wait(releases, timeout=_RELEASE_SEC)
            for each in pending:
                each.cancel()

    async def _release(self, record: Dispatch) -> None:
        """Fail this try of the activity. Temporal then runs it again, on any bridge that serves the role."""
        error = ApplicationError("the bridge is stopping", type=reason_codes.BRIDGE_STOPPING)
        async with self._slots:
            try:
                await self._context.activity(record).fail(error, rpc_timeout=_RPC_TIMEOUT)
            except RPCError as problem:
                _logger.info("attempt %s was not returned: %s", record.key, problem.message)

    @property
    def records(self) -> list[Dispatch]:
        """The records of the supervised attempts."""
        return [each.record for each in self._attempts.values()]

    async def _refresh(self) -> None:
        """Read the records that have changed. Other bridges may have renewed, ended or adopted them."""
        now = self._context.now()
        full = now - self._full_read_at >= _FULL_READ_SEC
        since = None if full else self._read_at - _OVERLAP_SEC
        owner = self._context.bridge_id
        found = await self._context.db(lambda: self._dispatches.owned(owner, since))
        self._read_at = now
        if full:
            self._full_read_at = now
            known = {record.key for record in found}
            for key in [key for key in self._attempts if key not in known]:
                await self._confirm(key)
        for record in found:
            self._take(record)

    async def _confirm(self, key: str) -> None:
        """Drop an attempt that this bridge no longer supervises. Keep one that was added during the full read."""
        stored = await self._context.db(lambda: self._dispatches.find_all([key]))
        record = stored.get(key)
        if record is None or record.owner != self._context.bridge_id or not record.active:
            self.drop(key)

    def _take(self, record: Dispatch) -> None:
        if not record.active:
            self.drop(record.key)
        elif (attempt := self._attempts.get(record.key)) is not None:
            update(attempt, record, self._context.monotonic())

    async def _read_flags(self) -> None:
        """Find cancels through the flags in MongoDB, which is faster than heartbeats if there are many attempts."""
        now = self._context.now()
        if now - self._flags_at < _FLAG_POLL_SEC or not self._attempts:
            return
        self._flags_at = now
        tasks = self._context.stores.tasks
        ids = sorted({each.record.attempt.task_id for each in self._attempts.values()})
        flagged = await self._context.db(lambda: tasks.flagged(ids))
        concerned = (
            each
            for each in self._attempts.values()
            if each.record.attempt.task_id in flagged and each.record.cancel is None
        )
        await self._for_each(concerned, self._read_flag)

    async def _read_flag(self, attempt: Supervised) -> None:
        record, tasks = attempt.record, self._context.stores.tasks
        flag = await self._context.db(lambda: tasks.raised_flag(record.attempt))
        if flag is not None and flag.concerns(record.run_id):
            await self._request_cancel(attempt, flag.reason)

    async def send_heartbeats(self) -> None:
        """Start the heartbeats that are due, except for attempts whose last one is still in progress."""
        now = self._context.monotonic()
        for attempt in self._attempts.values():
            if now >= attempt.next_heartbeat and not attempt.sending:
                attempt.next_heartbeat = now + self._pause_sec(attempt.record.attempt.lease_ttl_sec)
                attempt.sending = True
                sending = asyncio.create_task(self._heartbeat(attempt))
                self._heartbeats.add(sending)
                sending.add_done_callback(self._heartbeats.discard)

    def _pause_sec(self, lease_ttl_sec: float) -> float:
        return heartbeat_pause_sec(len(self._attempts), lease_ttl_sec)

    async def _heartbeat(self, attempt: Supervised) -> None:
        """Send a heartbeat. The response reports a cancel, or that Temporal no longer knows the activity."""
        handle = self._context.activity(attempt.record)
        try:
            async with self._slots:
                await handle.heartbeat(self._details(attempt), rpc_timeout=_RPC_TIMEOUT)
        except AsyncActivityCancelledError as error:
            if error.details is None or error.details.cancel_requested:
                attempt.answer = Answer.CANCEL
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                attempt.answer = Answer.UNKNOWN
            else:
                _logger.info("heartbeat of %s was not sent: %s", attempt.record.key, error.message)
        finally:
            attempt.sending = False

    def _details(self, attempt: Supervised) -> dict[str, object]:
        record = attempt.record
        if record.lease is None:
            return {"state": "queued", **self._commands.details(record)}
        return {"state": "running", "worker": record.lease.worker_id, "batches": record.batches}

    async def _unknown_to_temporal(self, attempt: Supervised) -> None:
        """Stop supervising an attempt whose activity Temporal does not know.

        End it if its workflow is closed, or if it was to be cancelled: a workflow that stops runs no activity again, so
        no bridge would adopt the record.
        """
        closed = await self._is_closed(attempt.record)
        record = attempt.record
        if closed is None or self._attempts.get(record.key) is not attempt:
            return
        if closed or record.cancel is not None:
            await self._checks.end(attempt, cancelled(self._context.now()), stop_worker=True)
        else:
            owner = self._context.bridge_id
            await self._context.db(lambda: self._dispatches.disown(record.key, owner))
            self.drop(record.key)

    async def _is_closed(self, record: Dispatch) -> bool | None:
        """Return whether the workflow run of an attempt has ended; None if Temporal is unavailable."""
        run = self._context.client.get_workflow_handle(record.attempt.task_id, run_id=record.run_id)
        try:
            description = await run.describe(rpc_timeout=_RPC_TIMEOUT)
        except RPCError as error:
            return True if error.status is RPCStatusCode.NOT_FOUND else None
        return description.status is not WorkflowExecutionStatus.RUNNING

    async def end_orphans(self) -> None:
        """End records that no bridge supervises and whose workflow has ended, for example by *Terminate*.

        Deliver outcomes that no bridge has delivered, or close their records if a bridge died after the delivery.
        Runs each minute.
        """
        now, roles = self._context.now(), self._context.roles
        before, after = now - _ORPHAN_AGE_SEC, self._orphans_after
        found = await self._context.db(lambda: self._dispatches.unchanged_since(before, roles, after=after))
        self._orphans_after = found[-1].key if found else ""
        heard_at = self._context.monotonic()
        await self._for_each(
            [Supervised(record=record, heard_at=heard_at) for record in found], self._end_orphan
        )

    async def _end_orphan(self, orphan: Supervised) -> None:
        record = orphan.record
        if record.state is DispatchState.ENDED:
            self._delivery.start(record, overdue=True)
        elif record.key not in self._attempts and await self._is_closed(record):
            await self._checks.end(orphan, cancelled(self._context.now()), stop_worker=True)

    async def _request_cancel(self, attempt: Supervised, reason: str | None) -> None:
        record, now = attempt.record, self._context.now()
        if record.cancel is not None:
            return
        why = reason or await self._cancel_reason(record)
        updated = await self._context.db(lambda: self._dispatches.request_cancel(record.key, why, now))
        if updated is None:
            return
        update(attempt, updated, self._context.monotonic())

    async def _cancel_reason(self, record: Dispatch) -> str:
        tasks = self._context.stores.tasks
        return await self._context.db(lambda: tasks.cancel_flag(record.attempt)) or "cancelled"
