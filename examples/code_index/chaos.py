"""Kill a worker while it processes a batch, start a new one, and watch who takes over what the killed one has left."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from code_index.faults import batches_before_kill
from code_index.flow import ENRICH
from code_index.rates import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from code_index.documents import Claim, ShardAttempt
    from code_index.processes import ProcessGroup
    from code_index.progress import NodeProgress, Progress
    from flowkit.local.process import FlowkitProcess

LEASE_SEC = 5.0
"""The lease in a run with a kill: long enough for a busy machine, short enough to watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A kill."""

    lost: ShardAttempt
    """The attempt whose worker was killed."""
    batches: int
    """Batches of the node that were done at the kill."""
    total: int
    killed_at: datetime
    replacement: str


def find_target(progress: Progress) -> NodeProgress | None:
    """Return the node with the shard whose worker to kill now: `enrich`, when half of its batches are done. Pure."""
    for node in progress.nodes:
        if node.node == ENRICH and node.running_shards and node.total:
            return node if node.batches >= batches_before_kill(node.total) else None
    return None


class Chaos:
    """Watches the progress of a task, kills one worker, and reports what happens."""

    def __init__(self, processes: ProcessGroup, print_line: Callable[[str], None]) -> None:
        self._processes = processes
        self._print_line = print_line
        self._starting: asyncio.Task[None] | None = None
        self._taken_over = 0
        self.incident: Incident | None = None

    async def update(self, progress: Progress) -> None:
        """Kill the worker or print what is taken over, when it is time.

        Raises DevServerError if the new worker does not start.
        """
        if self.incident is None:
            found = find_target(progress)
            if found is not None and self._processes.has(found.running_shards[0].worker):
                await self._kill(found, found.running_shards[0])
        else:
            for claim in progress.taken_over[self._taken_over :]:
                self._print_line(takeover_line(self.incident, claim))
            self._taken_over = len(progress.taken_over)
        if self._starting is not None and self._starting.done():
            self._starting.result()

    async def wait(self) -> None:
        """Wait until the new worker has started."""
        if self._starting is not None:
            await self._starting

    async def _kill(self, node: NodeProgress, shard: ShardAttempt) -> None:
        await asyncio.to_thread(self._processes.kill, shard.worker)
        killed_at = datetime.now(UTC)
        new = self._processes.new_worker()
        self.incident = Incident(
            lost=shard,
            batches=node.batches,
            total=node.total or 0,
            killed_at=killed_at,
            replacement=new.name,
        )
        for line in kill_lines(self.incident):
            self._print_line(line)
        self._starting = asyncio.create_task(self._start(new))

    async def _start(self, new: FlowkitProcess) -> None:
        since = time.monotonic()
        await asyncio.to_thread(self._processes.start_worker, new)
        self._print_line(f"chaos    {new.name} is ready, {time.monotonic() - since:.1f} s after the kill")


def kill_lines(incident: Incident) -> list[str]:
    """Return the lines to print at the kill."""
    done = f"{incident.batches:,}/{incident.total:,} batches of the node"
    lease = format_seconds(LEASE_SEC)
    return [
        f"chaos    SIGKILL to {incident.lost.worker}, which ran {incident.lost}, after {done}",
        f"chaos    {incident.replacement} starts in its place; the lease of the shard expires within {lease}",
    ]


def takeover_line(incident: Incident, claim: Claim) -> str:
    """Return the line to print when a batch is taken over."""
    after = f"{(claim.claimed_at - incident.killed_at).total_seconds():.1f} s after the kill"
    return f"chaos    {claim.worker} takes over batch {claim.uid}, {after}: attempt {claim.epoch}"
