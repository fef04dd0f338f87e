"""A pulling node for the contract tests."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, TASK, WORKER, attempt
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC

from flowkit.activities.batches.puller import Puller
from flowkit.adapters.artifacts import ArtifactStore
from flowkit.graph.input_adapters import PullArgs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flowkit.activities.batches.puller import ByteBudget, Delivery
    from flowkit.adapters.entries import Mark, Scan
    from flowkit.adapters.tasks.store import TaskStore


class WatchedArtifacts(ArtifactStore):
    """Counts how often a puller scans the sources."""

    def __init__(self, db: Any) -> None:
        super().__init__(db)
        self._looks = 0
        self._looked = asyncio.Condition()

    async def scan(
        self,
        task_id: str,
        sources: Sequence[str],
        since: Mapping[str, Mark] | None = None,
        first_epochs: Mapping[str, int] = MappingProxyType({}),
    ) -> Scan:
        """Count the scan and run it."""
        found = await super().scan(task_id, sources, since, first_epochs)
        async with self._looked:
            self._looks += 1
            self._looked.notify_all()
        return found

    @property
    def scans(self) -> int:
        """Return how often the sources were scanned."""
        return self._looks

    async def next_scan(self) -> None:
        """Wait until the puller has scanned the sources at least once more."""
        seen = self._looks
        async with asyncio.timeout(TIMEOUT_SEC), self._looked:
            await self._looked.wait_for(lambda: self._looks >= seen + 2)


class Pull:
    """The pull of one attempt of the node `sink`."""

    def __init__(self, artifacts: ArtifactStore, tasks: TaskStore) -> None:
        self._artifacts, self._tasks = artifacts, tasks

    def puller(
        self,
        *from_nodes: str,
        epoch: int = 1,
        sources: dict[str, int] | None = None,
        budget: ByteBudget | None = None,
        **args: Any,
    ) -> Puller:
        """Return the puller."""
        return Puller(
            artifacts=self._artifacts,
            tasks=self._tasks,
            attempt=attempt("sink", epoch=epoch, sources=sources),
            args=PullArgs(from_nodes=from_nodes, **{"poll_ms": 1, "backoff_max_ms": 2, **args}),
            budget=budget,
        )

    def start(self, *from_nodes: str, **options: Any) -> asyncio.Task[list[Delivery]]:
        """Pull all batches in a background task."""
        puller = self.puller(*from_nodes, **options)

        async def collect() -> list[Delivery]:
            return [delivery async for delivery in puller.batches()]

        return asyncio.create_task(collect())

    async def all(self, *from_nodes: str, **options: Any) -> list[Delivery]:
        """Return all batches."""
        return await asyncio.wait_for(self.start(*from_nodes, **options), TIMEOUT_SEC)

    async def uids(self, *from_nodes: str, **options: Any) -> list[str]:
        """Return the uids of all batches."""
        return [uid for uid, _ in await self.all(*from_nodes, **options)]


async def end(artifacts: ArtifactStore, *nodes: str, epoch: int = 1) -> None:
    """Write the complete markers of these nodes."""
    for node in nodes:
        await artifacts.mark_complete(TASK, node, epoch, {}, AT)


async def ended_source(artifacts: ArtifactStore, *uids: str, node: str = "u", **meta: Any) -> None:
    """Create a source that has ended, whose batches have this meta."""
    for age, uid in enumerate(uids):
        await artifacts.upsert_partial(attempt(node), uid, meta or {"uid": uid}, WORKER, AT + age)
    await end(artifacts, node)
