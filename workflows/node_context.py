"""What the nodes of one task share while they run: slots, the budget of inputs, and what the main loop is asked."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.limits import ACTIVATION_INPUT_BYTES
from flowkit.workflows.slots import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from flowkit.models import Node, Settings


class SharedSlots:
    """`Slots` to be awaited."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._granted: dict[int, asyncio.Future[None]] = {}
        self._tickets = 0

    @asynccontextmanager
    async def slot(self, role: str) -> AsyncIterator[None]:
        """A slot for an attempt of `role`; waits for its turn."""
        if not self._slots.take(role):
            await self._turn(role)
        try:
            yield
        finally:
            self._give_back(role)

    async def _turn(self, role: str) -> None:
        self._tickets += 1
        ticket, granted = self._tickets, asyncio.get_running_loop().create_future()
        self._granted[ticket] = granted
        self._slots.wait(role, ticket)
        try:
            await granted
        except asyncio.CancelledError:
            if not self._slots.leave(role, ticket):
                self._give_back(role)
            raise
        finally:
            del self._granted[ticket]

    def _give_back(self, role: str) -> None:
        for ticket in self._slots.give_back(role):
            granted = self._granted[ticket]
            if not granted.done():
                granted.set_result(None)


async def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(kw_only=True)
class NodeRunContext:
    """What all nodes of one task share while they run."""

    task_id: str
    settings: Settings
    draining: Callable[[], bool]
    """Whether no attempt may begin any more; asked right before each."""
    epoch_of: Callable[[str], int]
    """Epoch of an ended node, 0 while it is open."""
    on_retry_state_change: Callable[[int], None]
    """Told when a node begins to wait for its retry, and when it goes on."""
    progress_of: Callable[[Node], int] = lambda node: 0
    """A number that changes when a source of a pulling node begins an attempt or ends."""
    is_only_running_node: Callable[[], bool] = lambda: False
    """Whether only one node is open, so that a local activity holds nobody up."""
    repeating: Callable[[], Awaitable[None]] = _at_once
    """Awaited before a node runs again at once, after an attempt that needs no wait."""
    in_flight: int = 0
    local_streak: int = 0
    """Local activities since the last ordinary one."""
    _windows: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    _reserved: int = 0
    _reserved_at: int = -1
    _budget: asyncio.Lock = field(default_factory=asyncio.Lock)

    def slot(self, role: str) -> AbstractAsyncContextManager[None]:
        """A slot for an attempt of `role`, held while it runs."""
        if self._shared is not None:
            return self._shared.slot(role)
        return self._windows.setdefault(role, asyncio.Semaphore(self.settings.window))

    @cached_property
    def _shared(self) -> SharedSlots | None:
        """Slots shared by all roles; None for tasks of an earlier release, whose histories know only windows."""
        limit, window = self.settings.max_in_flight, self.settings.window
        return SharedSlots(Slots(limit=limit, window=window)) if limit else None

    @contextmanager
    def count_in_flight(self) -> Iterator[None]:
        """Count an attempt while it is in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def reserve_input_bytes(self, size: int) -> None:
        """Wait for a later workflow task when this one already schedules too many bytes of input."""
        async with self._budget:
            while not self._fits_budget(size):
                await workflow.sleep(0.001, summary="next batch of starts")
            self._reserved += size

    def _fits_budget(self, size: int) -> bool:
        now = workflow.info().get_current_history_length()
        if now != self._reserved_at:
            self._reserved, self._reserved_at = 0, now
        return self._reserved == 0 or self._reserved + size <= ACTIVATION_INPUT_BYTES
