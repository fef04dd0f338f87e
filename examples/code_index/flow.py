"""The flow of the demo: a chain of four nodes, each with its own role. All results of batches have a `file_count`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from code_index import facts, faults, packages, tree
from flowkit import Flow
from flowkit.worker import BatchFailure, RunContext, role

INDEX, ENRICH, GROUP, ANALYZE = "index", "enrich", "group", "analyze"
BATCH_SIZE = 40
"""Files per batch: large enough to keep all processors busy, small enough to show progress."""

MAX_SHARDS = 16
"""Shards of `enrich`, at most: more than the workers have slots, so that a worker that starts later takes part."""

TOP = 15
"""Packages in the ranking."""

KILL_TIMEOUT_SEC = 15.0
"""How long an attempt waits for its kill before it continues."""

SERVICE_SEC = 0.2
"""How long `enrich` waits in each batch, in place of a service that a real node would call."""


class Params(BaseModel):
    source: Path
    batch_size: int = BATCH_SIZE
    fault: faults.Fault = faults.Fault.FLAKY_DISK


class Files(BaseModel):
    """Names of files, and the totals of all batches, so that the demo can show progress from the start."""

    number: int
    total_batches: int
    total_files: int
    file_count: int
    files: list[str]


class Facts(BaseModel):
    file_count: int
    facts: list[facts.FileFacts]


class Sums(BaseModel):
    file_count: int
    packages: list[packages.Package]


def count(results: list[Files]) -> dict[str, int]:
    """Return the number of files found."""
    return {"files": sum(batch.file_count for batch in results)}


@role("indexer", key=lambda batch: f"files-{batch.number:04}", finalize=count)
def index(source: Path, batch_size: int) -> Iterator[Files]:
    """List the files of a tree. The uid of a batch has its number, so every attempt yields the same batches."""
    files = tree.python_files(source)
    chunks = [files[start : start + batch_size] for start in range(0, len(files), batch_size)]
    totals = {"total_batches": len(chunks), "total_files": len(files)}
    for number, chunk in enumerate(chunks, start=1):
        yield Files(number=number, file_count=len(chunk), files=chunk, **totals)


@role("enricher")
async def enrich(batch: Files, ctx: RunContext, *, source: str, fault: faults.Fault) -> Facts:
    """Parse the files of a batch on one processor, and inject the fault of the task."""
    position = {"attempt": ctx.attempt_epoch, "number": batch.number, "total": batch.total_batches}
    if faults.should_fail(fault, **position):
        raise BatchFailure(f"batch {batch.number}", reason_code=faults.REASON_CODE)
    kill_sec = KILL_TIMEOUT_SEC if faults.should_wait_for_kill(fault, **position) else 0
    await ctx.cancellable(asyncio.sleep(kill_sec + SERVICE_SEC))
    parsed = asyncio.to_thread(lambda: [facts.facts_of(source, path) for path in batch.files])
    return Facts(file_count=batch.file_count, facts=await ctx.cancellable(parsed))


@role("grouper")
async def group(batch: Facts) -> Sums:
    """Sum the facts of a batch by package. The files of a package may be in several batches."""
    return Sums(file_count=batch.file_count, packages=packages.grouped(batch.facts))


@role("analyzer", collects=True)
def analyze(sums: list[Sums]) -> dict[str, object]:
    """Return the ranking and the totals."""
    merged = packages.merged(part for each in sums for part in each.packages)
    return {"ranking": packages.ranked(merged, TOP), "total": packages.total(merged), "packages": len(merged)}


flow = Flow("code_index", params=Params)
indexed = flow.node(INDEX, index).from_params("source", "batch_size")
enriched = flow.node(ENRICH, enrich).pulls(indexed).from_params("source", "fault").parallel(MAX_SHARDS)
grouped = flow.node(GROUP, group).pulls(enriched)
analyzed = flow.node(ANALYZE, analyze).pulls(grouped)
for node in flow.nodes.values():
    node.retry(5, backoff_sec=1)
