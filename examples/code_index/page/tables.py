"""Rows of the report's tables. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from code_index.page.attempts import End

if TYPE_CHECKING:
    from collections.abc import Sequence

    from code_index.page.attempts import AttemptRun
    from code_index.page.data import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node with all of its attempts."""

    node: str
    role: str
    status: str
    attempts: int
    errors: str
    """How often attempts ended without success, by reason."""
    batches: int
    files: int
    metrics: int
    """Rows in `metrics_raw`: one for each batch and one for the end."""
    seconds: float
    """In which an attempt ran."""
    workers: str

    @property
    def batches_a_second(self) -> float:
        """While an attempt ran."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def files_a_second(self) -> float:
        """While an attempt ran."""
        return self.files / self.seconds if self.seconds > 0 else 0.0


def node_rows(run: Run, attempts: Sequence[AttemptRun]) -> list[NodeRow]:
    """The nodes, in the order of the graph."""
    rows = []
    for node in run.documents.task["graph"]["nodes"]:
        mine = [attempt for attempt in attempts if attempt.node == node["node_id"]]
        rows.append(
            NodeRow(
                node=node["node_id"],
                role=node["type"],
                status=node["status"],
                attempts=len(mine),
                errors=told_errors(mine),
                batches=sum(len(attempt.stored) for attempt in mine),
                files=sum(attempt.files for attempt in mine),
                metrics=run.documents.metrics.get(node["node_id"], 0),
                seconds=sum(attempt.seconds for attempt in mine),
                workers=", ".join(dict.fromkeys(attempt.worker for attempt in mine)),
            )
        )
    return rows


def told_errors(attempts: Sequence[AttemptRun]) -> str:
    """`2 × failed: flaky_disk, 1 × lost: SIGKILL`; empty when all went well."""
    errors = Counter((attempt.end, attempt.reason) for attempt in attempts if attempt.end is not End.DONE)
    return ", ".join(
        f"{times} × {end}{f': {reason}' if reason else ''}" for (end, reason), times in errors.items()
    )
