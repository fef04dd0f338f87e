"""Public import path of the settings, which `flowkit.config` defines."""

from flowkit.config import CoordinatorConfig, WorkerConfig

__all__ = ["CoordinatorConfig", "WorkerConfig"]
