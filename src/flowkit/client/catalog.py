"""The tasks of a database as lists show them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

from flowkit import limits
from flowkit.adapters.tasks.fields import read_times
from flowkit.adapters.tasks.queries import TaskQueries
from flowkit.models import TaskStatus
from flowkit.models.waits import OUTSIDE
from flowkit.validation.arguments import choice_problem, moment_problem, require, whole_problem
from flowkit.workflows.display.task_status import pipeline_name

if TYPE_CHECKING:
    from datetime import datetime


_logger = logging.getLogger("flowkit.client")
_MOST_SKIPPED = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSummary:
    """One task in a list, as its task document describes it."""

    task_id: str
    status: TaskStatus
    name: str | None = None
    """`params.pipeline_name`, else the graph's name."""
    started_at: str | None = None
    """When the task was created, as ISO 8601 text in UTC."""
    finished_at: str | None = None
    seconds: float | None = None
    """How long its latest run took, or has been open when the list was read."""
    total_seconds: float | None = None
    """The same since its creation: with all earlier runs, and the time between them."""
    reason: str | None = None
    """Why the task failed or was cancelled."""


class TaskCatalog(TaskQueries):
    """Queries on the `tasks` collection. They raise StoreUnavailable when MongoDB does not respond."""

    async def list_tasks(
        self,
        status: str | None = None,
        limit: int = 50,
        *,
        waits: str | None = None,
        name: str | None = None,
        since: float | None = None,
        ended_since: float | None = None,
        id_prefix: str | None = None,
        skip: int = 0,
    ) -> list[TaskSummary]:
        """Return up to `limit` tasks, newest first: those with `status`, or all if it is None.

        With `waits`, return only tasks with a node that waits for something outside the task: `decision` for a person,
        who decides about a held failure or an approval, and `event` for prerequisites. With `name`, return only those
        of this name; with `since` or `ended_since`, times in seconds since the epoch, only those that have started
        or ended then or later; with `id_prefix`, only those whose id begins so. `skip` is the number of newer tasks
        to leave out.

        Raise ConfigError for an unknown status or wait, for a limit outside 1 to 10,000 (`limits.LIST_TASKS`), and for
        a time or a number to skip that MongoDB cannot read.
        """
        if status is not None:
            require(choice_problem(status, "status", [each.value for each in TaskStatus]))
        if waits is not None:
            require(choice_problem(waits, "waits", [each.value for each in OUTSIDE]))
        require(
            whole_problem(limit, "limit", 1, limits.LIST_TASKS),
            whole_problem(skip, "skip", 0, _MOST_SKIPPED),
            moment_problem(since, "since"),
            moment_problem(ended_since, "ended_since"),
        )
        found = await self.newest(
            status,
            limit,
            waits=waits,
            name=name,
            since=since,
            ended_since=ended_since,
            id_prefix=id_prefix,
            skip=skip,
        )
        return [summary for document in found if (summary := make_summary(document)) is not None]


def make_summary(document: dict[str, Any]) -> TaskSummary | None:
    """Return the summary of a task; None for a document that no FlowKit of this version has written.

    One such document must not hide the others.
    """
    try:
        graph, params = document.get("graph") or {}, document.get("params") or {}
        times, now = read_times(document), time.time()
        return TaskSummary(
            task_id=document["id"],
            status=TaskStatus(document["status"]),
            name=pipeline_name(_text(graph.get("name")), params),
            started_at=_text(document.get("started_at")),
            finished_at=_format_time(document.get("finished_at")),
            seconds=times.run_seconds(now) if times else None,
            total_seconds=times.total_seconds(now) if times else None,
            reason=_text(document.get("reason")),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _logger.warning(
            "lists omit task %.200r, whose document cannot be read: %r", document.get("id"), error
        )
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _format_time(moment: datetime | None) -> str | None:
    """Return a stored date as ISO 8601 text. Stored dates are in UTC, with or without a time zone."""
    return None if moment is None else (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()
