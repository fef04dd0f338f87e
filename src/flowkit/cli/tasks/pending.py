"""What Temporal shows of the attempts of a task that have not ended: which ones no worker has started, and their waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.api.enums.v1 import PendingActivityState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from temporalio.api.workflow.v1 import PendingActivityInfo
    from temporalio.client import WorkflowExecutionDescription
    from temporalio.converter import DataConverter

_SCHEDULED = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED


def _pending(description: WorkflowExecutionDescription | None) -> Sequence[PendingActivityInfo]:
    return description.raw_description.pending_activities if description else ()


def not_taken(description: WorkflowExecutionDescription | None) -> frozenset[str]:
    """Return the ids of the activities that no worker has started."""
    return frozenset(each.activity_id for each in _pending(description) if each.state == _SCHEDULED)


async def shown_waits(
    description: WorkflowExecutionDescription | None, converter: DataConverter
) -> dict[str, str]:
    """Return what running attempts wait for according to their last heartbeats, by activity id.

    Omit heartbeats that this process cannot decode.
    """
    found = {}
    for each in _pending(description):
        if each.heartbeat_details.payloads and (wait := _wait(await _details(each, converter))):
            found[each.activity_id] = wait
    return found


async def _details(activity: PendingActivityInfo, converter: DataConverter) -> Any:
    try:
        (details, *_) = await converter.decode(activity.heartbeat_details.payloads)
    except (KeyError, RuntimeError, ValueError):
        return None
    return details


def _wait(details: Any) -> str:
    """Return the wait of an attempt that runs. Of an external attempt that waits, the task document has the text."""
    known = details if isinstance(details, dict) else {}
    return str(known.get("waits_for") or "") if known.get("state") == "running" else ""
