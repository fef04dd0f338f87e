"""A worker is killed in the middle of its work, another one takes its node over, and a new worker fills the gap."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from code_index.graph import ENRICH
from code_index.pace import told_seconds
from code_index.trouble import done_before_kill

if TYPE_CHECKING:
    from collections.abc import Callable

    from code_index.processes import Crew
    from code_index.progress import NodeProgress, Progress
    from flowkit.local.flowkit_process import FlowkitProcess

LEASE_SEC = 5.0
"""The lease under chaos: long enough for a busy machine, short enough for a person who watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One kill and what came of it."""

    worker: str
    """Who was killed."""
    node: str
    attempt: int
    batches: int
    """How many the node had done at the kill."""
    total: int
    began: datetime
    """When the attempt began; a worker that is killed soon after has not told it to anybody else."""
    killed_at: datetime
    replacement: str
    heir: str = ""
    """Who took the node over; empty while nobody has."""
    heir_attempt: int = 0
    taken_over_at: datetime | None = None

    @property
    def seconds_until_heir(self) -> float:
        """From the kill to the start of the attempt that goes on."""
        return (self.taken_over_at - self.killed_at).total_seconds() if self.taken_over_at else 0.0


def target(progress: Progress) -> NodeProgress | None:
    """The node whose worker is to be killed now: the one that parses, when half of it is done. Pure."""
    for node in progress.nodes:
        if node.node == ENRICH and node.status == "running" and node.worker and node.total:
            return node if node.batches >= done_before_kill(node.total) else None
    return None


def heir(incident: Incident, progress: Progress) -> NodeProgress | None:
    """The node of the incident, once another worker has taken it. Pure."""
    for node in progress.nodes:
        if node.node == incident.node and node.attempt > incident.attempt and node.worker:
            return node
    return None


class Chaos:
    """Watches the progress of a task, strikes once, and tells what happens."""

    def __init__(self, crew: Crew, tell: Callable[[str], None]) -> None:
        self._crew = crew
        self._tell = tell
        self._hiring: asyncio.Task[None] | None = None
        self.incident: Incident | None = None

    async def look(self, progress: Progress) -> None:
        """Do what is due. A DevServerError tells why no new worker could be started."""
        if self.incident is None:
            found = target(progress)
            if found is not None and self._crew.has(found.worker):
                await self._strike(found)
        elif not self.incident.heir and (taken := heir(self.incident, progress)):
            self._inherit(self.incident, taken)
        if self._hiring is not None and self._hiring.done():
            self._hiring.result()

    async def end(self) -> None:
        """Wait for the new worker, which may still be on its way."""
        if self._hiring is not None:
            await self._hiring

    async def _strike(self, node: NodeProgress) -> None:
        await asyncio.to_thread(self._crew.kill, node.worker)
        killed_at = datetime.now(UTC)
        new = self._crew.replacement()
        self.incident = Incident(
            worker=node.worker,
            node=node.node,
            attempt=node.attempt,
            batches=node.batches,
            total=node.total or 0,
            began=node.began or killed_at,
            killed_at=killed_at,
            replacement=new.name,
        )
        for line in killed_lines(self.incident):
            self._tell(line)
        self._hiring = asyncio.create_task(self._hire(new))

    async def _hire(self, new: FlowkitProcess) -> None:
        since = time.monotonic()
        await asyncio.to_thread(self._crew.take_on, new)
        self._tell(f"chaos    {new.name} is ready, {time.monotonic() - since:.1f} s after the kill")

    def _inherit(self, incident: Incident, node: NodeProgress) -> None:
        self.incident = replace(
            incident, heir=node.worker, heir_attempt=node.attempt, taken_over_at=node.began
        )
        self._tell(taken_over_line(self.incident))


def killed_lines(incident: Incident) -> list[str]:
    """What a person reads at the kill."""
    done = f"{incident.batches:,}/{incident.total:,} batches"
    held = f"{incident.node}, attempt {incident.attempt}, {done}"
    lease = told_seconds(LEASE_SEC)
    return [
        f"chaos    SIGKILL to {incident.worker}, which held {held}",
        f"chaos    {incident.replacement} is started in its place; the lease runs out within {lease}",
    ]


def taken_over_line(incident: Incident) -> str:
    """What a person reads when the node goes on."""
    epoch = f"attempt {incident.heir_attempt} (epoch {incident.heir_attempt})"
    return f"chaos    {incident.heir} took {incident.node} over after {incident.seconds_until_heir:.1f} s: {epoch}"
