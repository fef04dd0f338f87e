"""What people see of a backfill: how far it is, what runs, and what has failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit.graph.scheduled import format_nominal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from flowkit.models.backfills import BackfillCounts, BackfillRun, StoredBackfill


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillView:
    """A backfill with the number of its nominal times in each status."""

    backfill: StoredBackfill
    counts: BackfillCounts
    running: Sequence[BackfillRun] = ()
    """The nominal times whose tasks run. Only `status` reads them, as all that follow."""
    failed: Sequence[BackfillRun] = ()
    """The first nominal times that have failed, at most 100."""
    skipped: Sequence[BackfillRun] = ()
    """The first nominal times that were skipped, at most 100."""
    is_new: bool = True
    """Of the result of `create`: whether the call has created it, and it did not exist before."""
    left_sec: float | None = None
    """How long it still takes, in seconds, if the next tasks last as long as the latest ones; None if unknown."""
    is_driven: bool = True
    """Whether Temporal runs its workflow. If not, nothing of an open backfill continues."""
    has_engine: bool = True
    """Whether an engine has asked for work on backfills within the last 70 seconds."""

    @property
    def percent(self) -> int:
        """How much has ended, rounded down."""
        return 100 * self.counts.ended // self.backfill.total

    def as_json(self) -> dict[str, Any]:
        """Return the backfill and its counts in JSON types."""
        backfill = self.backfill
        return {
            "id": backfill.backfill_id,
            "schedule": backfill.schedule,
            "state": backfill.state.value,
            "from": format_nominal(backfill.start),
            "to": format_nominal(backfill.end),
            "order": backfill.order.value,
            "max_active": backfill.max_active,
            "existing": backfill.existing.value,
            "created_at": format_nominal(backfill.created_at),
            "ended_at": _text(backfill.ended_at),
            "total": backfill.total,
            "percent": self.percent,
            "counts": {
                "pending": self.counts.pending,
                "running": self.counts.running,
                "succeeded": self.counts.succeeded,
                "failed": self.counts.failed,
                "cancelled": self.counts.cancelled,
                "skipped": self.counts.skipped,
            },
        }

    def details_as_json(self) -> dict[str, Any]:
        """Return what `status` shows in JSON types."""
        return {
            **self.as_json(),
            "left_sec": self.left_sec,
            "is_driven": self.is_driven,
            "has_engine": self.has_engine,
            "running": [run_as_json(each) for each in self.running],
            "failed": [run_as_json(each) for each in self.failed],
            "skipped": [run_as_json(each) for each in self.skipped],
        }


def run_as_json(run: BackfillRun) -> dict[str, Any]:
    """Return a nominal time of a backfill in JSON types."""
    return {
        "scheduled_at": format_nominal(run.at),
        "task_id": run.task_id,
        "status": run.status.value,
        "reason": run.reason,
        "code": run.code,
        "started_at": _text(run.started_at),
        "ended_at": _text(run.ended_at),
    }


def _text(at: datetime | None) -> str | None:
    return None if at is None else format_nominal(at)
