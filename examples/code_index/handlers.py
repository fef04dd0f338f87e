"""The four roles: what happens to a batch in each."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from code_index import flaky, packages
from code_index.facts import FileFacts
from code_index.parsing import Parser
from code_index.tree import python_files
from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOP = 15
"""Packages in the ranking."""


class Indexer(RoleHandler):
    """Lists the files of `input_inline.source`, `input_inline.batch_size` to a batch."""

    role = "indexer"

    async def load_input(self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None) -> Any:
        """All files of the tree, in pieces."""
        given = input_inline or {}
        source, size = given["source"], given["batch_size"]
        files = await asyncio.to_thread(python_files, Path(source))
        return source, [files[start : start + size] for start in range(0, len(files), size)]

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """One batch for each piece. Its uid is its number, so a second attempt makes the same ones."""
        source, pieces = loaded
        for number, files in enumerate(pieces, start=1):
            payload = {"source": source, "files": files, "number": number, "of": len(pieces)}
            yield Batch(batch_uid=f"files-{number:04}", payload=payload)

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Hand the names on."""
        return BatchResult(success=True, metrics=batch.payload)

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """How many files were found."""
        found = [len(partial["meta"]["files"]) async for partial in ctx.artifacts.partials()]
        return FinalizeResult(metrics={"files": sum(found)})


class Enricher(RoleHandler):
    """Parses the files of a batch; two batches of a task fail once each."""

    role = "enricher"

    def __init__(self) -> None:
        self._parser = Parser()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Facts of each file."""
        listed = batch.payload["meta"]
        if flaky.fails(attempt=ctx.attempt_epoch, number=listed["number"], of=listed["of"]):
            return BatchResult(success=False, reason_code=flaky.REASON, error=f"batch {listed['number']}")
        facts = await ctx.cancellable(self._parser.facts(listed["source"], listed["files"]))
        return BatchResult(success=True, metrics={"facts": [asdict(file) for file in facts]})


class Grouper(RoleHandler):
    """Sums up the facts of a batch by package."""

    role = "grouper"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Partial sums: the files of a package may lie in several batches."""
        facts = [FileFacts(**fields) for fields in batch.payload["meta"]["facts"]]
        return BatchResult(success=True, metrics={"packages": packages.as_dicts(packages.grouped(facts))})


class Analyzer(RoleHandler):
    """Takes the partial sums over, and ranks the packages at the end."""

    role = "analyzer"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store the partial sums as this node's own, for `finalize` to read whichever attempt it runs in."""
        return BatchResult(success=True, metrics={"packages": batch.payload["meta"]["packages"]})

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """The ranking and the totals."""
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
