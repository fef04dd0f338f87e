"""Public import path of RunContext."""

from flowkit.activities.context import RunContext, TaskVariables

__all__ = ["RunContext", "TaskVariables"]
