"""The roles that an engine hosts: it serves their task queues as a worker does, and runs inline handlers itself."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flowkit.activities.role_attempt import refuse_inline
from flowkit.adapters.remote_database import RemoteDatabase
from flowkit.config import WorkerConfig
from flowkit.connection import WorkerThread
from flowkit.core.loop_portal import LoopPortal
from flowkit.errors import ConfigError
from flowkit.worker.runner import Worker, inline_roles

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from temporalio.client import Client

    from flowkit.activities.handlers import RoleHandler
    from flowkit.activities.role_attempt import RoleActivities
    from flowkit.attempt.background import LoopHealth
    from flowkit.attempt.role_lease import RolePoller
    from flowkit.config import CoordinatorConfig


T = TypeVar("T")

_INLINE_SLOTS = 10
"""Ordinary attempts of an inline role, such as fallbacks, that one engine runs at once; also its threads for hooks."""


class HostedRoles:
    """Hosts the handlers of one engine. Without handlers, it does nothing.

    The handlers run on the loop that calls `open`, or with `own_loop` on a loop of their own. That loop also runs
    everything else that concerns them, but calls the database on the loop of `open`.
    """

    def __init__(
        self,
        *,
        db: Any,
        cfg: CoordinatorConfig,
        handlers: Mapping[str, RoleHandler],
        clock: Any,
        own_thread: bool = True,
        own_loop: bool = False,
    ) -> None:
        """Raise ConfigError if the engine cannot host the handlers.

        This applies if it runs on the loop of the handlers (`own_thread` is False), or if a role has external workers.
        """
        if handlers and not own_thread:
            raise ConfigError(
                "own_thread is False, but handlers are given, which must not share an event loop with the engine: "
                "omit own_thread"
            )
        if external := sorted(set(handlers) & set(cfg.worker_types)):
            raise ConfigError(
                f"role {external[0]!r} has both a handler and external workers: remove it from worker_types, or do "
                "not pass its handler"
            )
        self.inline_roles = inline_roles(handlers)
        self._remote = RemoteDatabase(db) if own_loop else None
        self._worker = _create_worker(self._remote or db, cfg, handlers, clock) if handlers else None
        self._thread: HandlerThread | None = None
        self._activities: RoleActivities | None = None

    async def open(self, namespace: str) -> None:
        """Create the indexes, register the engine as a worker of its roles, and prepare the activities."""
        if self._worker is None:
            return
        if self._remote is not None:
            self._remote.bind()
            self._thread = await HandlerThread.started()
        self._activities = await self._run(self._worker.open(namespace, in_engine=True))

    @property
    def local_activity(self) -> Callable[..., Any]:
        """The local activity that runs the attempts of inline roles, or refuses all if there are none."""
        return (
            refuse_inline if self._activities is None else self._activities.inline_activity(self.inline_roles)
        )

    def pollers(self, client: Client) -> list[RolePoller]:
        """Return the pollers of the roles' task queues, for the loop that runs the engine's workers."""
        if self._worker is None or self._activities is None:
            return []
        return self._worker.pollers(client, self._activities)

    @property
    def loops(self) -> tuple[LoopHealth, ...]:
        """The health of the background loops."""
        return () if self._worker is None else self._worker.health().loops

    async def stop(self) -> None:
        """Release what `open` created. Call this after the Temporal workers have ended."""
        self._activities = None
        if self._worker is not None:
            await self._run(self._worker.stop())
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop of the handlers."""
        return await (work if self._thread is None else self._thread.portal.run(work))


def _create_worker(
    db: Any, cfg: CoordinatorConfig, handlers: Mapping[str, RoleHandler], clock: Any
) -> Worker:
    inline = inline_roles(handlers)
    settings = WorkerConfig(
        roles=list(handlers),
        queue=cfg.queue,
        worker_id=f"engine-{secrets.token_hex(4)}",
        max_concurrent=dict.fromkeys(inline, _INLINE_SLOTS),
        kept_log_level=cfg.kept_log_level,
        keep_prints=cfg.keep_prints,
    )
    return Worker(db=db, cfg=settings, handlers=dict(handlers), clock=clock)


class HandlerThread:
    """A thread that runs an event loop until `stop`."""

    def __init__(self) -> None:
        self._thread = WorkerThread("flowkit-handlers", lambda: [_IdleService(self)])
        self.portal: LoopPortal
        """Access to the loop, after `started`."""

    @classmethod
    async def started(cls) -> Self:
        """Return a new thread whose loop is running."""
        thread = cls()
        await thread._thread.start()
        return thread

    async def stop(self) -> None:
        """Cancel what still runs on the loop, and wait until the thread has ended."""
        await self._thread.stop()


class _IdleService:
    """Keeps the loop of a thread running, and gives access to it."""

    def __init__(self, thread: HandlerThread) -> None:
        thread.portal = LoopPortal()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until `shutdown`."""
        await self._stop.wait()

    async def shutdown(self) -> None:
        """End `run`."""
        self._stop.set()
