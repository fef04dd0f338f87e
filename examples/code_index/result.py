"""The result of a finished task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_index.documents import load_documents
from code_index.errors import DemoError
from code_index.graph import ANALYZE, INDEX
from code_index.integrity import integrity_errors
from code_index.packages import Package, from_dicts

if TYPE_CHECKING:
    from code_index.documents import Documents


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
    attempts: dict[str, list[int]]
    """Number of batches that each attempt stored, by node."""
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
        counts=DocumentCounts(
            tasks=1,
            batches=len(documents.batches),
            markers=len(documents.markers),
            metrics=sum(documents.metrics.values()),
        ),
    )


def _attempts(documents: Documents) -> dict[str, list[int]]:
    nodes = documents.task["graph"]["nodes"]
    attempts = {node["node_id"]: [0] * node["attempt_epoch"] for node in nodes}
    for batch in documents.batches:
        attempts[batch.node][batch.epoch - 1] += 1
    return attempts
