"""The four roles: what happens to a batch in each. Every result says of how many files it is: `file_count`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from code_index import packages, trouble
from code_index.facts import FileFacts
from code_index.parsing import Parser
from code_index.tree import python_files
from flowkit.worker.handlers.base import Batch, BatchResult, FinalizeResult, RoleHandler, RunContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOP = 15
"""Packages in the ranking."""

KILL_WITHIN_SEC = 15.0
"""How long an attempt waits for its kill before it goes on without."""


class Indexer(RoleHandler):
    """Lists the files of `input_inline.source`, `input_inline.batch_size` to a batch.

    Each batch tells how many batches and files there are in all: whoever looks knows it from the first one on.
    """

    role = "indexer"

    async def load_input(self, input_ref: dict[str, Any] | None, input_inline: dict[str, Any] | None) -> Any:
        """All files of the tree, and what to say of them."""
        given = input_inline or {}
        return given, await asyncio.to_thread(python_files, Path(given["source"]))

    async def iter_batches(self, loaded: Any) -> AsyncIterator[Batch]:
        """One batch for each piece. Its uid is its number, so a second attempt makes the same ones."""
        given, files = loaded
        size = given["batch_size"]
        pieces = [files[start : start + size] for start in range(0, len(files), size)]
        common = {"source": given["source"], "trouble": given["trouble"]}
        for number, piece in enumerate(pieces, start=1):
            place = {"number": number, "of": len(pieces), "of_files": len(files)}
            yield Batch(
                batch_uid=f"files-{number:04}",
                payload={**common, **place, "files": piece, "file_count": len(piece)},
            )

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Hand the names on."""
        return BatchResult(success=True, metrics=batch.payload)

    async def finalize(self, ctx: RunContext) -> FinalizeResult:
        """How many files were found."""
        found = [partial["meta"]["file_count"] async for partial in ctx.artifacts.partials()]
        return FinalizeResult(metrics={"files": sum(found)})


class Enricher(RoleHandler):
    """Parses the files of a batch, through the trouble that the graph names."""

    role = "enricher"

    def __init__(self) -> None:
        self._parser = Parser()

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Facts of each file."""
        listed = batch.payload["meta"]
        place = {"attempt": ctx.attempt_epoch, "number": listed["number"], "of": listed["of"]}
        if trouble.fails(listed["trouble"], **place):
            return BatchResult(success=False, reason_code=trouble.REASON, error=f"batch {listed['number']}")
        if trouble.waits_to_be_killed(listed["trouble"], **place):
            await ctx.cancellable(asyncio.sleep(KILL_WITHIN_SEC))
        facts = await ctx.cancellable(self._parser.facts(listed["source"], listed["files"]))
        return _result(batch, facts=[asdict(file) for file in facts])


class Grouper(RoleHandler):
    """Sums up the facts of a batch by package."""

    role = "grouper"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Partial sums: the files of a package may lie in several batches."""
        facts = [FileFacts(**fields) for fields in batch.payload["meta"]["facts"]]
        return _result(batch, packages=packages.as_dicts(packages.grouped(facts)))


class Analyzer(RoleHandler):
    """Takes the partial sums over, and ranks the packages at the end."""

    role = "analyzer"

    async def process_batch(self, batch: Batch, ctx: RunContext) -> BatchResult:
        """Store the partial sums as this node's own, for `finalize` to read whichever attempt it runs in."""
        return _result(batch, packages=batch.payload["meta"]["packages"])

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


def _result(batch: Batch, **found: Any) -> BatchResult:
    return BatchResult(success=True, metrics={**found, "file_count": batch.payload["meta"]["file_count"]})
