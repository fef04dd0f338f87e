"""Everything about slots inside the workflow: which attempts of a task may be in flight, and which ones
wait for a slot.

An attempt needs a slot of its task, whose limits (`window` and `max_in_flight`) the workflow counts. With concurrency
limits, it also needs a concurrency slot, which the engine counts over all tasks. A node first asks whether
such a slot is free. If none is, the nodes of its role wait in the workflow, and only the first of them has
a request in the engine, so that tasks take turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from temporalio import workflow
from temporalio.exceptions import FailureError, is_cancelled_exception

from flowkit.models import (
    AcquireSlots,
    ReleaseSlots,
    Slot,
    SlotReplies,
    SlotReply,
    SlotRequest,
    slot_wait_id,
    temporal_names,
    waits,
)
from flowkit.validation.values import is_whole
from flowkit.workflows.display.summaries import free_summary, slots_summary
from flowkit.workflows.engine_calls import call_engine, call_locally_first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flowkit.models import Node, NodeState
    from flowkit.models.waits import NodeWait
    from flowkit.workflows.state_codec import TaskState

    TaskSlot = Callable[[], AbstractAsyncContextManager[None]]
    from collections.abc import Iterator

_WAIT_TIMEOUT = timedelta(seconds=60)
"""After this time, `await_slot` runs again and asks for the slot again, in case an engine lost the request."""

_TRIES = 10
"""How many nodes of a role ask at the same time whether a slot is free."""

_MOST_WANTED = 50
"""How many slots one call asks for. It takes some milliseconds for each, and may take two seconds."""


class Slots:
    """Slots for at most `limit` attempts of a task at once, and at most `window` attempts of one role.

    Waiting roles get free slots in turn. Within a role, the attempt that has waited longest gets the slot. A ticket is
    a number by which the caller identifies an attempt that waits.
    """

    def __init__(self, *, limit: int, window: int) -> None:
        self._limit = limit
        self._window = window
        self._used: Counter[str] = Counter()
        self.in_use = 0
        """Number of slots in use."""
        self._waiting: dict[str, OrderedDict[int, None]] = {}
        """Waiting tickets by role. The first role with room in its window gets the next free slot."""

    def in_use_by(self, role: str) -> int:
        """Return the number of slots that `role` uses."""
        return self._used[role]

    def try_acquire(self, role: str) -> bool:
        """Use a slot for `role` if one is free. Return whether there was one.

        This never overtakes a waiting attempt: while a slot is free, attempts wait only if the window of their role is
        full.
        """
        if not self._has_room(role):
            return False
        self._use(role, 1)
        return True

    def enqueue(self, role: str, ticket: int) -> None:
        """Add `ticket` to the queue of `role`."""
        self._waiting.setdefault(role, OrderedDict())[ticket] = None

    def release(self, role: str) -> list[int]:
        """Free a slot of `role`. Return the tickets that get a slot now."""
        self._use(role, -1)
        granted: list[int] = []
        while (waiting_role := self._next_role()) is not None:
            granted.append(self._grant(waiting_role))
        return granted

    def cancel_wait(self, role: str, ticket: int) -> bool:
        """Remove `ticket` from the queue. Return False if it already has its slot; the caller must then release it."""
        queue = self._waiting.get(role)
        if queue is None or ticket not in queue:
            return False
        del queue[ticket]
        if not queue:
            del self._waiting[role]
        return True

    def _has_room(self, role: str) -> bool:
        return self.in_use < self._limit and self._used[role] < self._window

    def _next_role(self) -> str | None:
        if self.in_use >= self._limit:
            return None
        return next((role for role in self._waiting if self._has_room(role)), None)

    def _use(self, role: str, slots: int) -> None:
        self._used[role] += slots
        self.in_use += slots

    def _grant(self, role: str) -> int:
        queue = self._waiting.pop(role)
        ticket, _ = queue.popitem(last=False)
        if queue:
            self._waiting[role] = queue
        self._use(role, 1)
        return ticket


class TaskSlots:
    """Lets the nodes of a task wait for the slots that `Slots` assigns."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._granted: dict[int, asyncio.Future[None]] = {}
        self._tickets = 0

    def slot(self, role: str) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds a slot for an attempt of `role`. It waits until one is free."""
        return _TaskSlot(self, role)

    async def acquire(self, role: str) -> None:
        """Use a slot for `role`. Wait until one is free."""
        if not self._slots.try_acquire(role):
            await self._wait_for_slot(role)

    async def _wait_for_slot(self, role: str) -> None:
        self._tickets += 1
        ticket, granted = self._tickets, asyncio.get_running_loop().create_future()
        self._granted[ticket] = granted
        self._slots.enqueue(role, ticket)
        try:
            await granted
        except asyncio.CancelledError:
            if not self._slots.cancel_wait(role, ticket):
                self.release(role)
            raise
        finally:
            del self._granted[ticket]

    def release(self, role: str) -> None:
        """Free a slot of `role`."""
        for ticket in self._slots.release(role):
            granted = self._granted[ticket]
            if not granted.done():
                granted.set_result(None)


class _TaskSlot(AbstractAsyncContextManager[None]):
    """A slot of `TaskSlots.slot`. Each attempt has one, so it is no generator."""

    __slots__ = ("_role", "_slots")

    def __init__(self, slots: TaskSlots, role: str) -> None:
        self._slots, self._role = slots, role

    async def __aenter__(self) -> None:
        await self._slots.acquire(self._role)

    async def __aexit__(self, *_: object) -> None:
        self._slots.release(self._role)


@dataclass
class _WaitingRole:
    """The nodes of one role that have no slot yet."""

    waiting: dict[int, NodeState] = field(default_factory=dict)
    reason: str | None = None
    """Why the role has no free slot. None until a node was refused one, and again once no node waits."""
    tries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_TRIES))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the node whose request waits in the engine."""


class TakenSlot:
    """Takes a slot, and keeps it while its block runs.

    When a workflow leaves the cache of its worker, Python closes its coroutines with GeneratorExit. The attempt has not
    ended then, so the slot stays in use.
    """

    def __init__(
        self, acquire: Callable[[AsyncExitStack], Awaitable[None]], release: Callable[[], None]
    ) -> None:
        self._acquire = acquire
        self._release = release
        self._taken = AsyncExitStack()

    async def __aenter__(self) -> None:
        try:
            await self._acquire(self._taken)
        except (Exception, asyncio.CancelledError):
            await self._taken.aclose()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not GeneratorExit:
            self._release()
            await self._taken.aclose()


class ConcurrencySlots:
    """The concurrency slots of one task.

    One call of the engine at a time frees the slots of attempts that have ended, and asks for all slots that the task
    wants meanwhile. It is a local activity, if MongoDB responds in time.
    """

    def __init__(
        self,
        *,
        priority: int,
        is_draining: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a node begins or ends its wait for a slot, and when an attempt has ended."""
        self._priority = priority
        self._is_draining = is_draining
        self._on_change = on_change
        self._roles: dict[str, _WaitingRole] = {}
        self._wanted: list[tuple[Slot, asyncio.Future[SlotReply]]] = []
        """The slots to ask for, with the futures of the replies."""
        self._ended: list[Slot] = []
        """The slots to free."""
        self._calling: asyncio.Task[None] | None = None

    def slot(self, node: Node, state: NodeState, task_slot: TaskSlot) -> TakenSlot:
        """Return a context manager that holds a slot for the next attempt of a node, and one of `task_slot`.

        `task_slot` are the limits of the task itself.
        """
        slot = Slot(node_id=node.node_id, epoch=state.epoch + 1, role=node.type)
        return TakenSlot(
            acquire=lambda taken: self._acquire(node, state, slot, task_slot, taken),
            release=lambda: self._release(slot),
        )

    async def _acquire(
        self, node: Node, state: NodeState, slot: Slot, task_slot: TaskSlot, taken: AsyncExitStack
    ) -> None:
        role, wanted_at = self._roles.setdefault(node.type, _WaitingRole()), workflow.now().timestamp()
        role.waiting[node.index] = state
        try:
            state.wait = _wait_for_slot(node.type, role.reason)
            if not await self._try(slot, role, task_slot, taken):
                await self._wait(replace(slot, wanted_at=wanted_at), role, task_slot, taken)
            self._on_change()
        finally:
            role.waiting.pop(node.index, None)
            state.wait = None
            role.reason = role.reason if role.waiting else None

    async def _try(self, slot: Slot, role: _WaitingRole, task_slot: TaskSlot, taken: AsyncExitStack) -> bool:
        """Acquire a slot if one is free, and return whether it was. Do not ask if a node of the role waits already."""
        async with role.tries:
            if role.reason is not None:
                return False
            await taken.enter_async_context(task_slot())
            reply = await self._ask(slot)
        if reply.granted:
            return True
        await taken.aclose()
        role.reason = reply.reason
        for state in role.waiting.values():
            state.wait = _wait_for_slot(slot.role, reply.reason)
        self._on_change()
        return False

    async def _wait(self, slot: Slot, role: _WaitingRole, task_slot: TaskSlot, taken: AsyncExitStack) -> None:
        """Wait for a slot. A node that had to wait for its turn asks first, as slots may have become free meanwhile."""
        is_first = not role.turn.locked()
        async with role.turn:
            await taken.enter_async_context(task_slot())
            if is_first or not (await self._ask(slot)).granted:
                await self._wait_in_engine(slot)

    async def _ask(self, slot: Slot) -> SlotReply:
        """Ask for a slot in the next call."""
        reply: asyncio.Future[SlotReply] = asyncio.get_running_loop().create_future()
        self._wanted.append((slot, reply))
        self._start_calling()
        with self._withdrawn_on_cancel(slot):
            return await reply

    async def _wait_in_engine(self, slot: Slot) -> None:
        """Run `await_slot`, which returns when the slot is granted."""
        request = SlotRequest(
            task_id=workflow.info().workflow_id,
            node_id=slot.node_id,
            epoch=slot.epoch,
            role=slot.role,
            priority=self._priority,
            asked_at=workflow.now().timestamp(),
            wanted_at=slot.wanted_at,
        )
        with self._withdrawn_on_cancel(slot):
            await call_engine(
                temporal_names.AWAIT_SLOT,
                request,
                SlotReply,
                summary=f"{slot.node_id}: waits for a slot of role {slot.role}",
                activity_id=slot_wait_id(slot.node_id, slot.epoch),
                time_limit=_WAIT_TIMEOUT,
            )

    @contextmanager
    def _withdrawn_on_cancel(self, slot: Slot) -> Iterator[None]:
        """Withdraw a request if its node is cancelled, or the request fails.

        A task that stops withdraws all of its requests at its end, and a task that continues in a new run repeats them
        there.
        """
        try:
            yield
        except (FailureError, asyncio.CancelledError) as error:
            if not self._is_draining():
                self._release(replace(slot, withdrawn=True))
            if isinstance(error, FailureError) and is_cancelled_exception(error):
                raise asyncio.CancelledError from error
            raise

    def _release(self, slot: Slot) -> None:
        self._ended.append(slot)
        if self._is_draining():
            self.release_ended()
        else:
            self._on_change()

    def release_ended(self) -> None:
        """Free the slots of ended attempts, in the background. The main loop calls this after it has started nodes."""
        if self._ended:
            self._start_calling()

    def _start_calling(self) -> None:
        if self._calling is None:
            self._calling = asyncio.create_task(self._call_all())

    async def _call_all(self) -> None:
        try:
            while self._wanted or self._ended:
                uncancelled = [(slot, reply) for slot, reply in self._wanted if not reply.done()]
                wanted, self._wanted = uncancelled[:_MOST_WANTED], uncancelled[_MOST_WANTED:]
                ended, self._ended = self._ended, []
                if wanted:
                    await self._send_wanted(wanted, ended)
                elif ended:
                    await self._send_released(ended)
        finally:
            self._calling = None

    async def _send_wanted(
        self, wanted: list[tuple[Slot, asyncio.Future[SlotReply]]], released: list[Slot]
    ) -> None:
        slots = [slot for slot, _ in wanted]
        record = AcquireSlots(task_id=workflow.info().workflow_id, slots=slots, release=released)
        summary = slots_summary(slots)
        try:
            replies: SlotReplies = await call_locally_first(
                temporal_names.ACQUIRE_SLOTS, record, SlotReplies, summary=summary
            )
        except FailureError as error:
            for _, reply in wanted:
                if not reply.done():
                    reply.set_exception(error)
            return
        for (_, reply), given in zip(wanted, replies.replies, strict=True):
            if not reply.done():
                reply.set_result(given)

    async def _send_released(self, slots: list[Slot], *, whole_task: bool = False) -> None:
        record = ReleaseSlots(task_id=workflow.info().workflow_id, slots=slots, whole_task=whole_task)
        summary = free_summary(slots, whole_task=whole_task)
        await call_locally_first(temporal_names.RELEASE_SLOTS, record, summary=summary)

    async def flush(self) -> None:
        """Wait until the engine has freed the slots of all attempts that have ended."""
        self.release_ended()
        while self._calling is not None:
            await workflow.wait([self._calling])

    async def close(self) -> None:
        """Free all slots of the task, and withdraw its requests."""
        self._ended.clear()
        await self.flush()
        await self._send_released([], whole_task=True)


def _wait_for_slot(role: str, reason: str | None) -> NodeWait | None:
    return waits.for_slot(role, reason) if reason else None


def concurrency_slots_of(
    state: TaskState, *, is_draining: Callable[[], bool], on_change: Callable[[], None]
) -> ConcurrencySlots | None:
    """Return the concurrency slots of a task; None if its engine had no concurrency limits when it opened the task."""
    if not state.opened.settings.limits:
        return None
    return ConcurrencySlots(
        priority=priority_of(state.params),
        is_draining=is_draining,
        on_change=on_change,
    )


def priority_of(params: dict[str, Any]) -> int:
    """Return the priority of a task: `params.priority` if it is an integer of 32 bits, otherwise 0."""
    given = params.get("priority")
    if is_whole(given, 1 - 2**31, 2**31 - 1):
        return given
    return 0
