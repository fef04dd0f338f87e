"""How a task's state is told to the outside: reasons, views, search attributes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

from flowkit.limits import LAST_ERROR_CHARS, STATUS_CHANGES
from flowkit.models import NodeStatus, TaskStatus
from flowkit.text import clean

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from flowkit.models import Graph, Node, NodeState, StatusChange
    from flowkit.workflows.scheduler import Scheduler

PIPELINE = "FlowkitPipeline"
STATUS = "FlowkitStatus"
SEARCH_ATTRIBUTES = (PIPELINE, STATUS)
"""Search attributes that FlowKit fills when they are registered; both are keywords."""

DEFAULT_CANCEL_REASON = "user_request"
_PIPELINE_CHARS = 200
"""Temporal's visibility stores keep keywords of 255 characters at most."""

_FIRST_CHANGES = 10


def stop_reason(failed: Node | None, states: Sequence[NodeState], cancel_reason: str | None) -> str:
    """`cancel_reason` of a task that is stopped: the failure's code, or what the canceller said."""
    if failed is not None:
        return f"hard_fail:{states[failed.index].reason_code}"
    return clean(cancel_reason or DEFAULT_CANCEL_REASON)[:LAST_ERROR_CHARS]


def failure_text(scheduler: Scheduler) -> str:
    """Why the task failed, in one line."""
    first, *others = scheduler.failures
    error = scheduler.states[first.index].last_error or "failed"
    more = f" (and {len(others)} more failed nodes)" if others else ""
    return f"node {first.node_id!r} failed: {error}"[:LAST_ERROR_CHARS] + more


def open_status(scheduler: Scheduler) -> TaskStatus:
    """`deferred` while nothing runs and a node waits for its retry, else `running`."""
    counts = scheduler.counts()
    waits = counts[NodeStatus.DEFERRED] > 0
    idle = counts[NodeStatus.RUNNING] == 0
    return TaskStatus.DEFERRED if waits and idle else TaskStatus.RUNNING


def shorten(history: list[StatusChange]) -> int:
    """Drop entries from the middle of a long history; returns how many. The first ten and the latest stay."""
    surplus = max(0, len(history) - STATUS_CHANGES)
    del history[_FIRST_CHANGES : _FIRST_CHANGES + surplus]
    return surplus


def search_attributes(
    registered: Collection[str], history: Sequence[StatusChange], graph: Graph, params: dict[str, Any]
) -> list[SearchAttributeUpdate[Any]]:
    """Values to set after the latest change of status, for those attributes that are registered.

    A task that runs from its start to its end is told by Temporal's own status, which costs nothing; ours is set from
    the first time on that it says more (`deferred`, or `failed` while attempts still end).
    """
    pairs: list[SearchAttributeUpdate[Any]] = []
    status = history[-1].to
    if STATUS in registered and any(change.to not in _TOLD_BY_TEMPORAL for change in history):
        pairs.append(SearchAttributeKey.for_keyword(STATUS).value_set(status))
    name = pipeline_name(graph.name, params)
    if PIPELINE in registered and name and history[-1].from_ == TaskStatus.QUEUED:
        pairs.append(SearchAttributeKey.for_keyword(PIPELINE).value_set(name))
    return pairs


_TOLD_BY_TEMPORAL = frozenset(
    {TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FINISHED, TaskStatus.CANCELLED}
)


def pipeline_name(graph_name: str | None, params: dict[str, Any]) -> str | None:
    """What people call the task: `params.pipeline_name`, else the graph's name."""
    name = params.get("pipeline_name")
    chosen = name if isinstance(name, str) and name else graph_name
    return _printable(clean(chosen)[:_PIPELINE_CHARS]) if chosen else None


def _printable(text: str) -> str:
    """`text` without characters that some databases refuse, such as NUL."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
