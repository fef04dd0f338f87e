"""The checks of one supervised attempt: its cancel, its inputs, its command, its time limit and its lease."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from flowkit.adapters.dispatches.record import DispatchState
from flowkit.bridge.rules.leases import left_sec
from flowkit.bridge.rules.outcomes import cancelled, dispatch_lost, lease_lost, timeout, yielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from flowkit.adapters.dispatches.record import Dispatch, Outcome, WorkerLease
    from flowkit.bridge.command_watch import CommandWatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.delivery import Delivery
    from flowkit.bridge.pulled_inputs import PulledInputs
    from flowkit.bridge.signals import Signals

_ADVANCE_SEC = 1.0
"""How often the inputs of a running node that pulls are reordered."""

_IDLE_SEC = 5.0
"""How long none of the sources of a pulling node may be running before it yields its worker, as native workers do."""


class Answer(Enum):
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
    answer: Answer | None = None
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


class AttemptChecks:
    """Checks supervised attempts. Ends them only by conditional writes, because other bridges share the records."""

    def __init__(
        self,
        context: BridgeContext,
        *,
        delivery: Delivery,
        signals: Signals,
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
            await self._check_cancel(attempt)
        elif record.state is DispatchState.FINISHING:
            await self._check_inputs(attempt)
        elif record.lease is None:
            await self._check_command(attempt)
        else:
            await self._check_run(attempt, now)

    async def _check_cancel(self, attempt: Supervised) -> None:
        """Signal the worker until the run ends or the grace period is over. An unread command needs no signal."""
        record, now = attempt.record, self._context.now()
        assert record.cancel is not None
        deadline = record.cancel.at + record.attempt.cancel_grace_sec
        unread = record.lease is None and self._commands.is_queued(record)
        if unread or now >= deadline or record.state is DispatchState.FINISHING:
            await self.end(attempt, cancelled(now), stop_worker=not unread)
            return
        worker_id = record.lease.worker_id if record.lease else None
        self._signals.cancel(
            record.attempt, record.cancel.reason, worker_id=worker_id or None, deadline=deadline
        )

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
        if await self._confirmed(attempt, "command"):
            why = "a worker read the command and dropped it, or the worker group skipped it"
            await self._end_unchanged(attempt, dispatch_lost(why, self._context.now()))

    async def _check_run(self, attempt: Supervised, now: float) -> None:
        record, at = attempt.record, self._context.now()
        lease, limit = record.lease, record.attempt.timeout_sec
        assert lease is not None
        left = left_sec(lease, now - attempt.heard_at)
        if left > 0 and await self._yields(attempt, now):
            await self.end(attempt, yielded(at), stop_worker=True)
            return
        if limit is not None and record.accepted_at is not None and at >= record.accepted_at + limit:
            await self.end(attempt, timeout(limit, at), stop_worker=True)
            return
        self._query_once(attempt, lease, left)
        if left > 0:
            attempt.unread_until = {}
            return
        if await self._confirmed(attempt, "lease"):
            await self._end_unchanged(attempt, lease_lost(record, at))

    async def _yields(self, attempt: Supervised, now: float) -> bool:
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
        """Send a query when a lease lasts only `left` seconds. It reaches an arbitrary worker, so a reply is unlikely (H8)."""
        window = self._context.config.discovery_window_sec
        if attempt.queried or window <= 0 or left > min(window, lease.ttl_sec / 3):
            return
        attempt.queried = True
        self._signals.discover(attempt.record.attempt)

    async def _confirmed(self, attempt: Supervised, why: str) -> bool:
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
            update(attempt, found[key], self._context.monotonic())

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


def update(attempt: Supervised, record: Dispatch, now: float) -> None:
    """Replace the record of `attempt` at the monotonic time `now`. A new or renewed lease ends the suspicion.

    A record that was read may be older than what this process knows from its own writes; that knowledge is kept.
    """
    if _is_outdated(record, attempt.record):
        return
    if record.lease is not None and record.lease.is_later(attempt.record.lease):
        attempt.heard_at, attempt.queried, attempt.unread_until = now, False, {}
    attempt.record = _with_known(record, attempt.record)


def _is_outdated(record: Dispatch, known: Dispatch) -> bool:
    """Return whether `record` was read before the worker of `known` accepted the run.

    With it, the next event of that worker would seem to come from a worker that does not own the run.
    """
    if known.lease is None or record.lease is None:
        return known.lease is not None
    lease_id = record.lease.lease_id
    return lease_id != known.lease.lease_id and lease_id in known.past_leases


def _with_known(record: Dispatch, known: Dispatch) -> Dispatch:
    """Return `record` with the offset and the cancel request of `known`, if it has none, and the later lease."""
    offset = known.offset if record.offset is None else record.offset
    cancel, lease = record.cancel or known.cancel, record.lease
    if lease is not None and known.lease is not None and not lease.is_later(known.lease):
        lease = replace(known.lease, ended=lease.ended)
    if (offset, cancel, lease) == (record.offset, record.cancel, record.lease):
        return record
    return replace(record, offset=offset, cancel=cancel, lease=lease)
