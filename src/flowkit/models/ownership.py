"""What the memo of a workflow says: who owns it, and with which input it started; and ids reserved for one
kind of owner."""

from __future__ import annotations

import re
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Ids that only some kinds of owners can give to a task: others could compute, and take, the next ones."""

    form: re.Pattern[str]
    text: str
    """Which ids these are, and for what."""
    kinds: frozenset[OwnerKind] = frozenset()
    """Who can start a task with such an id."""

    def is_form_of(self, task_id: str) -> bool:
        """Return whether an id is one of these."""
        return self.form.match(task_id) is not None

    @property
    def of_schedules(self) -> bool:
        """Whether these are the ids of the tasks of schedules."""
        return OwnerKind.SCHEDULE in self.kinds


RESERVED: Final = (
    Reserved(
        form=re.compile(r"flow:"),
        text="ids that begin with flow: are reserved for the runs of flows, which flow.start starts",
        kinds=frozenset({OwnerKind.FLOW}),
    ),
    Reserved(
        form=re.compile(r"backfill:"),
        text="ids that begin with backfill: are reserved for the workflows of backfills",
    ),
    Reserved(
        form=re.compile(r".*-\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z\Z", re.ASCII | re.DOTALL),
        text="ids that end with a time such as -2026-11-28T02:00:00Z are reserved for the tasks of schedules",
        kinds=frozenset({OwnerKind.SCHEDULE, OwnerKind.BACKFILL}),
    ),
)


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


def reserved_for(task_id: str) -> Reserved | None:
    """Return what a task id is reserved for; None if any owner can use it."""
    return next((each for each in RESERVED if each.is_form_of(task_id)), None)


def task_owner(task_id: str, deployment: str) -> Owner:
    """Return the owner of a task that was not submitted to the admission queue."""
    kind = OwnerKind.FLOW if is_flow_run(task_id) else OwnerKind.TASK
    return Owner(kind=kind, deployment=deployment, id=task_id)


def is_flow_run(task_id: str) -> bool:
    """Return whether a task id is that of the run of a flow, which only its own gateway may adopt."""
    found = reserved_for(task_id)
    return found is not None and OwnerKind.FLOW in found.kinds


def belongs_here(task_id: str, found: Owner, deployment: str) -> bool:
    """Return whether the workflow of a task, which carries the marker `found`, belongs to a deployment."""
    if is_flow_run(task_id):
        return found == task_owner(task_id, deployment)
    return found.deployment == deployment


def may_lack_marker(task_id: str, scheduled_by: str | None) -> bool:
    """Return whether a task without a marker, which a client of Temporal has started, may have this id.

    Temporal notes in each task that a schedule starts the name of the schedule, `scheduled_by`. A task with the id of a
    nominal time and without this note is not the one of that time.
    """
    reserved = reserved_for(task_id)
    if reserved is None:
        return True
    return reserved.of_schedules and scheduled_by is not None and task_id.startswith(f"{scheduled_by}-")


def unowned_problem(task_id: str) -> str:
    """Return what is wrong with a workflow that has the reserved id of something else, and what helps."""
    return (
        f"workflow {task_id!r} has the id of a nominal time, but neither its schedule nor a backfill has started it: "
        "find out what has, and terminate it in Temporal; then start the task with a backfill, or with retry-failed"
    )
