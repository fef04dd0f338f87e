"""Open tasks by the Temporal namespace that they belong to, and the end of those whose namespace is gone."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError, RPCStatusCode

from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.cli.errors import remedied
from flowkit.cli.retention.purging import known_namespace
from flowkit.cli.servers import servers
from flowkit.engine.sweep import LOST
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.cli.options import Where


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCounts:
    """How many open tasks each namespace has."""

    counts: dict[str | None, int]
    here: dict[str, str]
    """Names of the namespaces that the connected server has, by id."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "namespaces": [
                {"namespace_id": found, "open_tasks": count, "name": self.here.get(found or "")}
                for found, count in self._sorted()
            ]
        }

    def lines(self) -> list[str]:
        """For people."""
        return [f"{count:>9,}  {self._told(found)}" for found, count in self._sorted()] or ["no open tasks"]

    def _sorted(self) -> list[tuple[str | None, int]]:
        return sorted(self.counts.items(), key=lambda pair: pair[0] or "")

    def _told(self, found: str | None) -> str:
        if found is None:
            return "open tasks that name no namespace (of an earlier release)"
        if name := self.here.get(found):
            return f"open tasks of namespace {found}, which this Temporal server has as {name!r}"
        return f"open tasks of namespace {found}, which this Temporal server does not have"


async def count_open(where: Where) -> OpenCounts:
    """Open tasks of each namespace."""
    async with servers(where) as both:
        counts = await OpenTasks(both.db).counts()
        names = {found: await _name(both.temporal, found) for found in counts if found}
    return OpenCounts(counts=counts, here={found: name for found, name in names.items() if name})


async def close_orphans(where: Where, namespace_id: str, *, dry_run: bool) -> int:
    """Close the open tasks of a namespace; answers how many. ConfigError when the server still has it."""
    async with servers(where) as both:
        await known_namespace(both.temporal)
        if name := await _name(both.temporal, namespace_id):
            problem = ConfigError(
                f"Temporal has namespace {namespace_id} ({name!r}): its tasks are not orphaned"
            )
            raise remedied(problem, "its engines close what has lost its workflow")
        tasks = OpenTasks(both.db)
        if dry_run:
            return (await tasks.counts()).get(namespace_id, 0)
        closed = 0
        async for page in tasks.pages_of(namespace_id):
            for document in (each for each in page if isinstance(each.get("id"), str)):
                closed += await tasks.close_orphan(document["id"], document.get("run_id"), LOST, time.time())
        return closed


async def _name(client: Client, namespace_id: str) -> str | None:
    """Name of a namespace of the connected server; None when it has none of this id."""
    if not _is_uuid(namespace_id):
        return None
    try:
        answer = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(id=namespace_id))
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return None
    return answer.namespace_info.name


def _is_uuid(text: str) -> bool:
    """Ids of namespaces are UUIDs; of another text the server says only that it is odd."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
