"""Runs a bridge, which connects external workers to Temporal: starts and stops its parts, serves its roles.

Any number of bridges can share a role.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from temporalio.worker import Worker

from flowkit.adapters.role_leases import RoleKind
from flowkit.adapters.worker_registry import BRIDGE_PREFIX
from flowkit.attempt.background import BackgroundLoop, BridgeHealth, LoopHealth, OutageLogger, RoleHealth
from flowkit.attempt.role_lease import leases_of
from flowkit.attempt.supervision import HEARTBEAT_THROTTLE
from flowkit.bridge.announcements import Announcements
from flowkit.bridge.commands import CommandSender, CommandWatch, Placement
from flowkit.bridge.context import BridgeContext, Stores
from flowkit.bridge.delivery import Delivery, FirstBatches
from flowkit.bridge.dispatcher import AttemptDispatcher
from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.clients import KafkaConnection
from flowkit.bridge.kafka.consumer import RecordConsumer
from flowkit.bridge.kafka.offsets import Offsets
from flowkit.bridge.kafka.producer import Producer
from flowkit.bridge.kafka.topics import Provisioner, Topics, worker_group
from flowkit.bridge.pulled_inputs import PulledInputs
from flowkit.bridge.signals import WorkerSignals
from flowkit.bridge.status import StatusEvents
from flowkit.bridge.supervisor import ORPHANS_SEC, TICK_SEC, AttemptSupervisor
from flowkit.core.instruments import BRIDGE_ATTEMPTS, BRIDGE_LAG, BRIDGE_QUEUED
from flowkit.errors import FlowKitError, KafkaUnavailable
from flowkit.models.temporal_names import role_queue
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from temporalio.client import Client

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.config import CoordinatorConfig
    from flowkit.core.loop_portal import LoopPortal

_logger = logging.getLogger("flowkit.bridge")

_TOPICS_RETRY_SEC = 1.0
_CLIENTS_CLOSE_SEC = 15.0
_ROLE_RETRY_SEC = 2.0
_CONCURRENT_ATTEMPTS = 2_000
"""Number of attempts of a role that a bridge holds before it supervises them: few start, others wait for
earlier ones."""

_SEED_SEC = 60.0
MEASURE_SEC = 5.0


class Bridge:
    """Serves external roles between `run` and `shutdown`. Create it on the loop on which it runs.

    `portal` gives access to the loop of the database handle. Kafka may be unavailable: the bridge keeps trying.
    """

    def __init__(
        self,
        client: Client,
        *,
        config: CoordinatorConfig,
        roles: Sequence[str],
        tasks: TaskStore,
        artifacts: ArtifactStore,
        portal: LoopPortal,
        deployment: str,
    ) -> None:
        connection = KafkaConnection.from_config(config)
        self.roles = tuple(dict.fromkeys(roles))
        self.bridge_id = clean(f"{BRIDGE_PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}")
        self.context = BridgeContext(
            bridge_id=self.bridge_id,
            roles=self.roles,
            config=config,
            client=client,
            stores=Stores(tasks=tasks, artifacts=artifacts),
            portal=portal,
            topics=Topics.of(config),
            producer=Producer(connection),
            offsets=Offsets(connection),
            deployment=deployment,
            leases=leases_of(
                *(tasks.database, portal, RoleKind.EXTERNAL),
                namespace=client.namespace,
                queue=config.queue,
                roles=self.roles,
                name=self.bridge_id,
            ),
        )
        self.measurements = Measurements(
            self.context, self.roles, count_attempts=lambda: self.supervisor.count_attempts()
        )
        self._connect_parts(connection)
        self._stop = asyncio.Event()
        self._tick = BackgroundLoop("supervising external attempts", self._supervise, pause_sec=TICK_SEC)
        self._beats = BackgroundLoop("heartbeats of external attempts", self._beat, pause_sec=TICK_SEC)
        self._orphans = BackgroundLoop(
            "abandoned external attempts", self._end_orphans, pause_sec=ORPHANS_SEC
        )

    def _connect_parts(self, connection: KafkaConnection) -> None:
        context = self.context
        self.signals = WorkerSignals(context)
        self.delivery = Delivery(context)
        inputs, self._first_batches = PulledInputs(context), FirstBatches(context)
        self.commands = CommandWatch(context)
        self.supervisor = AttemptSupervisor(
            context, delivery=self.delivery, signals=self.signals, inputs=inputs, commands=self.commands
        )
        self._placement = Placement(context, self.supervisor.list_records)
        self.dispatcher = AttemptDispatcher(
            context,
            delivery=self.delivery,
            signals=self.signals,
            supervisor=self.supervisor,
            inputs=inputs,
            first_batches=self._first_batches,
            placement=self._placement,
            sender=CommandSender(context),
        )
        self._provisioner = Provisioner(connection, context.config)
        self._outage = OutageLogger("use the Kafka topics of external workers")
        self._consuming = False
        self.services = [
            RoleService(role, context, self.dispatcher, self._provisioner) for role in self.roles
        ]
        self.status = StatusEvents(
            context,
            delivery=self.delivery,
            signals=self.signals,
            supervisor=self.supervisor,
            inputs=inputs,
            first_batches=self._first_batches,
        )
        self.announcements = Announcements(context, self.supervisor)
        self.consumers = self._new_consumers(connection)

    def _new_consumers(self, connection: KafkaConnection) -> list[RecordConsumer]:
        """Return a consumer for the status topic of each role, then one for announcements and replies."""
        context, topics = self.context, self.context.topics
        status = [
            RecordConsumer(
                *(connection, [topics.status(role)], context.status_group(role)),
                *(self.status.handle, self.status.settle),
            )
            for role in self.roles
        ]
        shared = [topics.announce, topics.reply]
        return [
            *status,
            RecordConsumer(connection, shared, context.announce_group, self.announcements.handle),
        ]

    async def prepare(self) -> None:
        """Create the indexes of the collections that only bridges and workers use."""
        stores = self.context.stores
        for store in (stores.dispatches, stores.events, stores.registry):
            await self.context.portal.run(store.prepare())

    async def run(self) -> None:
        """Serve the roles until `shutdown`. Raise the error that ends the bridge, if any."""
        await self.prepare()
        services = [asyncio.create_task(service.run()) for service in self.services]
        others = [asyncio.create_task(self._consume())]
        others += [asyncio.create_task(loop.run()) for loop in self._own_loops]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *services, *others], return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {stopping}:
                ended.result()
        finally:
            stopping.cancel()
            await self._close(services, others)

    async def _consume(self) -> None:
        """Consume the topics once they exist. Until then, Kafka's client would log errors about them."""
        await self._wait_for_topics()
        self._consuming = True
        async with asyncio.TaskGroup() as consuming:
            for consumer in self.consumers:
                consuming.create_task(consumer.run())

    async def _wait_for_topics(self) -> None:
        while True:
            if await self._topics_exist():
                return
            await asyncio.sleep(_TOPICS_RETRY_SEC)

    async def _topics_exist(self) -> bool:
        try:
            await self._provisioner.ensure(self.roles)
        except FlowKitError as error:
            self._outage.failed(error)
            return False
        self._outage.recovered()
        return True

    async def shutdown(self) -> None:
        """Stop serving the roles. Other bridges, or this one after a restart, continue the running attempts."""
        self._stop.set()

    async def _close(
        self, services: Sequence[asyncio.Task[None]], others: Sequence[asyncio.Task[None]]
    ) -> None:
        await asyncio.gather(*(service.shutdown() for service in self.services), return_exceptions=True)
        for task in [*services, *others]:
            task.cancel()
        await asyncio.gather(*services, *others, return_exceptions=True)
        self.measurements.clear()
        await asyncio.gather(*(lease.release() for lease in self.context.leases.values()))
        await self.dispatcher.stop()
        await self.delivery.stop()
        await self.supervisor.stop()
        await self.signals.stop()
        await self._first_batches.stop()
        await self._placement.stop()
        await self.context.producer.stop()
        await self.context.offsets.close()
        await clients.wait_closed(_CLIENTS_CLOSE_SEC)

    async def _supervise(self) -> None:
        await self.supervisor.tick()
        await self.announcements.recheck()
        self._tick.worked()

    async def _beat(self) -> None:
        await self.supervisor.send_heartbeats()
        self._beats.worked()

    async def _end_orphans(self) -> None:
        await self.supervisor.end_orphans()
        self._orphans.worked()

    @property
    def _own_loops(self) -> tuple[BackgroundLoop, ...]:
        return self._tick, self._beats, self._orphans, self._placement.loop, self.measurements.loop

    @property
    def loops(self) -> tuple[LoopHealth, ...]:
        """The health of the background loops, with those of the consumers once the topics exist."""
        own = [loop.health for loop in self._own_loops]
        consumers = [consumer.health for consumer in self.consumers] if self._consuming else []
        return (*own, *consumers)

    def health(self) -> BridgeHealth:
        """Return the state of the roles and the latest counts. Contacts no server."""
        return BridgeHealth(
            bridge_id=self.bridge_id,
            roles=tuple(
                replace(
                    self.measurements.health_of(service.role), waits_for=service.waits_for or consumer.held
                )
                for service, consumer in zip(self.services, self.consumers, strict=False)
            ),
            attempts=self.supervisor.attempts,
            malformed=dict(self.context.malformed.counts),
            measured_at=self.measurements.measured_at,
        )


class RoleService:
    """Dispatches the attempts of one role between `run` and `shutdown`."""

    def __init__(
        self, role: str, context: BridgeContext, dispatcher: AttemptDispatcher, provisioner: Provisioner
    ) -> None:
        self.role = role
        self.queue = role_queue(context.config.queue, role)
        self._unprepared: str | None = "start"
        """Why the topics of the role are not prepared yet; None once they are."""
        self._context = context
        self._dispatcher = dispatcher
        self._provisioner = provisioner
        self._lease = context.leases[role]
        self._worker: Worker | None = None
        self._idle = asyncio.Event()
        """Set while no worker runs."""
        self._idle.set()
        self._stopping = False

    @property
    def waits_for(self) -> str | None:
        """Why the role is not served; None while it is served."""
        return self._unprepared or self._lease.problem

    async def run(self) -> None:
        """Serve the role until cancelled or until `shutdown`. Wait for Kafka, and while native workers hold its lease.

        The lease is not released, because a cancel would interrupt that.
        """
        await self._wait_until_prepared()
        self._unprepared = None
        keeping = asyncio.create_task(self._lease.keep())
        try:
            while not self._stopping:
                await self._lease.wait()
                await self._serve()
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    async def _serve(self) -> None:
        """Serve the role until `shutdown`, or until the lease is lost to native workers."""
        self._worker = Worker(
            self._context.client,
            task_queue=self.queue,
            activities=[self._dispatcher.activity_for(self.role)],
            identity=self._context.bridge_id,
            max_concurrent_activities=_CONCURRENT_ATTEMPTS,
            max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        )
        _logger.info("role %s is dispatched to external workers through Kafka", self.role)
        seeding = asyncio.create_task(self._seed_regularly())
        self._idle.clear()
        try:
            await self._lease.poll(self._worker)
        finally:
            seeding.cancel()
            self._idle.set()

    async def shutdown(self) -> None:
        """Stop polling. Attempts whose dispatch is in progress return to Temporal.

        The worker's own `shutdown` never returns if its `run` was cancelled while it stopped.
        """
        self._stopping = True
        if self._worker is not None:
            stopping = asyncio.create_task(self._worker.shutdown())
            await self._idle.wait()
            stopping.cancel()

    async def _wait_until_prepared(self) -> None:
        while True:
            if await self._prepare_topics():
                return
            await asyncio.sleep(_ROLE_RETRY_SEC)

    async def _prepare_topics(self) -> bool:
        """Prepare the topics. Return False, and log the reason once, if the role cannot be served yet."""
        try:
            await self._provisioner.ensure([self.role])
            await self._provisioner.seed(self.role)
        except FlowKitError as error:
            self._wait_for(str(error))
            return False
        return True

    def _wait_for(self, problem: str) -> None:
        """Show why the role is not served, and log it once."""
        known, self._unprepared = self._unprepared, problem
        if problem != known:
            _logger.warning("role %s is not served yet: %s; retrying", self.role, problem)

    async def _seed_regularly(self) -> None:
        """Commit first offsets each minute, because Kafka deletes those of groups without members after 7 days."""
        while True:
            await asyncio.sleep(_SEED_SEC)
            try:
                await self._provisioner.seed(self.role)
            except KafkaUnavailable as error:
                _logger.info("the first offsets of role %s were not committed: %s", self.role, error)


class Measurements:
    """Reads the counts of the roles every five seconds, while `loop` runs."""

    def __init__(
        self, context: BridgeContext, roles: Sequence[str], *, count_attempts: Callable[[], Mapping[str, int]]
    ) -> None:
        """`count_attempts` returns how many attempts this bridge supervises, by role."""
        self._context = context
        self._count_attempts_of_bridge = count_attempts
        self._roles = {role: RoleHealth(role=role) for role in roles}
        self.measured_at: float | None = None
        """When all counts were last read; None before the first time."""
        self.loop = BackgroundLoop("measuring queues", self.measure, pause_sec=MEASURE_SEC)

    def health_of(self, role: str) -> RoleHealth:
        """Return the latest counts of a role."""
        return self._roles[role]

    async def measure(self) -> None:
        """Read all counts once. A count that cannot be read becomes None."""
        found = await asyncio.gather(*(self._measure(role) for role in self._roles))
        self._roles = {health.role: health for health in found}
        self.measured_at = self._context.now()
        self._report()
        self.loop.worked()

    def _report(self) -> None:
        """Set the gauges. A count that cannot be read has no value."""
        own, roles = self._count_attempts_of_bridge(), self._roles
        BRIDGE_ATTEMPTS.set({(role,): own.get(role, 0) for role in roles})
        for gauge, counts in (
            (BRIDGE_QUEUED, {role: each.queued for role, each in roles.items()}),
            (BRIDGE_LAG, {role: each.status_lag for role, each in roles.items()}),
        ):
            gauge.set({(role,): count for role, count in counts.items() if count is not None})

    def clear(self) -> None:
        """Report nothing any more, because the bridge has stopped."""
        for gauge in (BRIDGE_ATTEMPTS, BRIDGE_QUEUED, BRIDGE_LAG):
            gauge.set({})

    async def _measure(self, role: str) -> RoleHealth:
        attempts = await self._count_attempts(role)
        try:
            return replace(await self._read_queues(role), attempts=attempts)
        except KafkaUnavailable as error:
            self.loop.failed(error)
            return RoleHealth(role=role, attempts=attempts)

    async def _read_queues(self, role: str) -> RoleHealth:
        context, offsets = self._context, self._context.offsets
        return RoleHealth(
            role=role,
            workers=len(await offsets.read_members(worker_group(role))),
            queued=await offsets.read_lag(worker_group(role), context.topics.cmd(role)),
            status_lag=await offsets.read_lag(context.status_group(role), context.topics.status(role)),
        )

    async def _count_attempts(self, role: str) -> int | None:
        dispatches = self._context.stores.dispatches
        try:
            counts = await self._context.portal.run(dispatches.count_open([role]))
        except FlowKitError as error:
            self.loop.failed(error)
            return None
        return counts[role]
