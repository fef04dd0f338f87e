"""Start, await, list, cancel and steer tasks; a thin layer over Temporal's own client."""

from flowkit.client.catalog import TaskCatalog, TaskSummary
from flowkit.client.tasks import TaskClient
from flowkit.errors import TaskCancelled, TaskFailed, TaskStillOpen, UnknownTask

__all__ = [
    "TaskCancelled",
    "TaskCatalog",
    "TaskClient",
    "TaskFailed",
    "TaskStillOpen",
    "TaskSummary",
    "UnknownTask",
]
