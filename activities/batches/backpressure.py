"""Holds an attempt that is too far ahead of the nodes that pull from it (`io.max_ahead`)."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from flowkit.adapters.outages import clock_stopped, retry_while_unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flowkit.adapters.artifacts import ArtifactStore
    from flowkit.adapters.notifier import Claimed, Listener
    from flowkit.adapters.tasks.store import TaskStore
    from flowkit.models import AttemptInput

_logger = logging.getLogger("flowkit.worker")

_SHORTEST_SEC = 0.05
"""The pause before the second read of an attempt that is held. It doubles while no claims arrive."""
_LONGEST_SEC = 0.3
"""The longest pause between two reads of an attempt that is held or that no running node holds."""
_SHARE = 4.0
"""The pause after a read is at least this many times as long as the read."""
_SHOWN_SEC = 5.0
"""How long to show that the attempt was held."""


def is_reached(stored: int, max_ahead: int, claims: Iterable[int]) -> bool:
    """Return True if a node with `stored` batches is `max_ahead` or more ahead of any of these numbers of claims."""
    return any(stored - claimed >= max_ahead for claimed in claims)


class Backpressure:
    """The lead of one attempt over its followers, which are the nodes that pull from it.

    Only a follower that runs or is paused holds the attempt, not one that waits, has ended, or has lost its worker.
    Otherwise, an attempt could wait for a node that waits for the attempt's slot. While only paused followers hold the
    attempt, its clock does not run.

    The attempt counts its own batches in memory, and nodes in the same process notify it of their claims. It reads the
    claims and the statuses of its followers only when it has reached its limit according to these counts.
    """

    def __init__(
        self,
        attempt: AttemptInput,
        artifacts: ArtifactStore,
        tasks: TaskStore,
        subscription: Listener[Claimed],
    ) -> None:
        self._attempt = attempt
        self._artifacts = artifacts
        self._tasks = tasks
        self._subscription = subscription
        self._stored: set[str] | None = None
        """The batches that the node has stored, as far as the attempt knows. None until it has read them."""
        self._by_others = 0
        """How many more batches the node has stored, in other shards, according to the latest read."""
        self._claims = dict.fromkeys(attempt.followers, 0)
        self._running: set[str] = set()
        self._paused: set[str] = set()
        self._due = 0.0
        self._read_at = 0.0
        """When the latest read of the claims ended. It may have included claims whose write began before."""
        self._pause = _SHORTEST_SEC
        self._reported = False
        self._shown = ""
        self._shown_until = 0.0

    @property
    def waits_for(self) -> str | None:
        """What has held the attempt in the last five seconds, for people; None if nothing has. Any thread may read it.

        An attempt at its limit waits again and again. The text stays the same meanwhile, because commands print each
        change of it.
        """
        return self._shown if time.monotonic() < self._shown_until else None

    def stored(self, uid: str) -> None:
        """Count a batch that the attempt has stored."""
        if self._stored is not None:
            self._stored.add(uid)

    async def wait(self) -> None:
        """Return when the attempt may process its next batch."""
        attempt, artifacts = self._attempt, self._artifacts
        if self._stored is None:
            self._stored = await retry_while_unavailable(
                lambda: artifacts.stored_uids(attempt.task_id, attempt.node_id, attempt.first_epoch)
            )
        self._add_notified_claims()
        if attempt.shard and time.monotonic() >= self._due:
            await self._read()
        try:
            while self._is_reached(self._claims):
                if time.monotonic() >= self._due:
                    await self._read()
                if not self._is_reached(self._holders):
                    return
                self._report()
                with nullcontext() if self._is_reached(self._running) else clock_stopped():
                    await self._subscription.wait(max(0.0, self._due - time.monotonic()))
                self._add_notified_claims()
        finally:
            self._shown_until = min(self._shown_until, time.monotonic() + _SHOWN_SEC)

    @property
    def _holders(self) -> set[str]:
        return self._running | self._paused

    def _is_reached(self, followers: Iterable[str]) -> bool:
        claims = [self._claims[follower] for follower in followers]
        return is_reached(self._count(), self._attempt.max_ahead, claims)

    def _count(self) -> int:
        return len(self._stored or ()) + self._by_others

    def _report(self) -> None:
        """Note for which node the attempt waits, and log it the first time."""
        stored, most = self._count(), self._attempt.max_ahead
        slowest = min(self._holders, key=lambda follower: self._claims[follower])
        claimed = self._claims[slowest]
        paused = ", which is paused," if slowest in self._paused else ""
        self._shown = f"node {slowest}{paused} to claim batches (io.max_ahead is {most:,})"
        self._shown_until = float("inf")
        if self._reported:
            return
        self._reported = True
        _logger.info(
            "node %s of task %s has stored %d batches, of which node %s has claimed %d: it waits (io.max_ahead is %d)",
            *(self._attempt.node_id, self._attempt.task_id, stored, slowest, claimed, most),
        )

    def _add_notified_claims(self) -> None:
        """Add the claims that nodes in this process have made.

        Read at once if a follower has claimed that was not running so far, or if the latest read may have included the
        claims.
        """
        notified, must_read = self._subscription.take()
        for _, claimed in notified:
            if claimed.consumer not in self._claims:
                continue
            if claimed.began > self._read_at:
                self._claims[claimed.consumer] += claimed.batches
                must_read |= claimed.consumer not in self._running
            else:
                must_read = True
        if must_read:
            self._due = 0.0

    async def _read(self) -> None:
        """Read the claims and statuses of the followers, and decide when to read them again.

        Ignore the notifications that arrived meanwhile, because the read may have included their claims.
        """
        began, before = time.monotonic(), self._claims
        (self._running, self._paused), self._claims = await asyncio.gather(
            retry_while_unavailable(self._read_holders), retry_while_unavailable(self._read_claims)
        )
        if self._attempt.shard:
            await self._read_stored_by_others()
        notified, _ = self._subscription.take()
        progress = notified or self._claims != before
        now = self._read_at = time.monotonic()
        self._pause = _SHORTEST_SEC if progress else min(2 * self._pause, _LONGEST_SEC)
        pause = self._pause if self._is_reached(self._holders) else _LONGEST_SEC
        self._due = now + max(pause, (now - began) * _SHARE)

    async def _read_stored_by_others(self) -> None:
        stored = await retry_while_unavailable(lambda: self._artifacts.count_stored(self._attempt))
        self._by_others = max(0, stored - len(self._stored or ()))

    async def _read_holders(self) -> tuple[set[str], set[str]]:
        """Return the followers that run, and those that are paused. A pause that begins between the reads is seen."""
        task_id, followers = self._attempt.task_id, self._attempt.followers
        running = await self._tasks.running(task_id, followers, self._attempt.lease_ttl_sec)
        rest = [follower for follower in followers if follower not in running]
        return running, await self._tasks.paused(task_id, rest)

    async def _read_claims(self) -> dict[str, int]:
        attempt = self._attempt
        return await self._artifacts.claims.counts(
            attempt.task_id, attempt.node_id, attempt.followers, attempt.source_first_epochs
        )


@contextmanager
def backpressure(attempt: AttemptInput, artifacts: ArtifactStore, tasks: TaskStore) -> Iterator[Backpressure]:
    """Yield the backpressure of an attempt with `max_ahead` and followers.

    It receives notifications of claims until the end of the block.
    """
    with artifacts.claims.notifier.listener(attempt.task_id, [attempt.node_id]) as subscription:
        yield Backpressure(attempt, artifacts, tasks, subscription)
