"""FlowKit runs graphs of nodes as durable Temporal workflows.

Importing this package has no side effects and does no I/O, because workflow sandboxes import it too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowkit.config import CoordinatorConfig as CoordinatorConfig
    from flowkit.config import WorkerConfig as WorkerConfig
    from flowkit.coordinator import Coordinator as Coordinator
    from flowkit.core.version import __version__ as __version__
    from flowkit.flow import Flow as Flow
    from flowkit.flow import cel as cel
    from flowkit.models.admission import Admission as Admission

_MODULES = {
    "Admission": "flowkit.models.admission",
    "Coordinator": "flowkit.coordinator",
    "CoordinatorConfig": "flowkit.config",
    "Flow": "flowkit.flow",
    "WorkerConfig": "flowkit.config",
    "__version__": "flowkit.core.version",
    "cel": "flowkit.flow",
}

__all__ = ["Admission", "Coordinator", "CoordinatorConfig", "Flow", "WorkerConfig", "__version__", "cel"]


def __getattr__(name: str) -> Any:
    """Import a public name on first access. Raise AttributeError for any other name."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'flowkit' has no attribute {name!r}")
