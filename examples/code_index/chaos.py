"""Kill a worker while it processes a batch, watch another worker take the node over, and start a new worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from code_index.faults import batches_before_kill
from code_index.graph import ENRICH
from code_index.rates import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from code_index.processes import ProcessGroup
    from code_index.progress import NodeProgress, Progress
    from flowkit.local.process import FlowkitProcess

LEASE_SEC = 5.0
"""The lease in a run with a kill: long enough for a busy machine, short enough to watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A kill and the takeover that follows."""

    worker: str
    """The worker that was killed."""
    node: str
    attempt: int
    batches: int
    """Batches of the node that were done at the kill."""
    total: int
    started_at: datetime
    """When the attempt started. If the kill follows at once, there is no start event."""
    killed_at: datetime
    replacement: str
    successor: str = ""
    """The worker that took the node over; empty before the takeover."""
    successor_attempt: int = 0
    taken_over_at: datetime | None = None

    @property
    def takeover_seconds(self) -> float:
        """Seconds from the kill to the start of the next attempt."""
        return (self.taken_over_at - self.killed_at).total_seconds() if self.taken_over_at else 0.0


def find_target(progress: Progress) -> NodeProgress | None:
    """Return the node whose worker to kill now: `enrich`, when half of its batches are done. Pure."""
    for node in progress.nodes:
        if node.node == ENRICH and node.status == "running" and node.worker and node.total:
            return node if node.batches >= batches_before_kill(node.total) else None
    return None


def find_successor(incident: Incident, progress: Progress) -> NodeProgress | None:
    """Return the killed worker's node once another worker has taken it. Pure."""
    for node in progress.nodes:
        if node.node == incident.node and node.attempt > incident.attempt and node.worker:
            return node
    return None


class Chaos:
    """Watches the progress of a task, kills one worker, and reports what happens."""

    def __init__(self, processes: ProcessGroup, print_line: Callable[[str], None]) -> None:
        self._processes = processes
        self._print_line = print_line
        self._starting: asyncio.Task[None] | None = None
        self.incident: Incident | None = None

    async def update(self, progress: Progress) -> None:
        """Kill the worker or record the takeover, when it is time.

        Raises DevServerError if the new worker does not start.
        """
        if self.incident is None:
            found = find_target(progress)
            if found is not None and self._processes.has(found.worker):
                await self._kill(found)
        elif not self.incident.successor and (taken := find_successor(self.incident, progress)):
            self._record_takeover(self.incident, taken)
        if self._starting is not None and self._starting.done():
            self._starting.result()

    async def wait(self) -> None:
        """Wait until the new worker has started."""
        if self._starting is not None:
            await self._starting

    async def _kill(self, node: NodeProgress) -> None:
        await asyncio.to_thread(self._processes.kill, node.worker)
        killed_at = datetime.now(UTC)
        new = self._processes.new_worker()
        self.incident = Incident(
            worker=node.worker,
            node=node.node,
            attempt=node.attempt,
            batches=node.batches,
            total=node.total or 0,
            started_at=node.started_at or killed_at,
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

    def _record_takeover(self, incident: Incident, node: NodeProgress) -> None:
        self.incident = replace(
            incident, successor=node.worker, successor_attempt=node.attempt, taken_over_at=node.started_at
        )
        self._print_line(takeover_line(self.incident))


def kill_lines(incident: Incident) -> list[str]:
    """Return the lines to print at the kill."""
    done = f"{incident.batches:,}/{incident.total:,} batches"
    held = f"{incident.node}, attempt {incident.attempt}, {done}"
    lease = format_seconds(LEASE_SEC)
    return [
        f"chaos    SIGKILL to {incident.worker}, which held {held}",
        f"chaos    {incident.replacement} starts in its place; the lease expires within {lease}",
    ]


def takeover_line(incident: Incident) -> str:
    """Return the line to print at the takeover."""
    epoch = f"attempt {incident.successor_attempt} (epoch {incident.successor_attempt})"
    return f"chaos    {incident.successor} took {incident.node} over after {incident.takeover_seconds:.1f} s: {epoch}"
