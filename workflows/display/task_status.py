"""Derive the reasons, the status and the search attributes that users see from a task's state. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from flowkit import reason_codes
from flowkit.limits import LAST_ERROR_CHARS, STATUS_CHANGES
from flowkit.models import NodeStatus, TaskStatus
from flowkit.temporal_names import PIPELINE_ATTRIBUTE, STATUS_ATTRIBUTE
from flowkit.text import clean, truncate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from flowkit.models import Graph, Node, NodeState, StatusChange
    from flowkit.workflows.scheduling.scheduler import Scheduler

_PIPELINE_CHARS = 200
"""Temporal's visibility stores accept keywords of at most 255 characters."""

_SHOWN_BY_TEMPORAL = frozenset(
    {TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FINISHED, TaskStatus.CANCELLED}
)
"""Statuses that follow from Temporal's own status of the workflow."""

_FIRST_CHANGES = 10
"""Number of status changes at the beginning of a long history that are kept."""


def stop_reason(
    failed: Node | None, states: Sequence[NodeState], cancel_reason: str | None, *, overdue: bool = False
) -> str:
    """Return why a task stops: `hard_fail:` and the failed node's reason code, its deadline, or `cancel_reason`."""
    if failed is not None:
        return f"{reason_codes.HARD_FAIL}:{states[failed.index].reason_code}"
    if overdue:
        return reason_codes.DEADLINE
    return truncate(clean(cancel_reason or reason_codes.USER_REQUEST), LAST_ERROR_CHARS)


def failure_text(scheduler: Scheduler) -> str:
    """Return in one line why the task failed."""
    first, *others = scheduler.failures
    error = scheduler.states[first.index].last_error or "failed"
    suffix = f" (and {len(others)} more failed nodes)" if others else ""
    return truncate(f"node {first.node_id!r} failed: {error}", LAST_ERROR_CHARS) + suffix


def open_status(scheduler: Scheduler, *, silent: bool = False) -> TaskStatus:
    """Return the status of a task that has not ended.

    It is `deferred` if no node runs and at least one waits for its retry, otherwise `running`. A task whose running
    attempts are all `silent` is `deferred` too.
    """
    if silent:
        return TaskStatus.DEFERRED
    counts = scheduler.counts()
    waiting = counts[NodeStatus.DEFERRED] > 0
    idle = counts[NodeStatus.RUNNING] == 0
    return TaskStatus.DEFERRED if waiting and idle else TaskStatus.RUNNING


def is_dead(scheduler: Scheduler) -> bool:
    """Return whether a node that makes the task fail sent no heartbeats for too long."""
    states = (scheduler.states[node.index] for node in scheduler.failures)
    return any(state.reason_code == reason_codes.HEARTBEAT_TIMEOUT for state in states)


def shorten_history(history: list[StatusChange]) -> int:
    """Drop entries from the middle of a long history; keep the first ten and the latest. Return the number dropped."""
    surplus = max(0, len(history) - STATUS_CHANGES)
    del history[_FIRST_CHANGES : _FIRST_CHANGES + surplus]
    return surplus


def search_attributes(
    registered: Collection[str], history: Sequence[StatusChange], graph: Graph, params: dict[str, Any]
) -> list[SearchAttributeUpdate[Any]]:
    """Return the updates of registered search attributes after the latest status change.

    Each update costs an event in the history. For a task that only runs and then ends, Temporal's own status suffices.
    FlowKit therefore sets its status attribute only from the first status that Temporal does not show: `deferred`, or
    `failed` while attempts still end.
    """
    updates: list[SearchAttributeUpdate[Any]] = []
    status = history[-1].to
    if STATUS_ATTRIBUTE in registered and any(change.to not in _SHOWN_BY_TEMPORAL for change in history):
        updates.append(SearchAttributeKey.for_keyword(STATUS_ATTRIBUTE).value_set(status))
    name = pipeline_name(graph.name, params)
    if PIPELINE_ATTRIBUTE in registered and name and history[-1].from_ == TaskStatus.QUEUED:
        updates.append(SearchAttributeKey.for_keyword(PIPELINE_ATTRIBUTE).value_set(name))
    return updates


def pipeline_name(graph_name: str | None, params: dict[str, Any]) -> str | None:
    """Return `params.pipeline_name` or, without it, the graph's name. None if the task has neither."""
    name = params.get("pipeline_name")
    chosen = name if isinstance(name, str) and name else graph_name
    return _printable(clean(chosen)[:_PIPELINE_CHARS]) if chosen else None


def _printable(text: str) -> str:
    """Replace characters that some databases reject, such as NUL."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
