"""Public import path of Worker and of the classes for writing handlers.

A module of handlers needs none of what a worker needs, such as Temporal's SDK and the driver of MongoDB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.activities.function_roles import CollectorRole, FunctionRole, SourceRole, role
from flowkit.activities.handlers import EchoHandler, RoleHandler
from flowkit.activities.results import Batch, BatchFailure, BatchResult, FinalizeResult
from flowkit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from flowkit.activities.context import RunContext as RunContext
    from flowkit.config import WorkerConfig as WorkerConfig
    from flowkit.worker.runner import Worker as Worker

__all__ = [
    "Batch",
    "BatchFailure",
    "BatchResult",
    "CollectorRole",
    "EchoHandler",
    "FinalizeResult",
    "FunctionRole",
    "RoleHandler",
    "RunContext",
    "SourceRole",
    "Worker",
    "WorkerConfig",
    "role",
]

__getattr__ = lazy_names(
    __name__,
    {
        "RunContext": "flowkit.activities.context",
        "Worker": "flowkit.worker.runner",
        "WorkerConfig": "flowkit.config",
    },
)
