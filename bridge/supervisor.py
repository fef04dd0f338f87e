"""Supervises the attempts of one bridge: sends their heartbeats, and finds what must end them.

The heartbeats have a loop of their own, which waits neither for Kafka nor for MongoDB. The checks handle
the responses.

Other bridges write the same dispatch records, so the supervisor regularly reads those that have changed. It ends an
attempt only by a conditional write, which fails if another bridge has changed the attempt meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING

from temporalio.client import AsyncActivityCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from flowkit import reason_codes
from flowkit.adapters.dispatches import DispatchState
from flowkit.attempt.background import error_summary
from flowkit.attempt.supervision import count_late_heartbeat, heartbeat_pause_sec
from flowkit.attempt.workflows import WorkflowState, is_absent, look_up
from flowkit.bridge.commands import ShownWaits
from flowkit.bridge.rules.fencing import left_sec
from flowkit.bridge.rules.outcomes import (
    cancelled,
    dispatch_lost,
    idle_sources,
    lease_lost,
    outcome_of_error,
    timeout,
)
from flowkit.errors import FlowKitError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from flowkit.adapters.dispatches import Dispatch, Outcome, WorkerLease
    from flowkit.bridge.commands import CommandWatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.delivery import Delivery
    from flowkit.bridge.pulled_inputs import PulledInputs
    from flowkit.bridge.signals import WorkerSignals

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

_ADVANCE_SEC = 1.0
"""How often the inputs of a running node that pulls are reordered."""

_IDLE_SEC = 5.0
"""How long none of the sources of a pulling node may be running before it yields its worker, as native workers do."""


class HeartbeatResponse(Enum):
    """How Temporal has responded to a heartbeat."""

    CANCEL = auto()
    """The attempt is to be cancelled."""
    UNKNOWN = auto()
    """Temporal does not know the activity."""


@dataclass(kw_only=True, slots=True)
class Supervised:
    """One attempt that this bridge supervises. Its times are those of the bridge's monotonic clock."""

    record: Dispatch
    heard_at: float
    """When this bridge last saw a new lease, or a new event of its worker."""
    next_heartbeat: float = 0.0
    sending: bool = False
    """Whether a heartbeat waits for its turn or for Temporal."""
    response: HeartbeatResponse | None = None
    """The response to a heartbeat, which the next check handles."""
    problem: str = ""
    """The error of the last check, if it failed. It is logged once."""
    queried: bool = False
    """Whether the bridge has sent a query about the attempt since the last event of its worker."""
    suspected_because: str = ""
    """What seems to be lost: the `command` or the `lease`."""
    unread_until: dict[int, int] = field(default_factory=dict)
    """Ends of the status topic's partitions when the suspicion arose; empty without a suspicion.

    An event before these ends may refute the suspicion, so the bridges process all of them before the attempt ends.
    """
    advanced_at: float = 0.0
    """When the inputs were last reordered."""
    idle_since: float | None = None
    """Since when it waits for sources of which none is running."""

    def update(self, record: Dispatch, now: float) -> None:
        """Replace the record at the monotonic time `now`. A new or renewed lease ends the suspicion.

        A record that was read may be older than what this process knows from its own writes; that knowledge is kept.
        """
        if _is_outdated(record, self.record):
            return
        if record.lease is not None and record.lease.is_later(self.record.lease):
            self.heard_at, self.queried, self.unread_until = now, False, {}
        self.record = _keep_known(record, self.record)


class AttemptSupervisor:
    """The attempts that one bridge supervises."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: WorkerSignals,
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

    def count_attempts(self) -> Counter[str]:
        """Return the numbers of supervised attempts by role, without roles that have none."""
        return Counter(each.record.attempt.role for each in self._attempts.values())

    @property
    def sending(self) -> int:
        """Number of heartbeats that wait for their turn or for Temporal."""
        return len(self._heartbeats)

    def watch(self, record: Dispatch) -> None:
        """Start to supervise an attempt."""
        now = self._context.monotonic()
        first = now + min(_FIRST_HEARTBEAT_SEC, self._pause_sec(record.attempt.lease_ttl_sec))
        self._attempts[record.key] = Supervised(record=record, heard_at=now, next_heartbeat=first)

    def record_for(self, key: str) -> Dispatch | None:
        """Return the record of a supervised attempt as this process knows it, or None.

        Another bridge may have changed it. Every write about an attempt is conditional, so such a change is noticed.
        """
        attempt = self._attempts.get(key)
        return None if attempt is None else attempt.record

    def update_record(self, record: Dispatch) -> None:
        """Replace the known record of an attempt, after this process has changed it."""
        if (attempt := self._attempts.get(record.key)) is not None:
            attempt.update(record, self._context.monotonic())

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
        await self._commands.refresh(self.list_records())
        self._waits.refresh(self.list_records())
        await self._for_each(self._attempts.values(), lambda attempt: self._check(attempt, now))

    async def _for_each(
        self, attempts: Iterable[Supervised], act: Callable[[Supervised], Awaitable[None]]
    ) -> None:
        """Call `act` for each of the attempts, several at a time.

        The error of one attempt does not affect the others.
        """
        left = iter([*attempts])

        async def act_on_some() -> None:
            for attempt in left:
                try:
                    await act(attempt)
                    attempt.problem = ""
                except FlowKitError as error:
                    await self._handle_error(attempt, error)
                except Exception as error:
                    if attempt.problem != (problem := error_summary(error)):
                        attempt.problem = problem
                        _logger.exception("unexpected error in the check of attempt %s", attempt.record.key)

        await asyncio.gather(*(act_on_some() for _ in range(_CONCURRENT_CHECKS)))

    async def _handle_error(self, attempt: Supervised, error: FlowKitError) -> None:
        """End an attempt if a retry of its check does not help.

        Log other errors once; the next tick repeats the check.
        """
        node_id = attempt.record.attempt.node_id
        if not error.retryable:
            try:
                await self._checks.end(
                    attempt, outcome_of_error(error, self._context.now()), stop_worker=True
                )
            except FlowKitError as problem:
                error = problem
        if attempt.problem != str(error) and not isinstance(error, KafkaUnavailable):
            _logger.warning("could not check node %s: %s", node_id, error)
        attempt.problem = str(error)

    async def _check(self, attempt: Supervised, now: float) -> None:
        response, attempt.response = attempt.response, None
        if response is HeartbeatResponse.UNKNOWN:
            await self._handle_unknown_activity(attempt)
        elif response is HeartbeatResponse.CANCEL:
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

    def list_records(self) -> list[Dispatch]:
        """Return the records of the supervised attempts."""
        return [each.record for each in self._attempts.values()]

    async def _refresh(self) -> None:
        """Read the records that have changed. Other bridges may have renewed, ended or adopted them."""
        now = self._context.now()
        full = now - self._full_read_at >= _FULL_READ_SEC
        since = None if full else self._read_at - _OVERLAP_SEC
        owner = self._context.bridge_id
        owned = await self._context.db(lambda: self._dispatches.find_owned(owner, since))
        self._read_at = now
        if full:
            self._full_read_at = now
            known = {record.key for record in owned}
            for key in [key for key in self._attempts if key not in known]:
                await self._drop_unless_owned(key)
        for record in owned:
            self._apply_stored(record)

    async def _drop_unless_owned(self, key: str) -> None:
        """Drop an attempt that this bridge no longer supervises. Keep one that was added during the full read."""
        stored = await self._context.db(lambda: self._dispatches.find_all([key]))
        record = stored.get(key)
        if record is None or record.owner != self._context.bridge_id or not record.active:
            self.drop(key)

    def _apply_stored(self, record: Dispatch) -> None:
        if not record.active:
            self.drop(record.key)
        elif (attempt := self._attempts.get(record.key)) is not None:
            attempt.update(record, self._context.monotonic())

    async def _read_flags(self) -> None:
        """Find cancels through the flags in MongoDB, which is faster than heartbeats if there are many attempts."""
        now = self._context.now()
        if now - self._flags_at < _FLAG_POLL_SEC or not self._attempts:
            return
        self._flags_at = now
        tasks = self._context.stores.tasks
        ids = sorted({each.record.attempt.task_id for each in self._attempts.values()})
        flagged = await self._context.db(lambda: tasks.flags.find_flagged(ids))
        concerned = (
            each
            for each in self._attempts.values()
            if each.record.attempt.task_id in flagged and each.record.cancel is None
        )
        await self._for_each(concerned, self._read_flag)

    async def _read_flag(self, attempt: Supervised) -> None:
        record, tasks = attempt.record, self._context.stores.tasks
        flag = await self._context.db(lambda: tasks.flags.find_flag(record.attempt))
        if flag is not None and flag.concerns(record.run_id):
            await self._request_cancel(attempt, flag.reason)

    async def send_heartbeats(self) -> None:
        """Start the heartbeats that are due, except for attempts whose last one is still in progress."""
        now = self._context.monotonic()
        for attempt in self._attempts.values():
            if now >= attempt.next_heartbeat and not attempt.sending:
                run = attempt.record.attempt
                pause = self._pause_sec(run.lease_ttl_sec)
                count_late_heartbeat(run.role, now - attempt.next_heartbeat, pause)
                attempt.next_heartbeat = now + pause
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
                await handle.heartbeat(self._heartbeat_details(attempt), rpc_timeout=_RPC_TIMEOUT)
        except AsyncActivityCancelledError as error:
            if error.details is None or error.details.cancel_requested:
                attempt.response = HeartbeatResponse.CANCEL
        except RPCError as error:
            if is_absent(error):
                attempt.response = HeartbeatResponse.UNKNOWN
            else:
                _logger.info("heartbeat of %s was not sent: %s", attempt.record.key, error.message)
        finally:
            attempt.sending = False

    def _heartbeat_details(self, attempt: Supervised) -> dict[str, object]:
        record = attempt.record
        if record.lease is None:
            return {"state": "queued", **self._commands.details(record)}
        return {"state": "running", "worker": record.lease.worker_id, "batches": record.batches}

    async def _handle_unknown_activity(self, attempt: Supervised) -> None:
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
        """Return whether the workflow run of an attempt has ended; None if Temporal does not know.

        A run that had an attempt has existed, so it was deleted if it is absent.
        """
        client, task_id = self._context.client, record.attempt.task_id
        try:
            found = await look_up(client, task_id, run_id=record.run_id, rpc_timeout=_RPC_TIMEOUT)
        except RPCError:
            return None
        return found.state is not WorkflowState.OPEN

    async def end_orphans(self) -> None:
        """End records that no bridge supervises and whose workflow has ended, for example by *Terminate*.

        Deliver outcomes that no bridge has delivered, or close their records if a bridge died after the delivery.
        Runs each minute.
        """
        now, roles = self._context.now(), self._context.roles
        before, after = now - _ORPHAN_AGE_SEC, self._orphans_after
        found = await self._context.db(lambda: self._dispatches.find_unchanged(before, roles, after=after))
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
        tasks = self._context.stores.tasks
        if not reason:
            flag = await self._context.db(lambda: tasks.flags.find_flag(record.attempt))
            reason = flag.reason if flag else "cancelled"
        updated = await self._context.db(lambda: self._dispatches.request_cancel(record.key, reason, now))
        if updated is None:
            return
        attempt.update(updated, self._context.monotonic())


class AttemptChecks:
    """Checks supervised attempts. Ends them only by conditional writes, because other bridges share the records."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: WorkerSignals,
        inputs: PulledInputs,
        commands: CommandWatch,
        ended: Callable[[str], None],
    ) -> None:
        self._context = context
        self._dispatches = context.stores.dispatches
        self._delivery = delivery
        self._signals = signals
        self._inputs = inputs
        self._commands = commands
        self._on_end = ended
        """Called with the key of an attempt that has ended."""

    async def check(self, attempt: Supervised, now: float) -> None:
        """Check an attempt as of the monotonic time `now`. Raise KafkaUnavailable if a check cannot reach Kafka."""
        record = attempt.record
        if record.cancel is not None:
            await self._check_cancel(attempt, now)
        elif record.state is DispatchState.FINISHING:
            await self._check_inputs(attempt)
        elif record.lease is None:
            await self._check_command(attempt)
        else:
            await self._check_run(attempt, now)

    async def _check_cancel(self, attempt: Supervised, monotonic: float) -> None:
        """Signal the worker until the run ends or the grace period is over. An unread command needs no signal.

        Another attempt follows an interrupted one. A worker writes its artifacts itself, and could
        overwrite those of the next attempt, so an interrupt also waits until the worker has lost its lease.
        """
        record, now = attempt.record, self._context.now()
        assert record.cancel is not None
        deadline = record.cancel.at + record.attempt.cancel_grace_sec
        unread = record.lease is None and self._commands.is_queued(record)
        is_over = now >= deadline and not self._may_still_write(attempt, monotonic)
        if unread or is_over or record.state is DispatchState.FINISHING:
            await self.end(attempt, cancelled(now), stop_worker=not unread)
            return
        worker_id = record.lease.worker_id if record.lease else None
        self._signals.cancel(
            record.attempt, record.cancel.reason, worker_id=worker_id or None, deadline=deadline
        )

    def _may_still_write(self, attempt: Supervised, monotonic: float) -> bool:
        """Return whether an interrupted attempt has a worker whose lease lasts."""
        record = attempt.record
        if record.cancel is None or record.cancel.reason != reason_codes.INTERRUPTED or record.lease is None:
            return False
        return left_sec(record.lease, monotonic - attempt.heard_at) > 0

    async def _check_inputs(self, attempt: Supervised) -> None:
        ended = await self._inputs.check(attempt.record)
        if ended is not None:
            self._on_end(ended.key)
            self._delivery.start(ended)

    async def _check_command(self, attempt: Supervised) -> None:
        """End an attempt whose command was read but not accepted (H2 to H4). The workflow starts the next epoch."""
        if not self._commands.was_read(attempt.record):
            attempt.unread_until = {}
            return
        if await self._is_confirmed(attempt, "command"):
            why = "a worker read the command and dropped it, or the worker group skipped it"
            await self._end_unchanged(attempt, dispatch_lost(why, self._context.now()))

    async def _check_run(self, attempt: Supervised, now: float) -> None:
        record, at = attempt.record, self._context.now()
        lease, limit = record.lease, record.attempt.timeout_sec
        assert lease is not None
        left = left_sec(lease, now - attempt.heard_at)
        if left > 0 and await self._should_yield(attempt, now):
            await self.end(attempt, idle_sources(at), stop_worker=True)
            return
        if limit is not None and record.accepted_at is not None and at >= record.accepted_at + limit:
            await self.end(attempt, timeout(limit, at), stop_worker=True)
            return
        self._query_once(attempt, lease, left)
        if left > 0:
            attempt.unread_until = {}
            return
        if await self._is_confirmed(attempt, "lease"):
            stored = self._context.stores.artifacts
            settled = await self._context.db(lambda: stored.count_settled(record.attempt))
            await self._end_unchanged(attempt, lease_lost(record, at, settled))

    async def _should_yield(self, attempt: Supervised, now: float) -> bool:
        """Look at the inputs of a pulling node. Return whether it has waited too long for sources that do not run."""
        if attempt.record.pull is None or now - attempt.advanced_at < _ADVANCE_SEC:
            return False
        attempt.advanced_at = now
        await self._inputs.advance(attempt.record)
        if not await self._inputs.waits_in_vain(attempt.record):
            attempt.idle_since = None
        elif attempt.idle_since is None:
            attempt.idle_since = now
        return attempt.idle_since is not None and now - attempt.idle_since >= _IDLE_SEC

    def _query_once(self, attempt: Supervised, lease: WorkerLease, left: float) -> None:
        """Send a query when a lease lasts only `left` seconds.

        It reaches an arbitrary worker, so a reply is unlikely (H8).
        """
        window = self._context.config.discovery_window_sec
        if attempt.queried or window <= 0 or left > min(window, lease.ttl_sec / 3):
            return
        attempt.queried = True
        self._signals.discover(attempt.record.attempt)

    async def _is_confirmed(self, attempt: Supervised, why: str) -> bool:
        """Return whether no unprocessed status event can refute that the command or lease (`why`) is lost.

        The first call notes where the status topic ends, and returns False.
        """
        role = attempt.record.attempt.role
        if attempt.suspected_because != why or not attempt.unread_until:
            attempt.suspected_because, attempt.unread_until = why, await self._commands.status_ends(role)
            return False
        return await self._commands.status_processed(role, attempt.unread_until)

    async def _end_unchanged(self, attempt: Supervised, outcome: Outcome) -> None:
        """End an attempt, and stop its worker if it has one, unless its lease has changed since the record was read."""
        record = attempt.record
        ended = await self._context.db(lambda: self._dispatches.end_unchanged(record, outcome))
        if ended is None:
            attempt.unread_until = {}
            await self._read_again(attempt)
            return
        self._finish(ended)

    async def _read_again(self, attempt: Supervised) -> None:
        """Read the record of an attempt, which another bridge has changed."""
        key = attempt.record.key
        found = await self._context.db(lambda: self._dispatches.find_all([key]))
        if key in found:
            attempt.update(found[key], self._context.monotonic())

    async def end(self, attempt: Supervised, outcome: Outcome, *, stop_worker: bool) -> None:
        """Store the outcome of an attempt, and deliver it. Signal its worker to stop if `stop_worker`."""
        key = attempt.record.key
        ended = await self._context.db(lambda: self._dispatches.end(key, outcome))
        if ended is None:
            self._on_end(key)
            return
        self._finish(ended, stop_worker=stop_worker)

    def _finish(self, record: Dispatch, *, stop_worker: bool = True) -> None:
        self._on_end(record.key)
        if stop_worker:
            self._signals.stop_owner(record)
        self._delivery.start(record)


def _is_outdated(record: Dispatch, known: Dispatch) -> bool:
    """Return whether `record` was read before the worker of `known` accepted the run.

    With it, the next event of that worker would seem to come from a worker that does not own the run.
    """
    if known.lease is None or record.lease is None:
        return known.lease is not None
    lease_id = record.lease.lease_id
    return lease_id != known.lease.lease_id and lease_id in known.past_leases


def _keep_known(record: Dispatch, known: Dispatch) -> Dispatch:
    """Return `record` with the offset and the cancel request of `known`, if it has none, and the later lease."""
    offset = known.offset if record.offset is None else record.offset
    cancel, lease = record.cancel or known.cancel, record.lease
    if lease is not None and known.lease is not None and not lease.is_later(known.lease):
        lease = replace(known.lease, ended=lease.ended)
    if (offset, cancel, lease) == (record.offset, record.cancel, record.lease):
        return record
    return replace(record, offset=offset, cancel=cancel, lease=lease)
