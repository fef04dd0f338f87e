"""Backfills, which start tasks of a schedule for past nominal times: `await coordinator.backfills()` returns them."""

from flowkit.backfills.client import BackfillPlan, Backfills
from flowkit.backfills.views import BackfillView
from flowkit.models.backfills import (
    BackfillCounts,
    BackfillRun,
    BackfillRunStatus,
    BackfillState,
    StoredBackfill,
)

__all__ = [
    "BackfillCounts",
    "BackfillPlan",
    "BackfillRun",
    "BackfillRunStatus",
    "BackfillState",
    "BackfillView",
    "Backfills",
    "StoredBackfill",
]
