"""Removing ended tasks that Temporal does not run, step by step."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from temporalio.client import WorkflowExecutionStatus

from flowkit.adapters.tasks.purge import BELONGINGS, Purge
from flowkit.cli import output
from flowkit.cli.errors import remedied
from flowkit.cli.servers import servers
from flowkit.cli.tasks.view import describe
from flowkit.connection import Namespace, TemporalUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.client import Client

    from flowkit.cli.options import Where

_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be removed."""

    older_than_sec: float
    """Time since the task ended."""
    statuses: tuple[str, ...]
    dry_run: bool = False


@dataclass(kw_only=True, slots=True)
class Purged:
    """What was removed, or would be."""

    dry_run: bool
    rows: Counter[str] = field(default_factory=Counter)
    """Documents, by collection."""
    running: list[str] = field(default_factory=list)
    """Tasks that stay because Temporal runs them."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        rows = {name: self.rows[name] for name in BELONGINGS}
        return {"dry_run": self.dry_run, "tasks": self.rows["tasks"], "rows": rows, "running": self.running}

    def lines(self) -> list[str]:
        """For people."""
        verb = "would delete" if self.dry_run else "deleted"
        told = [f"{verb} {_count(self.rows['tasks'], 'task')}"]
        told += [f"  {name}: {self.rows[name]:,}" for name in BELONGINGS if self.rows[name]]
        if self.running:
            some = ", ".join(self.running[:_SHOWN]) + (", …" if len(self.running) > _SHOWN else "")
            told.append(f"kept {_count(len(self.running), 'task')} that Temporal runs: {some}")
        return told


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


async def purge_tasks(where: Where, wish: Wish, *, quiet: bool) -> Purged:
    """Remove them in steps, each of which is complete; tells how far it is unless `quiet`."""
    purged = Purged(dry_run=wish.dry_run)
    async with servers(where) as both:
        purge = Purge(
            both.db,
            before=time.time() - wish.older_than_sec,
            statuses=wish.statuses,
            namespace_id=await known_namespace(both.temporal),
        )
        async for task_ids in purge.steps():
            running = await _running(both.temporal, task_ids)
            purged.running += running
            ended = [task_id for task_id in task_ids if task_id not in running]
            purged.rows += Counter(await (purge.count(ended) if wish.dry_run else purge.remove(ended)))
            if not (quiet or wish.dry_run):
                output.note(f"deleted {_count(purged.rows['tasks'], 'task')} so far")
    return purged


async def known_namespace(client: Client) -> str:
    """Id of the client's namespace. TemporalUnavailable when the server does not tell it."""
    if found := await Namespace(client).id():
        return found
    problem = TemporalUnavailable(f"Temporal does not tell the id of namespace {client.namespace!r}")
    raise remedied(problem, "use credentials that may describe the namespace")


async def _running(client: Client, task_ids: Sequence[str]) -> list[str]:
    found = await asyncio.gather(*(describe(client, task_id) for task_id in task_ids))
    return [
        task_id
        for task_id, description in zip(task_ids, found, strict=True)
        if description is not None and description.status is WorkflowExecutionStatus.RUNNING
    ]
