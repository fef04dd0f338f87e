"""One gateway process: the front door over HTTP and WebSocket, and a worker of the role `job`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flowkit import WorkerConfig
from flowkit.adapters.tasks.store import TaskStore
from flowkit.attempt.background import Health
from flowkit.client import TaskClient
from flowkit.core.version import __version__
from flowkit.gateway import DEFAULT_MYCELIUM_URL
from flowkit.gateway.delivery import RemoteSupervisors
from flowkit.gateway.flows import ROLE
from flowkit.gateway.http_client import DEFAULT_ALLOWED, AllowedNetworks
from flowkit.gateway.jobs import CONCURRENCY, JobHandler
from flowkit.gateway.service import Gateway, methods
from flowkit.gateway.store import FlowStore
from flowkit.server.rpc import rpc_routes
from flowkit.server.serving import HttpServer, serve
from flowkit.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.gateway.secret_box import SecretBox

TITLE: Final = "FlowKit gateway"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """What one gateway process does."""

    queue: str
    addresses: Sequence[tuple[str, int]] = ()
    """Hosts and ports of the front door. Empty for a process that only runs jobs."""
    runs_jobs: bool = True
    concurrency: int = CONCURRENCY
    """How many jobs are in flight at once."""
    mycelium_url: str = DEFAULT_MYCELIUM_URL
    supervisor_networks: AllowedNetworks = DEFAULT_ALLOWED
    """Where supervisors at URLs may be."""
    certificate: str | None = None
    """PEM file with the certificate of the front door. None for HTTP without TLS."""
    key: str | None = None


class GatewayProcess:
    """Runs a gateway between `start` and `stop`."""

    def __init__(self, *, db: Any, client: Client, settings: GatewaySettings, secrets: SecretBox) -> None:
        self._db = db
        self._client = client
        self._settings = settings
        self._secrets = secrets
        self._store = FlowStore(db)
        self._supervisors: RemoteSupervisors | None = None
        self._server: HttpServer | None = None
        self._worker: Worker | None = None

    @property
    def ports(self) -> list[int]:
        """The ports on which the front door listens."""
        return [] if self._server is None else [each.port for each in self._server.bound]

    async def start(self) -> None:
        """Create the indexes, and start the front door and the worker.

        If an error is raised, nothing is left running.
        """
        await self._store.prepare()
        self._supervisors = RemoteSupervisors(
            mycelium_url=self._settings.mycelium_url, networks=self._settings.supervisor_networks
        )
        await self._supervisors.__aenter__()
        try:
            if self._settings.runs_jobs:
                await self._start_worker(self._supervisors)
            if self._settings.addresses:
                await self._start_server(self._supervisors)
        except BaseException:
            await self.stop()
            raise

    async def _start_worker(self, supervisors: RemoteSupervisors) -> None:
        handler = JobHandler(self._store, supervisors, self._secrets)
        supervisors.on_late = handler.late_reply
        cfg = WorkerConfig(
            roles=[ROLE], queue=self._settings.queue, max_concurrent={ROLE: self._settings.concurrency}
        )
        self._worker = Worker(db=self._db, cfg=cfg, handlers={ROLE: handler}, client=self._client)
        await self._worker.start()

    async def _start_server(self, supervisors: RemoteSupervisors) -> None:
        settings = self._settings
        tasks = TaskClient(self._client, TaskStore(self._db), queue=settings.queue)
        gateway = Gateway(self._store, tasks, supervisors, self._secrets)
        routes = rpc_routes("/", methods(gateway), {"title": TITLE, "version": __version__})
        self._server = await serve(
            routes,
            settings.addresses,
            db=self._db,
            health=lambda: self.health().ok,
            certificate=settings.certificate,
            key=settings.key,
        )

    async def stop(self) -> None:
        """Stop the front door, then the worker. Jobs in flight go to another worker, which continues them."""
        server, self._server = self._server, None
        worker, self._worker = self._worker, None
        supervisors, self._supervisors = self._supervisors, None
        if server is not None:
            await server.stop()
        if worker is not None:
            await worker.stop()
        if supervisors is not None:
            await supervisors.__aexit__(None, None, None)

    async def wait_stopped(self) -> None:
        """Wait until a part ends on its own, and raise its error."""
        parts = [each for each in (self._server, self._worker) if each is not None]
        waits = [asyncio.create_task(each.wait_stopped()) for each in parts]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        for each in waits:
            if each.done() and not each.cancelled():
                each.result()

    def health(self) -> Health:
        """Return whether the front door and the worker run."""
        if self._worker is not None:
            health = self._worker.health()
            if not health.ok:
                return health
        running = (self._server is not None and self._server.health().ok) or not self._settings.addresses
        return Health(running=running and (self._worker is not None or not self._settings.runs_jobs))
