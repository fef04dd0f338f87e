"""Count the open tasks of each Temporal namespace, and close those of a namespace that no longer exists."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.service import RPCError, RPCStatusCode

from flowkit import reason_codes
from flowkit.adapters.tasks.open_tasks import OpenTasks
from flowkit.cli.errors import add_remedy
from flowkit.cli.retention.purging import require_namespace
from flowkit.cli.servers import servers
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from temporalio.client import Client

    from flowkit.cli.options import DeploymentOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCounts:
    """The number of open tasks in each namespace."""

    counts: dict[str | None, int]
    here: dict[str, str]
    """Names of the namespaces on the connected server, by id."""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON document of `--json`."""
        return {
            "namespaces": [
                {"namespace_id": found, "open_tasks": count, "name": self.here.get(found or "")}
                for found, count in self._sorted()
            ]
        }

    def lines(self) -> list[str]:
        """Return the lines that the command prints."""
        return [f"{count:>9,}  {self._label(found)}" for found, count in self._sorted()] or ["no open tasks"]

    def _sorted(self) -> list[tuple[str | None, int]]:
        return sorted(self.counts.items(), key=lambda pair: pair[0] or "")

    def _label(self, found: str | None) -> str:
        if found is None:
            return "open tasks without a namespace (from an earlier release)"
        if name := self.here.get(found):
            return f"open tasks of namespace {found}, which is {name!r} on this Temporal server"
        return f"open tasks of namespace {found}, which this Temporal server does not have"


async def count_open(where: DeploymentOptions) -> OpenCounts:
    """Count the open tasks of each namespace."""
    async with servers(where) as both:
        counts = await OpenTasks(both.db).counts()
        names = {found: await _name(both.temporal, found) for found in counts if found}
    return OpenCounts(counts=counts, here={found: name for found, name in names.items() if name})


async def close_orphans(where: DeploymentOptions, namespace_id: str, *, dry_run: bool) -> int:
    """Close the open tasks of a namespace, or only count them for a dry run, and return their number.

    Raise ConfigError if the namespace still exists on the server.
    """
    async with servers(where) as both:
        await require_namespace(both.temporal)
        if name := await _name(both.temporal, namespace_id):
            problem = ConfigError(
                f"Temporal has namespace {namespace_id} ({name!r}): its tasks are not orphaned"
            )
            raise add_remedy(
                problem, "the engines of the namespace close tasks whose workflow no longer exists"
            )
        tasks = OpenTasks(both.db)
        if dry_run:
            return (await tasks.counts()).get(namespace_id, 0)
        closed = 0
        async for page in tasks.pages_of(namespace_id):
            for document in (each for each in page if isinstance(each.get("id"), str)):
                closed += await tasks.close_orphan(
                    document["id"], document.get("run_id"), reason_codes.LOST, time.time()
                )
        return closed


async def _name(client: Client, namespace_id: str) -> str | None:
    """Return the name of a namespace; None if the connected server has no namespace with this id."""
    if not _is_uuid(namespace_id):
        return None
    try:
        response = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(id=namespace_id))
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return None
    return response.namespace_info.name


def _is_uuid(text: str) -> bool:
    """Return whether a text is a UUID, as ids of namespaces are. For other texts, the server's error is not useful."""
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
