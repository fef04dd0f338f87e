"""State that the nodes of one task share while they run.

It limits the number of attempts (slots) and the bytes of input that one workflow task (an activation of the workflow by
the server) may schedule, and holds callbacks to the main loop of `Task`.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from temporalio import workflow

from flowkit.limits import ACTIVATION_INPUT_BYTES
from flowkit.workflows.local_attempts import LocalAttempts
from flowkit.workflows.scheduling.streams import Streams
from flowkit.workflows.slots import Slots, TaskSlots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from flowkit.models import AttemptFailure, Node, NodeState, Settings
    from flowkit.workflows.slots import ConcurrencySlots


async def _no_wait() -> None:
    """Return immediately."""


@dataclass(kw_only=True)
class NodeRunContext:
    """State and callbacks that all nodes of one task share while they run."""

    task_id: str
    settings: Settings
    is_draining: Callable[[], bool]
    """Return whether the task has stopped starting attempts, because it stops or continues in a new run."""
    is_stopping: Callable[[], bool]
    """Return whether the main loop has ended, so that it ends the running nodes itself."""
    epoch_of: Callable[[str], int]
    """Return the epoch of a node that has ended, or 0 while the node is open."""
    on_retry_state_change: Callable[[int], None]
    """Called when a node starts to wait for its retry and when its next attempt starts."""
    failed_nodes: Callable[[Node], list[dict[str, Any]]] = lambda node: []
    """Return the failures that started a node, for its attempts."""
    streams: Streams = field(default_factory=lambda: Streams(()))
    """The streaming edges of the graph."""
    source_progress: Callable[[Node], int] = lambda node: 0
    """Return a number that changes when a node from which this one pulls artifacts starts an attempt or ends."""
    before_immediate_retry: Callable[[], Awaitable[None]] = _no_wait
    """Awaited before a node runs again without backoff. It may wait until the task continues in a new run."""
    stop_failure: Callable[[int], AttemptFailure | None] = lambda index: None
    """Return the failure with which the task stops this single node, or None if it does not."""
    concurrency: ConcurrencySlots | None = None
    """The concurrency slots; None if there were no concurrency limits when the task was opened."""
    in_flight: int = 0
    """Number of attempts that are scheduled or running."""
    local: LocalAttempts = field(default_factory=LocalAttempts)
    """The attempts that run inside the engine."""
    _reserved: int = 0
    """Bytes of input that nodes have reserved in the present workflow task."""
    _reserved_at: int = -1
    """Length of the history when `_reserved` was last set to 0."""
    _reserving: asyncio.Lock = field(default_factory=asyncio.Lock)

    def slot_of(self, node: Node, state: NodeState) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds a slot for the next attempt of `node`, in all limits that apply."""
        if self.concurrency is None or node.is_function:
            return self.slot(node.type)
        return self.concurrency.slot(node, state, lambda: self.slot(node.type))

    def slot(self, role: str) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds a slot for an attempt of `role`."""
        return self._task_slots.slot(role)

    @cached_property
    def _task_slots(self) -> TaskSlots:
        """The slots that all roles share."""
        return TaskSlots(Slots(limit=self.settings.max_in_flight, window=self.settings.window))

    def source_epochs(self, node: Node) -> dict[str, int]:
        """Return the epochs of the source nodes, from which `node` pulls artifacts, that have ended."""
        if not node.pulls:
            return {}
        return {source: epoch for source in node.pulls_from if (epoch := self.epoch_of(source))}

    @contextmanager
    def count_in_flight(self) -> Iterator[None]:
        """Count an attempt while it is in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def reserve_input_bytes(self, size: int) -> None:
        """Reserve `size` bytes for the input of an activity.

        Waits for a later workflow task if this one already schedules more input than Temporal accepts at once.
        """
        async with self._reserving:
            while not self._fits_workflow_task(size):
                await workflow.sleep(0.001, summary="schedule the next attempts")
            self._reserved += size

    def _fits_workflow_task(self, size: int) -> bool:
        """Return whether this workflow task may schedule `size` more bytes. The first call of each resets the count."""
        length = workflow.info().get_current_history_length()  # It changes with each workflow task.
        if length != self._reserved_at:
            self._reserved, self._reserved_at = 0, length
        return self._reserved == 0 or self._reserved + size <= ACTIVATION_INPUT_BYTES
