"""What the memo of a workflow says: who owns it, and with which input it started; and ids reserved for one
kind of owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MEMO: Final = "flowkit_owner"
"""Key of the marker in the memo of a workflow. Continue-as-new, *Reset* and a rerun keep the memo."""


INPUT_MEMO: Final = "flowkit_input"
"""Key of the hashes of the params and of the graph with which a task started, in the same memo."""


class OwnerKind(StrEnum):
    """What has started a workflow."""

    TASK = "task"
    """A call of `create_task`."""
    ADMISSION = "admission"
    """The admission queue, for one of its requests."""
    SCHEDULE = "schedule"
    """A schedule. Its own memo has this marker; its tasks have that of a call of `create_task`."""
    BACKFILL = "backfill"
    """A backfill, for one of its nominal times. The workflow of the backfill itself has this marker, too."""
    FLOW = "flow"
    """The gateway, for a run of a flow."""


RESERVED: Final[Mapping[str, OwnerKind]] = {"flow:": OwnerKind.FLOW}
"""By the beginning of a task id, the only kind of owner that can start a task with such an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The marker of a workflow. Only the owner whose marker a workflow carries may adopt it."""

    kind: OwnerKind
    deployment: str
    """Id of the database in which the owner keeps its state."""
    id: str
    """What the owner has started the workflow for, for example a try of a request for admission."""

    def as_memo(self) -> dict[str, dict[str, str]]:
        """Return the memo with which the owner starts its workflow."""
        return {MEMO: {"kind": self.kind.value, "deployment": self.deployment, "id": self.id}}


def read_owner(value: object) -> Owner | None:
    """Return the owner that a marker names; None if it is not a marker of FlowKit."""
    if not isinstance(value, Mapping):
        return None
    kind, deployment, id = (value.get(name) for name in ("kind", "deployment", "id"))
    known = {each.value: each for each in OwnerKind}
    if not isinstance(kind, str) or not isinstance(deployment, str) or not isinstance(id, str):
        return None
    return Owner(kind=known[kind], deployment=deployment, id=id) if kind in known else None


def reserved_for(task_id: str) -> OwnerKind | None:
    """Return the kind of owner for which a task id is reserved; None if any owner can use it."""
    return next((kind for prefix, kind in RESERVED.items() if task_id.startswith(prefix)), None)


def task_owner(task_id: str, deployment: str) -> Owner:
    """Return the owner of a task that was not submitted to the admission queue."""
    return Owner(kind=reserved_for(task_id) or OwnerKind.TASK, deployment=deployment, id=task_id)


def belongs_here(task_id: str, found: Owner, deployment: str) -> bool:
    """Return whether the workflow of a task, which carries the marker `found`, belongs to a deployment."""
    if reserved_for(task_id) is not None:
        return found == task_owner(task_id, deployment)
    return found.deployment == deployment
