"""Public import path of RunContext."""

from flowkit.activities.context import RunContext

__all__ = ["RunContext"]
