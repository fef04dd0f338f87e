"""Names that FlowKit uses in Temporal: its workflow and query, activities, search attributes and task queues.

Histories contain them and running workflows call them, so never change a value.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

TASK: Final = "Task"
"""Type of the workflow."""

STATUS_QUERY: Final = "status"
"""Query that returns the state of a task and its nodes."""

FIRST_BATCH: Final = "first_batch"
"""Signal that an attempt has stored its first batch."""

SHARD_STARTED: Final = "shard_started"
"""Signal that the attempt of a shard has begun."""

REPORT_SILENCE: Final = "report_silence"
"""Update by which the sweep reports the attempts of a task that send no heartbeats."""

OPEN_TASK: Final = "open_task"
RECORD: Final = "record"
CLOSE_TASK: Final = "close_task"
EVALUATE_CONDITIONS: Final = "evaluate_conditions"
READ_STORED_GRAPH: Final = "read_stored_graph"
RESET_NODES: Final = "reset_nodes"
CHANGE_GRAPH: Final = "change_graph"
CHECK_BATCHES: Final = "check_batches"
SETTLE_BATCHES: Final = "settle_batches"

ACQUIRE_SLOTS: Final = "acquire_slots"
AWAIT_SLOT: Final = "await_slot"
RELEASE_SLOTS: Final = "release_slots"
SLOT_ACTIVITIES: Final = (ACQUIRE_SLOTS, AWAIT_SLOT, RELEASE_SLOTS)
"""The activities of the concurrency limits."""

INLINE_ATTEMPT: Final = "inline attempt"
"""The local activity that runs an attempt inside the engine.

It has the same name for all roles, because Temporal's SDK rejects a workflow that names a local activity
which its worker has not registered, even in a replay, and engines do not know the roles that other engines
host.
"""

ENGINE_ACTIVITIES: Final = (
    *(OPEN_TASK, RECORD, CLOSE_TASK, EVALUATE_CONDITIONS, READ_STORED_GRAPH, RESET_NODES),
    *(CHANGE_GRAPH, CHECK_BATCHES, SETTLE_BATCHES),
    *SLOT_ACTIVITIES,
)
"""The engine's own activities. All other activities have the name of a role or of a coordinator function."""

PIPELINE_ATTRIBUTE: Final = "FlowkitPipeline"
STATUS_ATTRIBUTE: Final = "FlowkitStatus"
WAITS_ATTRIBUTE: Final = "FlowkitWaitsFor"
"""Has the value `decision` while a node of the task waits for the decision of a person."""
SEARCH_ATTRIBUTES: Final = (PIPELINE_ATTRIBUTE, STATUS_ATTRIBUTE, WAITS_ATTRIBUTE)
"""Search attributes that FlowKit sets if they are registered. They have the type keyword."""

SCHEDULED_BY_ID: Final = "TemporalScheduledById"
"""Search attribute with the name of the schedule of Temporal that has started a workflow."""

SCHEDULED_START_TIME: Final = "TemporalScheduledStartTime"
"""Search attribute with the nominal time of a workflow that a schedule of Temporal has started."""

BACKFILL: Final = "Backfill"
"""Type of the workflow that runs a backfill."""

RUN_BACKFILL: Final = "run_backfill"
"""The activity that starts the tasks of a backfill and awaits their ends."""

WAKE_BACKFILL: Final = "wake"
"""Signal that a backfill has tasks to start again."""

_BACKFILLS: Final = "_backfills"
"""The end of the name of a task queue. No role has this name, because names of roles begin with a letter or digit."""

NOOP: Final = "noop"
"""The coordinator function of a node that names none."""


def role_queue(queue: str, role: str, version: str = "") -> str:
    """Return the task queue of a role's attempts. `queue` is the task queue of the engine.

    With `version`, return the queue of the attempts that only workers with this version of the handler may run.
    """
    return f"{queue}.{role}@{version}" if version else f"{queue}.{role}"


def backfill_queue(queue: str) -> str:
    """Return the task queue of backfills. They share no slots with the engine's own activities."""
    return role_queue(queue, _BACKFILLS)


def is_backfill_queue(name: str, queue: str) -> bool:
    """Return whether `name` is the task queue of backfills of an engine with the task queue `queue`."""
    return name == backfill_queue(queue)


def backfill_workflow_id(backfill_id: str) -> str:
    """Return the id of the workflow that runs a backfill."""
    return f"backfill:{backfill_id}"


_ID_CHARS = 8
_DATABASE = re.compile(rf"#(?P<name>[^#]*):(?P<id>[0-9a-f-]{{{_ID_CHARS}}})$")
"""The end of an engine's identity."""


def engine_identity(process: str, deployment: str) -> str:
    """Return the Temporal identity of an engine: its process and its database, for example
    `engine-7@host#shop:1f2e3d4c`.
    """
    database_id, _, name = deployment.partition("/")
    return f"{process}#{name}:{database_id[:_ID_CHARS]}"


def process_of(identity: str) -> str:
    """Return a Temporal identity without the database of an engine, as task documents name the process."""
    return _DATABASE.sub("", identity)


def other_databases(pollers: Iterable[str], deployment: str) -> list[str]:
    """Return the names of the databases of these engines. Return `[]` if one of them may use the database `deployment`.

    An engine inside another Temporal worker has an identity of its own, which names no database.
    """
    database_id, others = deployment.partition("/")[0], set()
    for poller in pollers:
        database = _DATABASE.search(poller)
        if database is None or database["id"] == database_id[:_ID_CHARS]:
            return []
        others.add(database["name"])
    return sorted(others)
