"""Build the records that the workflow writes to the task document, and the result of the query `status`. Pure.

A task can have thousands of nodes, but Temporal limits the size of payloads. Records are therefore split or truncated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flowkit import reason_codes
from flowkit.limits import REPORT_BYTES
from flowkit.models import NodeRecord, NodeStatus
from flowkit.workflows.budget import json_size, split_by_size
from flowkit.workflows.payloads import without_defaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import Node, NodeState, RecordTask

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
