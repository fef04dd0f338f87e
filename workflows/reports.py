"""Build what the workflow reports, within byte budgets: document writes and the result of the query `status`. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.limits import PAYLOAD_BYTES, REPORT_BYTES
from flowkit.models import NodeRecord, NodeStatus
from flowkit.workflows.budget import cut_fairly, fitting, json_size, split_by_size
from flowkit.workflows.payloads import without_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import CloseTask, Node, NodeState, RecordTask, TaskResult, TaskStatus
    from flowkit.workflows.scheduler import Scheduler

TELLING = (
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

_RANK = {status.value: place for place, status in enumerate(TELLING)}
_FIELDS_BYTES = 200
"""Upper bound for the size of a node's record without its texts."""

_MOST_BYTES_OF_A_CHARACTER = 6


def node_record(node: Node, state: NodeState, *, pulled: bool) -> NodeRecord:
    """Return the record that writes `state` to the task document. `pulled`: whether another node pulls from it."""
    return NodeRecord(
        index=node.index,
        node_id=node.node_id,
        status=state.status,
        epoch=state.epoch,
        next_retry_at=state.next_retry_at,
        last_error=state.last_error,
        skip_reason=state.skip_reason,
        marker=pulled,
    )


def pulled_nodes(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the ids of the nodes whose artifacts other nodes pull."""
    return frozenset(source for node in nodes for source in node.pulls_from)


def split_record(record: RecordTask) -> list[RecordTask]:
    """Split `record` into records of at most REPORT_BYTES; return it unchanged if it fits.

    When it is split, failed nodes come first, and only the first part has the cancel reason.
    """
    if _is_surely_small(record.nodes):
        return [record]
    room = REPORT_BYTES - json_size(without_defaults(replace(record, nodes=[])))
    if sum(map(_size, record.nodes)) <= room:
        return [record]
    ordered = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
    parts = split_by_size(ordered, _size, room)
    return [
        replace(record, nodes=nodes, cancel_reason=None if place else record.cancel_reason)
        for place, nodes in enumerate(parts)
    ]


def _is_surely_small(nodes: Sequence[NodeRecord]) -> bool:
    """Return whether the nodes fit by a quick upper estimate, which saves most writes the exact measurement."""
    letters = sum(len(node.node_id) + len(node.last_error or "") for node in nodes)
    return _FIELDS_BYTES * len(nodes) + _MOST_BYTES_OF_A_CHARACTER * letters < REPORT_BYTES // 2


def _size(node: NodeRecord) -> int:
    return json_size(without_defaults(node)) + 1


def truncate_close_record(close: CloseTask) -> CloseTask:
    """Return `close` with error texts truncated so that it fits into REPORT_BYTES, if that is possible.

    The status of every node and all node ids stay complete. `handled_failures` keeps only as many ids as fit into
    PAYLOAD_BYTES, the limit for one payload.
    """
    bare = [replace(node, last_error=None) for node in close.nodes]
    taken = json_size(without_defaults(replace(close, nodes=[], handled_failures=[]))) + sum(map(_size, bare))
    handled = fitting(close.handled_failures, _entry_size, PAYLOAD_BYTES - taken)
    room = REPORT_BYTES - taken - sum(map(_entry_size, handled)) - len(bare) * len(',"last_error":""')
    before = [node.last_error for node in close.nodes]
    errors = cut_fairly(before, room)
    return replace(
        close,
        nodes=[replace(node, last_error=error) for node, error in zip(bare, errors, strict=True)],
        handled_failures=handled,
        truncated=errors != before or handled != close.handled_failures,
    )


def _entry_size(text: str) -> int:
    return json_size(text) + 1


def status_view(status: TaskStatus, scheduler: Scheduler | None, result: TaskResult | None) -> dict[str, Any]:
    """Return the result of the query `status`, in at most REPORT_BYTES.

    For a large graph, error texts are truncated first. If that is not enough, nodes are omitted, finished nodes first.
    """
    room = REPORT_BYTES - _FIELDS_BYTES
    handled = [] if result is None else fitting(result.handled_failures, _entry_size, room // 4)
    views = (
        []
        if scheduler is None
        else [_node_view(node, scheduler.states[node.index]) for node in scheduler.nodes]
    )
    errors = [view["last_error"] for view in views]
    for view in views:
        view["last_error"] = None
    kept, room = _most_relevant(views, room - sum(map(_entry_size, handled)))
    shown = cut_fairly([errors[index] for index in kept], room)
    for index, error in zip(kept, shown, strict=True):
        views[index]["last_error"] = error
    return {
        "status": status.value,
        "nodes": [views[index] for index in kept],
        "handled_failures": handled,
        "nodes_omitted": len(views) - len(kept),
        "handled_failures_omitted": 0 if result is None else len(result.handled_failures) - len(handled),
        "errors_cut": sum(errors[index] != error for index, error in zip(kept, shown, strict=True)),
    }


def _most_relevant(views: Sequence[dict[str, Any]], room: int) -> tuple[list[int], int]:
    """Return the indexes of the views that fit into `room` bytes, in graph order, and the bytes that remain."""
    sizes = [json_size(view) + 1 for view in views]
    ranked = sorted(range(len(views)), key=lambda index: _RANK[views[index]["status"]])
    kept = sorted(fitting(ranked, sizes.__getitem__, room))
    return kept, room - sum(sizes[index] for index in kept)


def _node_view(node: Node, state: NodeState) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "type": node.type,
        "status": state.status.value,
        "attempt_epoch": state.epoch,
        "last_error": state.last_error,
        "skip_reason": state.skip_reason,
        "next_retry_at": state.next_retry_at,
    }
