"""What a backfill does with one nominal time, and how its task has ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING

from flowkit.graph.scheduled import format_nominal
from flowkit.models.admission import Admission
from flowkit.models.backfills import BackfillOutcome, BackfillRunStatus, Existing
from flowkit.models.tasks import TaskStatus
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flowkit.models.backfills import StoredBackfill


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenTask:
    """What Temporal and MongoDB know of the task of a nominal time."""

    is_open: bool = False
    """Whether Temporal runs it."""
    is_own: bool = False
    """Whether the backfill has started its latest run, for the same try."""
    status: TaskStatus | None = None
    """The status in its document; None if there is no document."""


class BackfillStep(Enum):
    """What a backfill does next with a nominal time."""

    START = "start"
    START_AGAIN = "start again"
    AWAIT = "await"


def next_step(seen: SeenTask, existing: Existing, tries: int) -> BackfillStep | BackfillOutcome:
    """Return what a backfill does next, or the end of a nominal time whose task it leaves as it is.

    `tries` is how often `retry-failed` has started it again. Its failed task then starts again, whatever `existing` is.
    """
    if seen.is_own:
        return BackfillStep.AWAIT
    if seen.is_open:
        return _skipped("its task runs already")
    if seen.status is None:
        return BackfillStep.START
    if not seen.status.closed:
        return _skipped(f"its task is {seen.status.value} already")
    if existing is Existing.ALL:
        return BackfillStep.START_AGAIN
    if seen.status is TaskStatus.FINISHED:
        return _skipped("its task has finished already")
    if existing is Existing.FAILED or tries:
        return BackfillStep.START_AGAIN
    how = "failed" if seen.status is TaskStatus.FAILED else "was cancelled"
    return _skipped(f"it has a task, which {how}; `--existing failed` starts such tasks again")


def _skipped(reason: str) -> BackfillOutcome:
    return BackfillOutcome(status=BackfillRunStatus.SKIPPED, reason=reason)


def same_problem(found: StoredBackfill, namespace_id: str, asked: Mapping[str, object]) -> str | None:
    """Return what is wrong with a second creation with the id of a backfill; None if it asks for the same."""
    taken = f"backfill_id is {printed(found.backfill_id)}, the id of another backfill"
    if found.namespace_id != namespace_id:
        return f"{taken}, in another namespace of Temporal; choose another id"
    stored: dict[str, object] = {
        "schedule": found.schedule,
        "from": found.start,
        "to": found.end,
        "order": found.order,
        "max_active": found.max_active,
        "existing": found.existing,
        "admission": found.admission,
    }
    for name, value in asked.items():
        if stored[name] != value:
            return f"{taken}, whose {name} is {_show(stored[name])} and not {_show(value)}; choose another id"
    return None


def _show(value: object) -> str:
    if isinstance(value, datetime):
        return format_nominal(value)
    if isinstance(value, Admission):
        return f"for user {value.user_id!r} of tenant {value.tenant!r}, with priority {value.priority}"
    return "none" if value is None else printed(value.value if isinstance(value, Enum) else value)


def estimate_left_sec(durations: list[float], left: int, max_active: int) -> float | None:
    """Return how many seconds a backfill still takes, if its tasks last as long as those that have ended.

    None with fewer than three of them. `durations` are their seconds, and `left` is the number that has not ended.
    """
    if len(durations) < _LEAST_DURATIONS:
        return None
    rounds = -(-left // max_active)
    return max(rounds, left / max_active) * sum(durations) / len(durations)


_LEAST_DURATIONS = 3
