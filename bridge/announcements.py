"""Processes announcements of external workers, and their replies to queries.

Announcements update the registry of workers. A restarted worker announces the run that it held, but does not continue
it (H9). The bridge therefore ends the lease of the run, unless the worker has sent a later event about it.

A reply that reports a run renews its lease, but only once between two events, because a restarted worker also replies
`running`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cachetools import LRUCache

from flowkit.adapters.dispatches import key_of
from flowkit.adapters.metrics import UNSTORABLE, storable
from flowkit.bridge.context import REMEMBERED
from flowkit.bridge.rules.messages import Malformed, read_announce, read_reply
from flowkit.errors import StoreRefused
from flowkit.limits import ANNOUNCEMENT_BYTES, ID_CHARS
from flowkit.protocol.messages import EvWorkerOffline, EvWorkerOnline
from flowkit.text import clean, prefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokafka import ConsumerRecord

    from flowkit.adapters.dispatches import Dispatch
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.supervisor import AttemptSupervisor
    from flowkit.protocol.messages import Envelope, RTaskSnapshot

_logger = logging.getLogger("flowkit.bridge")

_RUNNING = ("running", "cancelling")
_RECHECK_SEC = 1.0
_RECHECK_FOR_SEC = 15.0
"""How long the runs of a stopped worker are checked again: its last events may be processed after its announcement."""


class Announcements:
    """Handles the records of the announcement and reply topics."""

    def __init__(self, context: BridgeContext, supervisor: AttemptSupervisor) -> None:
        self._context = context
        self._dispatches = context.stores.dispatches
        self._registry = context.stores.registry
        self._supervisor = supervisor
        self._extended = LRUCache[tuple[str, int], None](REMEMBERED)
        """Leases that a snapshot has renewed, by lease id and time of the worker's latest event."""
        self._stopped: dict[str, tuple[int, float]] = {}
        """Workers that have stopped or restarted: when by their clock, and when by the clock of the bridge."""
        self._rechecked_at = 0.0

    async def handle(self, records: Sequence[ConsumerRecord]) -> None:
        """Process one poll. Return once everything is stored."""
        for record in records:
            try:
                if record.topic == self._context.topics.reply:
                    await self._handle_reply(record.value)
                else:
                    await self._handle_announcement(record.value)
            except (Malformed, StoreRefused) as error:
                self._context.malformed.skip(record, error)

    async def _handle_announcement(self, value: bytes | None) -> None:
        found = read_announce(value)
        if found is None:
            return
        envelope, announcement = found
        worker_id = _check_id(announcement.worker_id)
        if isinstance(announcement, EvWorkerOnline):
            await self._handle_online(worker_id, envelope, announcement, len(value or b""))
        elif isinstance(announcement, EvWorkerOffline):
            await self._context.db(lambda: self._registry.mark_offline(worker_id, self._context.now()))
            await self._worker_stopped(worker_id, envelope.ts_ms)

    async def _handle_online(
        self, worker_id: str, envelope: Envelope, announcement: EvWorkerOnline, size: int
    ) -> None:
        now = self._context.now()
        await self._context.db(
            lambda: self._registry.record_announcement(worker_id, announced_fields(announcement, size), now)
        )
        if announcement.capabilities is not None or announcement.resume is not None:
            await self._worker_stopped(worker_id, envelope.ts_ms)

    async def recheck(self) -> None:
        """End the leases of workers that stopped or restarted seconds ago. Status events have a topic of their own."""
        now = self._context.now()
        if now - self._rechecked_at < _RECHECK_SEC:
            return
        self._rechecked_at = now
        since = now - _RECHECK_FOR_SEC
        self._stopped = {each: when for each, when in self._stopped.items() if when[1] >= since}
        await self._expire_runs({worker_id: ts_ms for worker_id, (ts_ms, _) in self._stopped.items()})

    async def _worker_stopped(self, worker_id: str, ts_ms: int) -> None:
        self._stopped[worker_id] = (ts_ms, self._context.now())
        await self._expire_runs({worker_id: ts_ms})

    async def _expire_runs(self, stopped: Mapping[str, int]) -> None:
        """End the leases of stopped or restarted workers, unless they have sent events about their runs since then."""
        if not stopped:
            return
        at = self._context.now()
        for record in await self._context.db(lambda: self._dispatches.find_held_by(stopped)):
            lease = record.lease
            if lease is not None and not lease.ended:
                await self._expire(record, lease.lease_id, stopped[lease.worker_id], at)

    async def _expire(self, record: Dispatch, lease_id: str, ts_ms: int, at: float) -> None:
        if await self._context.db(lambda: self._dispatches.expire(record.key, lease_id, ts_ms, at)):
            self._supervisor.refresh_soon()

    async def _handle_reply(self, value: bytes | None) -> None:
        found = read_reply(value)
        if found is None:
            return
        envelope, snapshot = found
        key = key_of(envelope.task_id, envelope.node_id, envelope.attempt_epoch)
        records = await self._context.db(lambda: self._dispatches.find_all([key]))
        if (record := records.get(key)) is not None:
            await self._consider(record, snapshot)

    async def _consider(self, record: Dispatch, snapshot: RTaskSnapshot) -> None:
        """Renew a lease once if its owner replies that it runs the attempt: its heartbeats may have stopped (H33)."""
        lease, reported = record.lease, snapshot.lease
        if lease is None or reported is None or snapshot.run_state not in _RUNNING:
            return
        mark = (lease.lease_id, lease.worker_ts_ms)
        own = (reported.worker_id, reported.lease_id) == (lease.worker_id, lease.lease_id)
        if not own or mark in self._extended:
            return
        self._extended[mark] = None
        now = self._context.now()
        until = now + lease.ttl_sec
        await self._context.db(lambda: self._dispatches.extend(record.key, lease.lease_id, until, now))


def announced_fields(announcement: EvWorkerOnline, size: int) -> dict[str, object]:
    """Return the registry fields of an announcement of `size` bytes. Periodic ones do not contain `capabilities`.

    Omit what is too large, or what MongoDB cannot store: the worker is online all the same.
    """
    shown: dict[str, object] = {
        "type": prefix(announcement.type, 1_000),
        "version": prefix(announcement.version, 100),
    }
    if size > ANNOUNCEMENT_BYTES:
        return shown
    details: dict[str, object] = {"capacity": announcement.capacity}
    if announcement.capabilities is not None:
        details["capabilities"] = announcement.capabilities
    try:
        return {**shown, **storable("announcement", details)[0]}
    except UNSTORABLE:
        return shown


def _check_id(worker_id: str) -> str:
    if len(worker_id) > ID_CHARS:
        raise Malformed(f"worker_id must have 1 to {ID_CHARS} characters")
    return clean(worker_id)
