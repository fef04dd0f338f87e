"""Finds out which roles have workers. A role without workers gets no slots, so that it does not block other roles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.attempt.pollers import recent_pollers
from flowkit.temporal_names import role_queue

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.adapters.worker_registry import WorkerRegistry

_CACHE_SEC = 3.0


class ServedRoles:
    """Says which roles of a queue have native workers, or external workers that are connected to a bridge."""

    def __init__(self, client: Client, registry: WorkerRegistry, queue: str) -> None:
        self._client = client
        self._registry = registry
        self._queue = queue
        self._known: dict[str, tuple[bool, float]] = {}

    async def has_workers(self, role: str) -> bool:
        """Return whether the role has a worker. The result may be three seconds old."""
        served, until = self._known.get(role, (False, 0.0))
        if time.monotonic() >= until:
            served = await self._look(role)
            self._known[role] = served, time.monotonic() + _CACHE_SEC
        return served

    async def _look(self, role: str) -> bool:
        pollers = await recent_pollers(self._client, role_queue(self._queue, role))
        if not pollers:
            return False
        native = {poller for poller in pollers if not poller.startswith(BRIDGE_PREFIX)}
        if native - await self._registry.find_stopped(native):
            return True
        return native != pollers and await self._registry.is_served(role)
