"""A user's own Temporal code, which runs FlowKit as a plugin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import activity, workflow

from flowkit.models import TaskResult


@activity.defn
async def greet(name: str) -> str:
    """An activity without any relation to FlowKit."""
    return f"hello {name}"


@workflow.defn
class Order:
    """A workflow that calls its own activity, then runs a FlowKit task as a child workflow."""

    @workflow.run
    async def run(self, order: dict[str, Any]) -> list[str]:
        """Return the greeting and the task's status."""
        greeting = await workflow.execute_activity(
            greet, order["name"], start_to_close_timeout=timedelta(seconds=60)
        )
        result = await workflow.execute_child_workflow(
            "Task",
            {"params": {}, "graph": order["graph"]},
            id=order["task_id"],
            task_queue=order["queue"],
            result_type=TaskResult,
        )
        return [greeting, result.status.value]
