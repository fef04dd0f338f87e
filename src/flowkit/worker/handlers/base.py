"""Public import path of the classes for writing handlers."""

from flowkit.activities.context import RunContext
from flowkit.activities.handlers import Batch, BatchResult, FinalizeResult, RoleHandler

Handler = RoleHandler

__all__ = ["Batch", "BatchResult", "FinalizeResult", "Handler", "RoleHandler", "RunContext"]
