"""The rows of the report's tables. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from code_index.page.attempts import AttemptEnd, running_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from code_index.page.attempts import AttemptRun
    from code_index.page.data import DemoRun


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node with the totals of its attempts."""

    node: str
    role: str
    status: str
    attempts: int
    errors: str
    """Number of unsuccessful attempts, by reason."""
    batches: int
    files: int
    metrics: int
    """Rows in `metrics_raw`: one for each batch, and one for `finalize`."""
    seconds: float
    """How long at least one attempt ran."""
    workers: str

    @property
    def batches_per_second(self) -> float:
        """Rate during attempts."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def files_per_second(self) -> float:
        """Rate during attempts."""
        return self.files / self.seconds if self.seconds > 0 else 0.0


def node_rows(run: DemoRun, attempts: Sequence[AttemptRun]) -> list[NodeRow]:
    """Return the rows of the nodes, in the order of the graph."""
    rows = []
    for node in run.documents.task["graph"]["nodes"]:
        own = [attempt for attempt in attempts if attempt.node == node["node_id"]]
        rows.append(
            NodeRow(
                node=node["node_id"],
                role=node["type"],
                status=node["status"],
                attempts=len(own),
                errors=format_errors(own),
                batches=sum(len(attempt.stored) for attempt in own),
                files=sum(attempt.files for attempt in own),
                metrics=run.documents.metrics.get(node["node_id"], 0),
                seconds=running_seconds(own),
                workers=", ".join(dict.fromkeys(attempt.worker for attempt in own)),
            )
        )
    return rows


def format_errors(attempts: Sequence[AttemptRun]) -> str:
    """Format errors as `2 × failed: flaky_disk, 1 × lost: SIGKILL`; empty without errors."""
    errors = Counter(
        (attempt.end, attempt.reason) for attempt in attempts if attempt.end is not AttemptEnd.DONE
    )
    return ", ".join(
        f"{times} × {end}{f': {reason}' if reason else ''}" for (end, reason), times in errors.items()
    )
