"""Histories of tasks: each must replay with the current workflow code and contain no failed workflow task."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from flowkit import reason_codes
from flowkit.engine.activations import REPEATED, OrderedRunner
from flowkit.models import temporal_names
from flowkit.workflows.task import Task
from tests.integration.chaos.cluster import retry_until_available

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from temporalio.api.failure.v1 import Failure
    from temporalio.client import Client, WorkflowHistory

_HARMLESS = {
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND,
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_FORCE_CLOSE_COMMAND,
    WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_RESET_STICKY_TASK_QUEUE,
}
"""Causes on the server's side. The workflow task runs again and loses nothing."""


INLINE, FELL_BACK = "inline attempts", "of them fell back"


@dataclass
class Replayed:
    """What the histories of tasks contain."""

    histories: int = 0
    inline: Counter[str] = field(default_factory=Counter)
    """Number of inline attempts, and of those that ordinary attempts followed."""
    problems: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """The histories that do not replay, as JSON, by the id of the task."""


async def replayed(client: Client, task_ids: Sequence[str]) -> Replayed:
    """Replay the histories of these tasks."""
    # Without the sandbox, as in the engine. tests/replay uses the sandbox, which takes several times as long.
    replayer = Replayer(
        workflows=[Task],
        data_converter=pydantic_data_converter,
        workflow_runner=OrderedRunner(UnsandboxedWorkflowRunner()),
    )
    found = Replayed()
    for task_id in task_ids:
        async for history in histories(client, task_id):
            found.histories += 1
            found.inline += inline_attempts(history)
            found.problems += failed_steps(history)
            result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
            if result.replay_failure is not None:
                problem = f"{task_id}: its history does not replay: {result.replay_failure!r}"
                found.problems.append(problem)
                found.bad[task_id] = history.to_json()
    return found


async def histories(client: Client, task_id: str) -> AsyncIterator[WorkflowHistory]:
    """Yield the history of every run of a task, latest first."""
    run_id: str | None = None
    while run_id != "":
        handle = client.get_workflow_handle(task_id, run_id=run_id)
        history = await retry_until_available(handle.fetch_history)
        yield history
        run_id = history.events[0].workflow_execution_started_event_attributes.continued_execution_run_id


def failed_steps(history: WorkflowHistory) -> list[str]:
    """Describe the workflow tasks that failed for a reason on FlowKit's side."""
    failed = [
        event.workflow_task_failed_event_attributes
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    ]
    return [
        f"{history.workflow_id}: a workflow task failed: {WorkflowTaskFailedCause.Name(each.cause)}: "
        f"{each.failure.message}"
        for each in failed
        if each.cause not in _HARMLESS and each.failure.message != REPEATED
    ]


def inline_attempts(history: WorkflowHistory) -> Counter[str]:
    """Count the inline attempts of a run. The SDK records each local activity as a marker with its type."""
    counts = Counter[str]()
    for event in history.events:
        marker = event.marker_recorded_event_attributes
        data = marker.details["data"].payloads if "data" in marker.details else []
        if any(json.loads(each.data).get("activity_type") == temporal_names.INLINE_ATTEMPT for each in data):
            counts[INLINE] += 1
            counts[FELL_BACK] += marker.HasField("failure") and _falls_back(marker.failure)
    return counts


def _falls_back(failure: Failure) -> bool:
    """Return whether an attempt took too long, or its engine refused it."""
    causes = [failure, failure.cause]
    return any(
        each.HasField("timeout_failure_info") or each.application_failure_info.type == reason_codes.NOT_LOCAL
        for each in causes
    )
