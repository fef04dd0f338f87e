"""Names that FlowKit uses in Temporal: its workflow and query, activities, search attributes and task queues.

Histories contain them and running workflows call them, so never change a value.
"""

from __future__ import annotations

from typing import Final

TASK: Final = "Task"
"""Type of the workflow."""

STATUS_QUERY: Final = "status"
"""Query that returns the state of a task and its nodes."""

FIRST_BATCH: Final = "first_batch"
"""Signal that an attempt has stored its first batch."""

REPORT_SILENCE: Final = "report_silence"
"""Update by which the sweep reports the attempts of a task that send no heartbeats."""

OPEN_TASK: Final = "open_task"
RECORD: Final = "record"
CLOSE_TASK: Final = "close_task"
EVALUATE_CONDITIONS: Final = "evaluate_conditions"
READ_STORED_GRAPH: Final = "read_stored_graph"

ACQUIRE_SLOT: Final = "acquire_slot"
AWAIT_SLOT: Final = "await_slot"
RELEASE_SLOTS: Final = "release_slots"
SLOT_ACTIVITIES: Final = (ACQUIRE_SLOT, AWAIT_SLOT, RELEASE_SLOTS)
"""The activities of the concurrency limits."""

INLINE_ATTEMPT: Final = "inline attempt"
"""The local activity that runs an attempt inside the engine.

It has the same name for all roles, because Temporal's SDK rejects a workflow that names a local activity which its worker
has not registered, even in a replay, and engines do not know the roles that other engines host.
"""

ENGINE_ACTIVITIES: Final = (
    *(OPEN_TASK, RECORD, CLOSE_TASK, EVALUATE_CONDITIONS, READ_STORED_GRAPH),
    *SLOT_ACTIVITIES,
)
"""The engine's own activities. All other activities have the name of a role or of a coordinator function."""

PIPELINE_ATTRIBUTE: Final = "FlowkitPipeline"
STATUS_ATTRIBUTE: Final = "FlowkitStatus"
SEARCH_ATTRIBUTES: Final = (PIPELINE_ATTRIBUTE, STATUS_ATTRIBUTE)
"""Search attributes that FlowKit sets if they are registered. Both have the type keyword."""

NOOP: Final = "noop"
"""The coordinator function of a node that names none."""


def role_queue(queue: str, role: str) -> str:
    """Return the task queue of a role's attempts. `queue` is the task queue of the engine."""
    return f"{queue}.{role}"
