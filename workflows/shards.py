"""The shards of a node with `parallel`: attempts that process its batches together, on as many workers.

The shards take batches from one pool, in MongoDB. Only one of them at a time waits for a worker: when it has begun, the
next one is scheduled. A wide node therefore does not starve other tasks, and a worker that is added later takes part.
When a shard has found no more batches, no further shard starts. When all have ended, an ordinary attempt of the node
follows, which finds all batches processed and finishes the node.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from temporalio import workflow

from flowkit import reason_codes
from flowkit.models import AttemptFailure, FailureKind, NodeStatus
from flowkit.workflows.display.summaries import shard_timer_summary
from flowkit.workflows.payloads import has_more
from flowkit.workflows.retry import Fail, decide, describe_runner, is_same_loss, note_failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from flowkit.models import Node, NodeState, Settings, ShardStarted
    from flowkit.workflows.retry import Retry
    from flowkit.workflows.scheduling.scheduler import Scheduler


class ShardNodes(Protocol):
    """What shards need of the running nodes of their task (`node.RunningNodes`)."""

    settings: Settings
    scheduler: Scheduler
    before_immediate_retry: Callable[[], Awaitable[None]]

    def starts_no_attempt_of(self, node: Node) -> bool:
        """Return whether this node must not start an attempt."""

    def slot_of(self, node: Node, state: NodeState) -> AbstractAsyncContextManager[None]:
        """Return a context manager that holds a slot for the next attempt."""

    def defer(self, index: int, until: float) -> None:
        """Show that a node waits for its retry."""

    async def await_retry(self, index: int, wait: Coroutine[Any, Any, None]) -> None:
        """Await `wait`, or until an action ends the wait of the node."""

    async def await_sources(self, node: Node, wait_sec: float, seen: int | None, summary: str) -> None:
        """Wait after a yield until an attempt may find new batches."""

    def fail_with(self, error: Exception) -> None:
        """Let the main loop raise an unexpected error."""


class Shards:
    """The shards of one node, in one run of the workflow."""

    def __init__(
        self,
        nodes: ShardNodes,
        node: Node,
        state: NodeState,
        run_attempt: Callable[[int], Awaitable[Any]],
    ) -> None:
        """`run_attempt` runs the next attempt of the node for a shard. It returns the result or an AttemptFailure."""
        self._nodes = nodes
        self._node = node
        self._state = state
        self._run_attempt = run_attempt
        self._next: deque[int] = deque([1])
        """The numbers of the shards that start next."""
        self._highest = 1
        """The highest number of a shard that has been in `_next`."""
        self._waiting: int | None = None
        """The shard that waits for a slot or a worker."""
        self._running: dict[int, asyncio.Task[None]] = {}
        """The shards that wait, run, or wait for a retry."""
        self._left: set[int] = set()
        """The shards whose latest attempt has left batches."""
        self._withdrawn: set[int] = set()
        """The shards that were cancelled because they waited for a worker when nothing was left."""
        self._epochs: dict[int, int] = {}
        """The epochs of the attempts in flight, by shard."""
        self.epochs: set[int] = set()
        """The same epochs. The set changes in place."""
        self._loss_counted_at = -math.inf
        """When the last loss that counted took place."""
        self._retries: dict[int, float] = {}
        """When the shards that wait for a retry run again."""
        self._seen: dict[int, int] = {}
        """The progress of the sources when the latest attempt of each shard began."""
        self._exhausted = False
        """Whether a shard has found no more batches, so that only those start again that have left some."""
        self._failed = False
        self._stopping = False
        self._changed = False

    async def run(self) -> NodeStatus | None:
        """Run the shards. Return `finished` when all batches are processed, and None if the node must not
        continue now.
        """
        try:
            while not self._failed:
                if self._may_start():
                    await self._start()
                elif self._running and not self._only_waits():
                    self._changed = False
                    await workflow.wait_condition(
                        lambda: self._changed or self._may_start() or self._only_waits()
                    )
                else:
                    break
        except asyncio.CancelledError:
            await self._stop()
            raise
        is_done = self._exhausted and not self._next and not self._running
        await self._stop()
        if self._failed:
            return NodeStatus.FAILED
        return NodeStatus.FINISHED if is_done else None

    def _only_waits(self) -> bool:
        """Return whether the node must not start an attempt, for example because it is paused, and runs none."""
        return not self._epochs and self._nodes.starts_no_attempt_of(self._node)

    def note_started(self, started: ShardStarted) -> None:
        """Let the next shard start, because the latest one has begun."""
        if self._waiting is None or self._epochs.get(self._waiting) != started.epoch:
            return
        self._waiting, self._changed = None, True
        if self._highest < self._node.parallel and not self._exhausted:
            self._highest += 1
            self._next.append(self._highest)

    def _may_start(self) -> bool:
        is_free = self._waiting is None and bool(self._next) and not self._failed
        return is_free and not self._nodes.starts_no_attempt_of(self._node)

    async def _start(self) -> None:
        """Start the next shard. The main loop sees first whether the task must continue in a new run."""
        await self._nodes.before_immediate_retry()
        if self._may_start():
            shard = self._waiting = self._next.popleft()
            self._running[shard] = asyncio.create_task(self._run_shard(shard))

    async def _run_shard(self, shard: int) -> None:
        try:
            failure = await self._run_in_slot(shard)
            if self._waiting == shard:
                self._waiting, self._changed = None, True
            if failure is not None and not self._stopping:
                await self._await_retry(shard, failure)
        except Exception as error:
            self._nodes.fail_with(error)
            raise
        finally:
            self._running.pop(shard, None)
            self._waiting = None if self._waiting == shard else self._waiting
            self._changed = True
            self._defer_idle()

    async def _run_in_slot(self, shard: int) -> AttemptFailure | None:
        """Run the next attempt of a shard, and return why it failed.

        Return None if it succeeded, or must not run now.
        """
        async with self._nodes.slot_of(self._node, self._state):
            if self._nodes.starts_no_attempt_of(self._node):
                self._next.appendleft(shard)
                return None
            epoch = self._epochs[shard] = self._state.epoch + 1
            self.epochs.add(epoch)
            self._seen[shard] = self._nodes.scheduler.source_progress(self._node)
            try:
                result = await self._run_attempt(shard)
            finally:
                del self._epochs[shard]
                self.epochs.discard(epoch)
        if isinstance(result, AttemptFailure):
            if shard not in self._withdrawn:
                return result
            self._note_withdrawal(shard)
            return None
        self._note_end(shard, more=has_more(result))
        return None

    def _note_withdrawal(self, shard: int) -> None:
        """Note the end of a withdrawn attempt. If it has begun meanwhile, it may have left batches."""
        self._withdrawn.discard(shard)
        if self._waiting != shard:
            self._left.add(shard)
            self._next.append(shard)

    def _note_end(self, shard: int, *, more: bool) -> None:
        self._left.discard(shard)
        if more:
            self._next.append(shard)
        else:
            self._exhaust()

    def _exhaust(self) -> None:
        """Start no further shard, except those that have left batches. One that still waits would find nothing."""
        self._exhausted = True
        self._next = deque(shard for shard in self._next if shard in self._left)
        if self._waiting is not None and self._waiting not in self._left:
            self._withdrawn.add(self._waiting)
            self._running[self._waiting].cancel()

    async def _await_retry(self, shard: int, failure: AttemptFailure) -> None:
        """Decide whether a shard runs again, and wait until it may.

        Its next attempt continues with what it has left.
        """
        state = self._state
        decision = self._decide(failure)
        if isinstance(decision, Fail):
            note_failure(state, decision.code, decision.message, describe_runner(failure))
            self._failed = True
            return
        self._left.add(shard)
        if decision.after_sec > 0:
            note_failure(state, failure.code, failure.message, describe_runner(failure))
            await self._wait(shard, failure, decision.after_sec)
        self._next.append(shard)

    async def _wait(self, shard: int, failure: AttemptFailure, wait_sec: float) -> None:
        """Wait for a retry."""
        summary = shard_timer_summary(self._node, shard, failure.code, wait_sec)
        self._retries[shard] = workflow.now().timestamp() + wait_sec
        self._defer_idle()
        if failure.code == reason_codes.YIELDED:
            wait = self._nodes.await_sources(self._node, wait_sec, self._seen[shard], summary)
        else:
            wait = workflow.sleep(wait_sec, summary=summary)
        await self._nodes.await_retry(self._node.index, wait)
        del self._retries[shard]

    def _defer_idle(self) -> None:
        """Show that the node waits for a retry if all shards that have not ended do, so that nothing of it runs."""
        is_idle = not (self._epochs or self._next or self._waiting or self._failed or self._stopping)
        if is_idle and self._retries:
            self._nodes.defer(self._node.index, min(self._retries.values()))

    def _decide(self, failure: AttemptFailure) -> Retry | Fail:
        """Decide whether a shard runs again. The shards that a lost worker ran count as one loss of the node."""
        policy, lost_at = self._node.retry_policy, failure.lost_at
        if failure.kind is FailureKind.FENCED:
            failure, lost_at = replace(failure, kind=FailureKind.LOSS), workflow.now().timestamp()
        counts = not lost_at or not is_same_loss(
            self._loss_counted_at, lost_at, self._nodes.settings.lease_ttl_sec
        )
        if counts and lost_at:
            self._loss_counted_at = lost_at
        chance = workflow.random().random() if policy.jitter else 0.0
        return decide(policy, failure, self._state, chance, loss_counts=counts)

    async def _stop(self) -> None:
        """Cancel all shards, and wait until they have ended. If all wait for a retry, the node does so afterwards."""
        self._stopping = True
        if self._retries and not (self._epochs or self._next or self._failed):
            self._state.next_retry_at = min(self._retries.values())
        while running := [*self._running.values()]:
            for each in running:
                each.cancel()
            try:
                await workflow.wait(running)
            except asyncio.CancelledError:
                continue
