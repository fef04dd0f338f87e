"""The background loops of an engine: the sweep, and the checks of slots."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.engine.limits.leaks import SlotLoop
from flowkit.engine.silence import SilenceCheck
from flowkit.engine.sweep import Sweep

if TYPE_CHECKING:
    from flowkit.adapters.tasks.task_store import TaskStore
    from flowkit.attempt.background import LoopHealth
    from flowkit.config import CoordinatorConfig
    from flowkit.connection import Namespace
    from flowkit.engine.limits.grants import SlotGrants


class EngineLoops:
    """Runs the background loops of one engine between its creation and `stop`, on the loop of the database handle."""

    def __init__(
        self, tasks: TaskStore, config: CoordinatorConfig, namespace: Namespace, grants: SlotGrants
    ) -> None:
        silence = SilenceCheck(grants.client, tasks.database, config)
        sweep = Sweep(grants.client, tasks, namespace, every_sec=config.sweep_sec, silence=silence)
        self._loops = (sweep, SlotLoop(grants))
        self._running = [asyncio.create_task(loop.run()) for loop in self._loops]

    @property
    def health(self) -> tuple[LoopHealth, ...]:
        """The health of each loop."""
        return tuple(loop.health for loop in self._loops)

    async def stop(self) -> None:
        """Stop the loops."""
        for each in self._running:
            each.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
