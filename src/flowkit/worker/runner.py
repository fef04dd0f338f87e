"""The native worker: polls the queues of its roles and runs their handlers (spec: Worker)."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import worker as temporal

from flowkit.activities.attempts import Host
from flowkit.activities.home import HomeLoop
from flowkit.activities.roles import RoleActivities
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.store import TaskStore
from flowkit.config import WorkerConfig
from flowkit.connection import WorkerThread, connect
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.activities.handlers import RoleHandler

__all__ = ["Worker", "WorkerConfig"]

_logger = logging.getLogger("flowkit.worker")

_HEARTBEAT_THROTTLE = timedelta(seconds=1)
"""A cancel is seen within this time; Temporal's default is a good part of the lease."""


class Worker:
    """Runs handlers between `start` and `stop`, on the loop that called `start`.

    `roles` overrides `cfg.roles`; `handlers` maps each role to its handler. Each role runs `cfg.max_concurrent`
    attempts at once. `client` is a Temporal client with `pydantic_data_converter`; without it `TEMPORAL_*` says where
    to connect.
    """

    def __init__(
        self,
        *,
        db: Any,
        cfg: WorkerConfig | None = None,
        roles: list[str] | None = None,
        handlers: dict[str, RoleHandler] | None = None,
        client: Client | None = None,
    ) -> None:
        self.db = db
        self.cfg = copy.deepcopy(cfg) if cfg is not None else WorkerConfig()
        self.handlers = dict(handlers or {})
        self.roles = list(roles or (self.cfg.roles if cfg is not None else self.handlers))
        self.worker_id = self.cfg.worker_id or f"w-{secrets.token_hex(4)}"
        self._given_client = client
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._thread: WorkerThread | None = None
        if missing := [role for role in self.roles if role not in self.handlers]:
            raise ConfigError(f"no handler for role {missing[0]!r}: pass handlers={{{missing[0]!r}: ...}}")

    async def start(self) -> None:
        """Connect and poll the roles' queues. Raises what keeps it from that; then nothing runs."""
        if self._thread is not None:
            return
        await self._artifacts.prepare()
        client = self._given_client or await connect()
        activities = self._activities()
        thread = WorkerThread(
            "flowkit-worker", lambda: [self._poller(client, activities, role) for role in self.roles]
        )
        await thread.start()
        self._thread = thread
        _logger.info("worker %s runs %s (process %d)", self.worker_id, ", ".join(self.roles), os.getpid())

    def _activities(self) -> RoleActivities:
        host = Host(
            tasks=self._tasks,
            home=HomeLoop(),
            worker_id=self.worker_id,
            hb_interval_sec=self.cfg.hb_interval_sec,
            cancel_poll_sec=self.cfg.db_cancel_poll_ms / 1000,
        )
        return RoleActivities(host=host, artifacts=self._artifacts, handlers=self.handlers)

    def _poller(self, client: Client, activities: RoleActivities, role: str) -> temporal.Worker:
        return temporal.Worker(
            client,
            task_queue=f"{self.cfg.queue}.{role}",
            activities=[activities.of(role)],
            identity=self.worker_id,
            max_concurrent_activities=self.cfg.max_concurrent,
            max_heartbeat_throttle_interval=_HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=_HEARTBEAT_THROTTLE,
        )

    async def stop(self) -> None:
        """Stop polling and hand running attempts back; they go on elsewhere at once, at no charge."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    async def wait_stopped(self) -> None:
        """Wait until the worker ends by itself; raises what ended it."""
        if self._thread is not None:
            await asyncio.shield(self._thread.failed)
