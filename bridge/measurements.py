"""Measures counts for operators: the queues of the roles, and the lag of the bridges. No decision depends on them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit.attempt.background import BackgroundLoop, RoleHealth
from flowkit.bridge.kafka.topics import worker_group
from flowkit.errors import FlowKitError, KafkaUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.bridge.context import BridgeContext

MEASURE_SEC = 5.0


class Measurements:
    """Reads the counts of the roles every five seconds, while `loop` runs."""

    def __init__(self, context: BridgeContext, roles: Sequence[str]) -> None:
        self._context = context
        self._roles = {role: RoleHealth(role=role) for role in roles}
        self.measured_at: float | None = None
        """When all counts were last read; None before the first time."""
        self.loop = BackgroundLoop("measuring queues", self.measure, pause_sec=MEASURE_SEC)

    def of(self, role: str) -> RoleHealth:
        """Return the latest counts of a role."""
        return self._roles[role]

    async def measure(self) -> None:
        """Read all counts once. A count that cannot be read becomes None."""
        found = await asyncio.gather(*(self._measured(role) for role in self._roles))
        self._roles = {health.role: health for health in found}
        self.measured_at = self._context.now()
        self.loop.worked()

    async def _measured(self, role: str) -> RoleHealth:
        attempts = await self._open_attempts(role)
        try:
            return replace(await self._from_kafka(role), attempts=attempts)
        except KafkaUnavailable as error:
            self.loop.failed(error)
            return RoleHealth(role=role, attempts=attempts)

    async def _from_kafka(self, role: str) -> RoleHealth:
        context, offsets = self._context, self._context.offsets
        return RoleHealth(
            role=role,
            workers=len(await offsets.members(worker_group(role))),
            queued=await offsets.lag(worker_group(role), context.topics.cmd(role)),
            status_lag=await offsets.lag(context.status_group(role), context.topics.status(role)),
        )

    async def _open_attempts(self, role: str) -> int | None:
        dispatches = self._context.stores.dispatches
        try:
            counts = await self._context.portal.run(dispatches.count_open([role]))
        except FlowKitError as error:
            self.loop.failed(error)
            return None
        return counts[role]
