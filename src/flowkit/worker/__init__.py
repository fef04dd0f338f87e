"""Public import path of Worker and of the classes for writing handlers."""

from flowkit.activities.context import RunContext
from flowkit.activities.handlers import Batch, BatchResult, EchoHandler, FinalizeResult, RoleHandler
from flowkit.config import WorkerConfig
from flowkit.worker.runner import Worker

__all__ = [
    "Batch",
    "BatchResult",
    "EchoHandler",
    "FinalizeResult",
    "RoleHandler",
    "RunContext",
    "Worker",
    "WorkerConfig",
]
