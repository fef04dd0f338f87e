"""The Markdown that Temporal's Web UI shows as a run's current details. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from flowkit.models import NodeStatus, TaskStatus

if TYPE_CHECKING:
    from flowkit.models import Node, NodeState
    from flowkit.workflows.graph import Walk

ROWS = 40
"""Nodes shown; the most telling ones come first in a larger graph."""

_TELLING = (
    NodeStatus.FAILED,
    NodeStatus.CANCELLING,
    NodeStatus.DEFERRED,
    NodeStatus.RUNNING,
    NodeStatus.CANCELLED,
    NodeStatus.SKIPPED,
    NodeStatus.QUEUED,
    NodeStatus.FINISHED,
)
_CELL_CHARS = 80


def render(status: TaskStatus, walk: Walk) -> str:
    """A heading with counts and a table of nodes."""
    counts = walk.counts()
    total = len(walk.nodes)
    summary = ", ".join(f"{counts[kind]} {kind.value}" for kind in _TELLING if counts[kind])
    rows = [_row(node, walk.states[node.index]) for node in _shown(walk)]
    more = [f"\n… and {total - len(rows)} more nodes"] if total > len(rows) else []
    head = ["| node | role | status | attempt | note |", "|---|---|---|---|---|"]
    return "\n".join([f"**{status.value}**: {summary} (of {total})", "", *head, *rows, *more])


def _shown(walk: Walk) -> list[Node]:
    if len(walk.nodes) <= ROWS:
        return list(walk.nodes)
    rank = {status: place for place, status in enumerate(_TELLING)}
    return sorted(walk.nodes, key=lambda node: rank[walk.states[node.index].status])[:ROWS]


def _row(node: Node, state: NodeState) -> str:
    label = node.io.fn if node.is_function else node.type
    return _cells(node.node_id, label, state.status.value, state.epoch, _remark(state))


@lru_cache(maxsize=4096)
def _cells(node_id: str, label: str, status: str, epoch: int, remark: str) -> str:
    """One row; cached, because of all rows only one or two differ from the previous picture."""
    attempt = str(epoch) if epoch else ""
    return "| " + " | ".join([*map(_cell, (node_id, label, status)), attempt, _cell(remark)]) + " |"


def _remark(state: NodeState) -> str:
    if state.status is NodeStatus.SKIPPED and state.skip_reason:
        return state.skip_reason.value
    if state.status is NodeStatus.DEFERRED and state.next_retry_at:
        when = datetime.fromtimestamp(state.next_retry_at, UTC)
        return f"retry at {when:%H:%M:%S} UTC; {state.last_error or ''}"
    return (state.last_error or "") if state.status is not NodeStatus.FINISHED else ""


def _cell(text: str) -> str:
    flat = " ".join(text.replace("|", "\\|").split())
    return flat if len(flat) <= _CELL_CHARS else flat[: _CELL_CHARS - 1] + "…"
