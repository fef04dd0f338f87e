"""Chooses the partition of each command, and knows the offset from which a search for the command must begin.

A choice reads nothing: the commands of other bridges are read in the background.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.attempt.background import BackgroundLoop
from flowkit.bridge.kafka.topics import worker_group
from flowkit.bridge.rules.partitions import choose
from flowkit.errors import KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flowkit.adapters.dispatches.record import Dispatch, PlacedCommand
    from flowkit.bridge.context import BridgeContext

_logger = logging.getLogger("flowkit.bridge")

_OWNERS_SEC = 3.0
"""How long a read assignment of partitions to workers is used. An outdated one only makes a choice less good."""

_OTHERS_SEC = 1.0
"""The shortest pause between two reads of the commands of other bridges."""

_OTHERS_PAUSES = 9
"""The shortest pause in durations of a read, so that thousands of commands are not read all the time."""


@dataclass(kw_only=True, slots=True)
class _Role:
    ends: dict[int, int] = field(default_factory=dict)
    """A lower bound for the end of each partition."""
    owners: dict[int, str] = field(default_factory=dict)
    owners_at: float = 0.0
    last: int = -1
    planned: Counter[int] = field(default_factory=Counter)
    """Commands that are being sent, by partition."""


class Placement:
    """Chooses partitions of the command topics for one bridge."""

    def __init__(self, context: BridgeContext, records: Callable[[], Iterable[Dispatch]]) -> None:
        self._context = context
        self._records = records
        self._roles: dict[str, _Role] = {}
        self._reading: asyncio.Task[None] | None = None
        self._others: list[PlacedCommand] = []
        self.loop = BackgroundLoop("commands of other bridges", self.read_others, pause_sec=_OTHERS_SEC)

    async def choose(self, role: str) -> tuple[int, int]:
        """Return the partition for the next command of a role, and a lower bound for its end.

        Raise KafkaUnavailable if the topic has never been read and Kafka is unavailable.
        """
        known = self._roles.setdefault(role, _Role())
        if not known.ends:
            known.ends = dict(await self._context.offsets.ends(self._context.topics.cmd(role)))
            known.last = zlib.crc32(self._context.bridge_id.encode()) % len(known.ends)
        self._read_owners_later(role, known)
        outstanding, busy = self._load(role, known)
        known.last = choose(
            tuple(known.ends), owners=known.owners, outstanding=outstanding, busy=busy, last=known.last
        )
        known.planned[known.last] += 1
        return known.last, known.ends[known.last]

    def sent(self, role: str, partition: int, offset: int | None) -> None:
        """Note the offset of the command for which `choose` was called; None if it is unknown or was not sent."""
        known = self._roles[role]
        known.planned[partition] -= 1
        if offset is not None:
            known.ends[partition] = max(known.ends.get(partition, 0), offset + 1)

    async def read_others(self) -> None:
        """Read the commands of other bridges, then pause in proportion to the duration of the read."""
        began, owner, roles = self._context.monotonic(), self._context.bridge_id, self._context.roles
        self._others = await self._context.db(
            lambda: self._context.stores.dispatches.placed_by_others(owner, roles)
        )
        self.loop.worked()
        await asyncio.sleep(_OTHERS_PAUSES * (self._context.monotonic() - began))

    async def stop(self) -> None:
        """Stop reading assignments, so that no read opens a client after the bridge has closed its clients."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _load(self, role: str, known: _Role) -> tuple[Counter[int], Counter[str]]:
        """Return unaccepted commands by partition, and running attempts by group member."""
        outstanding, busy = Counter(known.planned), Counter[str]()
        own = {record.key: record for record in self._records() if record.attempt.role == role}
        placed = [
            (record.partition, record.lease is not None)
            for record in own.values()
            if record.lease is not None or record.offset is not None
        ]
        placed += [
            (each.partition, each.accepted)
            for each in self._others
            if each.role == role and each.key not in own
        ]
        for partition, accepted in placed:
            if not accepted:
                outstanding[partition] += 1
            elif (owner := known.owners.get(partition)) is not None:
                busy[owner] += 1
        return outstanding, busy

    def _read_owners_later(self, role: str, known: _Role) -> None:
        now = self._context.now()
        if now - known.owners_at < _OWNERS_SEC or (self._reading is not None and not self._reading.done()):
            return
        known.owners_at = now
        self._reading = asyncio.create_task(self._read_owners(role, known))

    async def _read_owners(self, role: str, known: _Role) -> None:
        topic = self._context.topics.cmd(role)
        try:
            members = await self._context.offsets.members(worker_group(role))
            partitions = await self._context.offsets.partitions(topic)
        except KafkaUnavailable as error:
            _logger.debug("the members of %s cannot be read: %s", worker_group(role), error)
            return
        known.owners = {
            partition: member
            for member, places in members.items()
            for place, partition in places
            if place == topic
        }
        for partition in partitions:
            known.ends.setdefault(partition, 0)
