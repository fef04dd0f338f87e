"""Inline roles: attempts that an engine runs itself, with the same outcome as those of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from temporalio.api.enums.v1 import EventType

from tests.integration.handlers import InlineQuick
from tests.integration.harness import node

if TYPE_CHECKING:
    from tests.integration.harness import Harness

INLINE = {"inline": InlineQuick()}


async def event_counts(harness: Harness, task_id: str) -> tuple[int, int]:
    """Return how many local activities ran attempts of the task, and how many ordinary activities did."""
    history = await (await harness.handle(task_id)).fetch_history()
    local = sum(e.event_type == EventType.EVENT_TYPE_MARKER_RECORDED for e in history.events) - 1
    names = [e.activity_task_scheduled_event_attributes.activity_type.name for e in history.events]
    return local, names.count("inline")


async def test_a_chain_of_inline_nodes_needs_no_ordinary_activity(harness: Harness) -> None:
    await harness.engine(handlers=INLINE)
    chain = [node("n0", "inline"), *(node(f"n{i}", "inline", f"n{i - 1}") for i in range(1, 10))]
    task = await harness.create(*chain)
    await harness.result(task)
    assert await event_counts(harness, task) == (10, 0)
    assert set((await harness.statuses(task)).values()) == {"finished"}
