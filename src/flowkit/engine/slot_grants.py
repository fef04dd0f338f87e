"""Grants the slots of the concurrency limits to the attempts of all tasks of a queue.

An attempt asks for its slot with the activity `acquire_slots`. If it must wait, the activity `await_slot` stays open
without a worker until some engine grants the slot and completes it. A role without workers gets no slots, so that it
does not block other roles.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from cachetools import TTLCache
from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from flowkit.adapters.slots import (
    PAGE,
    QueueLimits,
    SlotStore,
    SlotUsage,
    full_roles,
    has_room,
    is_full,
    wait_reason,
)
from flowkit.adapters.worker_registry import BRIDGE_PREFIX, WorkerRegistry
from flowkit.attempt.failures import cut
from flowkit.attempt.pollers import recent_pollers
from flowkit.attempt.workflows import WorkflowState, is_absent, look_up
from flowkit.connection import TemporalUnavailable
from flowkit.core.instruments import SLOT_WAIT
from flowkit.errors import FlowKitError
from flowkit.models import (
    AcquireSlots,
    ReleaseSlots,
    Slot,
    SlotReplies,
    SlotReply,
    SlotRequest,
    slot_wait_id,
    temporal_names,
)
from flowkit.models.temporal_names import role_queue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from temporalio.client import Client

    from flowkit.adapters.mongo import Database
    from flowkit.attempt.workflows import FoundWorkflow
    from flowkit.config import CoordinatorConfig
    from flowkit.core.loop_portal import LoopPortal


T = TypeVar("T")

_logger = logging.getLogger("flowkit.engine.limits")

_CACHE_SEC = 3.0
_CACHED_ROLES = 1_000
"""How long FlowKit remembers whether a role has workers."""


class SlotGrants:
    """Grants and frees slots for one engine. All methods run on the loop of the database handle.

    The limits are those that `config` contains at the moment of a grant.
    """

    def __init__(
        self,
        client: Client,
        db: Database,
        namespace_id: Callable[[], Awaitable[str]],
        config: CoordinatorConfig,
    ) -> None:
        self.client = client
        self._db = db
        self._namespace_id = namespace_id
        self._config = config
        self._roles = ServedRoles(client, WorkerRegistry(db), config.queue)
        self._store: SlotStore | None = None
        self._granting = asyncio.Lock()
        self._delivering: set[asyncio.Task[None]] = set()
        self.released = asyncio.Event()
        """Set when a slot has become free, so that waiting requests should be checked."""

    @property
    def limits(self) -> QueueLimits:
        """The limits at this moment."""
        return QueueLimits.of(self._config)

    async def store(self) -> SlotStore:
        """Return the slots of the queue. Raise TemporalUnavailable while the namespace id is unknown."""
        if self._store is None:
            namespace_id = await self._namespace_id()
            if not namespace_id:
                problem = "Temporal did not return the id of the namespace"
                raise TemporalUnavailable(problem, "check that the Temporal server responds")
            store = SlotStore(self._db, namespace_id=namespace_id, queue=self._config.queue)
            await store.prepare()
            self._store = store
        return self._store

    async def acquire(self, wanted: AcquireSlots, run_id: str) -> SlotReplies:
        """Free slots, then grant those that are free and no waiting request can have. Return why not otherwise.

        After a refusal, further slots of the same role are refused for the same reason.
        """
        await self._free(wanted.task_id, wanted.release)
        refused: dict[str, SlotReply] = {}
        replies: list[SlotReply] = []
        for slot in wanted.slots:
            request = SlotRequest(
                task_id=wanted.task_id,
                run_id=run_id,
                node_id=slot.node_id,
                epoch=slot.epoch,
                role=slot.role,
                wanted_at=slot.wanted_at,
            )
            if await self._holds(request, may_grant=slot.role not in refused):
                self._measure_wait(request)
                replies.append(SlotReply(granted=True))
                continue
            if slot.role not in refused:
                refused[slot.role] = await self._refusal(slot.role)
            replies.append(refused[slot.role])
        return SlotReplies(replies=replies)

    async def _holds(self, request: SlotRequest, *, may_grant: bool) -> bool:
        """Return whether an attempt holds a slot.

        If it `may_grant` one and no waiting request can have it, grant it.
        """
        store = await self.store()
        if may_grant and await self._is_first(store, request.role):
            return await store.grant(request, self.limits, time.time())
        return await store.renew(request)

    async def _refusal(self, role: str) -> SlotReply:
        limits, usage = self.limits, await (await self.store()).usage()
        served = await self._may_grant(role)
        return SlotReply(granted=False, reason=wait_reason(limits, usage, role, served=served))

    async def _is_first(self, store: SlotStore, role: str) -> bool:
        """Return whether no waiting request can have a slot of which `role` could have one as well."""
        page = await store.waiting()
        if page and (len(page) == PAGE or role in {request.role for request in page}):
            return False
        limits, usage = self.limits, await store.usage() if page else SlotUsage()
        others = {request.role for request in page if has_room(limits, usage, request.role)}
        return await self._may_grant(role) and not any([await self._may_grant(other) for other in others])

    async def wait(self, request: SlotRequest) -> None:
        """Let a request wait. Once the attempt has its slot, complete the activity in which the workflow waits."""
        store = await self.store()
        if await store.renew(request):
            await self._deliver(request)
        else:
            await store.enqueue(request, time.time())
            self.released.set()

    async def release(self, record: ReleaseSlots) -> None:
        """Free slots, and let waiting requests have them."""
        store = await self.store()
        if record.whole_task:
            await store.release_task(record.task_id)
            self.released.set()
        await self._free(record.task_id, record.slots)

    async def _free(self, task_id: str, slots: list[Slot]) -> None:
        store = await self.store()
        for slot in slots:
            await store.release(task_id, slot)
            self.released.set()

    async def grant_waiting(self) -> None:
        """Grant free slots to the requests that wait, in their order, and begin to deliver them."""
        async with self._granting:
            granted = await self._grant_in_order(await self.store())
        for request in granted:
            delivering = asyncio.create_task(self._deliver(request))
            self._delivering.add(delivering)
            delivering.add_done_callback(self._delivering.discard)

    async def stop(self) -> None:
        """Stop delivering. Another engine delivers what is left, once it finds that the workflows still wait."""
        delivering = [*self._delivering]
        for each in delivering:
            each.cancel()
        await asyncio.gather(*delivering, return_exceptions=True)

    async def _grant_in_order(self, store: SlotStore) -> list[SlotRequest]:
        granted: list[SlotRequest] = []
        if not await store.waiting(most=1):
            return granted
        limits, usage = self.limits, await store.usage()
        passed = set(full_roles(limits, usage))
        while not is_full(limits, usage) and (page := await store.waiting(without=passed)):
            usage = await self._grant_page(store, page, usage, passed, granted)
        return granted

    async def _grant_page(
        self,
        store: SlotStore,
        page: list[SlotRequest],
        usage: SlotUsage,
        passed: set[str],
        granted: list[SlotRequest],
    ) -> SlotUsage:
        """Grant slots to the first requests. Add roles that cannot get one to `passed`. Return the usage afterward."""
        for request in page:
            if request.role in passed:
                continue
            room = has_room(self.limits, usage, request.role)
            if room and await self._may_grant(request.role) and await self._grant(store, request):
                granted.append(request)
                usage = usage.with_one(request.role)
            else:
                passed.add(request.role)
        return usage

    async def _grant(self, store: SlotStore, request: SlotRequest) -> bool:
        if not await store.grant(request, self.limits, time.time()):
            return False
        await store.dequeue(request)
        self._measure_wait(request)
        return True

    def _measure_wait(self, request: SlotRequest) -> None:
        """Note how long an attempt has waited for the slot that it has now, for each limit that applies to it."""
        waited = max(0.0, time.time() - request.wanted_at) if request.wanted_at else 0.0
        for limit in self.limits.names_for(request.role):
            SLOT_WAIT.observe(waited, limit)

    async def _may_grant(self, role: str) -> bool:
        """Return whether the role has workers, or needs none because no limit concerns it."""
        return not self.limits.concern(role) or await self._roles.has_workers(role)

    async def _deliver(self, request: SlotRequest) -> None:
        """Complete the activity in which the workflow waits. Free the slot if the workflow has ended."""
        try:
            delivered = await self.deliver(request.task_id, request.run_id, request.node_id, request.epoch)
            if not delivered and (await self.look_up(request.task_id)).state is WorkflowState.CLOSED:
                slot = Slot(node_id=request.node_id, epoch=request.epoch, role=request.role)
                await (await self.store()).release(request.task_id, slot)
                self.released.set()
        except RPCError as error:
            _logger.warning("a slot of task %s was not delivered; retrying: %s", request.task_id, error)

    async def deliver(self, task_id: str, run_id: str, node_id: str, epoch: int) -> bool:
        """Report to the workflow that an attempt has its slot. Return False if the workflow does not wait for it."""
        handle = self.client.get_async_activity_handle(
            workflow_id=task_id, run_id=run_id, activity_id=slot_wait_id(node_id, epoch)
        )
        try:
            await handle.complete(SlotReply(granted=True))
        except RPCError as error:
            if not is_absent(error):
                raise
            return False
        return True

    async def look_up(self, task_id: str) -> FoundWorkflow:
        """Return the latest run of a task. Raise RPCError."""
        return await look_up(self.client, task_id)


class ServedRoles:
    """Says which roles of a queue have native workers, or external workers that are connected to a bridge."""

    def __init__(self, client: Client, registry: WorkerRegistry, queue: str) -> None:
        self._client = client
        self._registry = registry
        self._queue = queue
        self._known: TTLCache[str, bool] = TTLCache(_CACHED_ROLES, _CACHE_SEC)

    async def has_workers(self, role: str) -> bool:
        """Return whether the role has a worker. The result may be three seconds old."""
        served = self._known.get(role)
        if served is None:
            served = self._known[role] = await self._look(role)
        return served

    async def _look(self, role: str) -> bool:
        pollers = await recent_pollers(self._client, role_queue(self._queue, role))
        if not pollers:
            return False
        native = {poller for poller in pollers if not poller.startswith(BRIDGE_PREFIX)}
        if native - await self._registry.find_stopped(native):
            return True
        return native != pollers and await self._registry.is_served(role)


class SlotActivities:
    """The activities `acquire_slots`, `await_slot` and `release_slots`."""

    def __init__(self, grants: SlotGrants, portal: LoopPortal) -> None:
        self._grants = grants
        self._portal = portal

    @property
    def all(self) -> list[Callable[..., Any]]:
        """Return the activities to register with a Temporal worker."""
        return [self.acquire_slots, self.await_slot, self.release_slots]

    @activity.defn(name=temporal_names.ACQUIRE_SLOTS)
    async def acquire_slots(self, wanted: AcquireSlots) -> SlotReplies:
        """Return for each attempt whether it has its slot now, or why it must wait."""
        return await self._run_retried(self._grants.acquire(wanted, _run_id()))

    @activity.defn(name=temporal_names.AWAIT_SLOT)
    async def await_slot(self, request: SlotRequest) -> SlotReply:
        """Let the attempt wait.

        The engine that grants its slot completes the activity; until then, no worker runs it.
        """
        await self._run_retried(self._grants.wait(replace(request, run_id=_run_id())))
        activity.raise_complete_async()

    @activity.defn(name=temporal_names.RELEASE_SLOTS)
    async def release_slots(self, record: ReleaseSlots) -> None:
        """Free slots of attempts that have ended."""
        await self._run_retried(self._grants.release(record))

    async def _run_retried(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. Temporal retries every error, because the workflow cannot continue without the slot."""
        try:
            return await self._portal.run(work)
        except FlowKitError as error:
            raise ApplicationError(cut(str(error)), type=error.code) from None


def _run_id() -> str:
    """Return the id of the run that asks."""
    return activity.info().workflow_run_id or ""
