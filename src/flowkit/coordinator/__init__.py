"""The documented home of the Coordinator."""

from flowkit.config import CoordinatorConfig
from flowkit.coordinator.runner import Coordinator

__all__ = ["Coordinator", "CoordinatorConfig"]
