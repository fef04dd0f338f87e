"""FlowKit runs graphs of nodes as durable Temporal workflows.

Importing this package has no side effects and does no I/O, because workflow sandboxes import it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowkit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from flowkit.config import CoordinatorConfig as CoordinatorConfig
    from flowkit.config import WorkerConfig as WorkerConfig
    from flowkit.coordinator import Coordinator as Coordinator
    from flowkit.core.version import __version__ as __version__
    from flowkit.flow import Flow as Flow
    from flowkit.flow import cel as cel
    from flowkit.models.admission import Admission as Admission

__all__ = ["Admission", "Coordinator", "CoordinatorConfig", "Flow", "WorkerConfig", "__version__", "cel"]

__getattr__ = lazy_names(
    __name__,
    {
        "Admission": "flowkit.models.admission",
        "Coordinator": "flowkit.coordinator",
        "CoordinatorConfig": "flowkit.config",
        "Flow": "flowkit.flow",
        "WorkerConfig": "flowkit.config",
        "__version__": "flowkit.core.version",
        "cel": "flowkit.flow",
    },
)
