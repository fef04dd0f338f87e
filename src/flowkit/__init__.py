"""FlowKit: tasks that are graphs of nodes, run as durable Temporal workflows.

Importing this package reads and opens nothing: a workflow sandbox imports it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowkit.config import CoordinatorConfig as CoordinatorConfig
    from flowkit.config import WorkerConfig as WorkerConfig
    from flowkit.coordinator import Coordinator as Coordinator
    from flowkit.version import __version__ as __version__

_HOMES = {
    "Coordinator": "flowkit.coordinator",
    "CoordinatorConfig": "flowkit.config",
    "WorkerConfig": "flowkit.config",
    "__version__": "flowkit.version",
}

__all__ = ["Coordinator", "CoordinatorConfig", "WorkerConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Load a documented name when it is first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flowkit' has no attribute {name!r}")
