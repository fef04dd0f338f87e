"""Build the records that the workflow writes to the task document, and the result of the query `status`. Pure.

A task can have thousands of nodes, but Temporal limits the size of payloads. Records are therefore split or truncated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.limits import HANDLED_FAILURES_BYTES, REPORT_BYTES
from flowkit.models import NodeRecord, NodeStatus, TaskResult
from flowkit.workflows.budget import json_size, longest_prefix, split_by_size, truncate_longest
from flowkit.workflows.payloads import without_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState, RecordTask, TaskStatus
    from flowkit.workflows.scheduling.scheduler import Scheduler

DISPLAY_ORDER = (
    NodeStatus.FAILED,
    NodeStatus.CANCELLING,
    NodeStatus.DEFERRED,
    NodeStatus.RUNNING,
    NodeStatus.CANCELLED,
    NodeStatus.SKIPPED,
    NodeStatus.QUEUED,
    NodeStatus.FINISHED,
)
"""Node statuses in display order: those that need attention come first."""

_RANK = {status.value: position for position, status in enumerate(DISPLAY_ORDER)}
_FIELDS_BYTES = 200
"""Upper bound for the size of a node's record without its texts."""

_MAX_BYTES_PER_CHARACTER = 6
"""Size of a character that JSON escapes, such as `\\u0000`."""


def node_record(
    node: Node, state: NodeState, *, pulled: bool, cancel_reason: str | None = None
) -> NodeRecord:
    """Return the record that writes `state` to the task document.

    `pulled` says whether other nodes pull artifacts from the node; its end then needs a complete marker. With
    `cancel_reason`, the write sets the node's own cancel flag.
    """
    return NodeRecord(
        index=node.index,
        node_id=node.node_id,
        status=state.status,
        epoch=state.epoch,
        next_retry_at=state.next_retry_at,
        last_error=state.last_error,
        skip_reason=state.skip_reason,
        marker=pulled,
        after_finish=state.status is NodeStatus.FAILED and state.reason_code == reason_codes.UPSTREAM_FAILED,
        cancel_reason=cancel_reason,
    )


def pulled_nodes(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the ids of the nodes whose artifacts other nodes pull."""
    return frozenset(source for node in nodes for source in node.pulls_from)


def split_record(record: RecordTask) -> list[RecordTask]:
    """Split `record` into records of at most REPORT_BYTES; return it unchanged if it fits.

    When it is split, failed nodes come first, and only the first part has the cancel reason.
    """
    if _is_clearly_small(record.nodes):
        return [record]
    remaining = REPORT_BYTES - json_size(without_defaults(replace(record, nodes=[])))
    if sum(map(_record_bytes, record.nodes)) <= remaining:
        return [record]
    ordered = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
    parts = split_by_size(ordered, _record_bytes, remaining)
    return [
        replace(record, nodes=nodes, cancel_reason=None if number else record.cancel_reason)
        for number, nodes in enumerate(parts)
    ]


def _is_clearly_small(nodes: Sequence[NodeRecord]) -> bool:
    """Return whether the nodes fit by a quick upper estimate. Most writes then need no exact measurement."""
    characters = sum(len(node.node_id) + len(node.last_error or "") for node in nodes)
    return _FIELDS_BYTES * len(nodes) + _MAX_BYTES_PER_CHARACTER * characters < REPORT_BYTES // 2


def _record_bytes(node: NodeRecord) -> int:
    return json_size(without_defaults(node)) + 1


def fit_into_close(nodes: Sequence[NodeRecord]) -> bool:
    """Return whether the close can carry these nodes. If not, the workflow writes them before."""
    return _is_clearly_small(nodes) or sum(map(_record_bytes, nodes)) <= REPORT_BYTES // 2


def task_result(task_id: str, status: TaskStatus, handled_failures: Sequence[str]) -> TaskResult:
    """Return the result of a task, which lists at most HANDLED_FAILURES_BYTES of handled failures."""
    kept = longest_prefix(handled_failures, _entry_bytes, HANDLED_FAILURES_BYTES)
    return TaskResult(
        task_id=task_id,
        status=status,
        handled_failures=kept,
        handled_failures_omitted=len(handled_failures) - len(kept),
    )


def _entry_bytes(text: str) -> int:
    return json_size(text) + 1


def status_view(status: TaskStatus, scheduler: Scheduler | None, result: TaskResult | None) -> dict[str, Any]:
    """Return the result of the query `status`, in at most REPORT_BYTES.

    For a large graph, error texts are truncated first. If that is not enough, nodes are omitted, finished nodes first.
    """
    remaining = REPORT_BYTES - _FIELDS_BYTES
    handled = [] if result is None else longest_prefix(result.handled_failures, _entry_bytes, remaining // 4)
    views = (
        []
        if scheduler is None
        else [_node_view(node, scheduler.states[node.index]) for node in scheduler.nodes]
    )
    errors = [view["last_error"] for view in views]
    for view in views:
        view["last_error"] = None
    kept, remaining = _most_relevant(views, remaining - sum(map(_entry_bytes, handled)))
    shown = truncate_longest([errors[index] for index in kept], remaining)
    for index, error in zip(kept, shown, strict=True):
        views[index]["last_error"] = error
    return {
        "status": status.value,
        "nodes": [views[index] for index in kept],
        "handled_failures": handled,
        "nodes_omitted": len(views) - len(kept),
        "handled_failures_omitted": _all_handled(result) - len(handled),
        "errors_cut": sum(errors[index] != error for index, error in zip(kept, shown, strict=True)),
    }


def _all_handled(result: TaskResult | None) -> int:
    return 0 if result is None else len(result.handled_failures) + result.handled_failures_omitted


def _most_relevant(views: Sequence[dict[str, Any]], remaining: int) -> tuple[list[int], int]:
    """Return the indexes of the views that fit into `remaining` bytes, in graph order, and the bytes that remain."""
    sizes = [json_size(view) + 1 for view in views]
    ranked = sorted(range(len(views)), key=lambda index: _RANK[views[index]["status"]])
    kept = sorted(longest_prefix(ranked, sizes.__getitem__, remaining))
    return kept, remaining - sum(sizes[index] for index in kept)


def _node_view(node: Node, state: NodeState) -> dict[str, Any]:
    view = {
        "node_id": node.node_id,
        "type": node.type,
        "status": state.status.value,
        "attempt_epoch": state.epoch,
        "last_error": state.last_error,
        "skip_reason": state.skip_reason,
        "next_retry_at": state.next_retry_at,
    }
    return view | {"waits_for": state.waits_for} if state.waits_for else view
