"""The native worker, which polls the task queues of its roles and runs their handlers (spec: Worker)."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any

from temporalio import worker as temporal

from flowkit.activities.batches.inputs import InputSettings
from flowkit.activities.batches.puller import ByteBudget
from flowkit.activities.calls import Threads
from flowkit.activities.contracts import announce
from flowkit.activities.handlers import (
    EchoHandler,
    RoleHandler,
    misspelled_hook,
    types_problem,
    unfit_hook,
    version_of,
    version_problem,
)
from flowkit.activities.process_pool import ProcessPool
from flowkit.activities.role_attempt import RoleActivities, RoleContext
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.adapters.dispatches import DispatchStore
from flowkit.adapters.role_leases import RoleKind
from flowkit.adapters.tasks.store import TaskStore
from flowkit.adapters.worker_registry import HostedHandler
from flowkit.attempt.background import Health, error_summary
from flowkit.attempt.role_lease import RoleLease, RolePoller, leases_of
from flowkit.attempt.supervision import HEARTBEAT_THROTTLE, WorkerContext
from flowkit.config import WorkerConfig
from flowkit.connection import WorkerThread, connect
from flowkit.core.loop_portal import LoopPortal
from flowkit.core.time import SystemClock
from flowkit.errors import ConfigError
from flowkit.models.temporal_names import role_queue
from flowkit.products import keep_logs
from flowkit.validation.arguments import (
    client_problem,
    clock_problem,
    database_problem,
    handlers_problem,
    require,
    roles_problem,
    settings_problem,
)
from flowkit.worker.registration import WorkerRegistration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from temporalio.client import Client

    from flowkit.activities.attempt_log import AttemptEventLog
    from flowkit.core.time import Clock
    from flowkit.products import LogKeeper

__all__ = ["Worker", "WorkerConfig"]

_logger = logging.getLogger("flowkit.worker")

_POLLS = 5
"""Concurrent requests that poll the task queue of a role: the default of Temporal's SDK."""


class Worker:
    """Runs handlers between `start` and `stop`, on the event loop that called `start`.

    `roles` overrides `cfg.roles`. `handlers` maps each role to its handler; the role `echo` has a built-in one. Each
    role runs up to `cfg.max_concurrent` attempts concurrently.

    Hooks defined with `def` run on threads. With `cfg.executor="process"`, `process_batch` runs in separate processes.
    Handlers see `clock` as `ctx.clock`. `client` is a Temporal client with `pydantic_data_converter`; without it, the
    worker connects as `TEMPORAL_*` specifies.

    Raise ConfigError if a role has no handler, if a handler does not fit the settings or has an invalid version, or if
    one of its methods looks like a misspelled hook.
    """

    def __init__(
        self,
        *,
        db: Any,
        cfg: WorkerConfig | None = None,
        clock: Clock | None = None,
        roles: list[str] | None = None,
        handlers: dict[str, RoleHandler] | None = None,
        client: Client | None = None,
    ) -> None:
        require(database_problem(db), clock_problem(clock), client_problem(client))
        require(settings_problem(cfg, "cfg", WorkerConfig), roles_problem(roles, "roles"))
        require(handlers_problem(handlers))
        self.db = db
        self.cfg = copy.deepcopy(cfg) if cfg is not None else WorkerConfig()
        self.clock = clock or SystemClock()
        self.roles = list(roles or (self.cfg.roles if cfg is not None or not handlers else handlers))
        self.handlers = {**_built_in(self.roles), **(handlers or {})}
        self.worker_id = self.cfg.worker_id or f"w-{secrets.token_hex(4)}"
        self._given_client = client
        self._tasks = TaskStore(db)
        self._artifacts = ArtifactStore(db)
        self._thread: WorkerThread | None = None
        self._registration: WorkerRegistration | None = None
        self._leases: dict[str, RoleLease] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._threads: Threads | None = None
        self._processes: ProcessPool | None = None
        self._lines: LogKeeper | None = None
        """Keeps what the attempts log."""
        self._check_handlers()
        self.versions = {role: version_of(self.handlers[role]) for role in self.roles}
        """The version of the handler of each role."""

    def _check_handlers(self) -> None:
        slots = self.cfg.max_concurrent if isinstance(self.cfg.max_concurrent, dict) else {}
        for role in slots:
            if role not in self.roles:
                served = ", ".join(self.roles)
                raise ConfigError(f"max_concurrent names role {role!r}; this worker serves {served}")
        for role in self.roles:
            handler = self.handlers.get(role)
            if handler is None:
                raise ConfigError(f"no handler for role {role!r}: pass handlers={{{role!r}: ...}}")
            if not isinstance(handler, RoleHandler):
                raise ConfigError(
                    f"the handler of role {role!r} is {handler!r:.80}, not an instance of RoleHandler"
                )
            require(
                types_problem(handler),
                misspelled_hook(handler),
                unfit_hook(handler),
                version_problem(handler),
            )
            if self.cfg.executor == "process" and needs_loop(handler):
                hook = "process_batch" if handler._flowkit_types is None else "process"
                raise ConfigError(
                    f"executor='process' needs a plain `def {hook}`; that of role {role!r} is async"
                )

    async def start(self) -> None:
        """Connect and start polling the roles' task queues. If an error is raised, nothing is left running."""
        if self._thread is not None and self._thread.alive:
            return
        if self._thread is not None:
            await self.stop()
        client = self._given_client or await connect()
        activities = await self.open(client.namespace)
        thread = WorkerThread("flowkit-worker", lambda: self.pollers(client, activities))
        try:
            await thread.start()
        except BaseException:
            await self.stop()
            raise
        self._thread = thread
        _logger.info("worker %s runs %s (process %d)", self.worker_id, ", ".join(self.roles), os.getpid())

    async def open(self, namespace: str | None = None, *, in_engine: bool = False) -> RoleActivities:
        """Do everything that `start` does except polling, and return the activities to poll for.

        With `namespace`, it also takes the leases of the roles. With `in_engine`, the registry shows that
        an engine hosts the handlers. This creates the indexes and registers the worker. `stop` undoes it.
        Raise ConfigError if external workers still run attempts of one of the roles.
        """
        await self._check_not_external()
        if namespace is not None:
            await self._take_leases(namespace)
        await self._artifacts.prepare()
        contracts = announce({role: self.handlers[role] for role in sorted(self.versions)})
        registration = self._new_registration(
            [
                HostedHandler(role=role, version=version, engine=in_engine, contract=contracts.get(role))
                for role, version in sorted(self.versions.items())
            ]
        )
        await registration.prepare()
        self._lines = keep_logs(self.db, self.cfg)
        activities = self._activities(registration.events)
        self._registration = registration
        await registration.start()
        if self._lines is not None:
            self._lines.start()
        return activities

    async def _check_not_external(self) -> None:
        """Raise ConfigError if a bridge has dispatched attempts of a role that external workers have not ended."""
        dispatches = DispatchStore(self.db)
        for role in self.roles:
            count, example = await dispatches.find_unfinished(role, self.cfg.queue)
            if example is None:
                continue
            raise ConfigError(
                f"role {role!r} of queue {self.cfg.queue!r} is external: {count} of its attempts "
                f"{'has' if count == 1 else 'have'} no outcome yet, for example node {example.attempt.node_id!r} of "
                f"task {example.attempt.task_id!r}. A role is either native or external: remove it from this worker's "
                f"roles; or remove it from the bridges (worker_types) and cancel these tasks while the bridges still "
                f"run, or let them end, before native workers take the role over"
            )

    async def _take_leases(self, namespace: str) -> None:
        """Take the leases of the roles and keep them. If bridges hold one, its poller waits for it."""
        self._leases = leases_of(
            *(self.db, LoopPortal(), RoleKind.NATIVE),
            namespace=namespace,
            queue=self.cfg.queue,
            roles=self.roles,
            name=self.worker_id,
        )
        await asyncio.gather(*(lease.take() for lease in self._leases.values()), return_exceptions=True)
        self._keeping = [asyncio.create_task(lease.keep()) for lease in self._leases.values()]

    def _new_registration(self, handlers: Sequence[HostedHandler]) -> WorkerRegistration:
        return WorkerRegistration(
            self.db,
            worker_id=self.worker_id,
            roles=self.roles,
            version=self.cfg.worker_version,
            capacity=sum(self.cfg.slots(role) for role in self.roles),
            announce_interval_sec=self.cfg.announce_interval_sec,
            leaked_threads=lambda: self._threads.leaked if self._threads else 0,
            hb_interval_sec=self.cfg.hb_interval_sec,
            queue=self.cfg.queue,
            handlers=handlers,
        )

    def _activities(self, events: AttemptEventLog | None = None) -> RoleActivities:
        slots = sum(self.cfg.slots(role) for role in self.roles)
        self._threads = Threads(slots, "flowkit-hook")
        if self.cfg.executor == "process":
            self._processes = ProcessPool(self.handlers, processes=self.cfg.process_workers)
        context = WorkerContext(
            tasks=self._tasks,
            portal=LoopPortal(),
            worker_id=self.worker_id,
            hb_interval_sec=self.cfg.hb_interval_sec,
            cancel_poll_sec=self.cfg.db_cancel_poll_ms / 1000,
            lines=self._lines,
        )
        roles = RoleContext(
            artifacts=self._artifacts,
            handlers=self.handlers,
            threads=self._threads,
            inputs=self._inputs(slots),
            processes=self._processes,
            clock=self.clock,
            events=events,
            leases=self._leases,
            versions=self.versions,
            slots={role: asyncio.Semaphore(self.cfg.slots(role)) for role in self._leases},
        )
        return RoleActivities(worker=context, roles=roles)

    def _inputs(self, slots: int) -> InputSettings:
        cfg = self.cfg
        return InputSettings(
            defaults={"poll_ms": cfg.pull_poll_ms_default, "backoff_max_ms": cfg.pull_empty_backoff_ms_max},
            strict=cfg.strict_input_adapters,
            budget=ByteBudget(int(cfg.max_buffered_mb * 2**20), slots),
        )

    def pollers(self, client: Client, activities: RoleActivities) -> list[RolePoller]:
        """Return the services that poll the roles' task queues. Call this on the loop that will run them."""
        return [
            RolePoller(lease, functools.partial(self._new_poller, client, activities, role, version=version))
            for role, lease in self._leases.items()
            for version in ("", self.versions[role])
        ]

    def _new_poller(
        self, client: Client, activities: RoleActivities, role: str, *, version: str
    ) -> temporal.Worker:
        """Return the Temporal worker for a role or, with `version`, for the attempts of tasks that have fixed it.

        The latter are rare, so one request at a time polls for them.
        """
        return temporal.Worker(
            client,
            task_queue=role_queue(self.cfg.queue, role, version),
            activities=[activities.activity_for(role)],
            max_concurrent_activity_task_polls=1 if version else _POLLS,
            identity=self.worker_id,
            max_concurrent_activities=self.cfg.slots(role),
            max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        )

    async def stop(self) -> None:
        """Stop polling and hand over running attempts. Other workers continue them at once, which uses no budget."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.stop()
        pools = (self._threads, self._processes)
        await asyncio.gather(*(pool.close() for pool in pools if pool is not None))
        keeping, self._keeping = self._keeping, []
        for each in keeping:
            each.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(lease.release() for lease in self._leases.values()))
        registration, self._registration = self._registration, None
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.stop()
        if registration is not None:
            await registration.stop()

    def health(self) -> Health:
        """Return whether the worker is running, the error that ended it, and its loops' health. Contacts no server."""
        thread, registration = self._thread, self._registration
        error = thread.error if thread is not None else None
        loops = () if registration is None else (registration.loop.health, registration.events.loop.health)
        if self._lines is not None:
            loops = (*loops, self._lines.health)
        return Health(
            running=thread is not None and thread.alive,
            error=None if error is None else error_summary(error),
            loops=loops,
            lost_events=0 if registration is None else registration.events.lost,
        )

    async def wait_stopped(self) -> None:
        """Wait until the worker ends on its own, and raise the error that ended it, if any."""
        if self._thread is not None:
            await asyncio.shield(self._thread.failed)


def needs_loop(handler: RoleHandler) -> bool:
    """Return whether the batches of a handler cannot be processed in a process. Those that it only stores need none."""
    types = handler._flowkit_types
    only_stores = types is not None and (types.is_source or types.keeps_items)
    return inspect.iscoroutinefunction(handler.process_batch) and not only_stores


def inline_roles(handlers: Mapping[str, RoleHandler]) -> tuple[str, ...]:
    """Return the sorted roles whose handlers are inline."""
    return tuple(sorted(role for role, handler in handlers.items() if handler.inline))


def _built_in(roles: list[str]) -> dict[str, RoleHandler]:
    return {EchoHandler.role: EchoHandler()} if EchoHandler.role in roles else {}
