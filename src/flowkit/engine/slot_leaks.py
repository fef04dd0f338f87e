"""Frees slots whose attempts have ended without their workflow freeing them, as after Terminate or Reset."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from temporalio.service import RPCError

from flowkit.attempt.background import BackgroundLoop, Expected, new_owner
from flowkit.attempt.workflows import WorkflowState
from flowkit.core.time import LeaseObserver
from flowkit.errors import FlowKitError
from flowkit.models import slot_wait_id, temporal_names

if TYPE_CHECKING:
    from flowkit.adapters.slots import Holder, SlotStore
    from flowkit.attempt.background import LoopHealth
    from flowkit.attempt.workflows import FoundWorkflow
    from flowkit.engine.slot_grants import SlotGrants

_logger = logging.getLogger("flowkit.engine.limits")

_TICK_SEC = 1.0
"""Time between two checks for requests that can get a slot, for example because a worker has started."""

_IDLE_TICK_SEC = 5.0
"""The same for an engine without limits. It still serves tasks that were opened under limits."""

_CHECK_SEC = 2.0
_NEW_SEC = 2.0
"""How long an engine must know a slot before it checks it: its workflow may just be starting the attempt."""

_CONCURRENT_CHECKS = 10

_CHANGES = (temporal_names.ACQUIRE_SLOTS, temporal_names.RELEASE_SLOTS)
"""Activities that change the slots of their task. While one is open, its task is not checked."""


class Use(StrEnum):
    """How an attempt uses its slot."""

    IN_FLIGHT = "in_flight"
    """The attempt is in flight, or the workflow may be about to schedule it or to free its slot."""
    UNDELIVERED = "undelivered"
    """The workflow still waits for the slot, because the engine that granted it stopped."""
    UNUSED = "unused"
    """The workflow runs, but neither runs nor starts the attempt. Or Temporal does not find the workflow."""
    CLOSED = "closed"
    """The workflow has ended."""


def use_of(holder: Holder, found: FoundWorkflow) -> Use:
    """Return how an attempt uses its slot, from the latest run of its task."""
    if found.description is None:
        return Use.UNUSED
    if found.state is WorkflowState.CLOSED:
        return Use.CLOSED
    raw = found.description.raw_description
    pending = {activity.activity_id for activity in raw.pending_activities}
    changes = any(each.activity_type.name in _CHANGES for each in raw.pending_activities)
    if f"{holder.node_id}.{holder.epoch}" in pending or changes:
        return Use.IN_FLIGHT
    if slot_wait_id(holder.node_id, holder.epoch) in pending:
        return Use.UNDELIVERED
    # A workflow task that has not ended may be about to schedule the attempt.
    return Use.IN_FLIGHT if raw.HasField("pending_workflow_task") else Use.UNUSED


class SlotLoop:
    """Grants slots to waiting requests, and frees leaked slots. One engine of the queue at a time checks for leaks."""

    def __init__(self, grants: SlotGrants) -> None:
        self._grants = grants
        self._owner = new_owner()
        self._unused: set[tuple[str, str, int]] = set()
        """Slots that the last check found unused. They are freed if the next check finds them unused again."""
        self._seen = LeaseObserver()
        """Since when this engine knows the slots."""
        self._absent: set[str] = set()
        """Tasks with requests that Temporal did not find. Their requests are withdrawn if it does not find
        them again."""
        self._next_check = 0.0
        self._last_request = ""
        """The request that the last check of requests ended with."""
        log = partial(_logger.warning, "could not check concurrency slots; retrying: %s")
        outages = Expected(errors=(FlowKitError, RPCError), log=log)
        self._loop = BackgroundLoop("concurrency limits", self._step, expected=outages)

    @property
    def health(self) -> LoopHealth:
        """The health of the background loop."""
        return self._loop.health

    async def run(self) -> None:
        """Run until cancelled. Errors are logged, and the next step retries."""
        try:
            await self._loop.run()
        finally:
            await self._grants.stop()

    async def _step(self) -> None:
        tick = _TICK_SEC if self._grants.limits.configured else _IDLE_TICK_SEC
        with suppress(TimeoutError):
            async with asyncio.timeout(tick):
                await self._grants.released.wait()
        self._grants.released.clear()
        await self._once()

    async def _once(self) -> None:
        store = await self._grants.store()
        await self._grants.grant_waiting()
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _CHECK_SEC
            if await store.is_used():
                await self._check(store)

    async def _check(self, store: SlotStore) -> None:
        """Check all slots that are not new and some of the requests, if it is this engine's turn.

        Otherwise, ask again at the next tick, so that this engine soon takes over from one that has died. It then knows
        since when the slots are held.
        """
        read_at = self._seen.now()
        by_task: dict[str, list[Holder]] = {}
        for holder in await store.holders():
            if self._seen.unchanged_sec(holder.key, holder.at, read_at) >= _NEW_SEC:
                by_task.setdefault(holder.task_id, []).append(holder)
        if not await store.take_turn(self._owner, 2 * _CHECK_SEC):
            self._unused.clear()
            self._next_check = time.monotonic() + _TICK_SEC
            return
        checks = asyncio.Semaphore(_CONCURRENT_CHECKS)
        unused = await asyncio.gather(
            *(self._check_task(store, holders, checks) for holders in by_task.values())
        )
        self._unused = set().union(*unused)
        await self._check_requests(store)

    async def _check_requests(self, store: SlotStore) -> None:
        """Withdraw the requests of ended tasks. Each call checks the next few requests."""
        page = await store.requests_after(self._last_request)
        self._last_request = page[-1][0] if page else ""
        for task_id in dict.fromkeys(task_id for _, task_id in page):
            state = (await self._grants.look_up(task_id)).state
            if state is WorkflowState.CLOSED or (state is WorkflowState.ABSENT and task_id in self._absent):
                await store.release_task(task_id)
                self._absent.discard(task_id)
            elif state is WorkflowState.ABSENT:
                self._absent.add(task_id)
            else:
                self._absent.discard(task_id)

    async def _check_task(
        self, store: SlotStore, holders: list[Holder], checks: asyncio.Semaphore
    ) -> set[tuple[str, str, int]]:
        """Free the leaked slots of one task. Return those that are unused now."""
        async with checks:
            found = await self._grants.look_up(holders[0].task_id)
            uses = {holder: use_of(holder, found) for holder in holders}
            for holder, use in uses.items():
                await self._settle(store, holder, use, found)
        return {holder.key for holder, use in uses.items() if use is Use.UNUSED}

    async def _settle(
        self,
        store: SlotStore,
        holder: Holder,
        use: Use,
        found: FoundWorkflow,
    ) -> None:
        description = found.description
        if use is Use.UNDELIVERED and description is not None and description.run_id:
            await self._grants.deliver(holder.task_id, description.run_id, holder.node_id, holder.epoch)
        if use is Use.CLOSED or (use is Use.UNUSED and holder.key in self._unused):
            if not await store.release_unused(holder):
                return
            self._grants.released.set()
            _logger.warning(
                "the slot of node %s, attempt %s, of task %s was freed: %s",
                holder.node_id,
                holder.epoch,
                holder.task_id,
                "its workflow has ended" if use is Use.CLOSED else "its workflow does not use it",
            )
