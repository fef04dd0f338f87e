"""The states of a backfill and of its nominal times, and what its workflow exchanges with its activity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import dataclasses as wire

if TYPE_CHECKING:
    from datetime import datetime

    from flowkit.models.admission import Admission


class BackfillState(StrEnum):
    """The state of a backfill."""

    CREATING = "creating"
    """Its nominal times are being stored, by its creator or, if that was killed, by an engine. Nothing starts."""
    RUNNING = "running"
    FINISHED = "finished"
    """Each of its nominal times has ended."""
    CANCELLING = "cancelling"
    """It starts no more tasks, and those that run continue, or are being cancelled."""
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether no task of the backfill runs or will start."""
        return self in {BackfillState.FINISHED, BackfillState.CANCELLED}


class BackfillRunStatus(StrEnum):
    """What has become of one nominal time of a backfill."""

    PENDING = "pending"
    RUNNING = "running"
    """Its task starts, runs, or waits for admission."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Its task was cancelled, or the backfill before the task has started."""
    SKIPPED = "skipped"
    """It has a task, which the backfill leaves as it is."""

    @property
    def ended(self) -> bool:
        """Whether the backfill does no more for it."""
        return self not in {BackfillRunStatus.PENDING, BackfillRunStatus.RUNNING}


class Existing(StrEnum):
    """Which nominal times start again that have a task already."""

    NONE = "none"
    FAILED = "failed"
    """Those whose task has failed or was cancelled."""
    ALL = "all"
    """All whose task has ended."""


class Order(StrEnum):
    """With which nominal times a backfill begins."""

    OLDEST = "oldest"
    NEWEST = "newest"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillOutcome:
    """How a nominal time has ended."""

    status: BackfillRunStatus
    reason: str | None = None
    """Why it has failed, was cancelled or skipped."""
    code: str | None = None
    """The reason code of a task that has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackfillRun:
    """One nominal time of a backfill."""

    at: datetime
    """The nominal time, in UTC."""
    task_id: str
    status: BackfillRunStatus
    reason: str | None = None
    code: str | None = None
    tries: int = 0
    """How often `retry-failed` has started it again."""
    submitted: bool = False
    """Whether the backfill has submitted its task to the admission queue, or is about to."""
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBackfill:
    """A backfill as MongoDB has it, without its graph and params."""

    backfill_id: str
    schedule: str
    start: datetime
    """The nominal times begin here, in UTC."""
    end: datetime
    """The nominal times end before this, in UTC."""
    timezone: str
    order: Order
    max_active: int
    existing: Existing
    total: int
    """The number of nominal times."""
    queue: str
    namespace_id: str
    state: BackfillState
    created_at: datetime
    admission: Admission | None = None
    """For whom the tasks are submitted to the admission queue; None if they start at once."""
    ended_at: datetime | None = None
    revision: int = 0
    """Number of times that `retry-failed` has started tasks again."""
    cancels_running: bool = False
    """Whether the tasks that run are cancelled, too."""

    def owner_id(self, run: BackfillRun) -> str:
        """Return what the marker of a task says that this try of a nominal time has started.

        A later backfill of the same id, after a purge, has other ones.
        """
        return f"{self.backfill_id}/{self.created_at.timestamp():.0f}/{run.tries}"


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class RunBackfill:
    """Input of the workflow of a backfill and of its activity."""

    backfill_id: str
    schedule: str
    total: int
    deployment: str
    """Id of the database that has the backfill."""
    cancels: bool = False
    """Whether the workflow was cancelled, so that the activity cancels the backfill first."""


@wire.dataclass(frozen=True, kw_only=True, slots=True)
class BackfillCounts:
    """The nominal times of a backfill, counted by status. Result of its workflow."""

    pending: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0

    @property
    def total(self) -> int:
        """The number of nominal times."""
        return self.ended + self.pending + self.running

    @property
    def ended(self) -> int:
        """The number of nominal times for which the backfill does no more."""
        return self.succeeded + self.failed + self.cancelled + self.skipped

    @property
    def text(self) -> str:
        """The counts for people, without those that are zero: `20 succeeded, 1 failed`."""
        given = {each.value: getattr(self, each.value) for each in BackfillRunStatus}
        return ", ".join(f"{count:,} {name}" for name, count in given.items() if count) or "no nominal times"
