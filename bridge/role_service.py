"""Serves one external role: prepares its topics, then polls its task queue in Temporal for attempts to dispatch."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from temporalio.service import RPCError
from temporalio.worker import Worker

from flowkit.attempt.pollers import native_pollers
from flowkit.attempt.supervision import HEARTBEAT_THROTTLE
from flowkit.errors import FlowKitError, KafkaUnavailable

if TYPE_CHECKING:
    from flowkit.bridge.context import BridgeContext
    from flowkit.bridge.dispatcher import Dispatcher
    from flowkit.bridge.kafka.topics import Provisioner

_logger = logging.getLogger("flowkit.bridge")

_RETRY_SEC = 2.0
_CONCURRENT_DISPATCHES = 100
_CHECK_SEC = 60.0


class RoleService:
    """Dispatches the attempts of one role between `run` and `shutdown`."""

    def __init__(
        self, role: str, context: BridgeContext, dispatcher: Dispatcher, provisioner: Provisioner
    ) -> None:
        self.role = role
        self.queue = f"{context.config.queue}.{role}"
        self.waits_for: str | None = "start"
        """Why the role is not served yet; None while it is served."""
        self._context = context
        self._dispatcher = dispatcher
        self._provisioner = provisioner
        self._worker: Worker | None = None
        self._idle = asyncio.Event()
        """Set while no worker runs."""
        self._idle.set()
        self._stopping = False

    async def run(self) -> None:
        """Serve the role until cancelled or until `shutdown`. Wait for Kafka, and while native workers poll its queue."""
        while not self._stopping:
            await self._wait_until_prepared()
            self.waits_for = None
            await self._serve()

    async def _serve(self) -> None:
        """Serve the role until `shutdown`, or until native workers begin to poll its queue."""
        self._worker = Worker(
            self._context.client,
            task_queue=self.queue,
            activities=[self._dispatcher.activity_for(self.role)],
            identity=self._context.bridge_id,
            max_concurrent_activities=_CONCURRENT_DISPATCHES,
            max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
            default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
        )
        _logger.info("role %s is dispatched to external workers through Kafka", self.role)
        checking = asyncio.create_task(self._check_regularly(self._worker))
        self._idle.clear()
        try:
            await self._worker.run()
        finally:
            checking.cancel()
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
            if await self._prepared():
                return
            await asyncio.sleep(_RETRY_SEC)

    async def _prepared(self) -> bool:
        """Prepare the topics. Return False, and log the reason once, if the role cannot be served yet."""
        try:
            await self._provisioner.ensure([self.role])
            await self._provisioner.seed(self.role)
            problem = await self._native_worker_problem()
        except (FlowKitError, RPCError) as error:
            problem = str(error)
        if problem is not None:
            self._wait_for(problem)
        return problem is None

    def _wait_for(self, problem: str) -> None:
        """Show why the role is not served, and log it once."""
        if problem != self.waits_for:
            _logger.warning("role %s is not served yet: %s; retrying", self.role, problem)
        self.waits_for = problem

    async def _native_worker_problem(self) -> str | None:
        found = await native_pollers(self._context.client, self.queue)
        if not found:
            return None
        return (
            f"native workers poll its task queue {self.queue!r} ({', '.join(found)}), and a role is either native or "
            f"external: stop these workers, or remove {self.role!r} from the roles of bridge "
            f"{self._context.bridge_id!r} (worker_types)"
        )

    async def _check_regularly(self, worker: Worker) -> None:
        """Commit first offsets each minute, because Kafka deletes those of groups without members after 7 days.

        Stop `worker` once native workers poll the queue: each attempt would run on whichever of them receives it.
        """
        while True:
            await asyncio.sleep(_CHECK_SEC)
            try:
                await self._provisioner.seed(self.role)
                problem = await self._native_worker_problem()
            except (KafkaUnavailable, RPCError) as error:
                _logger.info("role %s was not checked: %s", self.role, error)
                continue
            if problem is not None:
                self._wait_for(problem)
                await asyncio.shield(worker.shutdown())
                return
