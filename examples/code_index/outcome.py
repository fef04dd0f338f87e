"""What a finished task has left in MongoDB, and whether it is all there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from code_index.errors import DemoError
from code_index.graph import ANALYZE, INDEX
from code_index.packages import Package, from_dicts

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Documents of one task, by collection."""

    tasks: int
    batches: int
    """In `artifacts`: one for each batch of each node."""
    markers: int
    """In `artifacts`: one for each finished node."""
    metrics: int
    failed_metrics: int
    """In `metrics_raw`: batches that failed and were not done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The analysis of a tree."""

    files_found: int
    total: Package
    packages: int
    ranking: list[Package]
    attempts: dict[str, list[int]]
    """How many batches each attempt of a node did, by node."""
    counts: Counts


async def outcome_of(db: Any, task_id: str) -> Outcome:
    """Read the outcome of a finished task. A DemoError tells if files were lost or counted twice."""
    metas = await _final_metas(db, task_id)
    found, analysis = metas[INDEX], metas[ANALYZE]
    outcome = Outcome(
        files_found=found["files"],
        total=Package(**analysis["total"]),
        packages=analysis["packages"],
        ranking=from_dicts(analysis["ranking"]),
        attempts=await _attempts(db, task_id),
        counts=await _counts(db, task_id),
    )
    _check(outcome)
    return outcome


async def _final_metas(db: Any, task_id: str) -> dict[str, Mapping[str, Any]]:
    markers = db.artifacts.find({"task_id": task_id, "status": "complete"})
    return {marker["node_id"]: marker["meta"] async for marker in markers}


async def _attempts(db: Any, task_id: str) -> dict[str, list[int]]:
    task = await db.tasks.find_one({"id": task_id})
    attempts = {node["node_id"]: [0] * node["attempt_epoch"] for node in task["graph"]["nodes"]}
    batches = db.artifacts.find(
        {"task_id": task_id, "status": "partial"}, {"_id": 0, "node_id": 1, "attempt_epoch": 1}
    )
    async for batch in batches:
        attempts[batch["node_id"]][batch["attempt_epoch"] - 1] += 1
    return attempts


async def _counts(db: Any, task_id: str) -> Counts:
    mine = {"task_id": task_id}
    return Counts(
        tasks=await db.tasks.count_documents({"id": task_id}),
        batches=await db.artifacts.count_documents({**mine, "status": "partial"}),
        markers=await db.artifacts.count_documents({**mine, "status": "complete"}),
        metrics=await db.metrics_raw.count_documents(mine),
        failed_metrics=await db.metrics_raw.count_documents({**mine, "failed": True}),
    )


def _check(outcome: Outcome) -> None:
    found, analysed = outcome.files_found, outcome.total.files
    if found != analysed:
        raise DemoError(f"{found:,} files were found, but {analysed:,} were analysed")
    if left := outcome.counts.failed_metrics:
        raise DemoError(f"{left} batches have failed and were not done again")
