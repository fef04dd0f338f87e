"""What the workflow reports, within its byte budgets: writes to the document, and the query `status`. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowkit.limits import PAYLOAD_BYTES, REPORT_BYTES
from flowkit.models import NodeRecord, NodeStatus
from flowkit.workflows.budget import cut_fairly, fitting, json_size, split_by_size
from flowkit.workflows.payloads import slim

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
"""Statuses of nodes, those first that people look for."""

_RANK = {status.value: place for place, status in enumerate(TELLING)}
_FIELDS_BYTES = 200
"""More than a node's record has besides its texts."""

_MOST_BYTES_OF_A_CHARACTER = 6


def node_record(node: Node, state: NodeState, *, pulled: bool) -> NodeRecord:
    """`state` as the document is to show it."""
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
    """Ids of the nodes that somebody reads artifacts of."""
    return frozenset(source for node in nodes for source in node.pulls_from)


def parts_of(record: RecordTask) -> list[RecordTask]:
    """`record`, or several of REPORT_BYTES at most whose first has the cancel reason; failed nodes come first then."""
    if _is_surely_small(record.nodes):
        return [record]
    room = REPORT_BYTES - json_size(slim(replace(record, nodes=[])))
    if sum(map(_size, record.nodes)) <= room:
        return [record]
    ordered = sorted(record.nodes, key=lambda node: node.status is not NodeStatus.FAILED)
    parts = split_by_size(ordered, _size, room)
    return [
        replace(record, nodes=nodes, cancel_reason=None if place else record.cancel_reason)
        for place, nodes in enumerate(parts)
    ]


def _is_surely_small(nodes: Sequence[NodeRecord]) -> bool:
    """A quick look that spares most writes the exact one."""
    letters = sum(len(node.node_id) + len(node.last_error or "") for node in nodes)
    return _FIELDS_BYTES * len(nodes) + _MOST_BYTES_OF_A_CHARACTER * letters < REPORT_BYTES // 2


def _size(node: NodeRecord) -> int:
    return json_size(slim(node)) + 1


def fitted(close: CloseTask) -> CloseTask:
    """`close` in REPORT_BYTES, as far as cut error texts can bring it there; every node's status stays.

    Ids of nodes are never cut, but of `handled_failures` only so many are kept as Temporal lets pass.
    """
    bare = [replace(node, last_error=None) for node in close.nodes]
    taken = json_size(slim(replace(close, nodes=[], handled_failures=[]))) + sum(map(_size, bare))
    handled = fitting(close.handled_failures, _listed, PAYLOAD_BYTES - taken)
    room = REPORT_BYTES - taken - sum(map(_listed, handled)) - len(bare) * len(',"last_error":""')
    before = [node.last_error for node in close.nodes]
    errors = cut_fairly(before, room)
    return replace(
        close,
        nodes=[replace(node, last_error=error) for node, error in zip(bare, errors, strict=True)],
        handled_failures=handled,
        truncated=errors != before or handled != close.handled_failures,
    )


def _listed(text: str) -> int:
    return json_size(text) + 1


def status_view(status: TaskStatus, scheduler: Scheduler | None, result: TaskResult | None) -> dict[str, Any]:
    """The result of the `status` query, in REPORT_BYTES.

    In large graphs errors are cut first. Where that is not enough, nodes are left out, finished ones before all others.
    """
    room = REPORT_BYTES - _FIELDS_BYTES
    handled = [] if result is None else fitting(result.handled_failures, _listed, room // 4)
    views = (
        []
        if scheduler is None
        else [_node_view(node, scheduler.states[node.index]) for node in scheduler.nodes]
    )
    errors = [view["last_error"] for view in views]
    for view in views:
        view["last_error"] = None
    kept, room = _most_telling(views, room - sum(map(_listed, handled)))
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


def _most_telling(views: Sequence[dict[str, Any]], room: int) -> tuple[list[int], int]:
    """Places of the views that fit, in graph order, and the room that is left."""
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
