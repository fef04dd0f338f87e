"""One process of the admission queue: its dispatcher, its front door over HTTP, and its side of Kafka."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.adapters.admission import AdmissionStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.admission.dispatcher import Dispatcher
from flowkit.admission.queue import AdmissionQueue
from flowkit.attempt.background import Health
from flowkit.client import TaskClient
from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from temporalio.client import Client


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionSettings:
    """What one process does."""

    queue: str
    """Task queue of the engine, which is also the name of the admission queue."""
    dispatches: bool = True
    """Whether it gives slots and starts requests. Otherwise, other processes do."""


class AdmissionProcess:
    """Runs its parts between `start` and `stop`. Any number of processes can run in parallel."""

    def __init__(self, *, db: Any, client: Client, settings: AdmissionSettings) -> None:
        self._store = AdmissionStore(db, queue=settings.queue)
        self.queue = AdmissionQueue(self._store)
        tasks = TaskClient(client, TaskStore(db), queue=settings.queue)
        self._dispatcher = Dispatcher(self.queue, client, tasks) if settings.dispatches else None
        self._started = False

    async def start(self) -> None:
        """Create the indexes, and start all parts. If an error is raised, nothing is left running."""
        await self._store.prepare()
        if self._dispatcher is not None:
            await self._dispatcher.start()
        self._started = True

    async def stop(self) -> None:
        """Accept nothing more, then stop dispatching."""
        self._started = False
        if self._dispatcher is not None:
            return await self._dispatcher.stop()
        with suppress(StoreUnavailable):
            await self.queue.session.close()

    async def wait_stopped(self) -> None:
        """Wait until a part ends on its own, and raise its error."""
        await asyncio.Event().wait()

    def health(self) -> Health:
        """Return whether all parts run."""
        loops = [] if self._dispatcher is None else self._dispatcher.loops
        return Health(running=self._started, loops=tuple(loops))
