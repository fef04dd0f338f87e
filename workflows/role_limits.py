"""Hold a slot of the limits across tasks while an attempt is in flight.

The engine counts the slots of all tasks. For each role, a task asks for one slot at a time, so that tasks take turns.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from flowkit import temporal_names
from flowkit.models import ReleaseSlots, Slot, SlotReply, SlotRequest, slot_wait_id
from flowkit.workflows.display.summaries import fit_summary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from flowkit.models import Node, NodeState

_CALL_TIMEOUT = timedelta(seconds=10)
_WAIT_TIMEOUT = timedelta(seconds=60)
"""After this time, `await_slot` runs again and asks for the slot again, in case an engine lost the request."""

_RETRIES = RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_interval=timedelta(seconds=10))


class RoleLimits:
    """The slots of one task."""

    def __init__(
        self, *, priority: int, is_draining: Callable[[], bool], on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when a node begins or ends its wait for a slot, and when an attempt has ended."""
        self._priority = priority
        self._is_draining = is_draining
        self._on_change = on_change
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, list[NodeState]] = {}
        """Nodes that wait for a slot, by role. The first one has asked for it."""
        self._ended: list[Slot] = []
        self._releasing: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def slot(
        self, node: Node, state: NodeState, task_slot: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[None]:
        """Hold a slot for the next attempt of a node. `task_slot` is its slot in the limits of the task."""
        slot = Slot(node_id=node.node_id, epoch=state.epoch + 1)
        turn = self._turns.setdefault(node.type, asyncio.Lock())
        queue = self._waiting.setdefault(node.type, [])
        queue.append(state)
        async with AsyncExitStack() as held:
            try:
                state.waits_for = queue[0].waits_for
                async with turn:
                    await held.enter_async_context(task_slot)
                    await self._acquire_or_withdraw(node, slot)
            finally:
                queue.remove(state)
                state.waits_for = None
            try:
                yield
            except GeneratorExit:
                raise  # Python deletes a workflow that left the worker's cache. The attempt has not ended.
            except BaseException:
                self._release(slot)
                raise
            self._release(slot)

    async def _acquire_or_withdraw(self, node: Node, slot: Slot) -> None:
        """Acquire a slot. After a cancel, withdraw the request.

        A task that stops withdraws its requests at its end, and a task that continues in a new run repeats them there.
        """
        try:
            await self._acquire(node, slot)
        except FailureError as error:
            if not self._is_draining():
                self._release(slot)
            if is_cancelled_exception(error):
                raise asyncio.CancelledError from error
            raise

    async def _acquire(self, node: Node, slot: Slot) -> None:
        request = SlotRequest(
            task_id=workflow.info().workflow_id,
            node_id=slot.node_id,
            epoch=slot.epoch,
            role=node.type,
            priority=self._priority,
        )
        reply = await self._ask(request, summary=f"{node.node_id}: slot of role {node.type}")
        self._show_wait(node.type, reply.reason)
        if not reply.granted:
            await _execute(
                temporal_names.AWAIT_SLOT,
                request,
                SlotReply,
                summary=f"{node.node_id}: waits for a slot of role {node.type}",
                activity_id=slot_wait_id(slot.node_id, slot.epoch),
                start_to_close_timeout=_WAIT_TIMEOUT,
            )
            self._on_change()

    async def _ask(self, request: SlotRequest, *, summary: str) -> SlotReply:
        """Ask for a slot, and free the slots of ended attempts with the same activity."""
        released, self._ended = self._ended, []
        try:
            reply: SlotReply = await _execute(
                temporal_names.ACQUIRE_SLOT, replace(request, release=released), SlotReply, summary=summary
            )
        except BaseException:
            self._ended = [*released, *self._ended]
            raise
        return reply

    def _show_wait(self, role: str, reason: str) -> None:
        """Show why the nodes of a role wait. `reason` is empty if the first one has its slot."""
        text = f"a slot of role {role} ({reason})" if reason else None
        for state in self._waiting[role]:
            state.waits_for = text
        self._on_change()

    def _release(self, slot: Slot) -> None:
        self._ended.append(slot)
        if self._is_draining():
            self.release_ended()
        else:
            self._on_change()

    def release_ended(self) -> None:
        """Free the slots of ended attempts, in the background. The main loop calls this after it has started nodes."""
        if self._ended and self._releasing is None:
            self._releasing = asyncio.create_task(self._release_all())

    async def _release_all(self) -> None:
        try:
            while self._ended:
                slots, self._ended = self._ended, []
                await self._send(slots, whole_task=False)
        finally:
            self._releasing = None

    async def flush(self) -> None:
        """Wait until the engine has freed the slots of all attempts that have ended."""
        self.release_ended()
        while self._releasing is not None:
            await workflow.wait([self._releasing])

    async def close(self) -> None:
        """Free all slots of the task, and withdraw its requests."""
        self._ended.clear()
        await self.flush()
        await self._send([], whole_task=True)

    async def _send(self, slots: list[Slot], *, whole_task: bool) -> None:
        record = ReleaseSlots(task_id=workflow.info().workflow_id, slots=slots, whole_task=whole_task)
        count = "all slots" if whole_task else "1 slot" if len(slots) == 1 else f"{len(slots)} slots"
        await _execute(temporal_names.RELEASE_SLOTS, record, None, summary=f"free {count}")


async def _execute(name: str, record: object, result_type: Any, *, summary: str, **options: Any) -> Any:
    """Run an activity on the engine's queue. A cancel ends the wait at once."""
    return await workflow.execute_activity(
        name,
        record,
        result_type=result_type,
        **{"start_to_close_timeout": _CALL_TIMEOUT, **options},
        retry_policy=_RETRIES,
        summary=fit_summary(summary),
        cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
    )


def priority_of(params: dict[str, Any]) -> int:
    """Return the priority of a task: `params.priority` if it is an integer of 32 bits, otherwise 0."""
    given = params.get("priority")
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) < 2**31:
        return given
    return 0
