"""The documented home of the settings; they are defined in `flowkit.config`."""

from flowkit.config import CoordinatorConfig, WorkerConfig

__all__ = ["CoordinatorConfig", "WorkerConfig"]
