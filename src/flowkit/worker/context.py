"""The documented home of RunContext."""

from flowkit.activities.context import RunContext

__all__ = ["RunContext"]
