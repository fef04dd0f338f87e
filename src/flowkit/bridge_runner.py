"""Runs a bridge to external workers as a process of its own, without an engine."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.background import Health, error_summary
from flowkit.bridge.kafka.topics import Topics
from flowkit.bridge.service import Bridge
from flowkit.config import CoordinatorConfig
from flowkit.connection import InlineWorkers, connect
from flowkit.core import version
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import ConfigError
from flowkit.validation.arguments import (
    client_problem,
    database_problem,
    require,
    roles_problem,
    settings_problem,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

__all__ = ["BridgeRunner"]

_logger = logging.getLogger("flowkit.bridge")


class BridgeRunner:
    """Lets external Kafka workers run the nodes of its roles between `start` and `stop`.

    Any number of bridges can serve a role, alone or in engines whose `worker_types` name it. `roles` overrides
    `cfg.worker_types`; `cfg` defaults to `CoordinatorConfig.load()`. `client` is a Temporal client with
    `pydantic_data_converter`; without it, the bridge connects as `TEMPORAL_*` specifies.

    The bridge runs on the event loop that called `start`, so nothing should block that loop. Raise ConfigError if there
    are no roles, or if a role does not fit the names of the topics.
    """

    def __init__(
        self,
        *,
        db: Any,
        roles: Sequence[str] | None = None,
        cfg: CoordinatorConfig | None = None,
        client: Client | None = None,
    ) -> None:
        require(database_problem(db), client_problem(client))
        require(settings_problem(cfg, "cfg", CoordinatorConfig))
        given = None if roles is None else list(roles)
        require(roles_problem(given, "roles"))
        self.db = db
        self.cfg = copy.deepcopy(cfg) if cfg is not None else CoordinatorConfig.load()
        if given is not None:
            self.cfg = dataclasses.replace(self.cfg, worker_types=given)
        if not self.cfg.worker_types:
            raise ConfigError(
                "the bridge has no roles: pass roles=['my_role'], or set worker_types (WORKER_TYPES)"
            )
        Topics.of(self.cfg)
        self._given_client = client
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._bridge: Bridge | None = None
        self._running: InlineWorkers | None = None

    @property
    def roles(self) -> list[str]:
        """The roles that the bridge serves."""
        return list(self.cfg.worker_types)

    async def start(self) -> None:
        """Connect to Temporal and MongoDB, and start serving the roles. If an error is raised, nothing is left running.

        Kafka may be unavailable: the bridge logs a warning and keeps trying.
        """
        if self._running is not None and self._running.alive:
            return
        await self.stop()
        client = self._given_client or await connect()
        await self._tasks.prepare()
        await self._artifacts.prepare()
        bridge = Bridge(
            client,
            config=self.cfg,
            roles=self.cfg.worker_types,
            tasks=self._tasks,
            artifacts=self._artifacts,
            portal=LoopPortal(),
            deployment=await self._tasks.deployment(),
        )
        running = InlineWorkers(lambda: [bridge])
        await running.start()
        self._bridge, self._running = bridge, running
        _logger.info(
            "bridge %s %s connects roles %s of queue %r to Kafka at %s",
            *(version.__version__, bridge.bridge_id, ", ".join(self.roles)),
            *(self.cfg.queue, self.cfg.kafka_bootstrap),
        )

    async def stop(self) -> None:
        """Stop serving the roles. Attempts continue: other bridges supervise them, or this one after its next start."""
        running, self._running = self._running, None
        self._bridge = None
        if running is not None:
            await running.stop()

    async def wait_stopped(self) -> None:
        """Wait until the bridge ends on its own, and raise the error that ended it, if any."""
        if self._running is not None:
            await asyncio.shield(self._running.failed)

    def health(self) -> Health:
        """Return the state of the bridge, its roles and its background loops. Contacts no server."""
        running, bridge = self._running, self._bridge
        error = running.error if running is not None else None
        return Health(
            running=running is not None and running.alive,
            error=None if error is None else error_summary(error),
            loops=() if bridge is None else bridge.loops,
            bridge=None if bridge is None else bridge.health(),
        )
