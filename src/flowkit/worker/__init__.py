"""Public import path of Worker and of the classes for writing handlers."""

from flowkit.activities.context import RunContext
from flowkit.activities.function_roles import CollectorRole, FunctionRole, SourceRole, role
from flowkit.activities.handlers import EchoHandler, RoleHandler
from flowkit.activities.results import Batch, BatchFailure, BatchResult, FinalizeResult
from flowkit.config import WorkerConfig
from flowkit.worker.runner import Worker

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
