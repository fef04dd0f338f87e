"""The documented home of what handlers are made of."""

from flowkit.activities.context import RunContext
from flowkit.activities.handlers import Batch, BatchResult, FinalizeResult, RoleHandler

Handler = RoleHandler

__all__ = ["Batch", "BatchResult", "FinalizeResult", "Handler", "RoleHandler", "RunContext"]
