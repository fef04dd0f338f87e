"""A rerun takes over all satisfied prerequisites, however many actions the task document has dropped since."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.contract.builders import AT, TASK, opened, record

from flowkit.adapters.tasks.store import earlier_run
from flowkit.models.actions import ActionRecord, AppliedAction

if TYPE_CHECKING:
    from flowkit.adapters.tasks.store import TaskStore


def applied(revision: int, action: str, what: str) -> AppliedAction:
    return AppliedAction(revision=revision, action=action, at=AT, what=what)


async def test_a_rerun_reads_them_from_their_list(db: Any, tasks: TaskStore) -> None:
    satisfied = ["data:eu", "data:us"]
    await opened(tasks, "a")
    actions = [applied(201, "satisfy", "data:us"), applied(202, "pause", "task")]
    shown = ActionRecord(applied=actions, satisfied=satisfied)
    await tasks.record(replace(record(), actions=shown))
    earlier = earlier_run(await db.tasks.find_one({"id": TASK}))
    assert (earlier.satisfied, earlier.applied) == (satisfied, actions)
