"""The activities with which workflows acquire and release slots of the limits across tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from flowkit import temporal_names
from flowkit.attempt.failures import cut
from flowkit.errors import FlowKitError
from flowkit.models import ReleaseSlots, SlotReply, SlotRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from flowkit.core.loop_portal import LoopPortal
    from flowkit.engine.limits.grants import SlotGrants

T = TypeVar("T")


class SlotActivities:
    """The activities `acquire_slot`, `await_slot` and `release_slots`."""

    def __init__(self, grants: SlotGrants, portal: LoopPortal) -> None:
        self._grants = grants
        self._portal = portal

    @property
    def all(self) -> list[Callable[..., Any]]:
        """Return the activities to register with a Temporal worker."""
        return [self.acquire_slot, self.await_slot, self.release_slots]

    @activity.defn(name=temporal_names.ACQUIRE_SLOT)
    async def acquire_slot(self, request: SlotRequest) -> SlotReply:
        """Return whether the attempt has its slot now, or why it must wait."""
        return await self._guarded(self._grants.acquire(_of_this_run(request)))

    @activity.defn(name=temporal_names.AWAIT_SLOT)
    async def await_slot(self, request: SlotRequest) -> SlotReply:
        """Let the attempt wait. The engine that grants its slot completes the activity; until then, no worker runs it."""
        await self._guarded(self._grants.wait(_of_this_run(request)))
        activity.raise_complete_async()

    @activity.defn(name=temporal_names.RELEASE_SLOTS)
    async def release_slots(self, record: ReleaseSlots) -> None:
        """Free slots of attempts that have ended."""
        await self._guarded(self._grants.release(record))

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. Temporal retries every error, because the workflow cannot continue without the slot."""
        try:
            return await self._portal.run(work)
        except FlowKitError as error:
            raise ApplicationError(cut(str(error)), type=error.code) from None


def _of_this_run(request: SlotRequest) -> SlotRequest:
    return replace(request, run_id=activity.info().workflow_run_id or "")
