"""The handlers of the four roles. The metrics of each batch contain its number of files, `file_count`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from code_index import faults, packages
from code_index.facts import FileFacts, facts_of
from code_index.tree import python_files
from flowkit.worker import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOP = 15
"""Packages in the ranking."""

KILL_TIMEOUT_SEC = 15.0
"""How long an attempt waits for its kill before it continues."""

SERVICE_SEC = 0.2
"""How long `enrich` waits in each batch, in place of a service that a real node would call."""


class Indexer(RoleHandler):
    """Lists the files of `input_inline.source`, with `input_inline.batch_size` files per batch.

    Each batch contains the total number of batches and files, so that the demo can show progress from the start.
    """

    role = "indexer"

    async def load_input(self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None) -> Any:
        """Return the node's input and all files of the tree."""
        given = input_inline or {}
        return given, await asyncio.to_thread(python_files, Path(given["source"]))

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """Yield the batches. The uid of a batch is its number, so every attempt yields the same batches."""
        given, files = loaded
        size = given["batch_size"]
        chunks = [files[start : start + size] for start in range(0, len(files), size)]
        common = {"source": given["source"], "fault": given["fault"]}
        for number, chunk in enumerate(chunks, start=1):
            position = {"number": number, "total_batches": len(chunks), "total_files": len(files)}
            yield Batch(
                batch_uid=f"files-{number:04}",
                payload={**common, **position, "files": chunk, "file_count": len(chunk)},
            )

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Pass the names of the files on."""
        return BatchResult(success=True, metrics=batch.payload)

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Return the number of files found."""
        found = [partial["meta"]["file_count"] async for partial in ctx.artifacts.partials()]
        return FinalizeResult(metrics={"files": sum(found)})


class Enricher(RoleHandler):
    """Parses the files of a batch on one processor, and injects the fault that the graph names."""

    role = "enricher"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return the facts of each file."""
        meta = batch.payload["meta"]
        position = {"attempt": ctx.attempt_epoch, "number": meta["number"], "total": meta["total_batches"]}
        if faults.should_fail(meta["fault"], **position):
            return BatchResult(success=False, reason_code=faults.REASON_CODE, error=f"batch {meta['number']}")
        if faults.should_wait_for_kill(meta["fault"], **position):
            await ctx.cancellable(asyncio.sleep(KILL_TIMEOUT_SEC))
        await ctx.cancellable(asyncio.sleep(SERVICE_SEC))
        facts = await ctx.cancellable(asyncio.to_thread(_facts_of_all, meta["source"], meta["files"]))
        return _result(batch, facts=facts)


class Grouper(RoleHandler):
    """Sums the facts of a batch by package."""

    role = "grouper"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Return partial sums, because the files of a package may be in several batches."""
        facts = [FileFacts(**fields) for fields in batch.payload["meta"]["facts"]]
        return _result(batch, packages=packages.as_dicts(packages.grouped(facts)))


class Analyzer(RoleHandler):
    """Collects the partial sums and ranks the packages."""

    role = "analyzer"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store the partial sums as results of this node, so that `finalize` can read them in any attempt."""
        return _result(batch, packages=batch.payload["meta"]["packages"])

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """Return the ranking and the totals."""
        merged: list[packages.Package] = []
        async for partial in ctx.artifacts.partials():
            merged = packages.merged([*merged, *packages.from_dicts(partial["meta"]["packages"])])
        return FinalizeResult(
            metrics={
                "ranking": packages.as_dicts(packages.ranked(merged, TOP)),
                "total": asdict(packages.total(merged)),
                "packages": len(merged),
            }
        )


def _facts_of_all(root: str, paths: list[str]) -> list[dict[str, Any]]:
    return [asdict(facts_of(root, path)) for path in paths]


def _result(batch: Batch, **metrics: Any) -> BatchResult:
    return BatchResult(success=True, metrics={**metrics, "file_count": batch.payload["meta"]["file_count"]})
