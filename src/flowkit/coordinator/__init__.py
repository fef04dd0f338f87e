"""Public import path of Coordinator."""

from flowkit.config import CoordinatorConfig
from flowkit.coordinator.runner import Coordinator

__all__ = ["Coordinator", "CoordinatorConfig"]
