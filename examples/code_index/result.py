"""The result of a finished task."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_index.documents import FIRST_FENCE, load_documents
from code_index.errors import DemoError
from code_index.flow import ANALYZE, INDEX
from code_index.integrity import integrity_errors
from code_index.packages import Package, from_dicts

if TYPE_CHECKING:
    from code_index.documents import Claim, Documents, ShardAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCounts:
    """Number of documents of one task, by collection."""

    tasks: int
    batches: int
    """In `artifacts`: one for each batch of each node."""
    markers: int
    """In `artifacts`: one complete marker for each finished node."""
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """The analysis of a source tree."""

    files_found: int
    total: Package
    packages: int
    ranking: list[Package]
    indexed_batches: int
    attempts: dict[str, dict[int, int]]
    """Number of batches that each attempt stored, by node and epoch."""
    workers: dict[str, Counter[str]]
    """Number of batches that each worker stored, by node."""
    shards: list[ShardAttempt]
    taken_over: list[Claim]
    """The claims of batches that another attempt had claimed before, and left."""
    counts: DocumentCounts


async def load_result(db: Any, task_id: str) -> IndexResult:
    """Read the result of a finished task; raises DemoError if files are lost or counted twice."""
    return verified_result(await load_documents(db, task_id))


def verified_result(documents: Documents) -> IndexResult:
    """Return the result in `documents`; raises DemoError if files are lost or counted twice. Pure."""
    if errors := integrity_errors(documents):
        raise DemoError("; ".join(errors))
    analysis = documents.markers[ANALYZE]
    return IndexResult(
        files_found=documents.markers[INDEX]["files"],
        total=Package(**analysis["total"]),
        packages=analysis["packages"],
        ranking=from_dicts(analysis["ranking"]),
        indexed_batches=sum(batch.node == INDEX for batch in documents.batches),
        attempts=_attempts(documents),
        workers=_workers(documents),
        shards=documents.shards,
        taken_over=[claim for claim in documents.claims if claim.fence > FIRST_FENCE],
        counts=DocumentCounts(
            tasks=1,
            batches=len(documents.batches),
            markers=len(documents.markers),
            metrics=sum(documents.metrics.values()),
        ),
    )


def _attempts(documents: Documents) -> dict[str, dict[int, int]]:
    attempts = {node: dict.fromkeys(epochs, 0) for node, epochs in documents.epochs.items()}
    for batch in documents.batches:
        attempts[batch.node][batch.epoch] += 1
    return attempts


def _workers(documents: Documents) -> dict[str, Counter[str]]:
    workers: dict[str, Counter[str]] = {node: Counter() for node in documents.epochs}
    for batch in sorted(documents.batches, key=lambda one: one.worker):
        workers[batch.node][batch.worker] += 1
    return workers
