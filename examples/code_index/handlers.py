"""The handlers of the four roles. What they store for each batch contains its number of files, `file_count`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from code_index import faults
from code_index.facts import Facts, facts_of
from code_index.packages import Ranking, Sums, grouped, merged, ranked, total
from code_index.tree import Files, python_files
from flowkit.worker import BatchFailure, FinalizeResult, RunContext, role

TOP = 15
"""Packages in the ranking."""

SERVICE_SEC = 0.2
"""How long `enrich` waits in each batch, in place of a service that a real node would call."""


def count_files(batches: list[Files]) -> FinalizeResult:
    """Return the number of files found."""
    return FinalizeResult(metrics={"files": sum(batch.file_count for batch in batches)})


@role("indexer", key=lambda batch: f"files-{batch.number:04}", finalize=count_files)
def index(source: str, batch_size: int, fault: str) -> Iterator[Files]:
    """List the files of `source`. The uid of a batch is its number, so every attempt yields the same batches."""
    files = python_files(Path(source))
    chunks = [files[start : start + batch_size] for start in range(0, len(files), batch_size)]
    for number, chunk in enumerate(chunks, start=1):
        yield Files(
            source=source,
            fault=fault,
            number=number,
            total_batches=len(chunks),
            total_files=len(files),
            files=chunk,
            file_count=len(chunk),
        )


@role("enricher")
async def enrich(batch: Files, ctx: RunContext) -> Facts:
    """Parse the files of a batch on one processor, and inject the fault that the graph names."""
    position = {"attempt": ctx.attempt_epoch, "number": batch.number, "total": batch.total_batches}
    if faults.should_fail(batch.fault, **position):
        raise BatchFailure(f"batch {batch.number}", reason_code=faults.REASON_CODE)
    if faults.should_wait_for_kill(batch.fault, **position):
        await ctx.cancellable(asyncio.sleep(faults.KILL_TIMEOUT_SEC))
    await ctx.cancellable(asyncio.sleep(SERVICE_SEC))
    parsing = asyncio.to_thread(lambda: [facts_of(batch.source, path) for path in batch.files])
    return Facts(facts=await ctx.cancellable(parsing), file_count=batch.file_count)


@role("grouper")
async def group(batch: Facts) -> Sums:
    """Sum the facts of a batch by package."""
    return Sums(packages=grouped(batch.facts), file_count=batch.file_count)


def rank(batches: list[Sums]) -> Ranking:
    """Return the ranking and the totals."""
    packages = merged(package for batch in batches for package in batch.packages)
    return Ranking(ranking=ranked(packages, TOP), total=total(packages), packages=len(packages))


@role("analyzer", finalize=rank)
async def analyze(batch: Sums) -> Sums:
    """Store the partial sums as results of this node, so that `rank` can read them in any attempt."""
    return batch
