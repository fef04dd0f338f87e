"""Records that clients, workflows, activities and stores exchange.

They are plain dataclasses. Each workflow, activity and signal takes one record and returns one. Add fields, but never
move them, because recorded histories contain them. Times are Unix timestamps in seconds unless the name ends in `_ms`.
"""

from __future__ import annotations

from flowkit.models.attempts import (
    AttemptFailure,
    AttemptInput,
    AttemptResult,
    FailureKind,
    FirstBatch,
)
from flowkit.models.conditions import ConditionResults, EvaluateConditions
from flowkit.models.graphs import (
    COORDINATOR_FN,
    FanIn,
    Graph,
    Node,
    NodeIO,
    OnNodeFailure,
    RetryPolicy,
    StartWhen,
)
from flowkit.models.silence import SilenceReport, SilentAttempt
from flowkit.models.slots import ReleaseSlots, Slot, SlotReply, SlotRequest, slot_wait_id
from flowkit.models.tasks import (
    OPEN_NODE_STATUSES,
    OPEN_TASK_STATUSES,
    RUNTIME_KEYS,
    CloseTask,
    NodeRecord,
    NodeState,
    NodeStatus,
    Opened,
    OpenTask,
    ReadStoredGraph,
    RecordTask,
    Settings,
    SkipReason,
    StatusChange,
    StoredGraph,
    TaskResult,
    TaskStatus,
)

__all__ = [
    "COORDINATOR_FN",
    "OPEN_NODE_STATUSES",
    "OPEN_TASK_STATUSES",
    "RUNTIME_KEYS",
    "AttemptFailure",
    "AttemptInput",
    "AttemptResult",
    "CloseTask",
    "ConditionResults",
    "EvaluateConditions",
    "FailureKind",
    "FanIn",
    "FirstBatch",
    "Graph",
    "Node",
    "NodeIO",
    "NodeRecord",
    "NodeState",
    "NodeStatus",
    "OnNodeFailure",
    "OpenTask",
    "Opened",
    "ReadStoredGraph",
    "RecordTask",
    "ReleaseSlots",
    "RetryPolicy",
    "Settings",
    "SilenceReport",
    "SilentAttempt",
    "SkipReason",
    "Slot",
    "SlotReply",
    "SlotRequest",
    "StartWhen",
    "StatusChange",
    "StoredGraph",
    "TaskResult",
    "TaskStatus",
    "slot_wait_id",
]
