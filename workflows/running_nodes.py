"""Run the nodes of a task as asyncio tasks: start them, collect how they ended, and cancel them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from temporalio import workflow

from flowkit.models import NodeStatus
from flowkit.workflows.local_attempts import LocalAttempts
from flowkit.workflows.node import run_node
from flowkit.workflows.node_context import NodeRunContext
from flowkit.workflows.retry import note_failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from flowkit.models import AttemptFailure, FirstBatch, Node, NodeState, Settings
    from flowkit.workflows.scheduling.local_activities import Streak
    from flowkit.workflows.scheduling.scheduler import Scheduler
    from flowkit.workflows.slots import ConcurrencySlots


class RunningNodes:
    """The nodes of a task that have started and whose end the main loop has not yet processed."""

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        *,
        is_draining: Callable[[], bool],
        is_stopping: Callable[[], bool],
        on_retry_state_change: Callable[[int], None],
        before_immediate_retry: Callable[[], Awaitable[None]],
        streak: Streak,
        concurrency: ConcurrencySlots | None = None,
    ) -> None:
        """Run the nodes of `scheduler`. The callbacks are those of `NodeRunContext`."""
        self._scheduler = scheduler
        self._index_of = {node.node_id: node.index for node in scheduler.nodes}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended: list[tuple[int, NodeStatus]] = []
        self._stops: dict[int, AttemptFailure] = {}
        """The failures of the nodes that `stop` ends."""
        self._error: Exception | None = None
        """An unexpected error of a node. It fails the workflow task, so that Temporal shows it."""
        self._local = LocalAttempts(
            settings,
            streams=scheduler.streams,
            streak=streak,
            is_only_running_node=lambda: len(self._running) == 1,
        )
        self._context = NodeRunContext(
            task_id=workflow.info().workflow_id,
            settings=settings,
            is_draining=is_draining,
            is_stopping=is_stopping,
            epoch_of=self._epoch_of,
            on_retry_state_change=on_retry_state_change,
            failed_nodes=scheduler.failed_nodes,
            streams=scheduler.streams,
            source_progress=self._source_progress,
            before_immediate_retry=before_immediate_retry,
            stop_failure=self._stops.get,
            local=self._local,
            concurrency=concurrency,
        )

    @property
    def in_flight(self) -> int:
        """Number of attempts that are scheduled or running."""
        return self._context.in_flight

    @property
    def any_ended(self) -> bool:
        """Whether `pop_ended` has a node to return or an error to raise."""
        return bool(self._ended) or self._error is not None

    def start(self, indexes: Iterable[int]) -> None:
        """Start these nodes."""
        starting = [(self._scheduler.nodes[index], self._scheduler.states[index]) for index in indexes]
        self._local.note_starts(starting, with_conditions=self._scheduler.any_due)
        for node, state in starting:
            self._running[node.index] = asyncio.create_task(self._run(node, state))

    async def _run(self, node: Node, state: NodeState) -> None:
        try:
            status = await run_node(self._context, node, state)
        except asyncio.CancelledError:
            if node.index not in self._stops:
                raise
            self._fail_stopped(node.index)
            return
        except Exception as error:
            self._error = error
            raise
        if status is not None:
            self._ended.append((node.index, status))

    def pop_ended(self) -> list[tuple[int, NodeStatus]]:
        """Return the nodes that have ended since the last call, with their statuses, in the order in which they ended.

        Raise the unexpected error of a node if there was one.
        """
        if self._error is not None:
            raise self._error
        ended, self._ended = self._ended, []
        for index, _ in ended:
            self._running.pop(index, None)
        return ended

    def add_batch(self, batch: FirstBatch) -> bool:
        """Open the gates for the first batch of an attempt. Return False if it changes nothing, or is not the latest."""
        index = self._index_of.get(batch.node_id)
        if index is None or self._scheduler.states[index].epoch != batch.epoch:
            return False
        return self._scheduler.add_batch(index)

    def stop(self, index: int, failure: AttemptFailure) -> None:
        """End an open node with `failure`, in place of any other outcome.

        A node with the status `cancelling` ends with its attempt, which the caller cancels with `cancel_attempt`. Any
        other node ends at once.
        """
        self._stops[index] = failure
        if self._scheduler.states[index].status is not NodeStatus.CANCELLING and not self._cancel(index):
            self._fail_stopped(index)

    def cancel_attempt(self, index: int) -> None:
        """Cancel the attempt of a node that `stop` ends, unless it has ended by itself."""
        self._cancel(index)

    def _cancel(self, index: int) -> bool:
        """Cancel a node that runs or waits. Return False if it does neither."""
        running = self._running.get(index)
        return running is not None and running.cancel()

    def _fail_stopped(self, index: int) -> None:
        failure, state = self._stops[index], self._scheduler.states[index]
        note_failure(state, failure.code, failure.message)
        state.next_retry_at = None
        self._ended.append((index, NodeStatus.FAILED))

    def cancel_local(self) -> None:
        """Cancel the attempts that run inside the engine.

        Commands, such as the one that writes the cancel flags, wait for the end of these attempts.
        """
        for index in sorted(self._local.nodes):
            self._cancel(index)

    async def cancel(self, grace_sec: float) -> None:
        """Cancel the running nodes and wait until they stop, at most `grace_sec`. 0 means without a limit."""
        running = list(self._running.values())
        for each in running:
            each.cancel()
        if running:
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: all(each.done() for each in running),
                    timeout=grace_sec or None,
                    timeout_summary="let the attempts stop",
                )
        for each in running:
            if each.done() and not each.cancelled():
                each.exception()  # Mark the exception as retrieved; otherwise, asyncio logs it.
        self._running.clear()

    def _epoch_of(self, node_id: str) -> int:
        state = self._scheduler.states[self._index_of[node_id]]
        return state.epoch if state.status.ended else 0

    def _source_progress(self, node: Node) -> int:
        states = self._scheduler.states
        return sum(_progress(states[self._index_of[source]]) for source in node.pulls_from)


def _progress(state: NodeState) -> int:
    """Return a number that increases with each attempt of a node and when the node ends."""
    return 2 * state.epoch + state.status.ended
