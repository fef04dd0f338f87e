"""The lease of a role in a process that polls its task queue: a native worker, an engine with handlers, or a bridge.

Temporal's list of pollers lags by up to a minute, so it cannot tell two kinds of processes apart in time. The lease in
MongoDB can: a process polls a role's task queue only while it holds the lease, and checks it before each attempt.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from flowkit.adapters.outages import retry_while_unavailable
from flowkit.adapters.role_leases import RoleKind, RoleLeases
from flowkit.attempt.background import new_owner
from flowkit.core.time import steady_sec
from flowkit.errors import FlowKitError, RoleHeld
from flowkit.models.temporal_names import role_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from temporalio.worker import Worker

    from flowkit.adapters.mongo import Database
    from flowkit.adapters.role_leases import RoleHolders
    from flowkit.core.loop_portal import LoopPortal

_logger = logging.getLogger("flowkit.worker")

TTL_SEC = 30.0
"""How long a process of the other kind must see no renewal of a lease before it takes the lease."""
RENEWAL_SEC = 10.0
MARGIN_SEC = 5.0
"""How long before its end a process stops using a lease that it could not renew."""
RETRY_SEC = 2.0
_TAKEN_SEC = 0.1
LOST_SEC = 1.0
"""Pauses between two looks at the lease, which `keep` may take or lose on the loop of another thread."""
_RELEASE_SEC = 5.0

_NOT_TAKEN = "MongoDB has not confirmed the lease of its task queue yet"
_POLLERS = {RoleKind.NATIVE: "native workers", RoleKind.EXTERNAL: "bridges"}


class RoleLease:
    """The share of one process in the lease of a role's task queue. Any event loop may call its methods."""

    def __init__(
        self,
        leases: RoleLeases,
        portal: LoopPortal,
        kind: RoleKind,
        *,
        namespace: str,
        role: str,
        task_queue: str,
        name: str,
    ) -> None:
        """Prepare the lease. `name` is what other processes show of this one, such as its worker id."""
        self._leases = leases
        self._portal = portal
        self._role = role
        self._key = (namespace, task_queue)
        self._kind = kind
        self._holder = f"{name} ({new_owner()})"
        self.held_until = 0.0
        """Until when this process may begin attempts without another check, by `steady_sec`."""
        self._problem: str | None = _NOT_TAKEN

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lease, according to its own clock."""
        return steady_sec() < self.held_until

    @property
    def problem(self) -> str | None:
        """Why this process does not serve the role, for people; None while it holds the lease."""
        return self._problem

    async def take(self) -> None:
        """Take or renew the lease. Raise RoleHeld if processes of the other kind hold it, and StoreUnavailable."""
        at = steady_sec()
        other = await self._portal.run(self._leases.take(self._key, self._kind, self._holder, TTL_SEC))
        if other is not None:
            self.held_until, self._problem = 0.0, self._describe(other)
            raise RoleHeld(self._problem)
        self.held_until, self._problem = at + TTL_SEC - MARGIN_SEC, None

    def _describe(self, other: RoleHolders) -> str:
        return (
            f"{_POLLERS[other.kind]} serve its task queue {self._key[1]!r} ({', '.join(other.holders)}), and a role is "
            f"either native or external: stop them, or remove {self._role!r} from the roles of {self._holder}. Their "
            f"lease ends when none of them has renewed it for {TTL_SEC:.0f} s"
        )

    async def check(self) -> None:
        """Return if this process may begin an attempt of the role, otherwise raise RoleHeld.

        A process that was frozen for longer than its lease lasts takes the lease again first. Wait while MongoDB is
        unavailable.
        """
        if not self.is_held:
            await retry_while_unavailable(self.take)

    async def keep(self) -> None:
        """Take the lease and renew it until cancelled. If others hold it, or MongoDB is unavailable, try again."""
        shown = None
        while True:
            if self.is_held:
                await asyncio.sleep(RENEWAL_SEC)
            try:
                await self.take()
                shown = None
            except FlowKitError as error:
                if str(error) != shown:
                    _logger.warning("role %s is not served: %s; retrying", self._role, error)
                shown = str(error)
                await asyncio.sleep(RETRY_SEC)

    async def wait(self) -> None:
        """Wait until this process holds the lease."""
        while True:
            if self._problem is None:
                return
            await asyncio.sleep(_TAKEN_SEC)

    async def poll(self, worker: Worker) -> None:
        """Run a Temporal worker until it ends or the lease is lost. An outage of MongoDB alone does not end it."""
        losing, polling = asyncio.create_task(self._wait_for_loss()), asyncio.create_task(worker.run())
        try:
            await asyncio.wait([losing, polling], return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                await worker.shutdown()
            await polling
        finally:
            losing.cancel()
            polling.cancel()
            await asyncio.wait([losing, polling])

    async def _wait_for_loss(self) -> None:
        while True:
            if self._problem is not None:
                return
            await asyncio.sleep(LOST_SEC)

    async def release(self) -> None:
        """End the share of this process in the lease, if it has one. MongoDB may be unavailable."""
        if not self.held_until:
            return
        self.held_until, self._problem = 0.0, _NOT_TAKEN
        with suppress(FlowKitError, TimeoutError):
            async with asyncio.timeout(_RELEASE_SEC):
                await self._portal.run(self._leases.release(self._key, self._kind, self._holder))


def leases_of(
    db: Database,
    portal: LoopPortal,
    kind: RoleKind,
    *,
    namespace: str,
    queue: str,
    roles: Iterable[str],
    name: str,
) -> dict[str, RoleLease]:
    """Return the lease of each role of an engine queue, for the process that other processes show as `name`."""
    stored = RoleLeases(db)
    return {
        role: RoleLease(
            *(stored, portal, kind),
            namespace=namespace,
            role=role,
            task_queue=role_queue(queue, role),
            name=name,
        )
        for role in roles
    }


class RolePoller:
    """Polls the task queue of a native role between `run` and `shutdown`, while this process holds its lease."""

    def __init__(self, lease: RoleLease, new_worker: Callable[[], Worker]) -> None:
        """Prepare the poller. Raise the error of `new_worker` if the lease is held already."""
        self._lease = lease
        self._new_worker = new_worker
        self._worker = new_worker() if lease.problem is None else None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Poll until `shutdown`. While bridges hold the lease, wait for it."""
        stop = asyncio.create_task(self._stopping.wait())
        while not self._stopping.is_set():
            polling = asyncio.create_task(self._poll())
            await asyncio.wait([polling, stop], return_when=asyncio.FIRST_COMPLETED)
            if not polling.done() and self._worker is None:
                polling.cancel()
                return
            if not polling.done() and self._worker is not None:
                await self._worker.shutdown()
            await polling

    async def _poll(self) -> None:
        if self._worker is None:
            await self._lease.wait()
            self._worker = self._new_worker()
        await self._lease.poll(self._worker)
        self._worker = None

    async def shutdown(self) -> None:
        """End `run`."""
        self._stopping.set()
