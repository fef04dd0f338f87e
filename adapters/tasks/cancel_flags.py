"""The cancel flags of a task document: the fields, their origin, and their meaning for an attempt.

The workflow sets flags for external workers and stores its run id in `coordinator.cancel_run_id`. A flag without a run
id is a direct write to the document, which Temporal does not know about yet. A flag with another run id is outdated:
Temporal's *Reset* has returned the task to a point before the cancel. If the workflow stops a single node, for example
at its deadline, the node's own `coordinator` contains flag, reason and run id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.adapters.mongo import moment, translate_errors
from flowkit.adapters.tasks.fields import nodes_of
from flowkit.errors import FlowKitError
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.core.utils import Fields
    from flowkit.models import AttemptInput, NodeRecord


NOT_FLAGGED: Fields = {"coordinator.cancelled": {"$ne": True}}
"""Filter for documents without a cancel flag for the whole task."""

NODE_FLAGS = ("coordinator", "cancel_requested_at")
"""Fields of a node that request it to stop."""

UNSET_OF_TASK_FLAG: Fields = dict.fromkeys(
    (f"coordinator.{name}" for name in ("cancelled", "cancel_reason", "cancelled_at", "cancel_run_id")), ""
)
"""`$unset` for the cancel flag of the whole task."""

FLAG_PATHS: Fields = {
    "_id": 0,
    "coordinator.cancelled": 1,
    "coordinator.cancel_reason": 1,
    "coordinator.cancel_run_id": 1,
    **{f"graph.nodes.{name}": 1 for name in NODE_FLAGS},
}
"""Projection with all cancel flags of a task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelFlag:
    """A cancel flag that is set."""

    reason: str
    run_id: str | None
    """Id of the workflow run that set the flag; None for a direct write to the document."""

    def concerns(self, run_id: str | None) -> bool:
        """Return whether the flag applies to a workflow run. The flag of another run is outdated."""
        return self.run_id in (None, run_id)


class Flagged(FlowKitError):
    """Raised when a cancel flag prevents an attempt from beginning."""

    code = reason_codes.CANCEL_PENDING

    def __init__(self, flag: CancelFlag) -> None:
        self.flag = flag
        super().__init__(f"the task document has a cancel flag ({flag.reason})")


class CancelFlags:
    """The cancel flags in the collection `tasks`. Raises StoreUnavailable if MongoDB does not respond."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    @translate_errors
    async def find_flag(self, attempt: AttemptInput) -> CancelFlag | None:
        """Return the flag that requests this attempt's node to stop; None if no flag is set."""
        node = f"graph.nodes.{attempt.index}"
        flags = [
            {"coordinator.cancelled": True},
            {f"{node}.coordinator.cancelled": True},
            {f"{node}.status": NodeStatus.CANCELLING.value},
        ]
        found = await self._tasks.find_one({"id": attempt.task_id, "$or": flags}, FLAG_PATHS)
        return flag_of(found, attempt.index) if found is not None else None

    @translate_errors
    async def find_flagged(self, task_ids: Sequence[str]) -> set[str]:
        """Return the ids of those tasks for which a flag is set, for the task itself or for one of its nodes."""
        flags = [
            {"coordinator.cancelled": True},
            {"graph.nodes.coordinator.cancelled": True},
            {"graph.nodes.status": NodeStatus.CANCELLING.value},
        ]
        found = self._tasks.find({"id": {"$in": list(task_ids)}, "$or": flags}, {"_id": 0, "id": 1})
        return {task["id"] async for task in found}


def flag_of(document: Fields, index: int | None = None) -> CancelFlag:
    """Return the flag of a document or, if only the node at `index` has one, that flag.

    When the workflow stops a task, it sets the flag of the task before those of nodes. When it stops a single node, its
    flag has a run id. Any other flag of a node alone is therefore a direct write.
    """
    found = document.get("coordinator") or {}
    if found.get("cancelled") is not True and index is not None:
        own = nodes_of(document)[index].get("coordinator") or {}
        found = own if own.get("cancel_run_id") else found
    run_id = found.get("cancel_run_id") if found.get("cancelled") is True else None
    return CancelFlag(reason=str(found.get("cancel_reason") or reason_codes.DB_FLAG), run_id=run_id)


def set_of_task_flag(reason: str, at: float, run_id: str | None) -> Fields:
    """Return the `$set` of a task's cancel flag, which external workers poll.

    The run id distinguishes it from a direct write.
    """
    return {
        "coordinator.cancelled": True,
        "coordinator.cancel_reason": reason,
        "coordinator.cancelled_at": moment(at),
        "coordinator.cancel_run_id": run_id or "",
    }


def set_of_node_flag(node: NodeRecord, at: float, run_id: str) -> Fields:
    """Return the `$set` of the cancel flag of a node that the workflow stops; `{}` for any other node.

    The run id distinguishes the flag of a single node from a direct write.
    """
    path = f"graph.nodes.{node.index}"
    flag: Fields = {}
    if node.status is NodeStatus.CANCELLING:
        flag = {f"{path}.coordinator.cancelled": True, f"{path}.cancel_requested_at": moment(at)}
    if node.cancel_reason is not None:
        flag[f"{path}.coordinator.cancel_reason"] = node.cancel_reason
        flag[f"{path}.coordinator.cancel_run_id"] = run_id
    return flag


def unset_of_flags(document: Fields) -> Fields:
    """Return the `$unset` for the cancel flags of a task and of its nodes, as the document has them."""
    flagged = (index for index, node in enumerate(nodes_of(document)) if node)
    paths = (f"graph.nodes.{index}.{name}" for index in flagged for name in NODE_FLAGS)
    return {**UNSET_OF_TASK_FLAG, **dict.fromkeys(paths, "")}
