"""The cancel flags of a task document: their origin, and their meaning for an attempt.

The workflow sets flags for external workers and stores its run id in `coordinator.cancel_run_id`. A flag without a run
id is a direct write to the document, which Temporal does not know about yet. A flag with another run id is outdated:
Temporal's *Reset* has returned the task to a point before the cancel. If the workflow stops a single node, for example
at its deadline, the node's own `coordinator` contains flag, reason and run id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowkit import reason_codes
from flowkit.adapters.tasks import fields as task_fields
from flowkit.errors import FlowKitError
from flowkit.models import NodeStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.models import AttemptInput

_TASK_FLAG = {
    "_id": 0,
    "coordinator.cancelled": 1,
    "coordinator.cancel_reason": 1,
    "coordinator.cancel_run_id": 1,
}
_FLAGS = {**_TASK_FLAG, "graph.nodes.coordinator": 1}
_ALL_FLAGS = {
    **_TASK_FLAG,
    "closed_run_id": 1,
    "graph.nodes.coordinator.cancelled": 1,
    "graph.nodes.cancel_requested_at": 1,
}


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
    """The cancel flags in the collection `tasks`."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks

    async def of(self, attempt: AttemptInput) -> CancelFlag | None:
        """Return the flag that requests this attempt's node to stop; None if no flag is set."""
        node = f"graph.nodes.{attempt.index}"
        flags = [
            {"coordinator.cancelled": True},
            {f"{node}.coordinator.cancelled": True},
            {f"{node}.status": NodeStatus.CANCELLING.value},
        ]
        found = await self._tasks.find_one({"id": attempt.task_id, "$or": flags}, _FLAGS)
        return _flag(found, attempt.index) if found is not None else None

    async def flagged(self, task_ids: Sequence[str]) -> set[str]:
        """Return the ids of those tasks for which a flag is set, for the task itself or for one of its nodes."""
        flags = [
            {"coordinator.cancelled": True},
            {"graph.nodes.coordinator.cancelled": True},
            {"graph.nodes.status": NodeStatus.CANCELLING.value},
        ]
        found = self._tasks.find({"id": {"$in": list(task_ids)}, "$or": flags}, {"_id": 0, "id": 1})
        return {task["id"] async for task in found}

    async def clear_or_raise(self, attempt: AttemptInput, run_id: str) -> None:
        """Clear the flags of an earlier run. Raise Flagged if a current flag prevents the attempt from beginning.

        Do nothing if anything other than a flag prevents it.
        """
        hindered = task_fields.attempt_filter(attempt, run_id) | {"coordinator.cancelled": True}
        found = await self._tasks.find_one(hindered, _ALL_FLAGS)
        if found is None:
            return
        flag = _flag(found)
        if flag.run_id == run_id or (flag.run_id is None and "closed_run_id" not in found):
            raise Flagged(flag)
        same = {"id": attempt.task_id, "coordinator.cancel_run_id": flag.run_id}
        await self._tasks.update_one(same, {"$unset": task_fields.flags_of(found["graph"]["nodes"])})


def _flag(document: dict[str, Any], index: int | None = None) -> CancelFlag:
    """Return the flag of a document or, if only the node at `index` has one, that flag.

    When the workflow stops a task, it sets the flag of the task before those of nodes. When it stops a single node, its
    flag has a run id. Any other flag of a node alone is therefore a direct write.
    """
    found = document.get("coordinator") or {}
    if found.get("cancelled") is not True and index is not None:
        own = task_fields.nodes_of(document)[index].get("coordinator") or {}
        found = own if own.get("cancel_run_id") else found
    run_id = found.get("cancel_run_id") if found.get("cancelled") is True else None
    return CancelFlag(reason=str(found.get("cancel_reason") or reason_codes.DB_FLAG), run_id=run_id)
