"""What a finished task has come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_index.account import complaints
from code_index.documents import documents_of
from code_index.errors import DemoError
from code_index.graph import ANALYZE, INDEX
from code_index.packages import Package, from_dicts

if TYPE_CHECKING:
    from code_index.documents import Documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Documents of one task, by collection."""

    tasks: int
    batches: int
    """In `artifacts`: one for each batch of each node."""
    markers: int
    """In `artifacts`: one for each finished node."""
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The analysis of a tree."""

    files_found: int
    total: Package
    packages: int
    ranking: list[Package]
    listed_batches: int
    attempts: dict[str, list[int]]
    """How many batches each attempt of a node did, by node."""
    counts: Counts


async def outcome_of(db: Any, task_id: str) -> Outcome:
    """Read the outcome of a finished task. A DemoError tells if files were lost or counted twice."""
    return checked_outcome(await documents_of(db, task_id))


def checked_outcome(documents: Documents) -> Outcome:
    """The outcome that `documents` tell of. A DemoError tells if files were lost or counted twice. Pure."""
    if problems := complaints(documents):
        raise DemoError("; ".join(problems))
    analysis = documents.markers[ANALYZE]
    return Outcome(
        files_found=documents.markers[INDEX]["files"],
        total=Package(**analysis["total"]),
        packages=analysis["packages"],
        ranking=from_dicts(analysis["ranking"]),
        listed_batches=sum(batch.node == INDEX for batch in documents.batches),
        attempts=_attempts(documents),
        counts=Counts(
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
